"""Corners of variables in functions and in other strategies, each with TensorFlow's answer."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.edges import (
    copies,
    in_and_out,
    make,
    mirrored_value,
    numbers,
    per,
    scope_if,
)
from helpers.engines import both_engines, compile_if, mirrored, parts, replica_id, run

import mirrax as mx

PerReplica = mx.distribute.PerReplica
Aggregation = mx.VariableAggregation
ON_READ = mx.VariableSynchronization.ON_READ
ON_WRITE = mx.VariableSynchronization.ON_WRITE


@pytest.fixture
def strategy():
    return mirrored(2)


@pytest.fixture
def other():
    """Two replicas on devices of their own."""
    return mx.MirroredStrategy(["CPU:2", "CPU:3"])


ON_READS = pytest.mark.parametrize("aggregation", Aggregation)


def make_on_read(strategy: Any, aggregation: Any) -> Any:
    """Its copies are 1 and 3."""
    v = make(strategy, synchronization=ON_READ, aggregation=aggregation)
    strategy.run(lambda: v.assign(jnp.float32(1.0) + 2 * replica_id()))
    assert copies(v) == [1.0, 3.0]
    return v


# Variables: copies, and per-replica values assigned ------------------------------------


@in_and_out
def test_local_results_of_a_mirrored_variable_in_a_function(where, strategy):
    v = make(strategy, 3.0)
    f = mx.function(lambda: strategy.experimental_local_results(v))
    g = mx.function(
        lambda: [copy + 1 for copy in strategy.experimental_local_results(v)]
    )
    with scope_if(where, strategy):
        assert numbers(f()) == [3.0, 3.0]
        assert numbers(g()) == [4.0, 4.0]
        v.assign(5.0)
        assert numbers(f()) == [5.0, 5.0]


@ON_READS
@in_and_out
def test_local_results_of_an_on_read_variable_in_a_function(
    where, aggregation, strategy
):
    v = make_on_read(strategy, aggregation)
    f = mx.function(lambda: strategy.experimental_local_results(v))
    with scope_if(where, strategy):
        assert numbers(strategy.experimental_local_results(v)) == [1.0, 3.0]
        assert numbers(f()) == [1.0, 3.0]
        assert numbers(mx.function(lambda: [c * 2 for c in v.values])()) == [2.0, 6.0]


@in_and_out
def test_local_results_in_a_function_that_assigns(where, strategy):
    v = make(strategy, 3.0)

    @mx.function
    def f():
        v.assign_add(1.0)
        return [copy * 1.0 for copy in strategy.experimental_local_results(v)]

    with scope_if(where, strategy):
        assert numbers(f()) == [4.0, 4.0]
        assert numbers(f()) == [5.0, 5.0]
    assert copies(v) == [5.0, 5.0]


@in_and_out
@both_engines
def test_copies_that_differ_are_read_as_the_first(engine, where, strategy):
    v = make(strategy, 7.0)
    v.values[1].assign_add(1.0)
    with scope_if(where, strategy):
        assert float(compile_if(engine, lambda: v.read_value())()) == 7.0
    assert copies(v) == [7.0, 8.0]


@both_engines
@pytest.mark.parametrize("method", ["assign", "assign_add"])
@pytest.mark.parametrize(
    "aggregation, expected",
    [("SUM", 4.0), ("MEAN", 2.0), ("ONLY_FIRST_REPLICA", 1.0)],
)
def test_a_captured_per_replica_value_assigned_in_a_replica_is_aggregated(
    aggregation, expected, method, engine, strategy
):
    """Every replica brings the same whole value; it counts once, by its parts."""
    v = make(strategy, aggregation=Aggregation[aggregation])
    value = per(1.0, 3.0)

    def replica_fn():
        getattr(v, method)(value)

    run(strategy, replica_fn, engine=engine)
    assert copies(v) == [expected, expected]
    run(strategy, replica_fn, engine=engine)
    again = 2 * expected if method == "assign_add" else expected
    assert copies(v) == [again, again]


@both_engines
@pytest.mark.parametrize("method", ["assign", "assign_add"])
@pytest.mark.parametrize(
    "synchronization, aggregation",
    [(ON_WRITE, Aggregation.NONE), *[(ON_READ, a) for a in Aggregation]],
)
def test_a_captured_per_replica_value_is_no_value_for_one_copy(
    synchronization, aggregation, method, engine, strategy
):
    """Where each replica assigns its own copy TensorFlow has an accidental error.

    Its own is an `AttributeError`: a `PerReplica` has no `dtype`. Pass the value as an
    argument of `run` to give each replica its part.
    """
    v = make(strategy, synchronization=synchronization, aggregation=aggregation)
    value = per(1.0, 3.0)
    kinds = (AttributeError, TypeError, ValueError)
    with pytest.raises(kinds, match="PerReplica"):
        run(strategy, lambda: getattr(v, method)(value) * 1, engine=engine)
    assert copies(v) == [0.0, 0.0]


@both_engines
@in_and_out
@pytest.mark.parametrize("aggregation", Aggregation)
def test_a_per_replica_value_assigned_outside_replicas_goes_to_the_copies(
    aggregation, where, engine, strategy
):
    """The aggregation has no say here, and the copies of a mirrored variable differ."""
    v = make(strategy, aggregation=aggregation)
    value = per(1.0, 3.0)

    def assign():
        v.assign(value)

    def add():
        v.assign_add(value)

    with scope_if(where, strategy):
        compile_if(engine, assign)()
        assert copies(v) == [1.0, 3.0]
        compile_if(engine, add)()
    assert copies(v) == [2.0, 6.0]


@in_and_out
def test_a_variable_made_from_a_per_replica_value_is_an_error(where, strategy):
    with scope_if(where, strategy), pytest.raises(ValueError, match="PerReplica"):
        mx.Variable(per(1.0, 3.0))


def test_variables_made_from_other_strategies_values(strategy, other):
    v = make(other, 7.0)
    assert copies(make(strategy, v)) == [7.0, 7.0]
    assert float(mx.Variable(v)) == 7.0
    value = mirrored_value(other, 1.0, 3.0)
    assert copies(make(strategy, value)) == [4.0, 4.0]
    assert float(mx.Variable(value)) == 4.0


def test_a_mirrored_value_is_assigned_to_any_variable(strategy, other):
    value = mirrored_value(strategy, 1.0, 3.0)
    v, ordinary = make(other), mx.Variable(0.0)
    v.assign(value)
    ordinary.assign(value)
    assert copies(v) == [4.0, 4.0]
    assert float(ordinary) == 4.0


# A variable of another strategy --------------------------------------------------------


OTHERS = {
    "other devices": lambda: mx.MirroredStrategy(["CPU:2", "CPU:3"]),
    "the same devices": lambda: mirrored(2),
    "one replica": lambda: mirrored(1),
    "one device": lambda: mx.OneDeviceStrategy("CPU:0"),
}
KINDS = {
    "mirrored": {},
    "summed": {"aggregation": Aggregation.SUM},
    "on read": {"synchronization": ON_READ, "aggregation": Aggregation.SUM},
    "on read, none": {"synchronization": ON_READ},
}
foreign = pytest.mark.parametrize(
    "which",
    [
        "other devices",
        "one replica",
        pytest.param("the same devices", marks=pytest.mark.slow),
        pytest.param("one device", marks=pytest.mark.slow),
    ],
)
kinds = pytest.mark.parametrize("kind", KINDS)


@both_engines
@foreign
@kinds
def test_a_variable_cannot_be_assigned_in_another_strategys_scope(
    kind, which, engine, strategy
):
    v = make(strategy, 1.0, **KINDS[kind])
    for assign in (v.assign, v.assign_add, v.assign_sub):
        use = compile_if(engine, lambda f=assign: f(jnp.float32(5.0)) * 1)
        with OTHERS[which]().scope(), pytest.raises(RuntimeError, match="strateg"):
            use()
        assert copies(v) == [1.0, 1.0]


@both_engines
@foreign
@kinds
def test_a_variable_cannot_be_assigned_in_another_strategys_replica(
    kind, which, engine, strategy
):
    v = make(strategy, 1.0, **KINDS[kind])
    for assign in (v.assign, v.assign_add):
        with pytest.raises(RuntimeError, match="strateg"):
            run(OTHERS[which](), lambda f=assign: f(jnp.float32(5.0)), engine=engine)
        assert copies(v) == [1.0, 1.0]


@both_engines
@foreign
def test_a_mirrored_variable_is_an_array_in_another_strategys_scope(
    which, engine, strategy
):
    """Arithmetic uses the first copy, although `read_value` there is an error."""
    v = make(strategy, 2.0)
    with OTHERS[which]().scope():
        assert float(compile_if(engine, lambda: v + 1)()) == 3.0
        assert float(compile_if(engine, lambda: jnp.sum(v))()) == 2.0
        assert float(compile_if(engine, lambda x: x + 1)(v)) == 3.0
    v.assign(4.0)
    with OTHERS[which]().scope():
        assert float(compile_if(engine, lambda: v + 1)()) == 5.0


@pytest.mark.parametrize("engine", ["eager", "compiled", "caller"])
@foreign
def test_a_mirrored_variable_is_an_array_in_another_strategys_replica(
    which, engine, strategy
):
    """The value is read anew each time; a compiled function does not keep the first."""
    v, user = make(strategy, 2.0), OTHERS[which]()
    compiled = mx.function(lambda: v * 2.0)
    step = {
        "eager": lambda: user.run(lambda: v * 2.0),
        "compiled": lambda: user.run(compiled),
        "caller": mx.function(lambda: user.run(lambda: v * 2.0)),
    }[engine]
    count = user.num_replicas_in_sync
    assert parts(user, step()) == [4.0] * count
    v.assign(5.0)
    assert parts(user, step()) == [10.0] * count


@both_engines
@foreign
@kinds
def test_read_value_in_another_strategys_scope_is_an_error(
    kind, which, engine, strategy
):
    v = make(strategy, 1.0, **KINDS[kind])
    with OTHERS[which]().scope(), pytest.raises(RuntimeError, match="strateg"):
        compile_if(engine, lambda: v.read_value())()


@both_engines
@foreign
@kinds
def test_read_value_in_another_strategys_replica_is_an_error(
    kind, which, engine, strategy
):
    v = make(strategy, 1.0, **KINDS[kind])
    with pytest.raises(RuntimeError, match="strateg"):
        run(OTHERS[which](), lambda: v.read_value(), engine=engine)


@both_engines
@foreign
@pytest.mark.parametrize("kind", ["on read", "on read, none"])
def test_an_on_read_variable_is_no_array_for_another_strategy(
    kind, which, engine, strategy
):
    """Reading would have to combine the copies, which is the other strategy's business."""
    v, user = make(strategy, 1.0, **KINDS[kind]), OTHERS[which]()
    with user.scope(), pytest.raises(RuntimeError, match="strateg"):
        compile_if(engine, lambda: v + 1)()
    with pytest.raises(RuntimeError, match="strateg"):
        run(user, lambda: v * 2.0, engine=engine)


@foreign
@kinds
def test_the_copies_of_a_variable_can_be_seen_in_any_scope(kind, which, strategy):
    v, user = make(strategy, 1.0, **KINDS[kind]), OTHERS[which]()
    with user.scope():
        assert numbers(strategy.experimental_local_results(v)) == [1.0, 1.0]
        assert float(v.values[0] + 1.0) == 2.0


@both_engines
@foreign
def test_gradients_by_a_variable_of_another_strategy(which, engine, strategy):
    v, user = make(strategy, 3.0), OTHERS[which]()
    out = run(user, lambda: mx.grad(lambda: v * v, v)(), engine=engine)
    assert parts(user, out) == [6.0] * user.num_replicas_in_sync


@both_engines
@kinds
def test_outside_of_any_scope_a_variable_is_used_as_in_its_own(kind, engine, strategy):
    v = make(strategy, 1.0, **KINDS[kind])

    def read():
        return v.read_value()

    def assign():
        v.assign(jnp.float32(5.0))

    def add():
        v.assign_add(jnp.float32(5.0))

    if kind == "on read, none":
        for use in (read, assign, add):
            with pytest.raises(ValueError, match="ON_READ and aggregation NONE"):
                compile_if(engine, use)()
        return
    assert float(compile_if(engine, read)()) == (2.0 if kind == "on read" else 1.0)
    compile_if(engine, assign)()
    assert float(v) == 5.0
    if kind == "on read":
        with pytest.raises(ValueError, match="assign_add"):
            compile_if(engine, add)()
        assert copies(v) == [2.5, 2.5]
    else:
        compile_if(engine, add)()
        assert copies(v) == [10.0, 10.0]


# Parts and copies of variables ---------------------------------------------------------


@both_engines
def test_rows_are_named_by_small_integers(engine):
    v = mx.Variable(jnp.zeros(300))
    add = compile_if(engine, lambda i: v.scatter_add(mx.IndexedSlices(1.0, i)))
    add(jnp.int8(100))
    add(jnp.uint8(200))
    assert jnp.flatnonzero(v.read_value()).tolist() == [100, 200]


def test_the_index_of_a_single_row_is_named_in_the_error():
    v = mx.Variable([1.0, 2.0], name="v")
    with pytest.raises(ValueError, match=r"'v': indices = 2 is not in \[0, 2\)"):
        v.scatter_add(mx.IndexedSlices(1.0, 2))


def test_a_slice_is_shown_as_its_array(strategy):
    v = make(strategy, [1.0, 2.0])
    assert (str(v[0]), f"{v[:]}", repr(v[1])) == (
        "1.0",
        "[1. 2.]",
        repr(jnp.float32(2.0)),
    )


def test_a_slice_of_a_sum_is_shared_out_or_refused(strategy):
    v = make(strategy, [1.0], synchronization=ON_READ, aggregation=Aggregation.SUM)
    assert v[0].assign(4.0).numpy().tolist() == [4.0]
    with pytest.raises(ValueError, match="assign_add.*in cross-replica context"):
        v[0].assign_add(1.0)


def test_a_variable_is_not_copied_inside_a_function_that_jax_traces(strategy):
    v = make(strategy, 1.0, name="v")
    with pytest.raises(RuntimeError, match="'v' is read inside a function that JAX"):
        jax.jit(lambda x: (copy.deepcopy(v), x)[1])(1.0)


@both_engines
def test_one_value_for_all_makes_copies_the_same_again(two_cpus, engine):
    with two_cpus.scope():
        v = mx.Variable([1.0, 2.0])
    two_cpus.extended.update(v, lambda copy: copy.assign_add([1.0, 1.0]))
    compile_if(engine, lambda: v.assign(jnp.asarray([5.0, 6.0])))()
    read = two_cpus.run(mx.function(lambda: 2 * v.read_value()))
    assert isinstance(read, mx.distribute.Mirrored)
    assert copies(v) == [[5.0, 6.0], [5.0, 6.0]]


def test_an_initial_value_is_converted_once():
    # As int32, which is what JAX makes of NumPy's integers, it would not fit.
    v = mx.Variable(np.array([3_000_000_000]), dtype="float32")
    assert v.numpy().tolist() == [3e9]
