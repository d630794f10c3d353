"""Many elements as one, and back: batch, padded_batch, unbatch, rebatch."""

from __future__ import annotations

from typing import Any

import numpy as np

from mirrax._src.input.blocks import Arrays, Block, join, value_of
from mirrax._src.input.node import (
    UNKNOWN,
    Cursor,
    Node,
    Path,
    State,
    node,
    open_cursor,
)
from mirrax._src.input.sources import (
    Generator,
    Slices,
    static_rows,
    static_rows_of,
)
from mirrax._src.input.structure import (
    PyTree,
    StructureError,
    TensorSpec,
    check_leaves,
    dtype_name,
    dtype_of,
    empty,
    leaves_of,
    map_leaves,
    shape_of,
    show,
    with_axis,
    without_axis,
)
from mirrax._src.input.transforms.selecting import Through

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

    def outline(self) -> PyTree | None:
        outline = self.input.outline()
        return None if outline is None else with_axis(outline, None)

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
        spec = self.input.spec()

        def padded(s: TensorSpec, target: Any) -> TensorSpec:
            if target is None:
                return with_axis(s, length)
            return TensorSpec((length, *lengths(target)), s.dtype)

        return map_leaves(padded, spec, spread(self.shapes, spec))

    def batch_size(self) -> int | None:
        return self.size

    def describe(self) -> str:
        return f"padded_batch({self.size})"


def spread(value: PyTree, element: PyTree) -> PyTree:
    """`value` at every leaf of the element, unless it has the element's structure itself."""
    is_structure = isinstance(value, dict) or isinstance(value, tuple)
    if value is not None and (is_structure or not isinstance(element, tuple | dict)):
        return value
    return map_leaves(lambda leaf: value, element)


def lengths(target: Any) -> list[int | None]:
    """A shape to fill up to; None where the longest decides."""
    shape = getattr(target, "shape", target)
    if not all(n is None or isinstance(n, int | np.integer) for n in shape):
        raise ValueError(f"`padded_shapes` must hold shapes, got {target!r}.")
    return [None if n in (None, -1) else int(n) for n in shape]


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
        first = elements[0]
        shapes, values = (
            spread(self._batch.shapes, first),
            spread(self._batch.values, first),
        )
        try:
            padded = map_leaves(_pad, *elements, shapes, values)
        except StructureError as error:
            if error.index + 1 < len(elements):
                raise ValueError(
                    f"The elements of a batch must be alike, but one is {show(first)} and "
                    f"another {show(elements[error.index + 1])}."
                ) from None
            raise ValueError(
                "`padded_shapes` and `padding_values` need the structure of an element, "
                f"{show(first)}; got {self._batch.shapes!r} and {self._batch.values!r}."
            ) from None
        return Block.of(padded, len(elements))

    def skip(self, count: int) -> None:
        self._inner.skip(count * self._batch.size)

    def state(self) -> State:
        return self._inner.state()

    def close(self) -> None:
        self._inner.close()


def _pad(*args: Any) -> np.ndarray:
    """Leaves of a batch, and last the shape and the value to fill them up with."""
    *leaves, target, filling = args
    check_leaves(leaves)
    first = leaves[0]
    rank, dtype = len(shape_of(first)), dtype_of(first)
    for leaf in leaves:
        if len(shape_of(leaf)) != rank or dtype_of(leaf) != dtype:
            raise ValueError(
                "`padded_batch` pads lengths, not ranks or dtypes: a batch holds "
                f"{show(first)} and {show(leaf)}."
            )
    target = [None] * rank if target is None else lengths(target)
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
        filling = b"" if dtype.hasobject else dtype.type(0)
    else:
        filling = filling.encode() if isinstance(filling, str) else filling
        _check_filling(filling, dtype)
    out = empty((len(leaves), *shape), dtype)
    out[...] = filling
    for i, leaf in enumerate(leaves):
        out[(i, *map(slice, shape_of(leaf)))] = leaf
    return out


def _check_filling(filling: Any, dtype: np.dtype) -> None:
    if np.ndim(filling):
        raise ValueError(
            f"`padding_values` must have one number or string for each array, got {filling!r}."
        )
    is_text = isinstance(filling, bytes)
    fits = is_text == dtype.hasobject
    if fits and not is_text:
        fits = np.can_cast(np.asarray(filling).dtype, dtype, "same_kind")
    if not fits:
        raise TypeError(
            f"`padding_values` has {filling!r} for an array of {dtype_name(dtype)}."
        )


@node
class Unbatch(Node):
    """The rows of each element."""

    input: Node

    def open(self, path: Path, state: State = None) -> UnbatchCursor:
        return UnbatchCursor(self, path, *(state or START))

    def cardinality(self) -> int:
        size, rows = self.input.cardinality(), fixed_rows(self.input)
        if size < 0:
            return size
        return UNKNOWN if rows is None else size * rows

    def spec(self) -> PyTree:
        return without_axis(self.input.spec())


def fixed_rows(step: Node) -> int | None:
    """The rows of every element, if they are known without looking at one."""
    if isinstance(step, Through):
        return fixed_rows(step.input)
    if isinstance(step, Unbatch | Batch | Slices | Generator):
        is_full = not isinstance(step, Batch) or step.drop_remainder
        outline = step.outline() if is_full else None
        return None if outline is None else static_rows(step.spec())
    return None


class UnbatchCursor(Cursor):
    """The state: that of the input before the current element, and the rows given of it."""

    def __init__(self, unbatch: Unbatch, path: Path, state: State, given: int) -> None:
        self._inner = open_cursor(unbatch.input, path, state)
        self._before = self._inner.state()
        self.current: Any = None  # the block that rows are taken from
        self._given = 0
        if given:
            self.has_more()
            self._given = given

    def has_more(self) -> bool:
        """Whether there are more rows; then the next one is in the current element."""
        while self.current is None or self._given >= len(self.current):
            self._before = self._inner.state()
            self._given = 0
            try:
                self.current = as_block(next(self._inner))
            except StopIteration:
                self.current = None
                return False
        return True

    def __next__(self) -> Any:
        if not self.has_more():
            raise StopIteration
        self._given += 1
        return self.current.row(self._given - 1)

    def next_block(self, count: int) -> Block | None:
        found = []
        while count and self.has_more():
            part = self.current[self._given : self._given + count]
            self._given += len(part)
            count -= len(part)
            found.append(part)
        return join(found) if found else None

    def state(self) -> State:
        if self.current is None or self._given >= len(self.current):
            return [self._inner.state(), 0]
        return [self._before, self._given]

    def close(self) -> None:
        self._inner.close()


@node
class Rebatch(Node):
    """The rows of batches in new ones, whose sizes take turns."""

    input: Node
    sizes: tuple[int, ...]
    drop_remainder: bool

    def open(self, path: Path, state: State = None) -> Cursor:
        return _RebatchCursor(self, path, *(state or START))

    def cardinality(self) -> int:
        return UNKNOWN

    def spec(self) -> PyTree:
        spec = self.input.spec()
        check_rows(spec)
        size = self.sizes[0] if len(set(self.sizes)) == 1 else None
        if size and not self.drop_remainder:
            rows = static_rows(spec)
            size = size if rows is not None and not rows % size else None
        return with_axis(without_axis(spec), size)

    def batch_size(self) -> int | None:
        return static_rows_of(self)

    def describe(self) -> str:
        return f"rebatch({', '.join(map(str, self.sizes))})"


def check_rows(spec: PyTree) -> None:
    """Raises if the specs are of elements that have no rows."""
    if any(s.shape == () for s in leaves_of(spec)):
        raise ValueError(
            f"`rebatch` takes batches, and an element {spec} holds a scalar. Make batches "
            "with `batch` first."
        )


class _RebatchCursor(Cursor):
    """The state: the rows', and the number of the next size."""

    def __init__(self, owner: Rebatch, path: Path, state: State, number: int) -> None:
        self._sizes, self._drop = owner.sizes, owner.drop_remainder
        self._rows = Unbatch(owner.input).open(path, state)
        self._number = number
        self._nothing: Block | None = None  # a batch without rows

    def __next__(self) -> Block:
        size = self._sizes[self._number]
        if size or self._nothing is None:  # a size of 0 does not look for the end
            if not self._rows.has_more():
                raise StopIteration
            self._nothing = self._rows.current[:0]
        block = self._rows.next_block(size) if size else self._nothing
        assert block is not None
        if len(block) < size:
            self._nothing = None  # this was the end
            if self._drop:
                raise StopIteration
        self._number = (self._number + 1) % len(self._sizes)
        return block

    def state(self) -> State:
        return [self._rows.state(), self._number]

    def close(self) -> None:
        self._rows.close()


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
    return Block(Arrays(element), range(len(leaves[0])))
