"""Which elements pass: take_while, unique, ignore_errors, assert_cardinality."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mirrax._src.base.errors import warn_user
from mirrax._src.input.blocks import value_of
from mirrax._src.input.element_fn import ElementFn
from mirrax._src.input.node import (
    UNKNOWN,
    Cursor,
    Node,
    Path,
    State,
    node,
    open_cursor,
    rebuild,
)
from mirrax._src.input.sources import static_rows_of
from mirrax._src.input.structure import (
    STRING,
    PyTree,
    dtype_name,
    leaves_of,
    spec_of,
)
from mirrax._src.input.transforms.elementwise import is_true
from mirrax._src.input.transforms.selecting import Through

_START: Any = (None, 0)  # of a pass that reads again what it has read


class Screen(Through):
    """A step that passes some elements on; how many is unknown."""

    def cardinality(self) -> int:
        return UNKNOWN

    def batch_size(self) -> int | None:
        return static_rows_of(self)


@node
class TakeWhile(Screen):
    """The elements before the first for which `fn` is false."""

    input: Node
    fn: ElementFn

    def open(self, path: Path, state: State = None) -> Cursor:
        has_ended, inner = state or (False, None)
        return _TakeWhileCursor(
            open_cursor(self.input, path, inner), self.fn, has_ended
        )

    def describe(self) -> str:
        return f"take_while({self.fn!r})"


class _TakeWhileCursor(Cursor):
    def __init__(self, inner: Cursor, fn: ElementFn, has_ended: bool) -> None:
        self._inner, self._fn, self._has_ended = inner, fn, has_ended

    def __next__(self) -> Any:
        if self._has_ended:
            raise StopIteration
        element = next(self._inner)
        if not is_true(self._fn, value_of(element)):
            self._has_ended = True
            raise StopIteration
        return element

    def state(self) -> State:
        return [self._has_ended, self._inner.state()]

    def close(self) -> None:
        self._inner.close()


@node
class Unique(Screen):
    """Each element once, where it is met first."""

    input: Node

    def open(self, path: Path, state: State = None) -> Cursor:
        return _UniqueCursor(self, path, *(state or _START))


class _UniqueCursor(Cursor):
    """The state: the input's at its start and the elements read, which are read again."""

    def __init__(self, owner: Unique, path: Path, start: State, read: int) -> None:
        self._inner = open_cursor(owner.input, path, start)
        self._start = self._inner.state() if start is None else start
        self._seen: set[Any] = set()
        self._read = 0
        while self._read < read:
            self._seen.add(self._next_key()[0])

    def _next_key(self) -> tuple[Any, Any]:
        element = next(self._inner)
        self._read += 1
        return _key(value_of(element)), element

    def __next__(self) -> Any:
        while True:
            key, element = self._next_key()
            if key not in self._seen:
                self._seen.add(key)
                return element

    def state(self) -> State:
        return [self._start, self._read]

    def close(self) -> None:
        self._inner.close()


def _key(element: PyTree) -> Any:
    """What is equal for equal elements."""
    check_comparable(spec_of(element))
    (leaf,) = leaves_of(element)
    if isinstance(leaf, bytes):
        return leaf
    if leaf.dtype == STRING:
        return leaf.shape, tuple(leaf.ravel().tolist())
    return leaf.shape, leaf.tobytes()


def check_comparable(spec: PyTree) -> None:
    """Raises unless `unique` can compare what the spec describes."""
    leaves = leaves_of(spec)
    if len(leaves) != 1:
        raise ValueError(
            f"`unique` compares elements of one array, and these are {spec}. Choose one with "
            "`map` first."
        )
    if leaves[0].dtype not in (np.int32, np.int64, STRING):
        raise TypeError(
            f"`unique` compares int32, int64 and strings, not {dtype_name(leaves[0].dtype)}."
        )


@node
class IgnoreErrors(Screen):
    """The elements that can be made; the others are left out."""

    input: Node
    log_warning: bool

    def open(self, path: Path, state: State = None) -> Cursor:
        return _IgnoringCursor(self, path, state)

    def describe(self) -> str:
        return "ignore_errors"


def keep_going(root: Node) -> Node:
    """The pipeline with threads that read on after an error."""

    def change(step: Node) -> Node | None:
        if getattr(step, "keeps_going", True):
            return None
        step = dataclasses.replace(step, keeps_going=True)  # type: ignore[type-var]
        return rebuild(step, change)

    return rebuild(root, change)


class _IgnoringCursor(Cursor):
    def __init__(self, owner: IgnoreErrors, path: Path, state: State) -> None:
        self._warns = owner.log_warning
        self._inner: Cursor | None = None
        self._last: Exception | None = None
        has_failed, inner = state or (False, None)
        try:
            if not has_failed:
                self._inner = open_cursor(owner.input, path, inner)
        except Exception as error:  # there is no way to the first element
            self._note(error)

    def _note(self, error: Exception) -> None:
        if self._warns:
            warn_user(f"`ignore_errors` left an element out: {error!r}")

    def __next__(self) -> Any:
        while self._inner is not None:
            try:
                return value_of(next(self._inner))
            except StopIteration:
                raise
            except Exception as error:
                if error is self._last:  # of a source that cannot go on after it
                    break
                self._last = error.with_traceback(None)
                self._note(error)
        raise StopIteration

    def state(self) -> State:
        return [self._inner is None, self._inner and self._inner.state()]

    def close(self) -> None:
        self._last = None
        if self._inner is not None:
            self._inner.close()


@node
class AssertCardinality(Through):
    """All elements, which have to be as many as was said."""

    input: Node
    expected: int

    def cardinality(self) -> int:
        return self.expected

    def open(self, path: Path, state: State = None) -> Cursor:
        read, inner = state or (0, None)
        return _CountingCursor(open_cursor(self.input, path, inner), self, read)

    def describe(self) -> str:
        return f"assert_cardinality({self.expected})"


class _CountingCursor(Cursor):
    def __init__(self, inner: Cursor, owner: AssertCardinality, read: int) -> None:
        self._inner, self._owner, self._read = inner, owner, read

    def __next__(self) -> Any:
        expected = self._owner.expected
        try:
            element = next(self._inner)
        except StopIteration:
            if self._read != expected:
                self._refuse(f"only {self._read}")
            raise
        self._read += 1
        if self._read > expected:
            self._refuse(f"at least {self._read}")
        return element

    def _refuse(self, found: str) -> None:
        raise RuntimeError(
            f"`assert_cardinality`: {self._owner.input.describe()} was expected to contain "
            f"{self._owner.expected} elements but contained {found}."
        )

    def state(self) -> State:
        return [self._read, self._inner.state()]

    def close(self) -> None:
        self._inner.close()
