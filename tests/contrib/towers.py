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

all_sizes = pytest.mark.parametrize("n", [1, 2, 3, 4])

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


def batches(distribution: Any, *rows: Any) -> Iterator[Any]:
    """An iterator over the slices of arrays; each tower takes one in turn."""
    columns = tuple(np.asarray(r) for r in rows)
    columns = columns if len(columns) > 1 else columns[0]
    return distribution.distribute_dataset(
        lambda: mx.data.Dataset.from_tensor_slices(columns)
    ).make_one_shot_iterator()
