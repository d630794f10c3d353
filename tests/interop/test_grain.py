"""Grain's `MapDataset`, `IterDataset` and `DataLoader`."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.engines import parts

import mirrax as mx
from interop import libraries
from interop.comparing import (
    assert_same,
    functions_in,
    take,
    through_json,
    to_numpy,
    union,
)

grain = libraries.grain()


def loader(num_records=22, shuffle=False, seed=None, num_epochs=1):
    sampler = grain.IndexSampler(
        num_records,
        shard_options=grain.NoSharding(),
        shuffle=shuffle,
        seed=seed,
        num_epochs=num_epochs,
    )
    return grain.DataLoader(
        data_source=np.arange(num_records),
        sampler=sampler,
        operations=[grain.Batch(4)],
    )


SHUFFLED = {
    "MapDataset": lambda: grain.MapDataset.range(22).shuffle(seed=3).batch(4),
    "epochs": lambda: grain.MapDataset.range(9).shuffle(seed=3).repeat(3).batch(4),
    "IterDataset": lambda: (
        grain.MapDataset.range(22).shuffle(seed=3).to_iter_dataset().batch(4)
    ),
    "window": lambda: grain.experimental.WindowShuffleIterDataset(
        grain.MapDataset.range(22).to_iter_dataset(), window_size=6, seed=3
    ).batch(4),
    "mix": lambda: grain.MapDataset.mix(
        [grain.MapDataset.range(12), grain.MapDataset.range(100, 112)], [0.5, 0.5]
    ).batch(4),
    "filter": lambda: (
        grain.MapDataset.range(44)
        .shuffle(seed=3)
        .filter(lambda x: x % 2 == 0)
        .to_iter_dataset()
        .batch(4)
    ),
    "DataLoader": lambda: loader(shuffle=True, seed=3, num_epochs=2),
}
shuffled = pytest.mark.parametrize("make", SHUFFLED.values(), ids=SHUFFLED)


def as_lists(batches):
    return [batch.tolist() for batch in batches]


# Elements --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        [1, 2, 3],
        [np.float16(1.5), np.float16(2.5)],
        [np.ones((2, 2), "uint8")] * 3,
        [(i, np.full(2, i, "int16")) for i in range(3)],
        [{"x": i, "y": (0.5 * i, {"z": True})} for i in range(3)],
    ],
    ids=["int", "float16", "array", "tuple", "nested"],
)
def test_values_structures_and_dtypes_are_the_librarys(rows):
    batched = grain.MapDataset.source(rows).batch(2)
    expected = [to_numpy(batch) for batch in batched]
    for a, b in zip(mx.data.as_dataset(batched), expected, strict=True):
        assert_same(a, b)


def test_a_list_is_structure_as_in_grain(two_cpus):
    """Grain's batches of `[x, y]` are lists of two arrays: two parts, not two rows."""
    pairs = grain.MapDataset.source([[i, 10 * i] for i in range(4)]).batch(4)
    assert as_lists(next(iter(pairs))) == [[0, 1, 2, 3], [0, 10, 20, 30]]
    (step,) = two_cpus.experimental_distribute_dataset(pairs)
    x, y = step
    assert parts(two_cpus, x) == [[0, 1], [2, 3]]
    assert parts(two_cpus, y) == [[0, 10], [20, 30]]


def test_strings_are_arrays_of_bytes(two_cpus):
    names = grain.MapDataset.source(["a", "bé", ""]).batch(3)
    (batch,) = mx.data.as_dataset(names)
    assert batch.tolist() == [b"a", "bé".encode(), b""]
    (step,) = two_cpus.experimental_distribute_dataset(names)
    assert parts(two_cpus, step) == [[b"a", "bé".encode()], [b""]]


def test_rows_are_batched_by_mirrax(two_cpus):
    rows = grain.MapDataset.range(5).map(lambda x: {"x": x, "y": np.array([x, x])})
    dataset = mx.data.as_dataset(rows).batch(3)
    steps = two_cpus.experimental_distribute_dataset(dataset)
    assert [union(two_cpus, step)["x"].tolist() for step in steps] == [
        [0, 1, 2],
        [3, 4],
    ]
    with pytest.raises(ValueError, match=r"cannot be split.*dataset.batch"):
        next(iter(two_cpus.experimental_distribute_dataset(rows)))


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: grain.MapDataset.range(22).batch(4), 6),
        (lambda: grain.MapDataset.range(22).repeat(2).batch(4), 11),
        (lambda: grain.MapDataset.range(22).repeat(), mx.data.INFINITE_CARDINALITY),
        (
            lambda: grain.MapDataset.range(22).to_iter_dataset(),
            mx.data.UNKNOWN_CARDINALITY,
        ),
        (loader, mx.data.UNKNOWN_CARDINALITY),
    ],
    ids=["finite", "repeated", "infinite", "IterDataset", "DataLoader"],
)
def test_the_length_is_told_where_grain_tells_it(make, size):
    assert mx.data.as_dataset(make()).cardinality() == size


def test_an_endless_dataset_is_read_as_far_as_asked(two_cpus):
    endless = grain.MapDataset.range(3).repeat().batch(4)
    iterator = iter(two_cpus.experimental_distribute_dataset(endless))
    assert [union(two_cpus, step).tolist() for step in take(iterator, 2)] == [
        [0, 1, 2, 0],
        [1, 2, 0, 1],
    ]
    iterator.close()


# Order -----------------------------------------------------------------------------------


@shuffled
def test_the_order_is_grains_in_every_pass(make, two_cpus):
    expected = as_lists(make())
    dataset = mx.data.as_dataset(make())
    assert [as_lists(dataset) for _ in range(2)] == [expected] * 2
    steps = two_cpus.experimental_distribute_dataset(make())
    assert [union(two_cpus, step).tolist() for step in steps] == expected


# Saving ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4])
@shuffled
def test_a_restored_pass_gives_exactly_the_rest(make, count):
    iterator = iter(mx.data.as_dataset(make()))
    take(iterator, count)
    state = through_json(iterator.get_state())
    rest = as_lists(iterator)
    assert rest == as_lists(make())[count:]
    again = iter(mx.data.as_dataset(make()))
    again.set_state(state)
    assert as_lists(again) == rest


@shuffled
def test_a_restored_pass_of_the_replicas_gives_exactly_the_rest(make, two_cpus):
    options = mx.distribute.InputOptions(experimental_per_replica_buffer_size=3)
    distributed = two_cpus.experimental_distribute_dataset(make(), options)
    iterator = iter(distributed)
    take(iterator, 2)
    state = through_json(iterator.get_state())
    rest = [union(two_cpus, step).tolist() for step in iterator]
    assert rest == as_lists(make())[2:]
    again = iter(distributed)
    again.set_state(state)
    assert [union(two_cpus, step).tolist() for step in again] == rest


def test_restoring_does_not_read_what_was_given():
    seen = []

    def look(x):
        seen.append(int(x))
        return x

    rows = grain.MapDataset.range(1000).map(look)
    iterator = iter(mx.data.as_dataset(rows))
    take(iterator, 500)
    state = through_json(iterator.get_state())
    iterator.close()
    again = iter(mx.data.as_dataset(rows))
    seen.clear()
    again.set_state(state)
    assert int(next(again)) == 500
    assert min(seen) >= 500
    again.close()


# Errors ----------------------------------------------------------------------------------


def test_an_error_in_a_map_arrives_with_its_own_traceback(two_cpus):
    def explode(x):
        if x == 5:
            raise KeyError("a bad file")
        return x

    batched = grain.MapDataset.range(8).map(explode).batch(4)
    for give in (mx.data.as_dataset, two_cpus.experimental_distribute_dataset):
        iterator = iter(give(batched))
        next(iterator)
        with pytest.raises(KeyError, match="a bad file") as caught:
            next(iterator)
        assert "explode" in functions_in(caught.value)
