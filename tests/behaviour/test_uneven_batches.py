"""Batches of unequal lengths, even empty ones, give exact results in both engines."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import (
    all_sum,
    both_engines,
    compile_if,
    mirrored,
    parts,
    per_replica,
    replica_id,
    run,
)

import mirrax as mx
from mirrax._src.base.jax_compat import Tracer

lengths = pytest.mark.parametrize(
    "lengths",
    [(4, 2), (3, 0), pytest.param((5, 3, 0, 1), marks=pytest.mark.slow)],
    ids=str,
)


def batch_of(strategy, lengths, width=None):
    """The numbers 1, 2, 3, ... cut into batches of these lengths, and all of them."""
    shape = (sum(lengths),) if width is None else (sum(lengths), width)
    every = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    cuts = np.split(every, np.cumsum(lengths)[:-1])
    return per_replica(strategy, *cuts), every


@both_engines
@lengths
def test_each_replica_sees_its_own_length(engine, lengths):
    strategy = mirrored(len(lengths))
    x, every = batch_of(strategy, lengths)
    out = run(strategy, lambda x: (x * 2, jnp.sum(x), x.shape[0]), x, engine=engine)
    doubled, sums, sizes = out
    cuts = np.split(every, np.cumsum(lengths)[:-1])
    assert parts(strategy, doubled) == [(2 * c).tolist() for c in cuts]
    assert parts(strategy, sums) == [float(c.sum()) for c in cuts]
    assert parts(strategy, sizes) == list(lengths)


@both_engines
@lengths
def test_reduce_and_gather_count_real_examples(engine, lengths):
    strategy = mirrored(len(lengths))
    x, every = batch_of(strategy, lengths, width=2)
    out = run(strategy, lambda x: x * x, x, engine=engine)
    np.testing.assert_allclose(
        strategy.reduce("MEAN", out, axis=0), (every**2).mean(axis=0), rtol=1e-6
    )
    np.testing.assert_allclose(
        strategy.reduce("SUM", out, axis=0), (every**2).sum(axis=0), rtol=1e-6
    )
    np.testing.assert_allclose(
        strategy.reduce("MEAN", out, axis=(0, 1)), (every**2).mean(), rtol=1e-6
    )
    np.testing.assert_array_equal(strategy.gather(out, axis=0), every**2)


@both_engines
@lengths
def test_an_all_reduce_in_a_replica_sums_what_is_there(engine, lengths):
    strategy = mirrored(len(lengths))
    x, every = batch_of(strategy, lengths)

    def replica_fn(x):
        total = all_sum({"sum": jnp.sum(x), "count": jnp.float32(x.shape[0])})
        return total["sum"] / total["count"], replica_id()

    mean, ids = run(strategy, replica_fn, x, engine=engine)
    np.testing.assert_allclose(parts(strategy, mean), every.mean(), rtol=1e-6)
    assert parts(strategy, ids) == list(range(len(lengths)))


@pytest.mark.parametrize("lengths", [(4, 2), (3, 0)], ids=str)
def test_a_function_around_run_and_reduce_takes_a_partial_batch(lengths):
    strategy = mirrored(2)
    x, every = batch_of(strategy, lengths)
    with strategy.scope():
        seen = mx.Variable(0.0, aggregation=mx.VariableAggregation.SUM)

    @mx.function
    def step(x):
        def replica_fn(x):
            seen.assign_add(jnp.float32(x.shape[0]))
            return x * x

        squares = strategy.run(replica_fn, (x,))
        return strategy.reduce("MEAN", squares, axis=0), strategy.gather(squares, 0)

    for k in range(1, 3):
        mean, gathered = step(x)
        np.testing.assert_allclose(mean, (every**2).mean(), rtol=1e-6)
        np.testing.assert_array_equal(gathered, every**2)
        assert float(seen) == k * sum(lengths)


@both_engines
@lengths
def test_an_all_gather_in_a_replica_joins_all_examples(engine, lengths):
    strategy = mirrored(len(lengths))
    x, every = batch_of(strategy, lengths)
    out = run(
        strategy,
        lambda x: mx.get_replica_context().all_gather(x, axis=0),
        x,
        engine=engine,
    )
    assert parts(strategy, out) == [every.tolist()] * len(lengths)


def test_a_replica_without_rows_may_assign_a_variable_its_own_value():
    strategy = mirrored(2)
    with strategy.scope():
        mean = mx.Variable(
            0.0,
            synchronization=mx.VariableSynchronization.ON_READ,
            aggregation=mx.VariableAggregation.MEAN,
        )
    calls = []

    @mx.function
    def step(x):
        calls.append(x.shape)
        old = mean.read_value()
        mean.assign(old if not len(x) else old + jnp.mean(x))

    x = per_replica(strategy, jnp.array([2.0, 4.0]), jnp.zeros(0))
    for _ in range(3):
        strategy.run(step, (x,))
    assert mean.numpy() == 4.5  # of 9 and 0
    assert len(calls) == 2  # compiled: traced once for each shape


def test_a_step_that_has_to_run_as_plain_python_is_not_traced_for_ever():
    strategy = mirrored(2)
    calls = []

    @mx.function
    def step(x):
        calls.append(x)
        return mx.distribute.get_replica_context().all_gather(x, axis=0)

    for k in range(1, 5):
        x = per_replica(strategy, [1.0 * k], [2.0, 3.0])
        assert parts(strategy, strategy.run(step, (x,))) == [[k, 2.0, 3.0]] * 2
    traced = [x for x in calls if isinstance(x, Tracer)]
    assert len(calls) - len(traced) == 8
    assert len(traced) == 2  # the first call may have made variables


@both_engines
@lengths
def test_a_training_step_on_a_partial_batch_is_the_step_on_all_its_examples(
    engine, lengths
):
    strategy = mirrored(len(lengths))
    x, every = batch_of(strategy, lengths)
    with strategy.scope():
        w = mx.Variable(1.0)
        seen = mx.Variable(
            0.0,
            synchronization=mx.VariableSynchronization.ON_READ,
            aggregation=mx.VariableAggregation.SUM,
        )

    def step(x):
        loss, gradient = mx.value_and_grad(
            lambda: jnp.sum((w * x - 2 * x) ** 2) / len(every), w
        )()
        w.assign_sub(0.001 * all_sum(gradient))
        seen.assign_add(jnp.float32(x.shape[0]))
        return loss

    loss = run(strategy, step, x, engine=engine)
    squares = np.mean(every**2)
    total = strategy.reduce("SUM", loss, axis=None)
    np.testing.assert_allclose(total, squares, rtol=1e-6)
    np.testing.assert_allclose(parts(strategy, w), 1 + 0.002 * squares, rtol=1e-6)
    assert float(seen) == len(every)


@both_engines
def test_full_and_partial_batches_alternate(engine):
    strategy = mirrored(2)
    with strategy.scope():
        total = mx.Variable(0.0, aggregation=mx.VariableAggregation.SUM)
        last = mx.Variable(0.0, aggregation=mx.VariableAggregation.MEAN)

    def step(x):
        total.assign_add(jnp.sum(x))
        last.assign(jnp.sum(x))
        return total.read_value()

    step = compile_if(engine, step)
    batches = [
        ([1.0, 2.0], [3.0, 4.0]),
        ([5.0, 6.0], [7.0]),
        ([8.0, 9.0], [10.0, 11.0]),
        ([12.0], []),
        ([13.0, 14.0], [15.0, 16.0]),
    ]
    so_far = 0.0
    for first, second in batches:
        so_far += sum(first) + sum(second)
        out = strategy.run(
            step, (per_replica(strategy, first, second, dtype="float32"),)
        )
        assert parts(strategy, out) == [so_far] * 2
        assert parts(strategy, total) == [so_far] * 2
        assert parts(strategy, last) == [(sum(first) + sum(second)) / 2] * 2


@both_engines
def test_a_nested_batch_with_partly_equal_shapes(engine):
    strategy = mirrored(2)
    batch = {
        "x": per_replica(strategy, [1.0, 2.0], [3.0]),
        "scale": per_replica(strategy, 10.0, 100.0),
        "shared": jnp.float32(0.5),
        "number": 2,
    }

    def replica_fn(batch, flag):
        scale = batch["scale"] * batch["shared"] * batch["number"]
        return batch["x"] * scale if flag else batch["x"]

    out = run(strategy, replica_fn, batch, engine=engine, flag=True)
    assert parts(strategy, out) == [[10.0, 20.0], [300.0]]


@both_engines
def test_functional_state_passes_through_a_partial_batch(engine):
    strategy = mirrored(2)
    optimizer = optax.sgd(0.5)
    state = strategy.replicate((jnp.float32(1.0), optimizer.init(jnp.float32(1.0))))

    def step(state, x):
        w, slots = state
        gradient = all_sum(jax.grad(lambda w: jnp.sum(w * x))(w))
        updates, slots = optimizer.update(gradient, slots)
        return optax.apply_updates(w, updates), slots

    step = compile_if(engine, step)
    state = strategy.run(step, (state, per_replica(strategy, [1.0, 2.0], [3.0])))
    assert parts(strategy, state[0]) == [-2.0, -2.0]
    state = strategy.run(step, (state, per_replica(strategy, [1.0], [3.0])))
    assert parts(strategy, state[0]) == [-4.0, -4.0]


@pytest.mark.parametrize("lengths", [(4, 2), (3, 0)], ids=str)
def test_plain_collectives_of_jax_work_on_a_partial_batch(lengths):
    strategy = mirrored(2)
    x, every = batch_of(strategy, lengths)
    out = run(
        strategy,
        lambda x: (
            jax.lax.psum(jnp.sum(x), strategy.axis_name),
            jax.lax.pmax(jnp.max(x, initial=0.0), strategy.axis_name),
            jax.lax.axis_index(strategy.axis_name),
        ),
        x,
        engine="compiled",
    )
    assert parts(strategy, out[0]) == [every.sum()] * 2
    assert parts(strategy, out[1]) == [every.max()] * 2
    assert parts(strategy, out[2]) == [0, 1]


@both_engines
def test_a_collective_inside_a_loop_on_a_partial_batch(engine):
    strategy = mirrored(2)
    x = per_replica(strategy, [1.0, 2.0, 3.0], [4.0])

    def replica_fn(x):
        total = jnp.float32(0)
        for k in range(3):
            total = total + all_sum(jnp.sum(x) * k)
        return total

    assert parts(strategy, run(strategy, replica_fn, x, engine=engine)) == [30.0] * 2


@both_engines
def test_a_merge_call_on_a_partial_batch(engine):
    strategy = mirrored(2)
    x = per_replica(strategy, [1.0, 2.0, 3.0], [4.0])

    def merge(strategy, value):
        return strategy.reduce("SUM", value, axis=None)

    def replica_fn(x):
        return mx.get_replica_context().merge_call(merge, (jnp.sum(x),)) + x

    out = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, out) == [[11.0, 12.0, 13.0], [14.0]]


@both_engines
def test_a_merge_fn_may_see_the_unequal_parts(engine):
    strategy = mirrored(2)
    x = per_replica(strategy, [1.0, 2.0, 3.0], [4.0])

    def merge(strategy, value):
        lengths = [p.shape[0] for p in strategy.experimental_local_results(value)]
        return strategy.reduce("MEAN", value, axis=0) + 0 * sum(lengths)

    def replica_fn(x):
        return mx.get_replica_context().merge_call(merge, (x,)) + replica_id()

    assert parts(strategy, run(strategy, replica_fn, x, engine=engine)) == [2.5, 3.5]


@both_engines
def test_a_result_may_be_an_array_on_one_replica_and_a_number_on_another(engine):
    strategy = mirrored(2)
    with strategy.scope():
        total = mx.Variable(0.0, aggregation=mx.VariableAggregation.SUM)

    def replica_fn(x):
        total.assign_add(jnp.sum(x))
        return jnp.sum(x) if x.shape[0] > 1 else 7.0, x.shape[0] > 1

    x = per_replica(strategy, [1.0, 2.0, 3.0], [4.0])
    value, is_long = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, value) == [6.0, 7.0]
    assert parts(strategy, is_long) == [True, False]
    assert float(total) == 10.0


# Unequal dtypes ------------------------------------------------------------------------


@both_engines
def test_replicas_may_get_and_return_different_dtypes(engine):
    strategy = mirrored(2)
    x = mx.distribute.PerReplica([jnp.float32(1.5), jnp.int32(2)])
    out = run(strategy, lambda x: x * 2, x, engine=engine)
    assert parts(strategy, out) == [3.0, 4]
    dtypes = [str(p.dtype) for p in strategy.experimental_local_results(out)]
    assert dtypes == ["float32", "int32"]


@both_engines
def test_different_dtypes_meet_after_conversion(engine):
    strategy = mirrored(2)
    x = mx.distribute.PerReplica([jnp.float32(1.5), jnp.int32(2)])
    out = run(strategy, lambda x: all_sum(x.astype("float32")), x, engine=engine)
    assert parts(strategy, out) == [3.5, 3.5]


@both_engines
def test_summing_different_dtypes_in_replicas_says_which_replica_has_which(engine):
    strategy = mirrored(2)
    x = mx.distribute.PerReplica([jnp.float32(1.5), jnp.int32(2)])
    with pytest.raises(ValueError, match=r"replica 1 \(CPU:1\): \(\) int32"):
        run(strategy, all_sum, x, engine=engine)


@pytest.mark.parametrize("axis", [None, 0])
def test_reducing_different_dtypes_says_which_replica_has_which(axis):
    strategy = mirrored(2)
    x = mx.distribute.PerReplica([jnp.ones(2, "float32"), jnp.ones(2, "int32")])
    with pytest.raises(ValueError, match=r"replica 1 \(CPU:1\): .*int32"):
        strategy.reduce("SUM", x, axis=axis)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_mean_of_a_partial_batch_has_the_dtype_of_a_full_one(dtype):
    strategy = mirrored(2)
    full = per_replica(strategy, [1.0, 2.0], [3.0, 6.0], dtype=dtype)
    partial = per_replica(strategy, [1.0, 2.0], [6.0], dtype=dtype)
    for value in (full, partial):
        mean = strategy.reduce("MEAN", value, axis=0)
        assert (mean.dtype, float(mean)) == (dtype, 3.0)


def test_a_partial_batch_does_not_take_the_users_arrays():
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable([0.0, 0.0])
    x = per_replica(strategy, [1.0, 2.0], [3.0])
    y = per_replica(strategy, [5.0, 6.0], [7.0, 8.0])
    full = per_replica(strategy, [1.0, 1.0], [3.0, 3.0])
    own = strategy.experimental_local_results(y)

    @mx.function
    def keep(x, y):
        v.assign(y)

    @mx.function
    def count(x):
        v.assign_add(x)

    strategy.run(count, (full,))
    strategy.run(keep, (x, y))
    for _ in range(2):
        strategy.run(count, (full,))
    assert [a.tolist() for a in own] == [[5.0, 6.0], [7.0, 8.0]]
    assert parts(strategy, v) == [[7.0, 8.0], [13.0, 14.0]]


@pytest.mark.slow
def test_what_a_partial_batch_returned_outlives_the_next_steps():
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable([1.0, 2.0])
        own = mx.Variable([0.0, 0.0])
        w = mx.Variable(0.0, aggregation=mx.VariableAggregation.SUM)
    partial = per_replica(strategy, [1.0, 2.0], [3.0])
    full = per_replica(strategy, [1.0, 1.0], [1.0, 1.0])

    @mx.function
    def step(x):
        v.assign_add(jnp.ones(2))
        own.assign(jnp.ones(2) * jnp.sum(x))
        w.assign(jnp.sum(x))
        return v.read_value(), own.read_value(), w.read_value()

    @mx.function
    def silent_step(x):
        v.assign_add(jnp.ones(2))
        own.assign_add(x)
        w.assign_add(jnp.sum(x))

    strategy.run(silent_step, (full,))
    returned = strategy.run(step, (partial,))
    for _ in range(2):
        strategy.run(silent_step, (full,))
    assert parts(strategy, returned[0]) == [[3.0, 4.0]] * 2
    assert parts(strategy, returned[1]) == [[3.0, 3.0]] * 2
    assert parts(strategy, returned[2]) == [6.0, 6.0]
