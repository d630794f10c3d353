"""`distribute_dataset`: towers take the elements of a dataset in turn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx

from .towers import (
    SUM,
    all_sizes,
    both_engines,
    compile_if,
    older_names,
    parts,
    towers,
)

pytestmark = older_names

Dataset = mx.data.Dataset
prefetching = pytest.mark.parametrize("prefetch", [None, True, False])


def all_of(distribution: Any, iterator: Any) -> list[list[Any]]:
    """What is left in an iterator, tower by tower."""
    found = []
    while True:
        try:
            found.append(parts(distribution, iterator.get_next()))
        except mx.errors.OutOfRangeError:
            return found


def groups(numbers: Any, n: int) -> list[list[Any]]:
    """Numbers in full groups of `n`."""
    numbers = list(numbers)
    return [numbers[i : i + n] for i in range(0, len(numbers) - n + 1, n)]


@prefetching
@all_sizes
def test_elements_go_to_towers_in_turn(n: int, prefetch: bool | None) -> None:
    distribution = towers(n, prefetch_on_device=prefetch)
    dataset = distribution.distribute_dataset(lambda: Dataset.range(10))
    assert isinstance(dataset, mx.contrib.distribute.TowerDataset)
    for _ in range(2):
        iterator = dataset.make_one_shot_iterator()
        assert all_of(distribution, iterator) == groups(range(10), n)
    assert [parts(distribution, x) for x in dataset] == groups(range(10), n)


def test_an_incomplete_last_group_is_dropped() -> None:
    distribution = towers(2)
    iterator = distribution.distribute_dataset(
        lambda: Dataset.range(11)
    ).make_one_shot_iterator()
    assert all_of(distribution, iterator) == groups(range(10), 2)


@all_sizes
def test_elements_lie_on_the_towers_devices(n: int) -> None:
    distribution = towers(n)
    iterator = distribution.distribute_dataset(
        lambda: Dataset.range(8).batch(2)
    ).make_one_shot_iterator()
    devices = [part.devices() for part in distribution.unwrap(iterator.get_next())]
    assert devices == [{d} for d in jax.devices("cpu")[:n]]


@prefetching
@pytest.mark.parametrize("n", [1, 2])
def test_structures_are_kept(n: int, prefetch: bool | None) -> None:
    distribution = towers(n, prefetch_on_device=prefetch)
    rows = {"x": np.arange(8.0).reshape(4, 2), "y": (np.arange(4), np.arange(4) * 10)}
    iterator = distribution.distribute_dataset(
        lambda: Dataset.from_tensor_slices(rows)
    ).make_one_shot_iterator()
    found = iterator.get_next()
    assert set(found) == {"x", "y"} and isinstance(found["y"], tuple)
    assert parts(distribution, found["x"]) == rows["x"][:n].tolist()
    assert parts(distribution, found["y"][1]) == [0, 10][:n]
    assert isinstance(found["x"], mx.distribute.PerReplica) == (n > 1)


@both_engines
def test_a_pair_goes_to_towers_as_one_argument_or_as_two(engine: str) -> None:
    distribution = towers(2)
    iterator = distribution.distribute_dataset(
        lambda: Dataset.zip((Dataset.range(4), Dataset.range(10, 14)))
    ).make_one_shot_iterator()
    with distribution.scope():
        as_one = distribution.call_for_each_tower(
            compile_if(engine, lambda pair: pair[0] + pair[1]), iterator.get_next()
        )
        as_two = distribution.call_for_each_tower(
            compile_if(engine, lambda x, y: x * y), *iterator.get_next()
        )
    assert parts(distribution, as_one) == [10, 12]
    assert parts(distribution, as_two) == [24, 39]


def test_the_last_batch_may_be_smaller() -> None:
    distribution = towers(2)
    iterator = distribution.distribute_dataset(
        lambda: Dataset.range(7).batch(2)
    ).make_one_shot_iterator()
    assert all_of(distribution, iterator) == [[[0, 1], [2, 3]], [[4, 5], [6]]]


def test_an_initializable_iterator_begins_anew() -> None:
    distribution = towers(2)
    iterator = distribution.distribute_dataset(
        lambda: Dataset.range(4)
    ).make_initializable_iterator()
    for _ in range(2):
        assert iterator.initialize() is None
        assert parts(distribution, iterator.get_next()) == [0, 1]
    assert all_of(distribution, iterator) == [[2, 3]]
    assert iterator.initializer is None
    assert parts(distribution, iterator.get_next(name="next")) == [0, 1]


def test_past_the_end() -> None:
    distribution = towers(2)
    iterator = distribution.distribute_dataset(
        lambda: Dataset.range(2)
    ).make_one_shot_iterator()
    iterator.get_next()
    for _ in range(2):
        with pytest.raises(mx.errors.OutOfRangeError, match="data has ended"):
            iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)


def test_the_function_is_called_at_once_and_once() -> None:
    calls = []

    def dataset_fn(*args: Any) -> Any:
        calls.append(args)
        return Dataset.range(4)

    dataset = towers(2).distribute_dataset(dataset_fn)
    assert calls == [()]
    list(dataset)
    list(dataset)
    assert calls == [()]


@pytest.mark.parametrize(
    ("dataset_fn", "message"),
    [
        (Dataset.range(3), "function|callable"),
        (lambda: 5, "`dataset_fn` returned is not a dataset: 5"),
        (lambda x: Dataset.range(3), "missing 1 required positional argument"),
    ],
)
def test_what_makes_no_dataset(dataset_fn: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        towers(2).distribute_dataset(dataset_fn)


def test_an_error_in_the_data_comes_out_as_itself() -> None:
    def generate():
        yield 1.0
        yield 2.0
        raise ZeroDivisionError("in the data")

    distribution = towers(2)
    iterator = distribution.distribute_dataset(
        lambda: Dataset.from_generator(
            generate, output_signature=mx.TensorSpec((), np.float32)
        )
    ).make_one_shot_iterator()
    assert parts(distribution, iterator.get_next()) == [1.0, 2.0]
    with pytest.raises(ZeroDivisionError, match="in the data"):
        iterator.get_next()


def test_plain_batches_of_numpy() -> None:
    distribution = towers(2)
    dataset = distribution.distribute_dataset(lambda: [np.arange(3)] * 4)
    total = 0
    for element in dataset:
        total += distribution.reduce(SUM, element, "CPU:0")
    np.testing.assert_array_equal(total, [0, 4, 8])


def test_a_compiled_function_over_a_whole_dataset() -> None:
    distribution = towers(2)

    @mx.function
    def epoch(dataset):
        total = 0.0
        for x in dataset:
            sums = distribution.call_for_each_tower(lambda x: jnp.sum(x), x)
            total += distribution.reduce(SUM, sums, "CPU:0")
        return total

    with distribution.scope():
        dataset = distribution.distribute_dataset(lambda: Dataset.range(20).batch(2))
        assert [int(epoch(dataset)) for _ in range(2)] == [190, 190]
