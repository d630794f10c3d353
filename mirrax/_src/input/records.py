"""Records in files: TFRecord files with their checksums, lines of text, fixed lengths.

A reader's state is the number of the file and the records passed in it, with the offset
where the next one starts: restoring seeks (in a compressed file: reads) to that offset.
"""

from __future__ import annotations

import io
import os
import struct
import weakref
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from mirrax._src.base.errors import DataLossError
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.node import UNKNOWN, Cursor, Node, Path, State, node
from mirrax._src.input.structure import PyTree, TensorSpec

_BUFFER_BYTES = 1 << 18
_LARGE_BYTES = 1 << 26
_HEAD = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
COMPRESSIONS = ("", "GZIP", "ZLIB")


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
            _skip_to(self._stream, self._offset, name)
        return reader.form.records(self._stream, name, self._offset)

    def state(self) -> State:
        return [self._number, self._offset]

    def close(self) -> None:
        if self._stream is not None:
            self._closer()
        self._stream = self._records = None


def open_stream(
    name: str, compression: str, buffer_bytes: int = _BUFFER_BYTES
) -> BinaryIO:
    """The (decompressed) bytes of a file."""
    try:
        raw = open(name, "rb", buffering=buffer_bytes)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There is no file {name!r} (looked in {os.getcwd()})."
        ) from None
    if compression:
        return io.BufferedReader(
            _Inflating(raw, _WINDOW_BITS[compression]), buffer_bytes
        )
    return raw


_WINDOW_BITS = {"GZIP": 31, "ZLIB": 15}


class _Inflating(io.RawIOBase):
    """The bytes of a compressed stream; of several, one after the other, as gzip allows."""

    def __init__(self, raw: BinaryIO, window_bits: int) -> None:
        self._raw, self._bits = raw, window_bits
        self._inflate = zlib.decompressobj(window_bits)
        self._has_begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        data = b""
        while not data:
            if self._inflate.eof:
                rest = self._inflate.unused_data or self._raw.read(_BUFFER_BYTES)
                if not rest.strip(b"\0"):
                    return 0
                self._inflate = zlib.decompressobj(self._bits)
            else:
                rest = self._inflate.unconsumed_tail or self._raw.read(_BUFFER_BYTES)
                if not rest:
                    if not self._has_begun and self._bits == _WINDOW_BITS["GZIP"]:
                        return 0  # an empty file, as gzip itself has it
                    raise EOFError("the compressed stream is cut off")
            self._has_begun = True
            data = self._inflate.decompress(rest, len(out))
        out[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _skip_to(stream: Any, offset: int, name: str) -> None:
    size = _plain_size(stream)
    if size is not None and size >= offset:
        stream.seek(offset)
        return
    left = offset
    while left:
        found = len(_read(stream, min(left, _BUFFER_BYTES), name, offset - left))
        if not found:
            raise _lost(
                name, offset - left, "the file is shorter than when it was saved"
            )
        left -= found


def _plain_size(stream: Any) -> int | None:
    """The bytes of a file that is not compressed."""
    is_plain = isinstance(getattr(stream, "raw", None), io.FileIO)
    return os.fstat(stream.fileno()).st_size if is_plain else None


def _read(stream: BinaryIO, size: int, name: str, offset: int) -> bytes:
    try:
        return stream.read(size)
    except (EOFError, zlib.error) as error:
        raise _lost(name, offset, f"its compression is damaged ({error})") from error


def _read_large(stream: BinaryIO, size: int, name: str, offset: int) -> bytes:
    """As `_read`, for a size that a damaged file may have made up."""
    if size <= _LARGE_BYTES:
        return _read(stream, size, name, offset)
    parts = []
    while size and (part := _read(stream, min(size, _LARGE_BYTES), name, offset)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _lost(name: str, offset: int, what: str) -> DataLossError:
    return DataLossError(
        f"{name} is damaged at byte {offset}: {what}. Write the file again, or leave it out."
    )


# Forms of records -------------------------------------------------------------------------


class TFRecords:
    """Length, its checksum, the record, its checksum."""

    label = "TFRecordDataset"

    def records(
        self, stream: BinaryIO, name: str, offset: int
    ) -> Iterator[tuple[bytes, int]]:
        checksum = _crc32c()
        while head := _read(stream, _HEAD.size, name, offset):
            if len(head) < _HEAD.size:
                raise _lost(name, offset, "the file ends inside the length of a record")
            length, expected = _HEAD.unpack(head)
            if _masked(checksum(head[:8])) != expected:
                raise _lost(name, offset, "the length of a record has a wrong checksum")
            body = _read_large(stream, length + _CHECKSUM.size, name, offset)
            if len(body) < length + _CHECKSUM.size:
                raise _lost(
                    name,
                    offset,
                    f"the file ends inside a record of {length} bytes, of which "
                    f"{len(body)} are there",
                )
            record = body[:length]
            if _masked(checksum(record)) != _CHECKSUM.unpack_from(body, length)[0]:
                raise _lost(
                    name, offset, f"a record of {length} bytes has a wrong checksum"
                )
            offset += _HEAD.size + len(body)
            yield record, offset


def frame_record(record: bytes) -> bytes:
    """A record as it lies in a TFRecord file."""
    checksum = _crc32c()
    length = struct.pack("<Q", len(record))
    return b"".join(
        (
            length,
            _CHECKSUM.pack(_masked(checksum(length))),
            record,
            _CHECKSUM.pack(_masked(checksum(record))),
        )
    )


def _masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _crc32c() -> Any:
    from google_crc32c import value

    return value


class Lines:
    """Lines of text, without their ends."""

    label = "TextLineDataset"

    def records(
        self, stream: BinaryIO, name: str, offset: int
    ) -> Iterator[tuple[bytes, int]]:
        try:
            for line in stream:
                offset += len(line)
                # As TensorFlow, which leaves out every carriage return.
                text = line.replace(b"\r", b"")
                if text:
                    yield text.removesuffix(b"\n"), offset
        except (EOFError, zlib.error) as error:
            raise _lost(
                name, offset, f"its compression is damaged ({error})"
            ) from error


class FixedLengths:
    """Records of one length between a header and a footer."""

    label = "FixedLengthRecordDataset"

    def __init__(self, record_bytes: int, header_bytes: int, footer_bytes: int) -> None:
        self.record, self.header, self.footer = record_bytes, header_bytes, footer_bytes

    def records(
        self, stream: BinaryIO, name: str, offset: int
    ) -> Iterator[tuple[bytes, int]]:
        if not offset:
            self._check_size(stream, name)
            offset = len(_read(stream, self.header, name, 0))
            if offset < self.header:
                raise _lost(
                    name, 0, f"it is shorter than its header of {self.header} bytes"
                )
        # A record is kept back as long as what follows may be the footer.
        waiting = b""
        while True:
            waiting += _read(
                stream, self.record + self.footer - len(waiting), name, offset
            )
            if len(waiting) < self.record + self.footer:
                break
            offset += self.record
            yield waiting[: self.record], offset
            waiting = waiting[self.record :]
        if len(waiting) != self.footer:
            raise _lost(
                name,
                offset,
                f"the {len(waiting)} bytes that are left are neither a record of "
                f"{self.record} bytes nor the footer of {self.footer}",
            )

    def _check_size(self, stream: Any, name: str) -> None:
        """Raises at once if a file that is not compressed cannot be right."""
        size = _plain_size(stream)
        if size is None:
            return
        records = size - self.header - self.footer
        if records < 0 or records % self.record:
            raise ValueError(
                f"{name} has {size} bytes, which are no header of {self.header}, whole records "
                f"of {self.record} and footer of {self.footer} bytes. Check `record_bytes`, "
                "`header_bytes` and `footer_bytes`, or whether the file is damaged."
            )


# Datasets ---------------------------------------------------------------------------------


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
        compression = compression_type or ""
        if compression not in COMPRESSIONS:
            raise ValueError(
                f"`compression_type` must be one of {', '.join(map(repr, COMPRESSIONS))} or "
                f"None, got {compression_type!r}."
            )
        if buffer_size is not None and buffer_size < 0:
            raise ValueError(f"`buffer_size` cannot be negative, got {buffer_size}.")
        size = max(buffer_size or _BUFFER_BYTES, 2)
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


# Writing ------------------------------------------------------------------------------------


class TFRecordOptions:
    """How a `TFRecordWriter` compresses.

    Args:
        compression_type: "", "GZIP" or "ZLIB".
        compression_level: From 0 (none) to 9 (smallest).
    """

    __module__ = "mirrax.io"

    def __init__(
        self, compression_type: str | None = None, compression_level: int | None = None
    ) -> None:
        if (compression_type or "") not in COMPRESSIONS:
            raise ValueError(
                f"`compression_type` must be one of {', '.join(map(repr, COMPRESSIONS))} or "
                f"None, got {compression_type!r}."
            )
        self.compression_type = compression_type or ""
        self.compression_level = 6 if compression_level is None else compression_level


class TFRecordWriter:
    """Writes records to a TFRecord file that TensorFlow and mirrax read alike.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/two.tfrecord"
    >>> with mx.io.TFRecordWriter(path) as writer:
    ...     writer.write(b"one")
    ...     writer.write(b"two")
    >>> list(mx.data.TFRecordDataset(path))
    [b'one', b'two']

    Args:
        path: The file; one that is there is replaced.
        options: A `TFRecordOptions`, or the compression's name.
    """

    __module__ = "mirrax.io"

    def __init__(self, path: Any, options: TFRecordOptions | str | None = None) -> None:
        if not isinstance(options, TFRecordOptions):
            options = TFRecordOptions(options)
        self._path = os.fsdecode(path)
        self._file: BinaryIO = open(self._path, "wb")
        self._deflate: Any = None
        level = options.compression_level
        if options.compression_type:
            bits = 31 if options.compression_type == "GZIP" else 15
            self._deflate = zlib.compressobj(level, wbits=bits)

    def write(self, record: bytes) -> None:
        """Appends a record."""
        if not isinstance(record, bytes | bytearray | memoryview):
            raise TypeError(
                f"A record is bytes, got {type(record).__name__}; `mx.io.encode_example` makes "
                "bytes of a dict of arrays."
            )
        if self._file.closed:
            raise ValueError(f"The writer of {self._path} is closed.")
        framed = frame_record(bytes(record))
        self._file.write(self._deflate.compress(framed) if self._deflate else framed)

    def flush(self) -> None:
        """Brings what was written so far to the file."""
        if self._deflate:
            self._file.write(self._deflate.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def close(self) -> None:
        """Finishes the file."""
        if not self._file.closed:
            if self._deflate:
                self._file.write(self._deflate.flush())
            self._file.close()

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
