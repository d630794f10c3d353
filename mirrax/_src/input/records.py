"""Datasets of records in files.

A reader's state is the number of the file and the offset where its next record starts:
restoring seeks (in a compressed file: reads) to that offset.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from mirrax._src.input.dataset import Dataset
from mirrax._src.input.node import UNKNOWN, Cursor, Node, Path, State, node
from mirrax._src.input.record_forms import FixedLengths, Lines, TFRecords
from mirrax._src.input.streams import (
    BUFFER_BYTES,
    check_compression,
    open_stream,
    skip_to,
)
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
                self._records = self._open(self._reader.files[self._number])
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


class _FileDataset(Dataset):
    """A dataset of records in files."""

    def __init__(
        self,
        filenames: Any,
        compression_type: str | None,
        buffer_size: int | None,
        num_parallel_reads: int | None,
        form: Any,
    ) -> None:
        compression = check_compression(compression_type)
        if buffer_size is not None and buffer_size < 0:
            raise ValueError(f"`buffer_size` cannot be negative, got {buffer_size}.")
        size = max(buffer_size or BUFFER_BYTES, 2)
        if not isinstance(filenames, Dataset) and num_parallel_reads is None:
            names = tuple(_names(filenames))
            super().__init__(FileReader(names, compression, size, form))
            return
        if not isinstance(filenames, Dataset):
            filenames = Dataset.from_tensor_slices(list(_names(filenames)))

        def read(name: Any) -> Dataset:
            return Dataset(FileReader((os.fsdecode(name),), compression, size, form))

        read.__qualname__ = form.label
        if num_parallel_reads is None:
            super().__init__(filenames.flat_map(read).node)
        else:
            cycle = num_parallel_reads
            super().__init__(
                filenames.interleave(
                    read, cycle_length=cycle, num_parallel_calls=cycle
                ).node
            )


def _names(filenames: Any) -> Iterator[str]:
    single = isinstance(filenames, str | bytes | os.PathLike)
    if not single and not isinstance(filenames, Iterable):
        raise TypeError(
            f"`filenames` is a file's name, a list of names or a dataset of names, got "
            f"{filenames!r}."
        )
    for name in [filenames] if single else filenames:
        if not isinstance(name, str | bytes | os.PathLike):
            raise TypeError(f"A file name is a string or a path, got {name!r}.")
        yield os.fsdecode(name)


class TFRecordDataset(_FileDataset):
    """The records of TFRecord files, as bytes; checksums are checked.

    Args:
        filenames: A name, a list of names, or a dataset of names.
        compression_type: "", "GZIP" or "ZLIB".
        buffer_size: The bytes that are read at a time.
        num_parallel_reads: How many files are read at a time, their records in turn.
        name: Unused, as in TensorFlow's eager mode.
    """

    __module__ = "mirrax.data"

    def __init__(
        self,
        filenames: Any,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            filenames, compression_type, buffer_size, num_parallel_reads, TFRecords()
        )


class TextLineDataset(_FileDataset):
    """The lines of text files, as bytes, without their ends.

    Args:
        filenames: A name, a list of names, or a dataset of names.
        compression_type: "", "GZIP" or "ZLIB".
        buffer_size: The bytes that are read at a time.
        num_parallel_reads: How many files are read at a time, their lines in turn.
        name: Unused, as in TensorFlow's eager mode.
    """

    __module__ = "mirrax.data"

    def __init__(
        self,
        filenames: Any,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            filenames, compression_type, buffer_size, num_parallel_reads, Lines()
        )


class FixedLengthRecordDataset(_FileDataset):
    """Records of one length in binary files, as bytes.

    Args:
        filenames: A name, a list of names, or a dataset of names.
        record_bytes: The length of a record.
        header_bytes: The bytes before the first record of a file.
        footer_bytes: The bytes after the last.
        buffer_size: The bytes that are read at a time.
        compression_type: "", "GZIP" or "ZLIB".
        num_parallel_reads: How many files are read at a time, their records in turn.
        name: Unused, as in TensorFlow's eager mode.
    """

    __module__ = "mirrax.data"

    def __init__(
        self,
        filenames: Any,
        record_bytes: int,
        header_bytes: int | None = None,
        footer_bytes: int | None = None,
        buffer_size: int | None = None,
        compression_type: str | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        if record_bytes < 1 or (header_bytes or 0) < 0 or (footer_bytes or 0) < 0:
            raise ValueError(
                "`record_bytes` must be positive, `header_bytes` and `footer_bytes` not "
                f"negative, got {record_bytes}, {header_bytes}, {footer_bytes}."
            )
        form = FixedLengths(record_bytes, header_bytes or 0, footer_bytes or 0)
        super().__init__(
            filenames, compression_type, buffer_size, num_parallel_reads, form
        )
