"""Elements of several datasets, chosen by another one or by lot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mirrax._src.input.blocks import value_of
from mirrax._src.input.node import (
    INFINITE,
    UNKNOWN,
    Cursor,
    Node,
    Path,
    State,
    merge_specs,
    node,
    open_cursor,
)
from mirrax._src.input.sources import seed_key, static_rows_of
from mirrax._src.input.structure import PyTree, TensorSpec, dtype_of, shape_of
from mirrax._src.input.transforms.selecting import START
from mirrax._src.input.transforms.shuffling import draws


@node
class Choose(Node):
    """One element after the other, each of the dataset whose number `choices` gives."""

    choices: Node
    parts: tuple[Node, ...]
    stop_on_empty: bool  # else datasets that have ended are passed over
    label: str

    def open(self, path: Path, state: State = None) -> Cursor:
        return _ChooseCursor(self, path, state)

    def cardinality(self) -> int:
        sizes = [part.cardinality() for part in self.parts]
        return INFINITE if INFINITE in sizes else UNKNOWN

    def spec(self) -> PyTree:
        return merge_specs([part.spec() for part in self.parts])

    def batch_size(self) -> int | None:
        return static_rows_of(self)

    def describe(self) -> str:
        return self.label


class _ChooseCursor(Cursor):
    """The state: that of the choices, and of each dataset with whether it has ended."""

    def __init__(self, owner: Choose, path: Path, state: State) -> None:
        choices, parts = state or (None, [[False, None]] * len(owner.parts))
        self._stop_on_empty, self._label = owner.stop_on_empty, owner.label
        self._choices = open_cursor(owner.choices, path, choices)
        self._has_ended = [has_ended for has_ended, _ in parts]
        self._parts = [
            open_cursor(part, (*path, i), inner)
            for i, (part, (_, inner)) in enumerate(zip(owner.parts, parts))
        ]

    def __next__(self) -> Any:
        while not all(self._has_ended):
            i = self._chosen(value_of(next(self._choices)))
            if self._has_ended[i]:
                continue
            try:
                return next(self._parts[i])
            except StopIteration:
                self._parts[i].close()
                self._has_ended[i] = True
                if self._stop_on_empty:
                    self._has_ended = [True] * len(self._parts)
        raise StopIteration

    def _chosen(self, choice: Any) -> int:
        if shape_of(choice) or dtype_of(choice) != np.int64:
            raise TypeError(
                f"The choices of `{self._label}` must be int64 numbers, got {choice!r}."
            )
        if not 0 <= choice < len(self._parts):
            raise ValueError(
                f"`{self._label}` has {len(self._parts)} datasets, and the choice is {choice}; "
                f"it must be from 0 to {len(self._parts) - 1}."
            )
        return int(choice)

    def state(self) -> State:
        parts = [[end, p.state()] for end, p in zip(self._has_ended, self._parts)]
        return [self._choices.state(), parts]

    def close(self) -> None:
        for cursor in (self._choices, *self._parts):
            cursor.close()


@node
class Lots(Node):
    """Random numbers of datasets, by the same weights always or by those of `weights`."""

    weights: Node | tuple[float, ...]
    count: int
    seed: int | None
    rerandomize: bool
    entropy: int

    def open(self, path: Path, state: State = None) -> Cursor:
        return _LotCursor(self, path, *(state or START))

    def cardinality(self) -> int:
        weights = self.weights
        return weights.cardinality() if isinstance(weights, Node) else INFINITE

    def spec(self) -> PyTree:
        return TensorSpec((), "int64")

    def describe(self) -> str:
        return "lots()" if self.seed is None else f"lots(seed={self.seed})"


class _LotCursor(Cursor):
    def __init__(self, lots: Lots, path: Path, drawn: int, inner: State) -> None:
        key = seed_key(lots.seed, lots.entropy, path if lots.rerandomize else ())
        self._numbers: Iterator[float] = draws(key, drawn)
        self._drawn, self._count = drawn, lots.count
        self._weights: Cursor | None = None
        if isinstance(lots.weights, Node):
            self._weights = open_cursor(lots.weights, path, inner)
        else:
            self._bounds = _bounds(np.asarray(lots.weights))

    def __next__(self) -> Any:
        if self._weights is not None:
            self._bounds = _bounds(self._checked(value_of(next(self._weights))))
        self._drawn += 1
        return np.int64(np.searchsorted(self._bounds, next(self._numbers), "right"))

    def _checked(self, element: PyTree) -> np.ndarray:
        weights = np.asarray(element, np.float64).ravel()
        if len(weights) != self._count or (weights < 0).any() or not weights.sum():
            raise ValueError(
                f"An element of `weights` must give {self._count} positive numbers, one for "
                f"each dataset, got {element!r}."
            )
        return weights

    def state(self) -> State:
        return [self._drawn, self._weights and self._weights.state()]

    def close(self) -> None:
        if self._weights is not None:
            self._weights.close()


def _bounds(weights: np.ndarray) -> np.ndarray:
    """Up to where a number between 0 and 1 stands for each dataset but the last."""
    sums = np.cumsum(weights)
    last = np.flatnonzero(weights)[-1]  # none of weight 0 after it, whatever is rounded
    return (sums / sums[-1])[:last]


def usable_weights(weights: Any, count: int) -> list[float]:
    """The weights that users gave, one for each dataset.

    Raises:
        ValueError: If there are more or fewer.
        TypeError: If they are not floating-point numbers.
    """
    array = np.asarray(weights)
    if array.shape != (count,):
        raise ValueError(
            f"`weights` must hold one number for each of the {count} datasets, got {weights!r}."
        )
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(
            f"`weights` must be floating-point numbers, got {weights!r} ({array.dtype})."
        )
    return array.tolist()
