"""A pass over another library's dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mirrax._src.input.node import (
    UNKNOWN,
    Cursor,
    Node,
    Path,
    State,
    node,
)
from mirrax._src.input.sources import spec_of_first
from mirrax._src.input.structure import PyTree, to_element


@node
class External(Node):
    """Elements of another library.

    `start(path, state)` begins a pass: it returns the iterator, and a function that tells
    its state, or None if the library has no states; then elements are counted, and a
    restored pass leaves out as many.
    """

    start: Callable[[Path, State], tuple[Iterator[Any], Callable[[], State] | None]]
    label: str
    convert: Callable[[Any], PyTree]
    length: int = UNKNOWN
    known_spec: Callable[[], PyTree] | None = None

    @property
    def is_described(self) -> bool:
        return self.known_spec is not None

    def open(self, path: Path, state: State = None) -> Cursor:
        return _ExternalCursor(self, path, state)

    def cardinality(self) -> int:
        return self.length

    def spec(self) -> PyTree:
        return self.known_spec() if self.known_spec else spec_of_first(self)

    def describe(self) -> str:
        return self.label


class _ExternalCursor(Cursor):
    def __init__(self, source: External, path: Path, state: State) -> None:
        count, inner = state or (0, None)
        self._convert = source.convert
        self._iterator, self._inner_state = source.start(path, inner)
        self._count = 0
        if self._inner_state is None:
            self.skip(count)
        self._count = count

    def __next__(self) -> Any:
        element = next(self._iterator)
        self._count += 1
        return self._convert(element)

    def skip(self, count: int) -> None:
        for _ in range(count):
            if next(self._iterator, self) is self:
                return
            self._count += 1

    def state(self) -> State:
        return [self._count, self._inner_state() if self._inner_state else None]

    def close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if callable(close):
            try:
                close()
            except ValueError:  # a generator that runs at this moment, in a thread
                pass


def with_tuples(value: Any) -> PyTree:
    """An element in which lists are structure: libraries collate tuples into lists."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return tuple(map(with_tuples, value))
    if isinstance(value, dict):
        return {key: with_tuples(part) for key, part in value.items()}
    return to_element(value)
