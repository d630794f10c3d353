"""What replica functions do: gradients, `merge_call`, functional state, whole loops."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import (
    all_styles,
    all_sum,
    both_engines,
    compile_if,
    per_replica,
    replica_id,
    run,
)

import mirrax as mx

from .comparing import Pool, error_of, worker_of

# Arguments and results ------------------------------------------------------------------


@all_styles
def test_arguments_and_results_of_all_kinds(two_by_two: Pool, engine: str) -> None:
    def results(strategy):
        def replica_fn(own, same, number, *, tree, name):
            assert name == "text"
            return {
                "own": own * 2,
                "same": same + number,
                "both": own + same,
                "tree": jax.tree.map(lambda x: x + replica_id(), tree),
                "given": same,
            }

        own = per_replica(strategy, *np.arange(8.0, dtype="float32").reshape(4, 2))
        same = strategy.replicate(jnp.arange(2.0))
        tree = (own, [jnp.int32(1)])
        return run(
            strategy, replica_fn, own, same, 3, tree=tree, name="text", engine=engine
        )

    two_by_two.assert_as_one(results)


@both_engines
def test_results_are_arguments_again(two_by_two: Pool, engine: str) -> None:
    def results(strategy):
        step = compile_if(
            engine, lambda x, y: (x + all_sum(y), y + replica_id(), all_sum(x))
        )
        x, y = per_replica(strategy, 1.0, 2.0, 3.0, 4.0), jnp.float32(1)
        found = []
        for _ in range(3):
            x, y, total = strategy.run(step, (x, y))
            found.append((x, y, total))
        return found

    two_by_two.assert_as_one(results)


@both_engines
def test_a_replica_knows_its_place(two_by_two: Pool, engine: str) -> None:
    def places(strategy):
        def replica_fn():
            ctx = mx.get_replica_context()
            return ctx.replica_id_in_sync_group, jnp.int32(ctx.num_replicas_in_sync)

        return run(strategy, replica_fn, engine=engine)

    ids, counts = two_by_two.assert_as_one(places)
    assert [int(i) for i in ids.parts] == [0, 1, 2, 3]
    assert counts.parts[0] == 4


# Gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["eager", "compiled", "caller"])
def test_gradients_through_collectives(two_by_two: Pool, engine: str) -> None:
    def gradients(strategy):
        with strategy.scope():
            w = mx.Variable([1.0, 2.0, 3.0])
            b = mx.Variable(0.5)

        def replica_fn(x):
            ctx = mx.get_replica_context()

            def loss():
                total = ctx.all_reduce("SUM", jnp.sum(w * x) + b)
                mean = ctx.all_reduce("MEAN", {"a": [w * w]})["a"][0]
                rows = ctx.all_gather(w[None] * x, axis=0)
                weights = jnp.arange(rows.size).reshape(rows.shape) * (1 + replica_id())
                return total**2 + jnp.sum(mean) + jnp.sum(rows * weights)

            return mx.value_and_grad(loss, [w, b])()

        x = per_replica(strategy, *np.arange(12.0, dtype="float32").reshape(4, 3))
        return run(strategy, replica_fn, x, engine=engine)

    two_by_two.assert_as_one(gradients, rtol=1e-5)


@both_engines
def test_gradients_through_a_gather_of_uneven_parts(two_by_two: Pool, engine) -> None:
    def gradients(strategy):
        with strategy.scope():
            w = mx.Variable(2.0)

        def replica_fn(x):
            def loss():
                rows = mx.get_replica_context().all_gather(w * x, axis=0)
                return jnp.sum(rows * jnp.arange(rows.shape[0])) * (1 + replica_id())

            return mx.value_and_grad(loss, w)()

        x = per_replica(strategy, *[np.arange(n) + 1.0 for n in (1, 3, 0, 2)])
        return run(strategy, replica_fn, x, engine=engine)

    two_by_two.assert_as_one(gradients)


@both_engines
def test_gradients_of_uneven_batches(two_by_two: Pool, engine: str) -> None:
    def gradients(strategy):
        with strategy.scope():
            w = mx.Variable([1.0, -1.0])

        def replica_fn(x):
            size = all_sum(len(x))

            def loss():
                errors = jnp.sum((x * w) ** 2, axis=1)
                return mx.nn.compute_average_loss(errors, global_batch_size=size)

            value, gradient = mx.value_and_grad(loss, w)()
            return all_sum(value), all_sum(gradient)

        found = []
        for sizes in ((2, 1, 0, 0), (0, 0, 1, 1), (2, 1, 0, 0)):
            rows = [np.ones((n, 2), "float32") * (i + 1) for i, n in enumerate(sizes)]
            found.append(
                run(strategy, replica_fn, per_replica(strategy, *rows), engine=engine)
            )
        return found

    two_by_two.assert_as_one(gradients)


# merge_call -----------------------------------------------------------------------------


@all_styles
def test_merge_call(two_by_two: Pool, engine: str) -> None:
    def merged(strategy):
        with strategy.scope():
            v = mx.Variable(0.0)

        def merge(strategy, own, same, number):
            total = strategy.reduce("SUM", own, axis=None)
            v.assign(total + number)
            strategy.extended.update(v, lambda copy, x: copy.assign_add(x), args=(own,))
            return total, own, {"same": strategy.reduce("MEAN", same, axis=None)}

        def replica_fn(x):
            ctx = mx.get_replica_context()
            out = ctx.merge_call(merge, (x, all_sum(x)), {"number": 100})
            return jax.tree.map(lambda leaf: leaf + 0, out), v.read_value()

        x = per_replica(strategy, 1.0, 2.0, 3.0, 4.0)
        return run(strategy, replica_fn, x, engine=engine), v

    two_by_two.assert_as_one(merged)


@both_engines
def test_local_results_in_a_merge_call_are_the_workers_own(
    two_by_two: Pool, engine: str
) -> None:
    def merged(strategy):
        def merge(strategy, x):
            parts = strategy.experimental_local_results(x)
            return mx.distribute.PerReplica([part * 10 for part in parts])

        def replica_fn(x):
            return mx.get_replica_context().merge_call(merge, (x,))

        x = per_replica(strategy, 1.0, 2.0, 3.0, 4.0)
        return run(strategy, replica_fn, x, engine=engine)

    two_by_two.assert_as_one(merged)


@both_engines
def test_a_sum_of_local_results_in_a_merge_call(two_by_two: Pool, engine: str) -> None:
    def merged(strategy):
        def merge(strategy, x):
            return sum(strategy.experimental_local_results(x))

        def replica_fn(x):
            return mx.get_replica_context().merge_call(merge, (x,))

        x = per_replica(strategy, 1.0, 2.0, 3.0, 4.0)
        return run(strategy, replica_fn, x, engine=engine)

    found = two_by_two.run(merged)
    assert [np.unique(own.parts).tolist() for own in found] == [[3.0], [7.0]]


# Functional state -----------------------------------------------------------------------


@pytest.mark.parametrize("donate", [(), (0,)])
@both_engines
def test_functional_state(two_by_two: Pool, engine: str, donate) -> None:
    def train(strategy):
        state = strategy.replicate({"w": jnp.ones((3, 2)), "step": 0})

        def replica_fn(state, x):
            def loss(w):
                return jnp.mean((x @ w - 1.0) ** 2)

            value, gradient = jax.value_and_grad(loss)(state["w"])
            gradient = mx.get_replica_context().all_reduce("MEAN", gradient)
            new = {"w": state["w"] - 0.1 * gradient, "step": state["step"] + 1}
            return new, value

        step = (
            mx.function(replica_fn, donate_argnums=donate)
            if engine == "compiled"
            else replica_fn
        )
        for i in range(4):
            x = per_replica(strategy, *(np.ones((4, 2, 3), "float32") * (i + 1) / 4))
            state, loss = strategy.run(step, (state, x))
        return state, strategy.reduce("MEAN", loss, axis=None)

    two_by_two.assert_as_one(train, rtol=1e-5)


# Whole loops in a function --------------------------------------------------------------


def test_a_function_around_several_runs(two_by_two: Pool) -> None:
    def loop(strategy):
        with strategy.scope():
            v = mx.Variable([0.0, 0.0])

        @mx.function
        def outer(x, n):
            total = jnp.float32(0)
            for _ in range(2):
                y = strategy.run(lambda x: x * 2 + v.read_value(), (x,))
                total += strategy.reduce("SUM", y, axis=0)
                v.assign_add(strategy.reduce("MEAN", y, axis=None) + n)
            return total, strategy.gather(y, axis=0), y

        x = per_replica(strategy, *np.arange(8.0, dtype="float32").reshape(4, 2))
        return [(outer(x, 1.0), v.read_value()) for _ in range(2)]

    two_by_two.assert_as_one(loop)


def test_a_function_that_looks_at_local_results(two_by_two: Pool) -> None:
    def loop(strategy):
        @mx.function
        def outer(x):
            y = strategy.run(lambda x: x + 1, (x,))
            return [part * 2 for part in strategy.experimental_local_results(y)], y

        return outer(per_replica(strategy, 1.0, 2.0, 3.0, 4.0))

    found = two_by_two.run(loop)
    assert [[float(x) for x in parts] for parts, _ in found] == [[4, 6], [8, 10]]


def test_plain_values_in_a_function(two_by_two: Pool) -> None:
    def loop(strategy):
        def outer(x):
            return (
                strategy.reduce("SUM", x, axis=0),
                strategy.reduce("MEAN", x, axis=None),
                strategy.gather(x, axis=0),
            )

        x = jnp.arange(3.0) + worker_of(strategy)
        return mx.function(outer)(x), outer(x)

    compiled, plain = two_by_two.run_alike(loop)
    for a, b in zip(compiled, plain):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("batch", [8, 6])
def test_a_function_that_takes_the_dataset(two_by_two: Pool, batch: int) -> None:
    def loop(strategy):
        with strategy.scope():
            v = mx.Variable(0.0, aggregation=mx.VariableAggregation.SUM)

        def replica_fn(x):
            v.assign_add(jnp.sum(x))
            return x * 2

        @mx.function
        def epoch(dataset):
            total = 0.0
            for x in dataset:
                y = strategy.run(replica_fn, (x,))
                total += strategy.reduce("SUM", y, axis=0)
            return total

        dataset = strategy.experimental_distribute_dataset(
            mx.data.Dataset.range(20).map(lambda x: np.float32(x)).batch(batch)
        )
        return [epoch(dataset) for _ in range(2)], v.read_value()

    totals, v = two_by_two.assert_as_one(loop)
    assert [float(t) for t in totals] == [380.0, 380.0] and v == 380.0


# Errors ---------------------------------------------------------------------------------


@both_engines
def test_an_error_of_all_workers_leaves_them_usable(two_by_two: Pool, engine) -> None:
    def fail(strategy):
        def replica_fn(x):
            raise KeyError("mine")

        def uneven(x):
            if engine == "eager" and replica_id() % 2:
                return x
            return all_sum(x) if engine == "eager" else x.no_such_name

        kinds = [
            error_of(lambda fn=fn: run(strategy, fn, jnp.ones(2), engine=engine))[0]
            for fn in (replica_fn, uneven)
        ]
        return kinds, run(strategy, lambda: all_sum(replica_id()), engine=engine)

    kinds, total = two_by_two.assert_as_one(fail)
    assert kinds == [
        "KeyError",
        "RuntimeError" if engine == "eager" else "AttributeError",
    ]
    assert int(total.parts[0]) == 6


def test_an_eager_error_of_one_worker_before_it_communicates(two_by_two: Pool) -> None:
    def fail(strategy):
        def replica_fn():
            if replica_id() == 3:
                raise KeyError("mine")
            return replica_id()

        try:
            strategy.run(replica_fn)
            found = "nothing"
        except KeyError as error:
            found = error.__notes__[0]
        return found, strategy.run(lambda: all_sum(1))

    found = two_by_two.run(fail)
    assert [name for name, _ in found] == [
        "nothing",
        "Raised in replica 3 (CPU:1 of worker 1).",
    ]
    assert found[0][1].parts[0] == 4


def test_steps_are_counted_wherever_run_is_called(two_by_two: Pool) -> None:
    """`mirrax top` shows them, and messages name the last one."""

    def counted(strategy):
        roster = strategy._cluster._roster
        with strategy.scope():
            total = mx.Variable(0.0)

        def one():
            total.assign_add(1.0)

        def three():
            for _ in range(3):
                strategy.run(one)

        dataset = mx.data.Dataset.range(32).batch(4)
        elements = iter(strategy.experimental_distribute_dataset(dataset))
        calls = {
            "plain": lambda: strategy.run(one),
            "compiled": functools.partial(strategy.run, mx.function(one)),
            "in a function": mx.function(lambda: strategy.run(one)),
            "three in a function": mx.function(three),
            "eager function": lambda: _eagerly(mx.function(three)),
            "many": lambda: strategy.run_steps(lambda x: x, elements, 4),
        }
        found = {}
        for name, call in calls.items():
            before = roster.steps
            call()
            call()
            found[name] = roster.steps - before
        return found

    assert two_by_two.run_alike(counted) == {
        "plain": 2,
        "compiled": 2,
        "in a function": 2,
        "three in a function": 6,
        "eager function": 6,
        "many": 8,
    }


def _eagerly(fn):
    mx.config.run_functions_eagerly(True)
    try:
        fn()
    finally:
        mx.config.run_functions_eagerly(False)
