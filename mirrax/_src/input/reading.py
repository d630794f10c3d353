"""The records of files, one file after the other.

A reader's state is the number of the file and the offset where its next record starts:
restoring seeks (in a compressed file: reads) to that offset.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from mirrax._src.input.node import UNKNOWN, Cursor, Node, Path, State, node
from mirrax._src.input.streams import open_stream, skip_to
from mirrax._src.input.structure import PyTree, TensorSpec


@node
class FileReader(Node):
    """The records of several files, one file after the other."""

    files: tuple[str, ...]
    compression: str
    buffer_bytes: int
    form: Any  # how records lie in a file: `records(stream, name, start)`

    def open(self, path: Path, state: State = None) -> Cursor:
        return _FileCursor(self, *(state or (0, 0)))

    def cardinality(self) -> int:
        return UNKNOWN

    def spec(self) -> PyTree:
        return TensorSpec((), "string")

    def describe(self) -> str:
        return f"{self.form.label}({len(self.files)} files)"


class _FileCursor(Cursor):
    def __init__(self, reader: FileReader, number: int, offset: int) -> None:
        self._reader, self._number, self._offset = reader, number, offset
        self._records: Iterator[tuple[bytes, int]] | None = None
        self._stream: Any = None

    def __next__(self) -> bytes:
        while self._number < len(self._reader.files):
            if self._records is None:
                try:
                    self._records = self._open(self._reader.files[self._number])
                except Exception:
                    self._number, self._offset = self._number + 1, 0
                    raise
            found = next(self._records, None)
            if found is not None:
                record, self._offset = found
                return record
            self.close()
            self._number, self._offset = self._number + 1, 0
        raise StopIteration

    def _open(self, name: str) -> Iterator[tuple[bytes, int]]:
        reader = self._reader
        self._stream = open_stream(name, reader.compression, reader.buffer_bytes)
        self._closer = weakref.finalize(self, self._stream.close)
        if self._offset:
            skip_to(self._stream, self._offset, name)
        return reader.form.records(self._stream, name, self._offset)

    def state(self) -> State:
        return [self._number, self._offset]

    def close(self) -> None:
        if self._stream is not None:
            self._closer()
        self._stream = self._records = None
