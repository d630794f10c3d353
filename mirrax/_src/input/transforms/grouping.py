"""Elements by their keys: `group_by_window`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mirrax._src.input.blocks import block_of, value_of
from mirrax._src.input.element_fn import ElementFn
from mirrax._src.input.node import (
    INFINITE,
    UNKNOWN,
    Cursor,
    Node,
    Path,
    State,
    first_elements,
    node,
    open_cursor,
)
from mirrax._src.input.sources import static_rows_of
from mirrax._src.input.structure import PyTree, shape_of
from mirrax._src.input.transforms.nesting import drawing_from
from mirrax._src.input.transforms.windows import Kept, Wrap

# A state adds the elements read since the last of these notes, which are read again.
_ELEMENTS_BETWEEN_NOTES = 4096


@node
class GroupByWindow(Node):
    """The datasets that `reduce_fn` makes of groups of elements with the same key."""

    input: Node
    key_fn: ElementFn
    reduce_fn: Callable[[Any, Any], Any]
    size_fn: Callable[[Any], Any]
    wrap: Wrap
    to_node: Callable[[Any, str], Node]
    entropy: int
    describes: Callable[[Node], PyTree] | None = None  # gives the specs, of the input

    def open(self, path: Path, state: State = None) -> Cursor:
        return _GroupCursor(self, path, state)

    is_described = False

    def cardinality(self) -> int:
        return INFINITE if self.input.cardinality() == INFINITE else UNKNOWN

    def spec(self) -> PyTree:
        if self.describes is not None:
            return self.describes(self.input)
        elements = first_elements(self.input)
        return self.reduced(self.key(elements[0]), elements, (0,)).spec()

    def batch_size(self) -> int | None:
        return static_rows_of(self)

    def key(self, element: PyTree) -> int:
        """An element's key."""
        try:
            return whole_number(self.key_fn.raw(element), "key_func")
        except Exception as error:
            self.key_fn.explain(error, element)
            raise

    def size(self, key: int) -> int:
        """How many elements with this key make a group."""
        size = whole_number(self.size_fn(np.int64(key)), "window_size_func")
        if size < 1:
            raise ValueError(
                f"The size of a window must be positive, got {size} for the key {key}."
            )
        return size

    def reduced(self, key: int, elements: list[Any], number: tuple[int, ...]) -> Node:
        """The dataset that is made of a group."""
        window = self.wrap(Kept(block_of(elements), self.input.spec, "window"))
        with drawing_from((self.entropy, *number)):
            made = self.reduce_fn(np.int64(key), window)
            return self.to_node(made, "group_by_window")

    def describe(self) -> str:
        return f"group_by_window({self.key_fn!r})"


def whole_number(value: Any, what: str) -> int:
    """What a function returned, as an integer.

    Raises:
        TypeError: If it is of another type.
        ValueError: If it is not a single one.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"`{what}` must return an integer, got {value!r}.")
    if shape_of(array):
        raise ValueError(
            f"`{what}` must return one integer, got an array of shape {array.shape}."
        )
    return int(array)


class _GroupCursor(Cursor):
    """A state holds the numbers of the elements in groups, not the elements.

    They are read again from where the oldest of them was (as in shuffling.py).
    """

    def __init__(self, owner: GroupByWindow, path: Path, state: State) -> None:
        self._owner, self._path = owner, path
        base, since, self._flushed, inner = state or ([None, 0, [], 0, 0], 0, 0, None)
        start, first, groups, self._read, self._number = base
        self._inner = open_cursor(owner.input, path, start)
        start = self._inner.state() if start is None else start
        self._base = [start, *base[1:]]
        self._marks: list[tuple[int, State]] = [(first, start)]
        self._groups: dict[int, list[tuple[int, Any]]] = {}
        self._sizes: dict[int, int] = {}
        self._full: tuple[int, list[Any]] | None = None
        self._current: Cursor | None = None
        self._restore(first, groups)
        for _ in range(since):
            self._full = self._add_next()
        for _ in range(self._flushed):
            self._full = self._flush()
        if inner is not None:
            self._open(inner[0])

    def _restore(self, first: int, groups: list[Any]) -> None:
        kept = {number for _, numbers in groups for number in numbers}
        elements: dict[int, Any] = {}
        for number in range(first, self._read):
            element = next(self._inner)
            if number in kept:
                elements[number] = element
        for key, numbers in groups:
            self._groups[key] = [(n, elements[n]) for n in numbers]

    def _add_next(self) -> tuple[int, list[Any]] | None:
        """Reads an element; its key and group if that is full now."""
        if self._read - self._marks[-1][0] >= _ELEMENTS_BETWEEN_NOTES:
            self._marks.append((self._read, self._inner.state()))
        element = next(self._inner)
        number, self._read = self._read, self._read + 1
        key = self._owner.key(value_of(element))
        group = self._groups.setdefault(key, [])
        group.append((number, element))
        if key not in self._sizes:
            self._sizes[key] = self._owner.size(key)
        if len(group) < self._sizes[key]:
            return None
        return self._take(key)

    def _flush(self) -> tuple[int, list[Any]]:
        """The group with the smallest key, at the end of the data."""
        return self._take(min(self._groups))

    def _take(self, key: int) -> tuple[int, list[Any]]:
        self._number += 1
        return key, [element for _, element in self._groups.pop(key)]

    def _note(self) -> None:
        """Makes a new base, and drops the marks that no group needs."""
        groups = [[key, [n for n, _ in group]] for key, group in self._groups.items()]
        oldest = min((numbers[0] for _, numbers in groups), default=self._read)
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            self._marks.pop(0)
        first, start = self._marks[0]
        self._base = [start, first, groups, self._read, self._number]

    def _open(self, state: State = None) -> None:
        """Opens the dataset of the group that is full."""
        assert self._full is not None
        key, elements = self._full
        number = (*self._path, self._number)
        made = self._owner.reduced(key, elements, number)
        self._current = open_cursor(made, number, state)

    def _advance(self) -> bool:
        """Goes to the next group; False when there is none."""
        self._full = None
        if not self._flushed:
            if self._read - self._base[3] >= _ELEMENTS_BETWEEN_NOTES:
                self._note()
            try:
                while self._full is None:
                    self._full = self._add_next()
            except StopIteration:
                pass
        if self._full is None:
            if not self._groups:
                return False
            self._full = self._flush()
            self._flushed += 1
        self._open()
        return True

    def __next__(self) -> Any:
        while self._current is not None or self._advance():
            assert self._current is not None
            try:
                return next(self._current)
            except StopIteration:
                self._end()
        raise StopIteration

    def _end(self) -> None:
        assert self._current is not None
        self._current.close()
        self._current = None

    def state(self) -> State:
        inner = None if self._current is None else [self._current.state()]
        return [self._base, self._read - self._base[3], self._flushed, inner]

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
        self._inner.close()
