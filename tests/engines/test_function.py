"""`mx.function` itself: decorating, static and donated arguments, variables, nesting."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import all_sum, mirrored, parts, per_replica, replica_id

import mirrax as mx
from mirrax._src.base.jax_compat import Tracer


def test_a_function_keeps_its_name_doc_and_says_what_it_is():
    @mx.function
    def train(x):
        """One step."""
        return x

    assert (vars(train)["__name__"], train.__doc__) == ("train", "One step.")
    assert repr(train).startswith("<mx.function ") and "train" in repr(train)
    assert mx.function(train) is train
    assert isinstance(train, mx.Function)


def test_a_function_can_be_called_without_a_strategy():
    calls = []

    @mx.function
    def f(x, *, y=2):
        calls.append(1)
        return {"sum": x + y}

    assert float(f(1.0)["sum"]) == 3.0
    assert float(f(5.0)["sum"]) == 7.0
    assert float(f(1.0, y=10)["sum"]) == 11.0
    assert len(calls) == f.trace_count == 2


def test_functions_may_call_functions():
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(0.0)

    @mx.function
    def inner(x):
        v.assign_add(x)
        return v * 2

    @mx.function
    def outer(x):
        return inner(x) + inner(x)

    # v becomes 1 and then 2.
    assert parts(strategy, strategy.run(outer, (1.0,))) == [6.0, 6.0]
    assert float(v) == 2.0
    assert inner.trace_count == 0, "it became part of the outer program"


def traced_values():
    """A function, and the list of whether what it got was traced."""
    seen = []

    @mx.function
    def f(a, b):
        seen.append(isinstance(b, Tracer))
        return a * b + replica_id()

    return f, seen


def test_a_partial_of_a_function_is_compiled():
    strategy = mirrored(2)
    f, seen = traced_values()
    out = strategy.run(functools.partial(f, 2.0), (3.0,))
    assert parts(strategy, out) == [6.0, 7.0]
    assert seen == [True]


def test_a_partial_with_keywords_of_a_function_is_compiled():
    strategy = mirrored(2)
    f, seen = traced_values()
    out = strategy.run(functools.partial(f, b=2.0), (3.0,))
    assert parts(strategy, out) == [6.0, 7.0]
    assert seen == [True]


def test_a_method_is_compiled():
    class Model:
        @mx.function
        def call(self, x):
            assert isinstance(x, Tracer)
            return x + replica_id()

    strategy, model = mirrored(2), Model()
    assert parts(strategy, strategy.run(model.call, (1.0,))) == [1.0, 2.0]
    assert Model.call.trace_count == 1


def test_keyword_arguments_are_sorted_by_name():
    strategy = mirrored(2)
    f = mx.function(lambda a, b: a - b + replica_id())
    assert parts(strategy, strategy.run(f, (), {"a": 3.0, "b": 1.0})) == [2.0, 3.0]
    assert parts(strategy, strategy.run(f, (), {"b": 1.0, "a": 3.0})) == [2.0, 3.0]
    assert f.trace_count == 1


# Static arguments ----------------------------------------------------------------------


def test_static_arguments_are_python_values():
    strategy = mirrored(2)

    @mx.function(static_argnames="depth")
    def power(x, depth):
        assert isinstance(depth, int)
        for _ in range(depth):
            x = x * 2
        return x

    for depth, expected in [(3, 8.0), (3, 8.0), (1, 2.0)]:
        assert parts(strategy, strategy.run(power, (1.0, depth))) == [expected] * 2
        assert parts(strategy, strategy.run(power, (1.0,), {"depth": depth}))[0] == (
            expected
        )
    assert power.trace_count == 2


def test_static_arguments_among_others_by_name():
    @mx.function(static_argnames="depth")
    def power(x, **options):
        assert isinstance(options["depth"], int)
        return x ** options["depth"] + options["y"]

    assert [power(2.0, depth=3, y=y) for y in (1.0, 2.0)] == [9.0, 10.0]
    assert power.trace_count == 1


def test_several_static_arguments_and_defaults():
    @mx.function(static_argnames=("shape", "how"))
    def make(x, shape, how="zeros"):
        return jnp.full(shape, 0.0 if how == "zeros" else x)

    assert make(5.0, (2,)).tolist() == [0.0, 0.0]
    assert make(5.0, (2,), how="fill").tolist() == [5.0, 5.0]
    assert make(7.0, (2,), how="fill").tolist() == [7.0, 7.0]
    assert make.trace_count == 2


def test_a_static_argument_of_a_method():
    class Model:
        @mx.function(static_argnames="training")
        def call(self, x, training):
            return x * 2 if training else x * 3

    model = Model()
    strategy = mirrored(2)
    assert parts(strategy, strategy.run(model.call, (1.0, True))) == [2.0, 2.0]
    assert parts(strategy, strategy.run(model.call, (1.0, False))) == [3.0, 3.0]


def test_static_numbers_of_different_types_are_different():
    f = mx.function(lambda x, n: jnp.asarray(n), static_argnames="n")
    assert [str(f(0, n).dtype) for n in (1, 1.0, True)] == ["int32", "float32", "bool"]


def test_static_arguments_on_a_partial_batch():
    strategy = mirrored(2)
    f = mx.function(lambda x, n: sum(x * k for k in range(n)), static_argnames="n")
    x = per_replica(strategy, [1.0, 2.0], [3.0])
    assert parts(strategy, strategy.run(f, (x, 3))) == [[3.0, 6.0], [9.0]]


# Donated arguments ---------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4])
def test_donated_state_is_reused(n):
    strategy = mirrored(n)
    state = strategy.replicate({"w": jnp.zeros(1000)})
    step = mx.function(lambda s, x: {"w": s["w"] + x}, donate_argnums=0)
    old = strategy.experimental_local_results(state["w"])
    pointers = [a.unsafe_buffer_pointer() for a in old]
    state = strategy.run(step, (state, 1.0))
    new = strategy.experimental_local_results(state["w"])
    assert [a.unsafe_buffer_pointer() for a in new] == pointers
    assert all(a.is_deleted() for a in old)
    assert [float(a[0]) for a in new] == [1.0] * n


def test_only_the_named_arguments_are_donated():
    strategy = mirrored(2)
    a, b = (strategy.replicate(jnp.zeros(10)) for _ in range(2))
    step = mx.function(lambda a, b: (a + 1, b + 1), donate_argnums=(1,))
    old = strategy.experimental_local_results(b)
    strategy.run(step, (a, b))
    assert parts(strategy, a) == [[0.0] * 10] * 2
    assert all(x.is_deleted() for x in old)


def test_a_per_replica_argument_can_be_donated():
    strategy = mirrored(2)
    x = strategy.run(mx.function(lambda: jnp.zeros(10) + replica_id()))
    step = mx.function(lambda x: x + 1, donate_argnums=0)
    y = strategy.run(step, (x,))
    assert parts(strategy, y) == [[1.0] * 10, [2.0] * 10]


def test_donation_in_a_function_around_run():
    strategy = mirrored(2)
    state = strategy.replicate(jnp.zeros(10))
    old = strategy.experimental_local_results(state)

    @mx.function(donate_argnums=0)
    def step(state):
        return strategy.run(lambda s: s + 1, (state,))

    state = step(state)
    assert all(x.is_deleted() for x in old)
    assert parts(strategy, state) == [[1.0] * 10] * 2


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("is_written", [False, True])
def test_a_variable_whose_array_is_donated_says_so(n, is_written):
    strategy = mirrored(n)
    with strategy.scope():
        v = mx.Variable(jnp.zeros(2), name="best")
    state = strategy.replicate(jnp.zeros(2))
    step = mx.function(lambda s: s + 1, donate_argnums=0)
    use = mx.function(lambda: (v.assign_add(v) if is_written else v) * 2)
    strategy.run(use)
    state = strategy.run(step, (state,))
    v.assign(state)
    state = strategy.run(step, (state,))
    for read in (lambda: strategy.run(use), lambda: strategy.run(use.fn), v.numpy):
        with pytest.raises(RuntimeError, match="'best' has lost.*`donate_argnums`"):
            read()
    v.assign(state)
    assert parts(strategy, strategy.run(use)) == [[8.0 if is_written else 4.0] * 2] * n


def test_a_variable_of_no_strategy_mixes_with_arguments_on_any_device():
    v, w = mx.Variable([1.0]), mx.Variable([2.0])
    on = [jax.device_put(jnp.ones(1), device) for device in jax.devices()[:2]]
    replace = mx.function(lambda x: v.assign(x * 2).read_value())
    add = mx.function(lambda x: v.assign_add(w + x).read_value())
    assert float(replace(on[1])[0]) == 2.0
    assert [float(add(x)[0]) for x in (on[0], on[1], on[0])] == [5.0, 8.0, 11.0]
    assert float((v + on[1])[0]) == float((v + on[0])[0]) == 12.0


def test_donation_and_a_partial_batch_give_the_right_state():
    strategy = mirrored(2)
    state = strategy.replicate(jnp.zeros(2))
    step = mx.function(lambda s, x: s + all_sum(jnp.sum(x)), donate_argnums=0)
    for first, second in [([1.0], [2.0]), ([1.0, 1.0], [3.0]), ([1.0], [2.0])]:
        state = strategy.run(step, (state, per_replica(strategy, first, second)))
    assert parts(strategy, state) == [[11.0, 11.0]] * 2


def test_a_variables_memory_is_reused_by_compiled_steps():
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(jnp.zeros(1000))
    step = mx.function(lambda: v.assign_add(1.0 + v, read_value=False))
    strategy.run(step)
    stored = v.stored
    strategy.run(step)
    assert stored.is_deleted()
    assert v.numpy()[0] == 3.0


# Variables -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_variables_made_on_the_first_call_of_a_replica_function(n):
    strategy = mirrored(n)
    made = []

    @mx.function
    def step(x):
        if not made:
            made.append(mx.Variable(lambda: jnp.array([1.0, 2.0]), name="w"))
        w = made[0]
        w.assign_add(x)
        return w.read_value()

    for k in range(1, 4):
        out = strategy.run(step, (jnp.ones(2),))
        assert parts(strategy, out) == [[1.0 + k, 2.0 + k]] * n
    assert len(made) == 1
    assert isinstance(made[0], mx.distribute.MirroredVariable)
    assert parts(strategy, made[0]) == [[4.0, 5.0]] * n


@pytest.mark.parametrize("n", [1, 2])
def test_variables_made_on_the_first_call_around_run(n):
    strategy = mirrored(n)
    made = {}

    @mx.function
    def step(x):
        if "outer" not in made:
            with strategy.scope():
                made["outer"] = mx.Variable(10.0)

        def replica_fn(x):
            if "inner" not in made:
                made["inner"] = mx.Variable(0.0)
            made["inner"].assign_add(x)
            return made["inner"] + made["outer"]

        return strategy.reduce("MEAN", strategy.run(replica_fn, (x,)), axis=None)

    assert [float(step(1.0)) for _ in range(3)] == [11.0, 12.0, 13.0]
    assert float(made["inner"]) == 3.0
    assert isinstance(made["inner"], mx.distribute.MirroredVariable)


@pytest.mark.parametrize("n", [1, 2])
def test_variables_made_on_the_first_call_of_an_eager_replica_function(n):
    strategy = mirrored(n)
    made = {}

    def step(x):
        if "w" not in made:
            made["w"] = mx.Variable(1.0, name="w")
        made["w"].assign_add(x)
        return made["w"] + replica_id()

    for k in range(1, 4):
        out = strategy.run(step, (1.0,))
        assert parts(strategy, out) == [1.0 + k + i for i in range(n)]
    assert isinstance(made["w"], mx.distribute.MirroredVariable)


def test_variables_made_without_a_strategy():
    made = []

    @mx.function
    def count():
        if not made:
            made.append(mx.Variable(0))
        return made[0].assign_add(1).read_value()

    assert [int(count()) for _ in range(3)] == [1, 2, 3]


def test_variables_made_later_are_found():
    strategy = mirrored(2)
    variables = []
    step = mx.function(
        lambda n: [v.assign_add(1.0, read_value=False) for v in variables]
    )
    for k in range(3):
        with strategy.scope():
            variables.append(mx.Variable(0.0))
        strategy.run(step, (str(k),))
    assert [float(v) for v in variables] == [3.0, 2.0, 1.0]


def test_a_variable_may_be_read_in_one_branch_only():
    strategy = mirrored(2)
    with strategy.scope():
        a, b = mx.Variable(1.0), mx.Variable(10.0)
    f = mx.function(lambda first: (a if first else b) * 2)
    assert parts(strategy, strategy.run(f, (True,))) == [2.0, 2.0]
    assert parts(strategy, strategy.run(f, (False,))) == [20.0, 20.0]


def test_forgotten_variables_do_not_disturb():
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(1.0)
        for _ in range(5):
            mx.Variable(jnp.zeros(3))
    assert parts(strategy, strategy.run(mx.function(lambda: v * 2))) == [2.0, 2.0]


def test_several_threads_may_call_one_function():
    strategy = mirrored(2)
    with strategy.scope():
        count = mx.Variable(0.0)
    step = mx.function(lambda: count.assign_add(1.0, read_value=False))

    def work():
        for _ in range(25):
            strategy.run(step)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert parts(strategy, count) == [100.0, 100.0]


# A function inside an eager replica ----------------------------------------------------


def test_a_function_inside_an_eager_replica_uses_the_replicas_copies():
    strategy = mirrored(2)
    with strategy.scope():
        metric = mx.Variable(
            0.0,
            synchronization=mx.VariableSynchronization.ON_READ,
            aggregation=mx.VariableAggregation.SUM,
        )

    @mx.function
    def part(x):
        metric.assign_add(x)
        return metric * 10

    def replica_fn(x):
        assert not isinstance(x, Tracer)
        return part(x)

    x = per_replica(strategy, 1.0, 2.0)
    for k in range(1, 3):
        out = strategy.run(replica_fn, (x,))
        assert parts(strategy, out) == [10.0 * k, 20.0 * k]
    assert float(metric) == 6.0


def test_a_function_inside_an_eager_replica_may_reduce():
    strategy = mirrored(2)
    part = mx.function(lambda x: all_sum(x) * 2)
    x = per_replica(strategy, 1.0, 2.0)
    assert parts(strategy, strategy.run(lambda x: part(x), (x,))) == [6.0, 6.0]


def test_a_function_with_static_arguments_inside_an_eager_replica():
    strategy = mirrored(2)
    part = mx.function(lambda x, n: sum(x for _ in range(n)), static_argnames="n")
    x = per_replica(strategy, 1.0, 2.0)
    assert parts(strategy, strategy.run(lambda x: part(x, 3), (x,))) == [3.0, 6.0]
    assert parts(strategy, strategy.run(lambda x: part(x, n=2), (x,))) == [2.0, 4.0]


# Inputs of every kind ------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.float32(2), np.int64(2), jnp.float32(2), np.array(2.0), jnp.array(2)],
    ids=lambda v: type(v).__name__,
)
def test_numbers_of_every_kind_can_be_arguments(value):
    strategy = mirrored(2)
    out = strategy.run(mx.function(lambda x: x * 3 + replica_id()), (value,))
    assert parts(strategy, out) == [6.0, 7.0]


def test_a_complex_tree_of_arguments_arrives_as_it_was():
    strategy = mirrored(2)
    given = {
        "a": [1.0, (jnp.ones(2), None)],
        "b": per_replica(strategy, 1.0, 2.0),
        "name": "x",
        "flag": True,
    }

    @mx.function
    def f(tree):
        assert tree["name"] == "x" and tree["flag"] is True
        assert tree["a"][1][1] is None
        return tree["a"][0] + tree["a"][1][0] + tree["b"]

    assert parts(strategy, strategy.run(f, (given,))) == [[3.0, 3.0], [4.0, 4.0]]


def test_options_for_what_is_compiled_already():
    @mx.function
    def fn(x, mode):
        return x + 1 if mode == "add" else x * 2

    assert mx.function(fn) is fn
    other = mx.function(fn, donate_argnums=0, static_argnames="mode")
    x = jnp.ones(4)
    np.testing.assert_array_equal(other(x, "add"), 2 * np.ones(4))
    assert x.is_deleted()
    np.testing.assert_array_equal(fn(jnp.ones(4), mode="double"), 2 * np.ones(4))
