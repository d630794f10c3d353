"""Many elements as one, and back: batch, padded_batch, unbatch."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mirrax._src.input.blocks import Block, join, value_of
from mirrax._src.input.node import (
    UNKNOWN,
    Cursor,
    Node,
    Path,
    State,
    node,
    open_cursor,
)
from mirrax._src.input.sources import Slices
from mirrax._src.input.structure import (
    PyTree,
    TensorSpec,
    dtype_of,
    empty,
    flatten,
    leaves_of,
    shape_of,
    show,
    with_axis,
    without_axis,
)

START: Any = (None, 0)  # of a pass over rows: the input's state, the rows given


def _num_batches(size: int, rows: int, drop_remainder: bool) -> int:
    if size < 0:
        return size
    return size // rows if drop_remainder else -(-size // rows)


@node
class Batch(Node):
    """`size` elements in each, along a new first axis."""

    input: Node
    size: int
    drop_remainder: bool
    is_parallel: bool = False

    def open(self, path: Path, state: State = None) -> Cursor:
        return _BatchCursor(self, open_cursor(self.input, path, state))

    def cardinality(self) -> int:
        return _num_batches(self.input.cardinality(), self.size, self.drop_remainder)

    def spec(self) -> PyTree:
        length = self.size if self.drop_remainder else None
        return with_axis(self.input.spec(), length)

    def batch_size(self) -> int | None:
        # As TensorFlow, which does not recognise its parallel batches.
        return None if self.is_parallel and not self.drop_remainder else self.size

    def describe(self) -> str:
        return f"batch({self.size})"


class _BatchCursor(Cursor):
    def __init__(self, batch: Batch, inner: Cursor) -> None:
        self._size, self._drop = batch.size, batch.drop_remainder
        self._inner = inner

    def __next__(self) -> Block:
        block = self._inner.next_block(self._size)
        if block is None or (self._drop and len(block) < self._size):
            raise StopIteration
        return block

    def skip(self, count: int) -> None:
        self._inner.skip(count * self._size)

    def state(self) -> State:
        return self._inner.state()

    def close(self) -> None:
        self._inner.close()


@node
class PaddedBatch(Node):
    """`size` elements in each, filled up to the same lengths.

    `shapes` and `values` have the structure of an element, or are None.
    """

    input: Node
    size: int
    shapes: PyTree | None
    values: PyTree | None
    drop_remainder: bool

    def open(self, path: Path, state: State = None) -> Cursor:
        return _PaddedCursor(self, open_cursor(self.input, path, state))

    def cardinality(self) -> int:
        return _num_batches(self.input.cardinality(), self.size, self.drop_remainder)

    def spec(self) -> PyTree:
        length = self.size if self.drop_remainder else None
        specs, tree = flatten(self.input.spec())
        shapes = targets(self.shapes, specs, tree)
        padded = [
            TensorSpec(None if s.shape is None else (length, *shape), s.dtype)
            for s, shape in zip(specs, shapes)
        ]
        return jax.tree.unflatten(tree, padded)

    def batch_size(self) -> int | None:
        return self.size

    def describe(self) -> str:
        return f"padded_batch({self.size})"


def targets(
    shapes: PyTree | None, leaves: list[Any], tree: Any
) -> list[tuple[Any, ...]]:
    """The shape that each leaf is filled up to; None where the longest decides."""
    if shapes is None:
        return [(None,) * len(leaf.shape or ()) for leaf in leaves]
    parts = tree.flatten_up_to(shapes)
    return [
        tuple(None if n in (None, -1) else int(n) for n in getattr(part, "shape", part))
        for part in parts
    ]


class _PaddedCursor(Cursor):
    def __init__(self, batch: PaddedBatch, inner: Cursor) -> None:
        self._batch, self._inner = batch, inner

    def __next__(self) -> Any:
        elements = []
        while len(elements) < self._batch.size:
            try:
                elements.append(value_of(next(self._inner)))
            except StopIteration:
                break
        is_short = len(elements) < self._batch.size
        if not elements or (is_short and self._batch.drop_remainder):
            raise StopIteration
        flat = [flatten(element) for element in elements]
        tree = flat[0][1]
        for i, (_, other) in enumerate(flat):
            if other != tree:
                raise ValueError(
                    f"The elements of a batch must be alike, but element 0 is "
                    f"{show(elements[0])} and element {i} is {show(elements[i])}."
                )
        leaves = [_Sized(leaf) for leaf in flat[0][0]]
        shapes = targets(self._batch.shapes, leaves, tree)
        values = fillings(self._batch.values, tree)
        columns = zip(*(leaves for leaves, _ in flat))
        padded = [_pad(c, s, v) for c, s, v in zip(columns, shapes, values)]
        return Block.of(jax.tree.unflatten(tree, padded), len(elements))

    def skip(self, count: int) -> None:
        self._inner.skip(count * self._batch.size)

    def state(self) -> State:
        return self._inner.state()

    def close(self) -> None:
        self._inner.close()


class _Sized:
    def __init__(self, leaf: Any) -> None:
        self.shape = shape_of(leaf)


def fillings(values: PyTree | None, tree: Any) -> list[Any]:
    """What each leaf is filled up with; None for zero or the empty string."""
    if values is None or (
        not isinstance(values, dict | tuple) and tree.num_leaves != 1
    ):
        return [values] * tree.num_leaves
    return (
        [values]
        if tree.num_leaves == 1 and not isinstance(values, dict | tuple)
        else (tree.flatten_up_to(values))
    )


def _pad(leaves: tuple[Any, ...], target: tuple[Any, ...], filling: Any) -> np.ndarray:
    first = leaves[0]
    rank, dtype = len(shape_of(first)), dtype_of(first)
    for leaf in leaves:
        if len(shape_of(leaf)) != rank or dtype_of(leaf) != dtype:
            raise ValueError(
                "`padded_batch` fills up lengths, not ranks or dtypes: a batch holds "
                f"{show(first)} and {show(leaf)}."
            )
    if len(target) != rank:
        raise ValueError(
            f"`padded_shapes` gives {len(target)} lengths for an array of rank {rank}: "
            f"{show(first)}."
        )
    longest = [max(shape_of(leaf)[axis] for leaf in leaves) for axis in range(rank)]
    shape = [n if t is None else t for n, t in zip(longest, target)]
    for axis, (found, allowed) in enumerate(zip(longest, shape)):
        if found > allowed:
            raise ValueError(
                f"An element of length {found} along axis {axis} does not fit into "
                f"`padded_shapes`, which says {allowed}."
            )
    if filling is None:
        filling = b"" if dtype.hasobject else 0
    elif isinstance(filling, str):
        filling = filling.encode()
    out = empty((len(leaves), *shape), dtype)
    out[...] = filling
    for i, leaf in enumerate(leaves):
        out[(i, *map(slice, shape_of(leaf)))] = leaf
    return out


@node
class Unbatch(Node):
    """The rows of each element."""

    input: Node

    def open(self, path: Path, state: State = None) -> Cursor:
        return _UnbatchCursor(self, path, *(state or START))

    def cardinality(self) -> int:
        size, rows = self.input.cardinality(), None
        if size == 0:
            return 0
        if size < 0:
            return size
        if isinstance(self.input, Slices):
            rows = self.input.batch_size()
        return UNKNOWN if rows is None else size * rows

    def spec(self) -> PyTree:
        return without_axis(self.input.spec())


class _UnbatchCursor(Cursor):
    """The state: that of the input before the current element, and the rows given of it."""

    def __init__(self, unbatch: Unbatch, path: Path, state: State, given: int) -> None:
        self._inner = open_cursor(unbatch.input, path, state)
        self._before = state
        self._block: Block | None = None
        self._given = 0
        if given:
            self._advance()
            self._given = given

    def _advance(self) -> bool:
        """Goes to the next element if the current one has no more rows."""
        while self._block is None or self._given >= len(self._block):
            self._before = self._inner.state()
            self._given = 0
            try:
                self._block = as_block(next(self._inner))
            except StopIteration:
                self._block = None
                return False
        return True

    def __next__(self) -> Any:
        if not self._advance():
            raise StopIteration
        assert self._block is not None
        self._given += 1
        return self._block.row(self._given - 1)

    def next_block(self, count: int) -> Block | None:
        found = []
        while count and self._advance():
            assert self._block is not None
            part = self._block[self._given : self._given + count]
            self._given += len(part)
            count -= len(part)
            found.append(part)
        return join(found) if found else None

    def state(self) -> State:
        return [self._before, self._given]

    def close(self) -> None:
        self._inner.close()


def as_block(element: Any) -> Block:
    """A batch as a block of its rows."""
    if isinstance(element, Block):
        return element
    element = value_of(element)
    leaves = leaves_of(element)
    lengths = {len(leaf) if shape_of(leaf) else None for leaf in leaves}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(
            f"An element {show(element)} has no rows in common: all its arrays need a first "
            "axis of the same length."
        )
    return Block.of(element, len(leaves[0]))
