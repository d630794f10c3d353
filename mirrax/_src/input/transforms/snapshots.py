"""`snapshot`: the elements of a whole pass on disk, for later passes and programs."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from dataclasses import field
from pathlib import Path as FilePath
from typing import Any

from mirrax._src.input.blocks import value_of
from mirrax._src.input.element_fn import ElementFn
from mirrax._src.input.fingerprint import fingerprint
from mirrax._src.input.node import Cursor, Node, Path, State, node, open_cursor
from mirrax._src.input.sources import static_rows_of
from mirrax._src.input.stored import Metadata, Writer, read_metadata
from mirrax._src.input.transforms.grouping import whole_number
from mirrax._src.input.transforms.selecting import Through

_READ, _PASS = "read", "pass"


@node
class Snapshot(Through):
    """The input, or what an earlier pass over such an input has written."""

    input: Node
    path: str
    compression: str
    shard_fn: ElementFn | None
    reader: Callable[[FilePath, Metadata], Node]  # of what was written
    folder: FilePath | None = field(init=False, default=None)

    def directory(self) -> FilePath:
        """Where the snapshot of this pipeline is: other pipelines have theirs beside it."""
        if self.folder is None:
            number = fingerprint([self.input, self.shard_fn, self.compression])
            self.folder = FilePath(self.path) / f"{number:016x}"
        return self.folder

    def open(self, path: Path, state: State = None) -> Cursor:
        kind, inner = state or (None, None)
        if kind == _PASS:  # a later part of a pass over the input
            return _Passing(open_cursor(self.input, path, inner))
        directory = self.directory()
        found = None
        with contextlib.suppress(FileNotFoundError):
            found = read_metadata(directory)
        if kind == _READ:
            assert inner is not None
            run, inner = inner
            if found is None or found.run != run:
                raise ValueError(
                    f"The state is in the middle of the snapshot {run} in {directory}, which "
                    "is not there any more. Begin a new pass."
                )
        if found is not None:
            steps = self.reader(directory, found)
            return _Reading(open_cursor(steps, path, inner), found.run)
        writer = Writer(directory, self.compression, self.input)
        return _Writing(open_cursor(self.input, path), writer, self.shard)

    def shard(self, element: Any, number: int) -> int:
        """The shard of an element; without a function they take turns, as TensorFlow's."""
        if self.shard_fn is None:
            return number % (os.cpu_count() or 1)
        try:
            return whole_number(self.shard_fn.raw(element), "shard_func")
        except Exception as error:
            self.shard_fn.explain(error, element)
            raise

    def batch_size(self) -> int | None:
        return static_rows_of(self)

    def describe(self) -> str:
        return "snapshot"


class _Passing(Cursor):
    """A pass over the input."""

    def __init__(self, inner: Cursor) -> None:
        self._inner = inner

    def __next__(self) -> Any:
        return next(self._inner)

    def state(self) -> State:
        return [_PASS, self._inner.state()]

    def close(self) -> None:
        self._inner.close()


class _Reading(_Passing):
    """A pass over a snapshot."""

    def __init__(self, inner: Cursor, run: str) -> None:
        super().__init__(inner)
        self._run = run

    def state(self) -> State:
        return [_READ, [self._run, self._inner.state()]]


class _Writing(_Passing):
    """A pass over the input from its start, which is written to disk."""

    def __init__(
        self, inner: Cursor, writer: Writer, shard: Callable[[Any, int], int]
    ) -> None:
        super().__init__(inner)
        self._writer, self._shard, self._number = writer, shard, 0
        self._discard = weakref.finalize(self, writer.discard)

    def __next__(self) -> Any:
        try:
            element = value_of(next(self._inner))
        except StopIteration:
            if self._discard.detach():
                self._writer.finish(replaces=False)
            raise
        except Exception:
            self._discard()  # what follows would not be the whole pass
            raise
        if self._discard.alive:
            self._writer.write(element, self._shard(element, self._number))
        self._number += 1
        return element

    def state(self) -> State:
        return super().state() if self._number else None

    def close(self) -> None:
        self._discard()
        super().close()
