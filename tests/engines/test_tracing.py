"""When a function is traced: once for any number of replicas, again only with a reason."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import all_sum, mirrored, parts, per_replica, replica_id
from jax.sharding import NamedSharding, PartitionSpec

import mirrax as mx


def counting(fn):
    """`fn` as an `mx.function`, and the list that grows when its Python runs."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return fn(*args, **kwargs)

    return mx.function(counted), calls


# Once for all replicas -----------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_a_replica_function_is_traced_once_for_any_number_of_replicas(n):
    strategy = mirrored(n)
    with strategy.scope():
        v = mx.Variable(0.0)
    step, calls = counting(lambda x: v.assign_add(all_sum(x)).read_value())
    for k in range(1, 4):
        out = strategy.run(step, (per_replica(strategy, *[1.0] * n),))
        assert parts(strategy, out) == [float(n * k)] * n
    assert len(calls) == 1
    assert step.trace_count == 1


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_a_function_around_run_is_traced_once_for_any_number_of_replicas(n):
    strategy = mirrored(n)
    inner_calls = []

    def replica_fn(x):
        inner_calls.append(1)
        return x * 2

    step, calls = counting(
        lambda x: strategy.reduce("SUM", strategy.run(replica_fn, (x,)), axis=None)
    )
    for _ in range(3):
        assert float(step(per_replica(strategy, *[1.0] * n))) == 2.0 * n
    assert (len(calls), len(inner_calls), step.trace_count) == (1, 1, 1)


def test_another_strategy_is_another_trace_and_going_back_is_none():
    step, calls = counting(lambda x: all_sum(x))
    strategies = [mirrored(2), mirrored(4)]
    for _ in range(2):
        for strategy in strategies:
            n = strategy.num_replicas_in_sync
            assert parts(strategy, strategy.run(step, (1.0,))) == [n] * n
    assert step.trace_count == len(calls) == 2


# Again with a reason -------------------------------------------------------------------


def test_new_shapes_and_dtypes_are_traced_and_old_ones_found_again():
    strategy = mirrored(2)
    step, calls = counting(lambda x: jnp.sum(x))
    shapes = [jnp.ones(2), jnp.ones(3), jnp.ones((2, 2)), jnp.ones(2, jnp.int32)]
    for _ in range(3):
        for x in shapes:
            assert parts(strategy, strategy.run(step, (x,)))[0] == x.size
    assert step.trace_count == len(calls) == 4


def test_new_values_of_arrays_and_numbers_are_not_traced():
    strategy = mirrored(2)
    step, calls = counting(lambda x, n, *, scale: x * n * scale + replica_id())
    for k in range(1, 5):
        out = strategy.run(step, (jnp.float32(k), k), {"scale": 0.5 * k})
        assert parts(strategy, out) == [0.5 * k**3, 0.5 * k**3 + 1]
    assert step.trace_count == len(calls) == 1


def test_the_place_of_an_array_is_no_reason():
    strategy = mirrored(2)
    step, calls = counting(lambda x: x * 2 + replica_id())
    placements = [
        jnp.ones(2),
        np.ones(2, np.float32),
        jax.device_put(jnp.ones(2), jax.devices()[0]),
        jax.device_put(jnp.ones(2), jax.devices()[3]),
        jax.device_put(jnp.ones(2), NamedSharding(strategy.mesh, PartitionSpec())),
        strategy.reduce("MEAN", per_replica(strategy, [1.0, 1.0], [1.0, 1.0]), None),
    ]
    for x in placements:
        assert parts(strategy, strategy.run(step, (x,))) == [[2.0, 2.0], [3.0, 3.0]]
    assert step.trace_count == len(calls) == 1


def test_a_mirrored_value_in_place_of_an_array_is_no_reason():
    strategy = mirrored(2)
    step, calls = counting(lambda state: {"w": all_sum(state["w"])})
    state = {"w": jnp.ones(2)}
    for _ in range(4):
        state = strategy.run(step, (state,))
    assert parts(strategy, state["w"]) == [[16.0, 16.0]] * 2
    assert step.trace_count == len(calls) == 1


@pytest.mark.parametrize("value", [True, "relu", None, (3, "a"), jnp.float32])
def test_other_values_are_static_and_compared_by_value(value):
    strategy = mirrored(2)
    step, calls = counting(lambda x, how: x * 2)
    for how in (value, value, "other", value):
        strategy.run(step, (1.0, how))
    assert step.trace_count == len(calls) == 2


def test_objects_are_static_and_compared_by_identity():
    class Settings:
        pass

    first, second = Settings(), Settings()
    strategy = mirrored(2)
    step, calls = counting(lambda x, settings: x * 2)
    for settings in (first, first, second, first):
        strategy.run(step, (1.0, settings))
    assert step.trace_count == len(calls) == 2


def test_copies_that_become_different_are_traced_at_most_once_more():
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(0.0)
    step, calls = counting(lambda x: v.assign_add(x).read_value())
    x = per_replica(strategy, 1.0, 2.0)
    for k in range(1, 6):
        assert parts(strategy, strategy.run(step, (x,))) == [k * 1.0, k * 2.0]
    assert len(calls) == step.trace_count <= 2


def test_a_metric_is_traced_once():
    strategy = mirrored(2)
    with strategy.scope():
        metric = mx.Variable(
            0.0,
            synchronization=mx.VariableSynchronization.ON_READ,
            aggregation=mx.VariableAggregation.SUM,
        )
    step, calls = counting(lambda x: metric.assign_add(x, read_value=False))
    for k in range(1, 5):
        strategy.run(step, (per_replica(strategy, 1.0, 2.0),))
        assert float(metric) == 3.0 * k
    assert step.trace_count == len(calls) == 1


def test_eager_and_compiled_steps_in_turn_stop_tracing():
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(0.0)
    step, calls = counting(lambda: v.assign_add(1.0, read_value=False))
    for _ in range(4):
        strategy.run(step)
        strategy.run(lambda: v.assign_add(1.0, read_value=False))
    assert parts(strategy, v) == [8.0, 8.0]
    assert len(calls) <= 2


def test_new_variables_of_other_code_are_no_reason():
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(0.0)
    step, calls = counting(lambda: v.assign_add(1.0, read_value=False))
    for _ in range(3):
        strategy.run(step)
        with strategy.scope():
            mx.Variable(jnp.zeros(5))
    assert len(calls) == 1


def test_partial_batches_are_traced_once_for_each_length():
    strategy = mirrored(2)
    step, calls = counting(lambda x: all_sum(jnp.sum(x)))
    batches = [([1.0, 2.0], [3.0, 4.0]), ([5.0, 6.0], [7.0])]
    for _ in range(3):
        for first, second in batches:
            out = strategy.run(step, (per_replica(strategy, first, second),))
            assert parts(strategy, out) == [sum(first) + sum(second)] * 2
    assert step.trace_count == len(calls) <= 3


# Saying why ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda k: ((jnp.ones(k + 1),), {}),
            r"argument 0 .*float32\[4\].*float32\[5\]",
        ),
        (lambda k: ((), {"x": [jnp.ones(k)]}), r"argument 'x'\[0\].*float32\[4\]"),
        (lambda k: ((f"mode {k}",), {}), r"argument 0 .*'mode 3' to 'mode 4'"),
        (lambda k: (([1.0] * (k + 1),), {}), r"structure of the arguments changed"),
        (lambda k: ((jnp.ones((1,) * k),), {}), r"argument 0 .*float32\[1,1,1,1\]"),
    ],
    ids=["shape", "keyword", "static", "structure", "rank"],
)
def test_many_traces_warn_and_name_what_changed(call, message):
    strategy = mirrored(2)

    def my_step(x):
        return replica_id()

    step = mx.function(my_step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(4):
            strategy.run(step, *call(k))
    with pytest.warns(UserWarning, match=rf"'my_step' .*traced 5 times.*{message}"):
        strategy.run(step, *call(4))


def test_the_warning_shows_the_shapes_that_a_replica_sees():
    strategy = mirrored(2)
    step = mx.function(lambda x: jnp.sum(x))
    for k in range(1, 5):
        strategy.run(step, (per_replica(strategy, *np.ones((2, k))),))
    with pytest.warns(UserWarning, match=r"argument 0 .*float32\[4\].*float32\[5\]"):
        strategy.run(step, (per_replica(strategy, *np.ones((2, 5))),))


def test_the_warning_points_at_the_call_of_the_user():
    step = mx.function(lambda x: x * 2)
    for k in range(1, 5):
        step(jnp.ones(k))
    with pytest.warns(UserWarning) as caught:
        step(jnp.ones(5))
    assert caught[0].filename == __file__


def test_few_traces_do_not_warn():
    strategy = mirrored(2)
    step = mx.function(lambda x: x * 2)
    for k in range(1, 5):
        strategy.run(step, (jnp.ones(k),))
    assert step.trace_count == 4


def test_the_method_of_many_objects_is_traced_for_each_and_does_not_warn():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @mx.function
        def call(self, x):
            return x * self.scale

    for scale in range(1, 7):
        model = Model(float(scale))
        assert float(model.call(2.0)) == 2.0 * scale


# Where a function is called ------------------------------------------------------------


def test_a_function_sees_the_strategy_that_it_is_called_under():
    @mx.function
    def count():
        return jnp.float32(mx.get_strategy().num_replicas_in_sync)

    assert float(count()) == 1.0
    with mirrored(2).scope():
        assert float(count()) == 2.0
    with mirrored(4).scope():
        assert float(count()) == 4.0
    assert float(count()) == 1.0


def test_a_function_runs_on_the_strategy_that_it_is_called_under():
    @mx.function
    def total(x):
        strategy = mx.get_strategy()
        out = strategy.run(lambda x: x + replica_id(), (x,))
        return strategy.reduce("SUM", out, axis=None)

    for n, expected in [(2, 21.0), (4, 46.0), (2, 21.0)]:
        with mirrored(n).scope():
            assert float(total(10.0)) == expected


def test_a_function_knows_whether_it_is_in_cross_replica_context():
    @mx.function
    def where():
        return jnp.int32(mx.distribute.in_cross_replica_context())

    assert int(where()) == 0
    with mirrored(2).scope():
        assert int(where()) == 1


def test_many_traces_of_uneven_parts_warn():
    strategy = mirrored(2)

    def my_step(x):
        return jnp.sum(x)

    step = mx.function(my_step)
    message = r"'my_step' .*traced 5 times.*argument 0 changed from float32\[\d\] to float32\[5\]"
    with pytest.warns(UserWarning, match=message):
        for k in range(1, 5):
            parts = per_replica(strategy, np.ones(k, "f4"), np.ones(k + 1, "f4"))
            strategy.run(step, (parts,))
