"""Elements that wait: cache and prefetch."""

from __future__ import annotations

import threading
from dataclasses import field
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from mirrax._src.input.background import Ahead
from mirrax._src.input.blocks import Arrays, Block, Singles, value_of
from mirrax._src.input.element_file import read_elements, write_elements
from mirrax._src.input.node import (
    BlockCursor,
    Cursor,
    Node,
    Path,
    State,
    node,
    open_cursor,
)
from mirrax._src.input.structure import map_leaves, own, stack_elements
from mirrax._src.input.transforms.selecting import Through


@node
class Prefetch(Through):
    """The same elements, of which up to `size` are made ahead in a thread."""

    input: Node
    size: int
    keeps_going: bool = False

    def whole(self, path: Path) -> Block | None:
        return self.input.whole(path)  # nothing to wait for

    def open(self, path: Path, state: State = None) -> Cursor:
        cursor = open_cursor(self.input, path, state)
        if not self.size:
            return cursor
        return Ahead(cursor, self.size, value_of, keeps_going=self.keeps_going)

    def describe(self) -> str:
        return f"prefetch({self.size})"


class Store:
    """Where a `cache` keeps its elements once a pass has reached the end."""

    def __init__(self, file: FilePath | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._kept: Block | list[Any] | None = None
        self.start: State = None  # of the input, where the pass that was kept began

    def load(self) -> Block | list[Any] | None:
        """What was kept: a block of elements that are alike, or a list of elements."""
        with self._lock:
            if self._kept is None and self._file and self._file.exists():
                try:
                    self._kept = _together(read_elements(self._file))
                except Exception as error:
                    raise OSError(
                        f"The file of `cache` cannot be read: {self._file} ({error!r}). "
                        "Delete it; the next pass over the data writes it again."
                    ) from error
            return self._kept

    def save(self, elements: list[Any], start: State = None) -> None:
        """Keeps the elements of a whole pass."""
        with self._lock:
            if self._kept is None:
                self.start = start
                if self._file:
                    write_elements(self._file, elements)
                self._kept = _together(elements)


def _together(elements: list[Any]) -> Block | list[Any]:
    for element in elements:
        map_leaves(_protect, element)
    try:
        stacked = stack_elements(elements) if elements else None
    except (ValueError, TypeError):  # elements of several shapes, datasets: stay single
        stacked = None
    if stacked is None:
        return elements
    map_leaves(_protect, stacked)
    return Block(Arrays(stacked), range(len(elements)))


def _protect(leaf: Any) -> None:
    if isinstance(leaf, np.ndarray):
        leaf.flags.writeable = False  # users get views of it


@node
class Cache(Through):
    """The elements of the first pass that reaches the end, kept for all later ones."""

    input: Node
    file: str
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.store = Store(FilePath(self.file) if self.file else None)

    def whole(self, path: Path) -> Block | None:
        # Always the same path: what is kept does not depend on which pass came first.
        block = self.input.whole(())
        if block is None:
            return None
        kept = self.store.load()
        if kept is None:
            self.store.save([block.row(i).value() for i in range(len(block))])
            kept = self.store.load()
        return kept if isinstance(kept, Block) else block

    def open(self, path: Path, state: State = None) -> Cursor:
        position, start = state or (0, None)
        kept = self.store.load()
        if kept is not None:
            return _KeptCursor(kept, self.store.start, position)
        return _FillingCursor(open_cursor(self.input, (), start), self.store, position)

    def forget(self) -> None:
        self.__post_init__()

    def describe(self) -> str:
        return f"cache({self.file!r})" if self.file else "cache()"


class _KeptCursor(BlockCursor):
    def __init__(self, kept: Block | list[Any], start: State, position: int) -> None:
        block = (
            kept if isinstance(kept, Block) else Block(Singles(kept), range(len(kept)))
        )
        super().__init__(block, position)
        self._start = start

    def state(self) -> State:
        return [super().state(), self._start]


class _FillingCursor(Cursor):
    def __init__(self, inner: Cursor, store: Store, position: int) -> None:
        self._inner, self._store = inner, store
        self._start = inner.state()
        self._elements: list[Any] = []
        self.skip(position)

    def __next__(self) -> Any:
        try:
            element = value_of(next(self._inner))
        except StopIteration:
            self._store.save(self._elements, self._start)
            raise
        self._elements.append(map_leaves(own, element))
        return element

    def state(self) -> State:
        return [len(self._elements), self._start]

    def close(self) -> None:
        self._inner.close()
