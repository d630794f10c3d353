"""Batches on the devices of their replicas, however their rows are looked up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.engines import mirrored

import mirrax as mx
from mirrax._src.input.blocks import Block
from mirrax._src.input.together import _looked_up, _shapes_of


def delivered(dataset: mx.data.Dataset, replicas: int = 2) -> list[list[list[float]]]:
    strategy = mirrored(replicas)
    return [
        [np.asarray(p).tolist() for p in strategy.experimental_local_results(batch)]
        for batch in strategy.experimental_distribute_dataset(dataset)
    ]


def test_rows_in_any_order() -> None:
    rows = mx.data.Dataset.from_tensor_slices(np.arange(12, dtype="f"))
    assert delivered(rows.skip(2).batch(4)) == [
        [[2, 3], [4, 5]],
        [[6, 7], [8, 9]],
        [[10], [11]],
    ]
    every_third = rows.shard(3, 1).batch(4)
    assert delivered(every_third) == [[[1, 4], [7, 10]]]
    shuffled = rows.shuffle(12, seed=1)
    whole = [float(x) for x in shuffled.as_numpy_iterator()]
    (step,) = delivered(shuffled.batch(12), 4)
    assert sum(step, []) == whole


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">f8", "<f8", "bool"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("rows", [4, 3])
def test_dtypes_that_jax_does_not_have(dtype: str, replicas: int, rows: int) -> None:
    values = np.arange(rows).astype(dtype)
    (step,) = delivered(mx.data.Dataset.from_tensor_slices(values).batch(4), replicas)
    assert sum(step, []) == values.tolist()


def test_dates_are_refused() -> None:
    days = np.arange(4).astype("datetime64[D]")
    with pytest.raises(TypeError, match="datetime64.* not a valid JAX array type"):
        delivered(mx.data.Dataset.from_tensor_slices(days).batch(4))


def test_the_source_may_change_afterwards() -> None:
    source = np.arange(4096, dtype="f")
    dataset = mx.data.Dataset.from_tensors(source)
    strategy = mirrored(2)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    source += 1
    np.testing.assert_array_equal(batch.values[1], np.arange(2048, 4096))


class Counted:
    """A table that counts how often its rows are looked up."""

    lookups = 0

    def rows(self, index: Any) -> Any:
        self.lookups += 1
        return np.ones((len(index), 3), np.float32), np.asarray(index)

    def row(self, i: int) -> Any:
        return np.ones(3, np.float32), i


def test_shapes_that_workers_tell_each_other_cost_no_second_lookup():
    table = Counted()
    part = _looked_up(Block(table, range(4, 8)))
    assert _shapes_of(part) == [[[4, 3], "float32"], [[4], "int64"]]
    assert part.value()[1].tolist() == [4, 5, 6, 7]
    assert table.lookups == 1


def test_elements_that_hold_objects_are_refused_however_many() -> None:
    strategy = mirrored(2)
    for count in (4, 4000):
        rows = np.empty(count, [("a", "O"), ("b", "f4")])
        rows["a"] = "text"
        dataset = mx.data.Dataset.from_tensor_slices(rows).batch(count)
        with pytest.raises(TypeError, match="data-type|JAX"):
            next(iter(strategy.experimental_distribute_dataset(dataset)))


def test_an_interrupt_while_the_first_rows_are_looked_up(monkeypatch) -> None:
    strategy = mirrored(2)
    options = mx.distribute.InputOptions(experimental_per_replica_buffer_size=0)
    dataset = mx.data.Dataset.from_tensor_slices(np.arange(12.0)).batch(4)
    batches = iter(strategy.experimental_distribute_dataset(dataset, options))

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Block, "value", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    found = [strategy.reduce("SUM", x, axis=0).item() for x in batches]
    assert found == [4 + 5 + 6 + 7, 8 + 9 + 10 + 11]


def test_a_structure_that_changes_is_told_with_the_number_of_the_element() -> None:
    strategy = mirrored(2)
    same = mx.data.Dataset.from_tensor_slices(np.arange(8.0)).batch(4)
    other = mx.data.Dataset.from_generator(lambda: iter([(np.ones(4),)]))
    with pytest.raises(ValueError, match="Element 2 of the dataset"):
        for _ in strategy.experimental_distribute_dataset([*same, *other]):
            pass
