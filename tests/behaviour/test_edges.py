"""Corners of scopes, functions and values, each with TensorFlow's answer.

Values of one strategy in the hands of another, the default strategy, `mx.function` inside
and outside of scopes. Where TensorFlow's answer may surprise somebody who comes from JAX,
the docstring says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.edges import (
    copies,
    devices,
    in_and_out,
    make,
    make_one_replica,
    mirrored_value,
    numbers,
    per,
    scope_if,
)
from helpers.engines import both_engines, compile_if, mirrored, parts, replica_id, run

import mirrax as mx

PerReplica = mx.distribute.PerReplica
Aggregation = mx.VariableAggregation


@pytest.fixture
def strategy():
    return mirrored(2)


@pytest.fixture
def other():
    """Two replicas on devices of their own."""
    return mx.MirroredStrategy(["CPU:2", "CPU:3"])


one_replica = pytest.mark.parametrize(
    "kind", ["mirrored", "one device", "one other device", "default"]
)


# Gathering on one replica --------------------------------------------------------------


def gather(x):
    return mx.get_replica_context().all_gather(x, axis=0)


def gather_gradient(x):
    return jax.grad(lambda x: jnp.sum(gather(x * x)))(x)


@one_replica
@pytest.mark.parametrize("engine", ["eager", "compiled", "caller"])
def test_all_gather_on_one_replica_gives_what_it_is_given(engine, kind):
    out = run(make_one_replica(kind), gather, jnp.array([1.0, 2.0]), engine=engine)
    assert numbers([out]) == [[1.0, 2.0]]


@one_replica
@pytest.mark.parametrize("engine", ["eager", "compiled", "caller"])
def test_the_gradient_of_all_gather_on_one_replica(engine, kind):
    x = jnp.array([1.0, 2.0])
    out = run(make_one_replica(kind), gather_gradient, x, engine=engine)
    assert numbers([out]) == [[2.0, 4.0]]


@one_replica
@pytest.mark.parametrize("engine", ["eager", "compiled", "caller"])
def test_the_gradient_of_all_gather_by_a_variable_on_one_replica(engine, kind):
    strategy = make_one_replica(kind)
    v = make(strategy, [1.0, 2.0])

    def step():
        return mx.value_and_grad(lambda: jnp.sum(gather(v * v)), v)()

    value, gradient = run(strategy, step, engine=engine)
    assert float(value) == 5.0
    assert numbers([gradient]) == [[2.0, 4.0]]


@one_replica
@pytest.mark.parametrize("engine", ["eager", "compiled", "caller"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_the_gradient_of_all_reduce_on_one_replica(op, engine, kind):
    def step(x):
        context = mx.get_replica_context()
        return jax.grad(lambda x: jnp.sum(context.all_reduce(op, x * x)))(x)

    out = run(make_one_replica(kind), step, jnp.array([1.0, 2.0]), engine=engine)
    assert numbers([out]) == [[2.0, 4.0]]


@both_engines
def test_all_gather_without_any_strategy(engine):
    assert numbers([compile_if(engine, gather)(jnp.array([1.0]))]) == [[1.0]]
    gradient = compile_if(engine, gather_gradient)(jnp.array([1.0, 2.0]))
    assert numbers([gradient]) == [[2.0, 4.0]]


# Results of `run` inside of a function -------------------------------------------------


@in_and_out
def test_local_results_in_a_function_are_one_for_each_replica(where, strategy):
    """Also where all replicas compute the same: `len` is the number of replicas."""
    f = mx.function(
        lambda x: strategy.experimental_local_results(
            strategy.run(lambda v: v * v, args=(x,))
        )
    )
    with scope_if(where, strategy):
        out = f(2.0)
    assert isinstance(out, tuple)
    assert numbers(out) == [4.0, 4.0]


@in_and_out
def test_local_results_of_per_replica_arguments_in_a_function(where, strategy):
    f = mx.function(
        lambda x: {
            "parts": strategy.experimental_local_results(
                strategy.run(lambda v: v * 2, args=(x,))
            )
        }
    )
    with scope_if(where, strategy):
        assert numbers(f(per(1.0, 3.0))["parts"]) == [2.0, 6.0]


@in_and_out
def test_the_values_of_a_result_in_a_function(where, strategy):
    same = mx.function(lambda x: strategy.run(lambda v: v * 2, args=(x,)).values)
    with scope_if(where, strategy):
        assert numbers(same(2.0)) == [4.0, 4.0]
        assert numbers(same(per(1.0, 3.0))) == [2.0, 6.0]


@in_and_out
def test_python_may_sum_the_local_results_in_a_function(where, strategy):
    @mx.function
    def total(x):
        out = strategy.run(lambda v: v * 2, args=(x,))
        return sum(strategy.experimental_local_results(out))

    with scope_if(where, strategy):
        assert float(total(per(1.0, 3.0))) == 8.0
        assert float(total(2.0)) == 8.0


@in_and_out
def test_a_result_that_leaves_a_function_has_a_part_for_each_replica(where, strategy):
    f = mx.function(lambda x: strategy.run(lambda v: v * v, args=(x,)))
    with scope_if(where, strategy):
        assert parts(strategy, f(2.0)) == [4.0, 4.0]


@in_and_out
@pytest.mark.parametrize("count", [1, 2, 3])
def test_combining_in_a_function(count, where):
    strategy = mirrored(count)

    @mx.function
    def f(x):
        out = strategy.run(lambda v: v * 2 + replica_id(), args=(x,))
        return strategy.reduce("SUM", out, axis=None), strategy.gather(
            strategy.run(lambda v: jnp.reshape(v, 1), args=(out,)), axis=0
        )

    with scope_if(where, strategy):
        total, joined = f(1.0)
    expected = [2.0 + i for i in range(count)]
    assert float(total) == sum(expected)
    assert numbers([joined]) == [expected]


def test_one_function_counts_the_replicas_of_the_scope_it_is_called_in(strategy):
    f = mx.function(lambda: jnp.int32(mx.get_strategy().num_replicas_in_sync))
    found = [int(f())]
    with strategy.scope():
        found.append(int(f()))
    with mirrored(3).scope():
        found.append(int(f()))
    assert [*found, int(f())] == [1, 2, 3, 1]


def test_a_function_knows_whether_there_is_a_strategy(strategy):
    f = mx.function(
        lambda: (
            mx.distribute.has_strategy(),
            mx.distribute.in_cross_replica_context(),
        )
    )
    assert f() == (False, False)
    with strategy.scope():
        assert f() == (True, True)
    assert strategy.run(f) == (True, False)


def test_a_function_is_called_outside_then_in_a_replica_then_outside(strategy):
    v = make(strategy, 2.0)
    f = mx.function(lambda x: x * v)
    assert float(f(3.0)) == 6.0
    assert parts(strategy, strategy.run(f, (jnp.float32(3.0),))) == [6.0, 6.0]
    v.assign(4.0)
    assert float(f(3.0)) == 12.0
    with strategy.scope():
        assert float(f(3.0)) == 12.0


def test_a_scope_inside_a_function(strategy):
    @mx.function
    def f(x):
        with strategy.scope():
            out = strategy.run(lambda v: v + replica_id(), args=(x,))
            return strategy.reduce("SUM", out, axis=None)

    assert float(f(1.0)) == 3.0


@in_and_out
def test_values_from_a_function_made_inside_a_compiled_one(where, strategy):
    @mx.function
    def f():
        value = strategy.experimental_distribute_values_from_function(
            lambda ctx: jnp.float32(10.0) * ctx.replica_id_in_sync_group
        )
        return strategy.experimental_local_results(value)

    with scope_if(where, strategy):
        assert numbers(f()) == [0.0, 10.0]


# Distributed values as arguments of a function -----------------------------------------


@in_and_out
@pytest.mark.parametrize("values", [(1.0,), (1.0, 3.0), (1.0, 3.0, 5.0)])
def test_a_per_replica_value_passes_through_a_function(values, where):
    strategy = mirrored(len(values))
    with scope_if(where, strategy):
        out = mx.function(lambda x: x)(per(*values))
    assert isinstance(out, PerReplica)
    assert numbers(out.values) == list(values)


def test_a_nested_per_replica_value_passes_through_a_function():
    f = mx.function(lambda x: {"a": x["a"], "b": x["b"] + 1, "c": [x["c"][0]]})
    out = f({"a": per(1.0, 3.0), "b": jnp.float32(1.0), "c": [per(5.0)]})
    assert numbers(out["a"].values) == [1.0, 3.0]
    assert float(out["b"]) == 2.0
    assert numbers(out["c"][0].values) == [5.0]


def test_a_function_may_work_with_the_parts():
    total = mx.function(lambda x: x.values[0] + x.values[1])
    assert float(total(per(1.0, 3.0))) == 4.0


@in_and_out
def test_a_function_may_make_a_per_replica_value(where, strategy):
    twice = mx.function(lambda x: PerReplica([part * 2 for part in x.values]))
    with scope_if(where, strategy):
        out = twice(per(1.0, 3.0))
    assert isinstance(out, PerReplica)
    assert numbers(out.values) == [2.0, 6.0]


def test_a_function_may_make_a_per_replica_value_from_an_array():
    out = mx.function(lambda x: PerReplica([x, x + 1]))(jnp.float32(1.0))
    assert numbers(out.values) == [1.0, 2.0]


def test_a_captured_per_replica_value_passes_through_a_function():
    value = per(1.0, 3.0)
    assert numbers(mx.function(lambda: value)().values) == [1.0, 3.0]


def test_a_per_replica_value_passes_through_beside_other_work(strategy):
    v = make(strategy, 2.0)

    @mx.function
    def f(x):
        v.assign_add(1.0)
        return x, strategy.reduce("SUM", x, axis=None) * v

    for k in (1, 2):
        value, total = f(per(1.0, 3.0))
        assert numbers(value.values) == [1.0, 3.0]
        assert float(total) == 4.0 * (2 + k)


def test_a_per_replica_value_of_unequal_parts_passes_through_a_function():
    value = PerReplica([jnp.ones(2), jnp.ones(1)])
    out = mx.function(lambda x: x)(value)
    assert numbers(out.values) == [[1.0, 1.0], [1.0]]


def test_arithmetic_with_a_per_replica_value_is_an_error_in_a_function_too():
    for f in (lambda x: x + 1, mx.function(lambda x: x + 1)):
        with pytest.raises(TypeError, match="PerReplica value has a part for each"):
            f(per(1.0, 3.0))


@pytest.mark.parametrize("where", ["outside", "own scope", "other scope", "m1 scope"])
def test_a_value_with_a_mesh_of_its_own_passes_through_a_function(
    where, strategy, other
):
    """Which scope the function is called in does not matter for what it only passes on."""
    double = mx.function(lambda x: x * 2)
    value = strategy.run(double, (per(1.0, 3.0),))
    scopes = {"own scope": strategy, "other scope": other, "m1 scope": mirrored(1)}
    scope = scopes[where].scope() if where in scopes else contextlib.nullcontext()
    with scope:
        out = mx.function(lambda x: x)(value)
    assert numbers(out.values) == [2.0, 6.0]


@in_and_out
def test_values_with_two_meshes_in_one_function(where, strategy, other):
    a = strategy.run(mx.function(lambda x: x * 2), (per(1.0, 3.0),))
    b = other.run(mx.function(lambda x: x * 10), (per(1.0, 3.0),))
    add = mx.function(lambda x, y: [p + q for p, q in zip(x.values, y.values)])
    with scope_if(where, strategy):
        assert numbers(add(a, b)) == [12.0, 36.0]


@pytest.mark.parametrize("where", ["outside", "own scope", "other scope", "m1 scope"])
@both_engines
def test_a_mirrored_value_can_be_used_as_an_array_anywhere(
    engine, where, strategy, other
):
    value = mirrored_value(strategy, 1.0, 3.0)
    scopes = {"own scope": strategy, "other scope": other, "m1 scope": mirrored(1)}
    scope = scopes[where].scope() if where in scopes else contextlib.nullcontext()
    with scope:
        assert float(compile_if(engine, lambda x: x + 1)(value)) == 5.0


@both_engines
def test_mirrored_values_of_two_strategies_can_be_added(engine, strategy, other):
    a, b = mirrored_value(strategy, 1.0, 3.0), mirrored_value(other, 2.0, 6.0)
    assert float(compile_if(engine, lambda x, y: x + y)(a, b)) == 12.0


@both_engines
@pytest.mark.parametrize("kind", ["mirrored", "one device", "default"])
def test_a_mirrored_value_is_an_argument_for_one_replica(engine, kind, strategy):
    """All copies are equal, so that a strategy with fewer replicas can use it."""
    value = mirrored_value(strategy, 1.0, 3.0)
    out = run(make_one_replica(kind), lambda x: x + 1, value, engine=engine)
    assert float(out) == 5.0


@both_engines
def test_a_captured_mirrored_value_is_each_replicas_own(engine, strategy):
    value = mirrored_value(strategy, 1.0, 3.0)
    out = run(strategy, lambda: value + 1.0, engine=engine)
    assert parts(strategy, out) == [5.0, 5.0]


@both_engines
def test_a_result_of_one_strategy_is_an_argument_for_another(engine, strategy, other):
    with strategy.scope():
        first = run(strategy, lambda: jnp.float32(2.0) + replica_id(), engine=engine)
    with other.scope():
        second = run(other, lambda x: x + 1, first, engine=engine)
    assert parts(other, second) == [3.0, 4.0]
    assert devices(second) == [2, 3]


def test_another_strategy_combines_a_result(strategy, other):
    value = strategy.run(lambda x: jnp.reshape(x * 2, 1), (per(1.0, 3.0),))
    assert numbers([other.reduce("SUM", value, axis=None)]) == [[8.0]]
    assert numbers([other.gather(value, axis=0)]) == [[2.0, 6.0]]
    with other.scope():
        assert numbers([other.reduce("MEAN", value, axis=0)]) == [4.0]


@pytest.mark.parametrize("kind", ["mirrored", "one device", "default"])
@pytest.mark.parametrize("method", ["reduce", "reduce_to"])
def test_no_part_is_dropped_when_one_replica_reduces_two(method, kind):
    """TensorFlow adds the parts, or under the default strategy gives them back.

    mirrax refuses values with the wrong number of parts elsewhere, which is as good. What
    may not happen is that a part is lost.
    """
    strategy = make_one_replica(kind)
    try:
        with contextlib.nullcontext() if kind == "default" else strategy.scope():
            if method == "reduce":
                out = strategy.reduce("SUM", per(1.0, 3.0), axis=None)
            else:
                out = strategy.extended.reduce_to("SUM", per(1.0, 3.0), "CPU:0")
    except ValueError as error:
        assert "2 parts" in str(error)
        return
    if isinstance(out, PerReplica):
        assert numbers(out.values) == [1.0, 3.0]
    else:
        assert float(out) == 4.0


# Two strategies in one function --------------------------------------------------------


def right_or_explained(fn: Callable[[], Any], expected: Any) -> None:
    """`fn()` is `expected`, as in TensorFlow, or mirrax says why it cannot be.

    One program of XLA runs on one set of devices, which JAX would put in its own words.
    """
    try:
        out = fn()
    except (RuntimeError, ValueError) as error:
        assert "strateg" in str(error)
        return
    assert numbers(out) == expected


def test_two_strategies_on_other_devices_run_in_one_function(strategy, other):
    @mx.function
    def f(x):
        a = strategy.reduce("SUM", strategy.run(lambda y: y * 2, args=(x,)), axis=None)
        b = other.reduce("SUM", other.run(lambda y: y * 3, args=(x,)), axis=None)
        return a, b

    right_or_explained(lambda: f(1.0), [4.0, 6.0])


def test_two_strategies_on_the_same_devices_run_in_one_function(strategy):
    same = mirrored(2)

    @mx.function
    def f(x):
        a = strategy.reduce("SUM", strategy.run(lambda y: y * 2, args=(x,)), axis=None)
        b = same.reduce("SUM", same.run(lambda y: y * 3, args=(x,)), axis=None)
        return a, b

    assert numbers(f(1.0)) == [4.0, 6.0]


def test_a_result_goes_from_strategy_to_strategy_in_one_function(strategy, other):
    def chain(second):
        @mx.function
        def f(x):
            first = strategy.run(lambda y: y * 2, args=(x,))
            out = second.run(lambda y: y * 3, args=(first,))
            return (second.reduce("SUM", out, axis=None),)

        return lambda: f(per(1.0, 3.0))

    assert numbers(chain(mirrored(2))()) == [24.0]
    right_or_explained(chain(other), [24.0])


@in_and_out
def test_variables_of_two_strategies_are_read_in_one_function(where, strategy, other):
    v, w = make(strategy, 1.0), make(other, 10.0)
    with scope_if(where, strategy):
        assert float(mx.function(lambda: v + w)()) == 11.0


def test_variables_of_two_strategies_are_assigned_in_one_function(strategy, other):
    v, w = make(strategy, 1.0), make(other, 10.0)

    @mx.function
    def f():
        v.assign_add(1.0)
        w.assign_add(1.0)

    def both():
        f()
        return [*v.values, *w.values]

    right_or_explained(both, [2.0, 2.0, 11.0, 11.0])


# The default strategy ------------------------------------------------------------------


@both_engines
def test_the_default_strategy_gives_plain_values_from_a_function(engine):
    """A plain array, no `PerReplica`: there is one replica and nothing to distribute."""
    strategy = mx.get_strategy()

    def f():
        return strategy.experimental_distribute_values_from_function(
            lambda ctx: jnp.float32(5.0)
        )

    assert float(compile_if(engine, lambda: f() + 1)()) == 6.0
    value = f()
    assert isinstance(value, jax.Array)
    assert float(strategy.run(lambda x: x + 1, (value,))) == 6.0
    assert strategy.experimental_local_results(value) == (value,)
    assert float(strategy.reduce("SUM", value, axis=None)) == 5.0


def test_the_default_strategy_keeps_structures_and_numbers_as_they_are():
    strategy = mx.get_strategy()
    make_values = strategy.experimental_distribute_values_from_function
    assert make_values(lambda ctx: 5) == 5
    assert float(make_values(lambda ctx: {"a": jnp.float32(1.0)})["a"]) == 1.0


def test_one_device_gives_plain_values_from_a_function():
    """As the default strategy; `MirroredStrategy` on one device makes a `PerReplica`."""
    strategy = mx.OneDeviceStrategy("CPU:1")
    value = strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.float32(5.0)
    )
    assert float(value + 1) == 6.0
    assert float(strategy.run(lambda x: x + 1, (value,))) == 6.0


def test_a_mirrored_strategy_on_one_device_gives_per_replica_values():
    strategy = mirrored(1)
    value = strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.float32(5.0)
    )
    assert isinstance(value, PerReplica)
    assert float(strategy.run(lambda x: x + 1, (value,))) == 6.0


def test_values_are_made_for_a_strategy_in_another_ones_scope(strategy):
    """It touches no device program, so that TensorFlow does not look at the scope."""
    with mirrored(1).scope():
        value = strategy.experimental_distribute_values_from_function(
            lambda ctx: jnp.float32(ctx.replica_id_in_sync_group)
        )
    assert parts(strategy, value) == [0.0, 1.0]
    default = mx.get_strategy()
    with strategy.scope():
        plain = default.experimental_distribute_values_from_function(
            lambda ctx: jnp.float32(5.0)
        )
    assert float(plain) == 5.0


def test_local_results_may_be_asked_of_any_strategy_in_any_scope(strategy, other):
    for scope in (strategy, other, mirrored(1)):
        with scope.scope():
            assert numbers(strategy.experimental_local_results(per(1.0, 3.0))) == [
                1.0,
                3.0,
            ]
            assert numbers(other.experimental_local_results(per(1.0, 3.0))) == [
                1.0,
                3.0,
            ]


def test_local_results_of_what_is_not_distributed(strategy):
    ordinary = mx.Variable(1.0)
    assert strategy.experimental_local_results(ordinary) == (ordinary,)
    assert numbers(strategy.experimental_local_results(jnp.float32(2.0))) == [2.0]
    nested = strategy.experimental_local_results({"a": per(1.0, 3.0)})
    assert [float(row["a"]) for row in nested] == [1.0, 3.0]


@both_engines
def test_the_default_strategy_runs_with_a_strategys_variable(engine, strategy):
    """Its replica is nobody's: all copies are read and assigned, as outside."""
    v = make(strategy, 1.0, aggregation=Aggregation.SUM)
    default = mx.get_strategy()
    assert float(run(default, lambda: v * 2.0, engine=engine)) == 2.0
    run(default, lambda: v.assign_add(jnp.float32(5.0)) * 1, engine=engine)
    assert copies(v) == [6.0, 6.0]


def test_the_default_strategys_scope_is_no_scope_to_be_in_the_way(strategy):
    v = make(strategy, 1.0)
    with mx.get_strategy().scope():
        assert float(v.read_value()) == 1.0
        v.assign(5.0)
    assert copies(v) == [5.0, 5.0]


def test_run_of_a_strategy_inside_the_default_strategys_run(strategy):
    out = mx.get_strategy().run(
        lambda: strategy.run(lambda x: x + 1, args=(per(1.0, 3.0),))
    )
    assert parts(strategy, out) == [2.0, 4.0]
