"""Batches of any library side by side."""

from __future__ import annotations

import json
import traceback
from typing import Any

import jax
import numpy as np


def to_numpy(value: Any) -> Any:
    """A library's batch with NumPy arrays as leaves, its structure kept."""
    return jax.tree.map(np.asarray, value)


def assert_same(found: Any, expected: Any) -> None:
    """Equal in structure, dtypes, shapes and every value."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)


def replica_parts(strategy: Any, step: Any) -> list[Any]:
    """What each replica gets of a step, with NumPy arrays as leaves."""
    return [to_numpy(part) for part in strategy.experimental_local_results(step)]


def union(strategy: Any, step: Any) -> Any:
    """The global batch again: all replicas' rows, one after the other."""
    parts = replica_parts(strategy, step)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def on_device(batch: Any) -> Any:
    """The batch in the dtypes that arrays of JAX have: 32 bits."""
    return jax.tree.map(
        lambda a: (
            a if a.dtype == object else a.astype(jax.dtypes.canonicalize_dtype(a.dtype))
        ),
        batch,
    )


def through_json(state: Any) -> Any:
    """The state as a file would give it back."""
    return json.loads(json.dumps(state))


def take(iterator: Any, count: int) -> list[Any]:
    """The next `count` elements."""
    return [next(iterator) for _ in range(count)]


def functions_in(error: BaseException) -> list[str]:
    """The functions in an error's traceback, the innermost last."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]
