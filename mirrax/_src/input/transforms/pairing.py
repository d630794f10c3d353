"""Elements beside others: zip and enumerate."""

from __future__ import annotations

from typing import Any

import numpy as np

from mirrax._src.input.blocks import Block, Numbers, Zipped, value_of
from mirrax._src.input.node import (
    INFINITE,
    UNKNOWN,
    Cursor,
    Node,
    Path,
    State,
    node,
    open_cursor,
)
from mirrax._src.input.structure import PyTree, TensorSpec
from mirrax._src.input.transforms.selecting import agreed


@node
class Zip(Node):
    """Tuples (or another structure) of the elements of several datasets."""

    parts: tuple[Node, ...]
    pack: Any  # the tuple of elements as the structure that the user gave

    def whole(self, path: Path) -> Block | None:
        blocks = [part.whole(path) for part in self.parts]
        if self.pack is not None or any(block is None for block in blocks):
            return None
        length = min(len(block) for block in blocks)  # type: ignore[arg-type]
        return Block(Zipped(blocks), range(length))  # type: ignore[arg-type]

    def open(self, path: Path, state: State = None) -> Cursor:
        states = state or [None] * len(self.parts)
        # The same path for all: two shuffles with one seed keep rows together.
        cursors = [open_cursor(p, path, s) for p, s in zip(self.parts, states)]
        return _ZipCursor(cursors, self.pack)

    def cardinality(self) -> int:
        sizes = [part.cardinality() for part in self.parts]
        if UNKNOWN in sizes:
            return UNKNOWN
        finite = [size for size in sizes if size >= 0]
        return min(finite) if finite else INFINITE

    def spec(self) -> PyTree:
        specs = tuple(part.spec() for part in self.parts)
        return specs if self.pack is None else self.pack(specs)

    def batch_size(self) -> int | None:
        return agreed(self.parts)


class _ZipCursor(Cursor):
    def __init__(self, cursors: list[Cursor], pack: Any) -> None:
        self._cursors, self._pack = cursors, pack

    def __next__(self) -> Any:
        found = []
        for i, cursor in enumerate(self._cursors):
            try:
                found.append(value_of(next(cursor)))
            except Exception as error:
                if not isinstance(error, StopIteration):
                    for other in self._cursors[i + 1 :]:  # they stay side by side
                        other.skip(1)
                raise
        elements = tuple(found)
        return elements if self._pack is None else self._pack(elements)

    def next_block(self, count: int) -> Block | None:
        if self._pack is not None:
            return super().next_block(count)
        blocks = [cursor.next_block(count) for cursor in self._cursors]
        if any(block is None for block in blocks):
            return None
        length = min(map(len, blocks))  # type: ignore[arg-type]
        return Block(Zipped(blocks), range(length))  # type: ignore[arg-type]

    def state(self) -> State:
        return [cursor.state() for cursor in self._cursors]

    def close(self) -> None:
        for cursor in self._cursors:
            cursor.close()


@node
class Enumerate(Node):
    """Pairs of a number and an element."""

    input: Node
    start: int

    def whole(self, path: Path) -> Block | None:
        block = self.input.whole(path)
        if block is None:
            return None
        numbers = Block(Numbers(self.start, 1, np.dtype("int64")), range(len(block)))
        return Block(Zipped([numbers, block]), range(len(block)))

    def open(self, path: Path, state: State = None) -> Cursor:
        number, inner = state or (self.start, None)
        return _EnumerateCursor(open_cursor(self.input, path, inner), number)

    def cardinality(self) -> int:
        return self.input.cardinality()

    def spec(self) -> PyTree:
        return TensorSpec((), "int64"), self.input.spec()

    def describe(self) -> str:
        return f"enumerate({self.start})"


class _EnumerateCursor(Cursor):
    def __init__(self, inner: Cursor, number: int) -> None:
        self._inner, self._number = inner, number

    def __next__(self) -> Any:
        self._number += 1  # also of an element that cannot be made
        return np.int64(self._number - 1), value_of(next(self._inner))

    def next_block(self, count: int) -> Block | None:
        block = self._inner.next_block(count)
        if block is None:
            return None
        numbers = Block(Numbers(self._number, 1, np.dtype("int64")), range(len(block)))
        self._number += len(block)
        return Block(Zipped([numbers, block]), range(len(block)))

    def state(self) -> State:
        return [self._number, self._inner.state()]

    def close(self) -> None:
        self._inner.close()
