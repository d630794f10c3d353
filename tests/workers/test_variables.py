"""Variables: equal on all workers from the start, and assigned as in one process."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import (
    all_sum,
    both_engines,
    compile_if,
    per_replica,
    replica_id,
    run,
)

import mirrax as mx
from mirrax import VariableAggregation, VariableSynchronization

from .comparing import Pool, agreements, error_of, per_worker, worker_of

AGGREGATIONS = ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]


# Making ---------------------------------------------------------------------------------

INITIAL = {
    "tiny": np.float32(1.5),
    "one byte": np.array([True, False, True]),
    "small": np.arange(6, dtype="int32").reshape(2, 3),
    "empty": np.zeros((0, 3), "float32"),
    "half": np.arange(5).astype(jnp.bfloat16),
    "uint8": np.arange(200, dtype="uint8"),
    "at the limit": np.arange(16 * 1024, dtype="float32"),
    "above the limit": np.arange(16 * 1024 + 1, dtype="float32"),
    "odd bytes": (np.arange(70_001) % 3 == 0),
    "odd halves": (np.arange(40_001) % 100).astype(jnp.bfloat16),
    "int8": (np.arange(100_000) % 100).astype("int8"),
    "several MB": np.arange(1_000_000, dtype="float32").reshape(1000, 1000),
    "specials": np.array([np.nan, -0.0, np.inf], "float32"),
}


def test_all_start_with_the_first_workers_value(two_by_two: Pool) -> None:
    def make(strategy):
        def initial(value):
            if worker_of(strategy) == 0:
                return value
            return np.zeros_like(value)

        with strategy.scope():
            made = [mx.Variable(initial(value)) for value in INITIAL.values()]
        return [v.values for v in made], [v.numpy() for v in made]

    for copies, values in two_by_two.run(make):
        for found, own, wanted in zip(values, copies, INITIAL.values()):
            assert found.dtype == wanted.dtype and found.shape == wanted.shape
            assert found.tobytes() == wanted.tobytes()
            for copy in own:
                assert copy.tobytes() == wanted.tobytes()


@both_engines
def test_random_keys(two_by_two: Pool, engine: str) -> None:
    def make(strategy):
        with strategy.scope():
            key = mx.Variable(jax.random.key(7 + worker_of(strategy)))
            old = mx.Variable(jax.random.PRNGKey(7 + worker_of(strategy)))

        def replica_fn():
            next_key, own = jax.random.split(key.read_value())
            key.assign(next_key)
            own = jax.random.fold_in(own, replica_id())
            return jax.random.uniform(own), jax.random.uniform(old.read_value())

        drawn = [run(strategy, replica_fn, engine=engine) for _ in range(2)]
        return drawn, key, old

    two_by_two.assert_as_one(make)


@both_engines
def test_made_in_a_replica_function(two_by_two: Pool, engine: str) -> None:
    def make(strategy):
        made = []

        def replica_fn(x):
            if not made:
                v = mx.Variable(
                    jnp.full((2,), 1.0 + replica_id())
                    if engine == "eager"
                    else np.full((2,), 1.0 + worker_of(strategy), "float32"),
                    aggregation=VariableAggregation.SUM,
                )
                made.append(v)
            made[-1].assign_add(x)
            return made[-1].read_value()

        step = compile_if(engine, replica_fn)
        x = per_replica(strategy, *np.ones((4, 2), "float32"))
        return [strategy.run(step, (x,)) for _ in range(2)], made[-1]

    _, v = two_by_two.assert_as_one(make)
    assert [p.tolist() for p in v.parts] == [[9.0, 9.0]] * 4


def test_made_in_the_first_call_of_a_function(two_by_two: Pool) -> None:
    def make(strategy):
        made = {}

        @mx.function
        def outer(x):
            if not made:
                large = np.full((200, 200), 1.0 + worker_of(strategy), "float32")
                made["w"] = mx.Variable(large)
                made["b"] = mx.Variable(lambda: jnp.zeros(3))
            y = strategy.run(lambda x: x + made["w"].read_value()[0, 0], (x,))
            made["b"].assign_add(jnp.ones(3))
            return strategy.reduce("SUM", y, axis=None)

        x = per_replica(strategy, 1.0, 2.0, 3.0, 4.0)
        with strategy.scope():
            totals = [outer(x) for _ in range(2)]
        return totals, made["w"].read_value()[0], made["b"]

    totals, *_ = two_by_two.assert_as_one(make)
    assert [float(t) for t in totals] == [14.0, 14.0]


@pytest.mark.parametrize("first", ["scope", "eager", "compiled"])
def test_different_shapes_are_an_error_on_all_workers(two_by_two: Pool, first) -> None:
    def make(strategy):
        def variable(shape):
            return lambda: mx.Variable(jnp.zeros(shape))

        def make_one(own):
            if first == "scope":
                with strategy.scope():
                    return own()
            return run(strategy, lambda: own() and None, engine=first)

        wrong = [
            [variable(2), variable(3)],
            [variable(2), lambda: mx.Variable(jnp.zeros(2, "int32"))],
            [variable((100, 1000)), variable((1000, 100))],
            [variable(2), variable((100, 1000))],  # small, and large
        ]
        found = [
            error_of(lambda each=each: make_one(per_worker(strategy, each)))
            for each in wrong
        ]
        with strategy.scope():
            v = mx.Variable(1.0)
        return found, strategy.run(lambda: all_sum(v.read_value()))

    errors, total = two_by_two.run_alike(make)
    assert total.parts[0] == 4.0
    for (kind, text), (mine, other) in zip(
        errors,
        [
            ("float32[2]", "float32[3]"),
            ("float32[2]", "int32[2]"),
            ("float32[100, 1000]", "float32[1000, 100]"),
            ("float32[2]", "float32[100, 1000]"),
        ],
    ):
        assert kind == "ValueError"
        assert f"{mine} on worker 0" in text and f"{other} on worker 1" in text


# Assigning ------------------------------------------------------------------------------


def variable(strategy, synchronization, aggregation, dtype="float32", shape=(2,)):
    with strategy.scope():
        return mx.Variable(
            np.ones(shape, dtype),
            synchronization=VariableSynchronization[synchronization],
            aggregation=VariableAggregation[aggregation],
        )


@both_engines
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_assigned_in_replicas(two_by_two: Pool, engine: str, synchronization) -> None:
    def assign(strategy):
        found = []
        for aggregation, dtype in itertools.product(AGGREGATIONS, ("float32", "int32")):
            if aggregation == "MEAN" and dtype == "int32":
                continue
            v = variable(strategy, synchronization, aggregation, dtype)

            def replica_fn(x, v=v):
                v.assign(x)
                v.assign_add(x * 2)
                v.assign_sub(x[::-1])
                return v.read_value()

            x = np.arange(8, dtype=dtype).reshape(4, 2)
            own = run(strategy, replica_fn, per_replica(strategy, *x), engine=engine)
            reads = aggregation in ("SUM", "MEAN") and [v.numpy()]
            found.append((own, v, reads))
        return found

    two_by_two.assert_as_one(assign)


@both_engines
def test_assigned_plain_values_in_replicas(two_by_two: Pool, engine: str) -> None:
    def assign(strategy):
        found = []
        for aggregation in AGGREGATIONS:
            v = variable(strategy, "ON_WRITE", aggregation, shape=())
            number = aggregation != "SUM"

            def replica_fn(v=v, number=number):
                v.assign(3.0 if number else jnp.float32(3))
                v.assign_add(v.read_value())
                return v.read_value()

            found.append((run(strategy, replica_fn, engine=engine), v))
        return found

    two_by_two.assert_as_one(assign)


@pytest.mark.parametrize("style", ["outside", "function"])
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_assigned_outside_of_replicas(two_by_two: Pool, synchronization, style) -> None:
    def assign(strategy):
        found = []
        for aggregation in AGGREGATIONS:
            v = variable(strategy, synchronization, aggregation)
            is_summed = synchronization == "ON_READ" and aggregation == "SUM"

            def outer(x, own, v=v, is_summed=is_summed):
                v.assign(x)
                if not is_summed:
                    v.assign_add(x)
                    v.assign_sub(own)
                    v.assign_add(own)

            if synchronization == "ON_READ" and aggregation == "NONE":
                continue
            x = jnp.array([4.0, 8.0])
            own = per_replica(strategy, *np.arange(8.0, dtype="float32").reshape(4, 2))
            (mx.function(outer) if style == "function" else outer)(x, own)
            found.append((v, v.numpy()))
        return found

    two_by_two.assert_as_one(assign)


@both_engines
def test_in_turn_from_all_contexts(two_by_two: Pool, engine: str) -> None:
    """Values that one context leaves behind are those that the next one finds."""

    def assign(strategy):
        v = variable(strategy, "ON_WRITE", "NONE")
        m = variable(strategy, "ON_WRITE", "MEAN")
        r = variable(strategy, "ON_READ", "MEAN")

        def replica_fn(x):
            v.assign(x + v.read_value())
            m.assign_add(x)
            r.assign_add(x * replica_id())
            return v * m * r

        x = per_replica(strategy, *np.arange(8.0, dtype="float32").reshape(4, 2))
        found = []
        for _ in range(2):
            found.append(run(strategy, replica_fn, x, engine=engine))
            v.assign_add(x)
            m.assign(jnp.array([2.0, 3.0]))
            found.append((r.numpy(), m.numpy()))
            r.assign(jnp.array([0.5, 1.5]))
            strategy.extended.update(m, lambda copy, x: copy.assign_sub(x), (x,))
            found.append([(u, strategy.reduce("SUM", u, axis=None)) for u in (v, m)])
        return found

    two_by_two.assert_as_one(assign)


@both_engines
def test_the_first_replica(two_by_two: Pool, engine) -> None:
    """Of all that assign; but a read does not communicate, as in TensorFlow."""

    def assign(strategy):
        written = variable(strategy, "ON_WRITE", "ONLY_FIRST_REPLICA", shape=())
        read = variable(strategy, "ON_READ", "ONLY_FIRST_REPLICA", shape=())

        def replica_fn():
            written.assign(replica_id() + 10.0)
            read.assign(replica_id() + 10.0)

        run(strategy, replica_fn, engine=engine)
        return written.numpy(), read.numpy(), mx.function(lambda: read + 1.0)()

    found = two_by_two.run(assign)
    assert [[float(x) for x in own] for own in found] == [
        [10.0, 10.0, 11.0],
        [10.0, 12.0, 13.0],
    ]


@both_engines
def test_bools_and_small_types(two_by_two: Pool, engine: str) -> None:
    def assign(strategy):
        found = []
        for dtype, aggregation in [
            ("bool", "ONLY_FIRST_REPLICA"),
            ("bool", "NONE"),
            ("int8", "SUM"),
            ("uint8", "ONLY_FIRST_REPLICA"),
            (jnp.bfloat16, "SUM"),
            (jnp.bfloat16, "MEAN"),
            ("float16", "MEAN"),
        ]:
            v = variable(strategy, "ON_WRITE", aggregation, dtype)

            def replica_fn(x, v=v):
                v.assign(x)
                return v.read_value()

            x = (np.arange(8) % 3).reshape(4, 2).astype(dtype)
            own = run(strategy, replica_fn, per_replica(strategy, *x), engine=engine)
            found.append((own, v))
        return found

    two_by_two.assert_as_one(assign)


@both_engines
def test_assigned_in_an_uneven_step(two_by_two: Pool, engine: str) -> None:
    def assign(strategy):
        total = variable(strategy, "ON_WRITE", "SUM", shape=())
        own = variable(strategy, "ON_READ", "SUM", shape=())
        alone = variable(strategy, "ON_WRITE", "NONE", shape=())

        def replica_fn(x):
            total.assign_add(jnp.sum(x))
            own.assign_add(jnp.sum(x))
            alone.assign(jnp.sum(x))
            return x + total.read_value()

        found = []
        for lengths in ((2, 1, 0, 0), (0, 0, 0, 2), (1, 1, 1, 1)):
            x = [np.arange(n, dtype="float32") + i for i, n in enumerate(lengths)]
            y = run(strategy, replica_fn, per_replica(strategy, *x), engine=engine)
            found.append((y, total.numpy(), own.numpy(), alone, own))
        return found

    two_by_two.assert_as_one(assign)


# update ---------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["outside", "function", "replicas"])
def test_update(two_by_two: Pool, style: str) -> None:
    def assign(strategy):
        v = variable(strategy, "ON_WRITE", "SUM")
        own = per_replica(strategy, *np.arange(8.0, dtype="float32").reshape(4, 2))

        def update(x, own):
            def change(copy, x, own, scale):
                copy.assign_add(own * scale + x)
                return copy.read_value() * 2

            group = strategy.extended.update(v, change, (x, own), {"scale": 10.0})
            return group

        x = jnp.ones(2)
        if style == "replicas":
            return strategy.run(mx.function(update), (x, own)), v
        return (mx.function(update) if style == "function" else update)(x, own), v

    two_by_two.assert_as_one(assign)


def test_update_calls_the_function_for_each_copy_here(two_by_two: Pool) -> None:
    def assign(strategy):
        v = variable(strategy, "ON_WRITE", "NONE")
        results = strategy.extended.update(v, lambda copy: copy.name, group=False)
        devices = strategy.extended.non_slot_devices([v])
        own = per_replica(strategy, 1.0, 2.0, 3.0, 4.0)
        sums = strategy.extended.update_non_slot(devices, lambda x: x * 2, (own,))
        return results, len(devices), sums

    for names, count, sums in two_by_two.run(assign):
        assert (names, count) == (("Variable", "Variable/replica_1"), 2)
        assert len(sums.parts) == 2


# Cost -----------------------------------------------------------------------------------


def test_compiled_steps_need_no_agreement(two_by_two: Pool) -> None:
    def count(strategy):
        v = variable(strategy, "ON_WRITE", "MEAN")
        r = variable(strategy, "ON_READ", "SUM")

        @mx.function
        def replica_fn(x):
            v.assign_add(x)
            r.assign_add(x)
            return v * r

        x = per_replica(strategy, *np.ones((4, 2), "float32"))
        strategy.run(replica_fn, (x,))
        with agreements(strategy) as found:
            for _ in range(3):
                y = strategy.run(replica_fn, (x,))
                strategy.reduce("SUM", y, axis=None)
                r.numpy()
        return found

    assert two_by_two.run_alike(count) == []
