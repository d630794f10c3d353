"""`run`, `reduce`, `gather` and the collectives: two workers of two replicas as one of four."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import all_styles, both_engines, per_replica, replica_id, run

import mirrax as mx

from .comparing import Pool, error_of, per_worker

DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool"]
# One of each kind, where each compiles many programs; in replicas there are all.
KINDS = ["float32", "bfloat16", "int8", "bool"]


def numbers(n: int, shape: tuple[int, ...], dtype: str = "float32") -> list[np.ndarray]:
    """An array for each replica: small numbers, whose sums are exact in all dtypes."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 5, shape).astype(jnp.dtype(dtype)) for _ in range(n)]


def of_lengths(*lengths: int, dtype: str = "float32") -> list[np.ndarray]:
    return [np.arange(n).astype(dtype) + 10 * i for i, n in enumerate(lengths)]


UNEVEN = {
    "a shorter one": of_lengths(2, 2, 2, 1),
    "an empty one": of_lengths(2, 0, 2, 2),
    "an empty worker": of_lengths(0, 0, 3, 1),
    "the first alone": of_lengths(3, 0, 0, 0),
    "the last alone": of_lengths(0, 0, 0, 3),
    "equal on each worker": of_lengths(3, 3, 1, 1),
    "all empty": of_lengths(0, 0, 0, 0),
}


# reduce ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS)
def test_reduce_of_every_dtype(two_by_two: Pool, dtype: str) -> None:
    parts = numbers(4, (2, 3), dtype)

    def reduced(strategy):
        x = per_replica(strategy, *parts)
        ops = ["SUM", "MEAN"]
        along: dict[Any, Any] = {
            (op, axis): strategy.reduce(op, x, axis=axis)
            for op in ops
            for axis in (0, -1, (0, 1))
        }
        if dtype != "bool":  # which cannot be summed over replicas
            along.update({(op, None): strategy.reduce(op, x, axis=None) for op in ops})
        return [along[key] for key in sorted(along, key=str)]

    two_by_two.assert_as_one(reduced)


@pytest.mark.parametrize("parts", UNEVEN.values(), ids=UNEVEN)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_reduce_of_uneven_parts(two_by_two: Pool, parts, op) -> None:
    def reduced(strategy):
        return strategy.reduce(op, per_replica(strategy, *parts), axis=0)

    found = two_by_two.assert_as_one(reduced)
    rows = np.concatenate(parts)
    if op == "SUM":
        np.testing.assert_allclose(found, rows.sum())
    elif len(rows):
        np.testing.assert_allclose(found, rows.mean())
    else:
        assert np.isnan(found)


def test_reduce_of_a_structure(two_by_two: Pool) -> None:
    def reduced(strategy):
        tree = strategy.experimental_distribute_values_from_function(
            lambda ctx: {
                "a": jnp.full((2,), ctx.replica_id_in_sync_group + 1.0),
                "b": [ctx.replica_id_in_sync_group, (np.ones((3, 1)),)],
                "none": None,
            }
        )
        return [strategy.reduce(op, tree, axis=None) for op in ("SUM", "MEAN")]

    found = two_by_two.assert_as_one(reduced)
    np.testing.assert_array_equal(found[0]["a"], [10.0, 10.0])
    assert found[0]["b"][0] == 6 and found[1]["b"][0] == 1.5


@both_engines
def test_reduce_of_what_a_function_returned(two_by_two: Pool, engine: str) -> None:
    def reduced(strategy):
        def replica_fn(x):
            same = mx.get_replica_context().all_reduce("SUM", x)
            return {"own": x + replica_id(), "same": same}

        out = run(strategy, replica_fn, jnp.float32(2), engine=engine)
        return out, [strategy.reduce(op, out, axis=None) for op in ("SUM", "MEAN")]

    _, (sums, means) = two_by_two.assert_as_one(reduced)
    assert (sums["own"], sums["same"]) == (14.0, 32.0)
    assert (means["own"], means["same"]) == (3.5, 8.0)


def test_a_plain_value_counts_once_for_each_worker(two_by_two: Pool) -> None:
    def reduced(strategy):
        own = per_worker(strategy, [jnp.arange(3.0), jnp.arange(3.0) + 10])
        sums = [strategy.reduce("SUM", own, axis=axis) for axis in (None, 0)]
        means = [strategy.reduce("MEAN", own, axis=axis) for axis in (None, 0)]
        return sums, means, strategy.reduce("SUM", 3, axis=None)

    sums, means, three = two_by_two.run_alike(reduced)
    np.testing.assert_array_equal(sums[0], [10.0, 12.0, 14.0])
    np.testing.assert_array_equal(means[0], [5.0, 6.0, 7.0])
    assert (sums[1], means[1], three) == (36.0, 6.0, 6)


def test_a_large_array(two_by_two: Pool) -> None:
    def reduced(strategy):
        x = strategy.experimental_distribute_values_from_function(
            lambda ctx: jnp.full((1000, 1000), ctx.replica_id_in_sync_group, "int32")
        )
        total = strategy.reduce("SUM", x, axis=None)
        return total.shape, int(total.min()), int(total.max())

    assert two_by_two.run_alike(reduced) == ((1000, 1000), 6, 6)


@pytest.mark.parametrize(
    "shapes",
    [
        [(2,), (3,), (2,), (2,)],  # different on worker 0
        [(2,), (2,), (2,), (3,)],  # different on worker 1
        [(2,), (2,), (3,), (3,)],  # the same on each worker
    ],
)
def test_shapes_that_do_not_fit_are_an_error_on_all_workers(
    two_by_two: Pool, shapes
) -> None:
    def errors(strategy):
        x = per_replica(strategy, *[np.ones(shape) for shape in shapes])
        y = per_replica(strategy, *[np.ones((2, *shape)) for shape in shapes])
        return (
            error_of(lambda: strategy.reduce("SUM", x, axis=None)),
            error_of(lambda: strategy.reduce("SUM", y, axis=0)),
            error_of(lambda: strategy.gather(y, axis=0)),
        )

    found = two_by_two.run_alike(errors)
    assert [kind for kind, _ in found] == ["ValueError"] * 3
    for (_, text), shape in zip(found, (shapes[3], shapes[3], (2, *shapes[3]))):
        assert f"replica 3 (CPU:1 of worker 1): {shape}" in text


def test_an_axis_that_is_not_there(two_by_two: Pool) -> None:
    def errors(strategy):
        x = per_replica(strategy, *numbers(4, (2,)))
        return (
            error_of(lambda: strategy.reduce("SUM", x, axis=1)),
            error_of(lambda: strategy.gather(x, axis=1)),
        )

    found = two_by_two.run_alike(errors)
    assert [kind for kind, _ in found] == ["ValueError"] * 2
    assert "there is no axis 1" in found[0][1]


# gather ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS)
def test_gather_of_every_dtype(two_by_two: Pool, dtype: str) -> None:
    def gathered(strategy):
        x = per_replica(strategy, *numbers(4, (2, 3), dtype))
        uneven = per_replica(
            strategy, *[a[:i] for i, a in enumerate(numbers(4, (3, 2), dtype))]
        )
        return [strategy.gather(x, axis=axis) for axis in (0, 1, -1)], strategy.gather(
            uneven, axis=0
        )

    even, uneven = two_by_two.assert_as_one(gathered)
    np.testing.assert_array_equal(even[0], np.concatenate(numbers(4, (2, 3), dtype)))
    assert uneven.shape == (6, 2)


def test_gather_of_uneven_parts(two_by_two: Pool) -> None:
    def gathered(strategy):
        return [
            (
                strategy.gather(per_replica(strategy, *parts), axis=0),
                strategy.gather(per_replica(strategy, *[p[None] for p in parts]), -1),
            )
            for parts in UNEVEN.values()
        ]

    for found, parts in zip(two_by_two.assert_as_one(gathered), UNEVEN.values()):
        np.testing.assert_array_equal(found[0], np.concatenate(parts))


def test_gather_of_a_plain_value_joins_workers(two_by_two: Pool) -> None:
    def gathered(strategy):
        own = per_worker(strategy, [jnp.arange(1), jnp.arange(3)])
        return strategy.gather({"x": own}, axis=0)

    np.testing.assert_array_equal(two_by_two.run_alike(gathered)["x"], [0, 0, 1, 2])


# Collectives in replicas ----------------------------------------------------------------


@all_styles
def test_all_reduce_of_a_structure(two_by_two: Pool, engine: str) -> None:
    def reduced(strategy):
        def replica_fn(x, y):
            i = replica_id()
            ctx = mx.get_replica_context()
            tree = {
                "f": x,
                "nested": [y, (i, i.astype(jnp.bfloat16))],
                "empty": jnp.zeros((0, 3)),
                "big": jnp.full((300, 300), i, jnp.float32),
            }
            return ctx.all_reduce("SUM", tree), ctx.all_reduce("MEAN", tree)

        x, y = (
            per_replica(strategy, 1.0, 2.0, 3.0, 4.0),
            per_replica(strategy, *numbers(4, (2, 2), "int32")),
        )
        return run(strategy, replica_fn, x, y, engine=engine)

    sums, _ = two_by_two.assert_as_one(reduced)
    assert [float(x) for x in sums["f"].parts] == [10.0] * 4


@all_styles
def test_all_gather(two_by_two: Pool, engine: str) -> None:
    def gathered(strategy):
        def replica_fn(x, mask):
            ctx = mx.get_replica_context()
            tree = {"x": x, "more": (x[:1] * 2, mask)}
            return ctx.all_gather(tree, axis=0), ctx.all_gather(x, axis=-1)

        x = per_replica(strategy, *numbers(4, (2, 3)))
        mask = per_replica(strategy, *numbers(4, (2, 3), "bool"))
        return run(strategy, replica_fn, x, mask, engine=engine)

    found = two_by_two.assert_as_one(gathered)
    np.testing.assert_array_equal(
        found[0]["x"].parts[3], np.concatenate(numbers(4, (2, 3)))
    )


@both_engines
@pytest.mark.parametrize("parts", UNEVEN.values(), ids=UNEVEN)
def test_collectives_of_uneven_parts(two_by_two: Pool, parts, engine: str) -> None:
    def together(strategy):
        def summed(x):
            ctx = mx.get_replica_context()
            return x * 2, ctx.all_reduce("SUM", (jnp.sum(x), x.shape[0]))

        def gathered(x):
            return mx.get_replica_context().all_gather(x, axis=0)

        x = per_replica(strategy, *parts)
        first = run(strategy, summed, x, engine=engine)
        again = run(strategy, summed, first[0], engine=engine)
        return first, again, run(strategy, gathered, x, engine=engine)

    (_, (total, count)), _, whole = two_by_two.assert_as_one(together)
    rows = np.concatenate(parts)
    assert total.parts[0] == rows.sum() and count.parts[0] == len(rows)
    np.testing.assert_array_equal(whole.parts[3], rows)


@both_engines
def test_every_dtype_in_replicas(two_by_two: Pool, engine: str) -> None:
    def together(strategy):
        def replica_fn(*arrays):
            ctx = mx.get_replica_context()
            return ctx.all_reduce("SUM", arrays), ctx.all_gather(arrays, axis=0)

        arrays = [
            per_replica(strategy, *numbers(4, (3,), dtype)) for dtype in DTYPES[:-1]
        ]
        return run(strategy, replica_fn, *arrays, engine=engine)

    two_by_two.assert_as_one(together)


def test_every_dtype_over_three_workers(three_by_one: Pool) -> None:
    def together(strategy):
        @mx.function
        def replica_fn(*arrays):
            ctx = mx.get_replica_context()
            return ctx.all_reduce("SUM", arrays), ctx.all_gather(arrays, axis=0)

        arrays = [
            per_replica(strategy, *numbers(3, (3,), dtype)) for dtype in DTYPES[:-1]
        ]
        sums = [
            strategy.reduce(op, x, axis=axis)
            for x in arrays
            for op in ("SUM", "MEAN")
            for axis in (None, 0)
        ]
        return sums, strategy.run(replica_fn, tuple(arrays))

    three_by_one.assert_as_one(together)


# IndexedSlices --------------------------------------------------------------------------


@both_engines
def test_sparse_values(two_by_two: Pool, engine: str) -> None:
    def reduced(strategy):
        def slices(rows):
            i = replica_id()
            values = jnp.ones((rows.shape[0], 2)) * (i + 1)
            return mx.IndexedSlices(values, rows + i, dense_shape=(9, 2))

        def together(rows):
            return mx.get_replica_context().all_reduce("SUM", slices(rows))

        even = per_replica(strategy, [0, 1], [0, 2], [3, 3], [5, 0])
        uneven = per_replica(strategy, [0, 1], [2], np.zeros(0, int), [5, 0, 0])
        found = []
        for rows in (even, uneven):
            out = run(strategy, slices, rows, engine=engine)
            for op in ("SUM", "MEAN"):
                reduced = strategy.reduce(op, out, axis=None)
                found.append((reduced.to_dense(), reduced.indices))
            out = run(strategy, together, rows, engine=engine)
            found.append(
                [s.to_dense() for s in strategy.experimental_local_results(out)][0]
            )
        return found

    two_by_two.assert_as_one(reduced)
