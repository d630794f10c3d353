"""One way to write a test for towers of plain Python and for compiled ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.engines import both_engines as both_engines
from helpers.engines import compile_if as compile_if

import mirrax as mx

# Messages of mirrax: "`call_for_each_tower` is the older name of ..."
older_names = pytest.mark.filterwarnings("ignore:`:DeprecationWarning")

# The strategies beneath are tested with more.
all_sizes = pytest.mark.parametrize("n", [1, 3])

# With the fixture `run_eagerly`: loops of steps as one program, and as plain Python.
eagerly = pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "eager"])

SUM = mx.VariableAggregation.SUM
MEAN = mx.VariableAggregation.MEAN
ONLY_FIRST_TOWER = mx.VariableAggregation.ONLY_FIRST_TOWER
NONE = mx.VariableAggregation.NONE
ON_READ = mx.VariableSynchronization.ON_READ

Distribution = mx.contrib.distribute.MirroredStrategy


def towers(n: int, **kwargs: Any) -> Distribution:
    """A strategy with that many towers, on logical CPUs."""
    return Distribution([f"CPU:{i}" for i in range(n)], **kwargs)


def call(
    distribution: Any, fn: Callable[..., Any], *args: Any, engine: str, **kwargs: Any
) -> Any:
    """`distribution.call_for_each_tower(fn, *args, **kwargs)` by that engine."""
    return distribution.call_for_each_tower(compile_if(engine, fn), *args, **kwargs)


def parts(distribution: Any, value: Any) -> list[Any]:
    """Every tower's part of a value, as NumPy sees it (lists, numbers)."""
    return [np.asarray(part).tolist() for part in distribution.unwrap(value)]


def numbered(distribution: Any) -> Any:
    """A per-device value: 1, 2, 3, ..."""
    return distribution.call_for_each_tower(mx.function(lambda: tower_id() + 1.0))


def tower() -> mx.contrib.distribute.TowerContext:
    """The context of the tower that asks."""
    found = mx.contrib.get_tower_context()
    assert found is not None
    return found


def tower_id() -> Any:
    """The id of the tower that asks."""
    return tower().tower_id


def batches(distribution: Any, *columns: Any) -> Iterator[Any]:
    """An iterator over the rows of arrays; each tower takes one in turn."""

    def dataset_fn() -> mx.data.Dataset:
        first, *others = columns
        return mx.data.Dataset.from_tensor_slices((first, *others) if others else first)

    return distribution.distribute_dataset(dataset_fn).make_one_shot_iterator()


def numbers(count: int) -> np.ndarray:
    """0, 1, 2, ..."""
    return np.arange(count, dtype="float32")


class Counter:
    """How often a function has been traced."""

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> None:
        self.count += 1
