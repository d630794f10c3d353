"""A pass over another library's dataset.

Its state is the number of elements that were given and the *origin* of the pass: whatever
the library's order depended on when it began. A restored pass begins at the same origin and
leaves out as many elements. A library with states of its own (Grain) keeps them there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from mirrax._src.input.node import (
    UNKNOWN,
    Cursor,
    Node,
    Path,
    State,
    merge_specs,
    node,
)
from mirrax._src.input.sources import spec_of_first
from mirrax._src.input.structure import PyTree, spec_of, to_array, to_element
from mirrax._src.input.transforms.selecting import START


@dataclasses.dataclass
class Pass:
    """A pass that has begun.

    Attributes:
        iterator: Gives the elements.
        origin: What its order depends on; plain numbers, strings, lists and dicts.
        state: Tells a state of the library's own, which takes the place of counting.
    """

    iterator: Iterator[Any]
    origin: Any = None
    state: Callable[[], State] | None = None


@node
class External(Node):
    """Elements of another library.

    Attributes:
        begin: Begins a pass, from an origin or the library's own state, or anew from None.
        label: What it is called.
        convert: Makes an element of what the library gives.
        length: The number of elements.
        known_spec: The specs, if the library knows them.
        rows: The rows of a full batch, if the library knows them.
        reads_files: Whether TensorFlow would call it a dataset of files.
        look: Makes a context in which a look at the first elements leaves no traces.
    """

    begin: Callable[[Any], Pass]
    label: str
    convert: Callable[[Any], PyTree]
    length: int = UNKNOWN
    known_spec: Callable[[], PyTree] | None = None
    rows: int | None = None
    reads_files: bool = False
    look: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    seen: list[PyTree] = dataclasses.field(default_factory=list, repr=False)

    @property
    def is_described(self) -> bool:
        return self.known_spec is not None

    def open(self, path: Path, state: State = None) -> Cursor:
        return _ExternalCursor(self, *(state or START))

    def looking(self) -> contextlib.AbstractContextManager[Any]:
        return self.look()

    def cardinality(self) -> int:
        return self.length

    def spec(self) -> PyTree:
        if self.known_spec:
            return self.known_spec()
        if not self.seen:
            with self.looking():
                self.seen.append(spec_of_first(self))
        return self.seen[0]

    def batch_size(self) -> int | None:
        return self.rows

    def describe(self) -> str:
        return self.label


class _ExternalCursor(Cursor):
    def __init__(self, source: External, count: int, origin: Any) -> None:
        self._source = source
        self._pass = source.begin(origin)
        self._count = count
        self._first: list[PyTree] = []
        if self._pass.state is None:
            for _ in itertools.islice(self._pass.iterator, count):
                pass

    def __next__(self) -> Any:
        element = self._source.convert(next(self._pass.iterator))
        self._count += 1
        if self._count <= 2 and not self._source.seen:
            self._first.append(spec_of(element))
            if len(self._first) == 2:
                self._source.seen.append(merge_specs(self._first))
        return element

    def state(self) -> State:
        own = self._pass.state
        return [self._count, self._pass.origin if own is None else own()]

    def close(self) -> None:
        # Without its iterator a library ends the threads and processes of the pass.
        iterator, self._pass.iterator = self._pass.iterator, iter(())
        close = getattr(iterator, "close", None)
        if callable(close):
            try:
                close()
            except ValueError:  # a generator that runs at this moment, in a thread
                pass


def with_tuples(value: Any) -> PyTree:
    """An element in which lists are structure: libraries collate tuples into lists."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        if value and all(isinstance(part, str | bytes) for part in value):
            return to_array(list(value))
        return tuple(map(with_tuples, value))
    if isinstance(value, dict):
        return {key: with_tuples(part) for key, part in value.items()}
    return to_element(value)
