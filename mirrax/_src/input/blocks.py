"""Rows of tables: how pipelines over data in memory work on indices.

A `Table` gives any of its rows at once. A `Block` is a choice of rows of a table, a `Row`
is one; both are cheap to cut, to reorder and to pass on, and are looked up only where the
values are needed (`value_of`). What is not in memory to begin with becomes a table when
elements are stacked, so `batch` and what comes after it see blocks always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from mirrax._src.input.structure import (
    PyTree,
    StructureError,
    empty,
    map_leaves,
    stack_elements,
)

Index = range | np.ndarray


class CannotVectorise(BaseException):
    """A function needs single rows; never reaches users.

    A BaseException, so that an `except Exception` of the function lets it pass.
    """


class Table(Protocol):
    """Equally shaped elements that can be looked up in any order."""

    def rows(self, index: Index) -> PyTree:
        """The rows, stacked."""
        ...

    def row(self, i: int) -> PyTree:
        """One row, as an element."""
        ...


class Arrays:
    """The rows of arrays that lie in memory.

    `is_ours` says that nobody else holds the arrays.
    """

    __slots__ = ("arrays", "is_ours", "_single")

    def __init__(self, arrays: PyTree, is_ours: bool = False) -> None:
        self.arrays, self.is_ours = arrays, is_ours
        self._single = isinstance(arrays, np.ndarray)

    def rows(self, index: Index) -> PyTree:
        if self._single:
            return _look_up(self.arrays, index)
        return map_leaves(lambda array: _look_up(array, index), self.arrays)

    def row(self, i: int) -> PyTree:
        if self._single:
            return self.arrays[i]
        return map_leaves(lambda array: array[i], self.arrays)


def _look_up(array: np.ndarray, index: Index) -> np.ndarray:
    if isinstance(index, range):
        return array[_as_slice(index)]
    if array.dtype.hasobject:
        return array[index]
    out = empty((len(index), *array.shape[1:]), array.dtype)
    # "clip" because NumPy looks up twice to be able to raise; the index is in range.
    return np.take(array, index, axis=0, out=out, mode="clip")


def _as_slice(index: range) -> slice:
    if not index:
        return slice(0, 0)
    stop = index.stop if index.step > 0 or index.stop >= 0 else None
    return slice(index.start, stop, index.step)


class Singles:
    """Elements that came one by one; they are stacked when they are looked up together."""

    __slots__ = ("elements",)
    is_ours = True

    def __init__(self, elements: list[Any]) -> None:
        self.elements = elements

    def rows(self, index: Index) -> PyTree:
        return _stack_rows(self, index)

    def row(self, i: int) -> PyTree:
        return value_of(self.elements[i])


class Numbers:
    """The table whose row i is `start + i * step`."""

    __slots__ = ("start", "step", "dtype")
    is_ours = True

    def __init__(self, start: float, step: float, dtype: np.dtype) -> None:
        self.start, self.step, self.dtype = start, step, dtype

    def rows(self, index: Index) -> np.ndarray:
        positions = np.asarray(index, np.int64)
        return (self.start + positions * self.step).astype(self.dtype)

    def row(self, i: int) -> Any:
        return np.asarray(self.start + i * self.step).astype(self.dtype)[()]


class Zipped:
    """Row i is the tuple of the rows i of several blocks."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)

    def rows(self, index: Index) -> PyTree:
        return tuple(block.pick(index).value() for block in self.blocks)

    def row(self, i: int) -> PyTree:
        return tuple(block.row(i).value() for block in self.blocks)


class Mapped:
    """Row i is a function of row i of another table."""

    __slots__ = ("table", "fn", "fn_of_rows")

    def __init__(
        self,
        table: Table,
        fn: Callable[[PyTree], PyTree],
        fn_of_rows: Callable[[PyTree], PyTree],
    ) -> None:
        self.table, self.fn, self.fn_of_rows = table, fn, fn_of_rows

    def rows(self, index: Index) -> PyTree:
        try:
            return self.fn_of_rows(self.table.rows(index))
        except (CannotVectorise, ValueError):  # rows that differ, or one with an error
            return _stack_rows(self, index)

    def row(self, i: int) -> PyTree:
        return self.fn(self.table.row(i))


def _stack_rows(table: Table, index: Index) -> PyTree:
    """The rows, looked up one by one; none are an empty stack of rows like the first."""
    if not len(index):
        return map_leaves(lambda array: array[:0], stack_elements([table.row(0)]))
    return stack_elements([table.row(int(i)) for i in index])


class Row:
    """One element of a table, not looked up yet."""

    __slots__ = ("table", "i")

    def __init__(self, table: Table, i: int) -> None:
        self.table, self.i = table, i

    def value(self) -> PyTree:
        return self.table.row(self.i)


class Block:
    """Some rows of a table in some order, not looked up yet; as an element: a batch."""

    __slots__ = ("table", "index")

    def __init__(self, table: Table, index: Index) -> None:
        self.table, self.index = table, index

    @classmethod
    def of(cls, stacked: PyTree, length: int) -> Block:
        """The block of all rows of newly stacked arrays."""
        return cls(Arrays(stacked, is_ours=True), range(length))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, part: slice) -> Block:
        return Block(self.table, self.index[part])

    def pick(self, positions: Index) -> Block:
        """The rows at `positions` of this block."""
        index = self.index
        if isinstance(index, np.ndarray):
            where = _as_slice(positions) if isinstance(positions, range) else positions
            return Block(self.table, index[where])
        if isinstance(positions, range):
            return Block(self.table, index[_as_slice(positions)])
        if index.start or index.step != 1:
            positions = positions * index.step + index.start
        return Block(self.table, positions)

    def row(self, position: int) -> Row:
        return Row(self.table, int(self.index[position]))

    def value(self) -> PyTree:
        return self.table.rows(self.index)

    def elements(self) -> Iterator[PyTree]:
        """The rows one by one; looked up all at once where they lie in memory."""
        if not isinstance(self.table, Singles):
            try:
                return rows_of(self.value(), len(self.index))
            except ValueError:  # rows that differ
                pass
        return (self.table.row(int(i)) for i in self.index)

    @property
    def is_fresh(self) -> bool:
        """Whether looking it up gives arrays that nobody else holds."""
        is_ours = getattr(self.table, "is_ours", False)
        return is_ours or isinstance(self.index, np.ndarray)


def rows_of(stacked: PyTree, count: int) -> Iterator[PyTree]:
    """The rows of stacked arrays."""
    if isinstance(stacked, np.ndarray):
        return iter(stacked)
    if type(stacked) is tuple and all(isinstance(a, np.ndarray) for a in stacked):
        return zip(*stacked)
    return (map_leaves(lambda a, i=i: a[i], stacked) for i in range(count))


def value_of(element: Any) -> PyTree:
    """An element's arrays, looked up if they were not yet."""
    return element.value() if isinstance(element, Row | Block) else element


def join(blocks: Sequence[Block]) -> Block:
    """The rows of several blocks, one after the other."""
    blocks = [block for block in blocks if len(block)] or list(blocks[:1])
    if len(blocks) == 1:
        return blocks[0]
    table = blocks[0].table
    if all(block.table is table for block in blocks):
        return Block(table, np.concatenate([np.asarray(b.index) for b in blocks]))
    if all(isinstance(block.table, Singles) for block in blocks):
        rows = [block.row(i) for block in blocks for i in range(len(block))]
        return Block(Singles(rows), range(len(rows)))
    parts = [block.value() for block in blocks]
    try:
        stacked = map_leaves(_concatenate, *parts)
    except (ValueError, StructureError):  # to say what differs, row by row
        stacked = stack_elements(
            [b.row(i).value() for b in blocks for i in range(len(b))]
        )
    return Block.of(stacked, sum(map(len, blocks)))


def _concatenate(first: np.ndarray, *others: np.ndarray) -> np.ndarray:
    for other in others:
        if other.shape[1:] != first.shape[1:] or other.dtype != first.dtype:
            raise ValueError
    out = empty((len(first) + sum(map(len, others)), *first.shape[1:]), first.dtype)
    return np.concatenate([first, *others], out=out)


def block_of(elements: list[Any]) -> Block:
    """Single elements as a block: of their table if they share one, else of a new one."""
    first = elements[0]
    if isinstance(first, Row) and all(
        isinstance(e, Row) and e.table is first.table for e in elements
    ):
        return Block(first.table, np.array([e.i for e in elements], np.int64))
    return Block(Singles(elements), range(len(elements)))
