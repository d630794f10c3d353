"""What mirrax should compute, in plain NumPy: one list entry for each replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Axis = int | tuple[int, ...] | None


def reduce(op: str, parts: Sequence[np.ndarray], axis: Axis) -> np.ndarray:
    """`strategy.reduce`: over replicas, and over `axis` within each."""
    if axis is None:
        total, count = sum(parts), len(parts)
    else:
        total = sum(part.sum(axis) for part in parts)
        axes = (axis,) if isinstance(axis, int) else axis
        count = sum(int(np.prod([part.shape[a] for a in axes])) for part in parts)
    if op == "SUM":
        return np.asarray(total)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total) / np.float32(count)


def gather(parts: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """`strategy.gather` and `all_gather`."""
    return np.concatenate(parts, axis=axis)


class NotAllowed(Exception):
    """What mirrax answers with a `ValueError`."""


class Variable:
    """A distributed variable: a copy on each replica, and the rules of assigning."""

    def __init__(
        self, value: np.ndarray, n: int, synchronization: str, aggregation: str
    ) -> None:
        self.copies = [value.copy() for _ in range(n)]
        self.dtype = value.dtype
        self.is_on_read = synchronization == "ON_READ"
        self.aggregation = aggregation

    def in_replicas(self, method: str, values: Sequence[np.ndarray]) -> None:
        """Every replica calls `method` with its own value."""
        if not self.is_on_read:
            values = self._aggregate(values)
        self._update(method, values)

    def across(self, method: str, value: np.ndarray | Sequence[np.ndarray]) -> None:
        """Cross-replica code calls `method`, with one value or one for each copy."""
        n = len(self.copies)
        is_apart = not isinstance(value, np.ndarray)
        if self.is_on_read and self.aggregation == "NONE":
            raise NotAllowed
        if self.is_on_read and self.aggregation == "SUM":
            if method != "assign":
                raise NotAllowed
            share = np.asarray(value) / n
            value = np.trunc(share) if self.dtype.kind == "i" else share
        self._update(method, list(value) if is_apart else [np.asarray(value)] * n)

    def read(self) -> np.ndarray:
        """The value that cross-replica code sees."""
        if not self.is_on_read:
            return self.copies[0]
        if self.aggregation == "NONE":
            raise NotAllowed
        if self.aggregation == "ONLY_FIRST_REPLICA":
            return self.copies[0]
        return reduce(self.aggregation, self.copies, None)

    def _aggregate(self, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        n = len(values)
        if self.aggregation == "NONE":
            return values
        if self.aggregation == "ONLY_FIRST_REPLICA":
            return [values[0]] * n
        return [reduce(self.aggregation, values, None)] * n

    def _update(self, method: str, values: Sequence[Any]) -> None:
        for i, value in enumerate(values):
            old = self.copies[i]
            new = {
                "assign": value,
                "assign_add": old + value,
                "assign_sub": old - value,
            }
            self.copies[i] = np.asarray(new[method]).astype(self.dtype)
