"""A dataset for each element: flat_map and interleave."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mirrax._src.input.background import Ahead
from mirrax._src.input.blocks import Block, join, value_of
from mirrax._src.input.element_fn import ElementFn
from mirrax._src.input.node import (
    UNKNOWN,
    Cursor,
    Node,
    Path,
    State,
    first_elements,
    node,
    open_cursor,
)
from mirrax._src.input.sources import static_rows
from mirrax._src.input.structure import PyTree

_entropy = threading.local()


def draw_entropy() -> int:
    """A seed for a step that was given none.

    Inside the function of a `flat_map` it follows from the place in the pass, so that a
    restored pass makes the same datasets again.
    """
    source = getattr(_entropy, "source", None)
    return int((source or np.random.default_rng()).integers(2**62))


@contextlib.contextmanager
def drawing_from(key: tuple[int, ...]) -> Iterator[None]:
    """Makes what `draw_entropy` gives here follow from `key`."""
    before = getattr(_entropy, "source", None)
    _entropy.source = np.random.default_rng(key)
    try:
        yield
    finally:
        _entropy.source = before


@node
class Interleave(Node):
    """The elements of the datasets that `fn` makes, `block_length` of each in turn.

    With one dataset at a time (`cycle_length=1`) this is `flat_map`.
    """

    input: Node
    fn: ElementFn
    to_node: Callable[[Any, str], Node]
    cycle_length: int
    block_length: int
    read_ahead: int  # elements that each dataset reads in a thread of its own
    entropy: int
    label: str
    keeps_going: bool = False

    def open(self, path: Path, state: State = None) -> Cursor:
        return _InterleaveCursor(self, path, state)

    def inner(self, element: PyTree, key: tuple[int, ...]) -> Node:
        """The dataset for an element."""
        with drawing_from((self.entropy, *key)):
            return self.to_node(self.fn.raw(element), self.label)

    is_described = False

    def cardinality(self) -> int:
        return UNKNOWN

    def first_inner(self) -> Node:
        """The first element's dataset."""
        return self.inner(first_elements(self.input, 1)[0], (0,))

    def spec(self) -> PyTree:
        return self.first_inner().spec()

    def batch_size(self) -> int | None:
        try:
            firsts = enumerate(first_elements(self.input))
            rows = {static_rows(self.inner(x, (i,)).spec()) for i, x in firsts}
        except Exception:  # the pass itself will raise it, at its place
            return None
        return rows.pop() if len(rows) == 1 else None

    def describe(self) -> str:
        return f"{self.label}({self.fn!r})"


class _Slot:
    """A dataset that takes part in the cycle."""

    def __init__(
        self, owner: Interleave, path: Path, number: int, before: State, element: Any
    ) -> None:
        self.number, self.before = number, before
        self._node = owner.inner(value_of(element), (*path, number))
        self._path = (*path, number)
        self._ahead, self._keeps_going = owner.read_ahead, owner.keeps_going
        self.cursor: Cursor

    def open(self, state: State = None) -> _Slot:
        self.cursor = open_cursor(self._node, self._path, state)
        if self._ahead:
            self.cursor = Ahead(
                self.cursor,
                self._ahead,
                name="interleave",
                keeps_going=self._keeps_going,
            )
        return self


class _InterleaveCursor(Cursor):
    """The state: the input's before each open dataset and after all, and theirs."""

    def __init__(self, owner: Interleave, path: Path, state: State) -> None:
        self._owner, self._path = owner, path
        self._slots: list[_Slot | None] = [None] * owner.cycle_length
        self._turn = self._given = self._number = 0
        self._ended = False
        after = None
        if state is not None:
            self._turn, self._given, self._number, self._ended, after, slots = state
            for position, number, before, inner in slots:
                element = self._element_after(before)
                slot = _Slot(owner, path, number, before, element)
                self._slots[position] = slot.open(inner)
        self._input = open_cursor(owner.input, path, after)

    def _element_after(self, state: State) -> Any:
        cursor = open_cursor(self._owner.input, self._path, state)
        try:
            return next(cursor)
        finally:
            cursor.close()

    def _ready(self) -> _Slot | None:
        """The dataset whose turn it is; None when all have ended."""
        while True:
            slot = self._slots[self._turn]
            if slot is None and not self._ended:
                before = self._input.state()
                try:
                    element = next(self._input)
                except StopIteration:
                    self._ended = True
                    continue
                slot = _Slot(self._owner, self._path, self._number, before, element)
                self._slots[self._turn] = slot.open()
                self._number += 1
            if slot is not None:
                return slot
            if not any(self._slots):
                return None
            self._next_turn()

    def _next_turn(self) -> None:
        self._turn = (self._turn + 1) % len(self._slots)
        self._given = 0

    def _end(self, slot: _Slot) -> None:
        slot.cursor.close()
        self._slots[self._turn] = None
        self._next_turn()

    def __next__(self) -> Any:
        while (slot := self._ready()) is not None:
            try:
                element = next(slot.cursor)
            except StopIteration:
                self._end(slot)
                continue
            self._count(1)
            return element
        raise StopIteration

    def _count(self, given: int) -> None:
        self._given += given
        if self._given == self._owner.block_length:
            self._next_turn()

    def next_block(self, count: int) -> Block | None:
        if self._owner.block_length == 1 and len(self._slots) > 1:
            return super().next_block(count)
        found = []
        while count and (slot := self._ready()) is not None:
            most = count
            if len(self._slots) > 1:
                most = min(count, self._owner.block_length - self._given)
            block = slot.cursor.next_block(most)
            if block is None:
                self._end(slot)
                continue
            if len(self._slots) > 1:
                self._count(len(block))
            found.append(block)
            count -= len(block)
        return join(found) if found else None

    def state(self) -> State:
        slots = [
            [i, slot.number, slot.before, slot.cursor.state()]
            for i, slot in enumerate(self._slots)
            if slot is not None
        ]
        return [
            self._turn,
            self._given,
            self._number,
            self._ended,
            self._input.state(),
            slots,
        ]

    def close(self) -> None:
        self._input.close()
        for slot in self._slots:
            if slot is not None:
                slot.cursor.close()
