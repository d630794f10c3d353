"""`TFRecordWriter`: records to a file that TensorFlow and mirrax read alike."""

from __future__ import annotations

import os
import zlib
from typing import Any, BinaryIO

from mirrax._src.input.record_forms import frame_record
from mirrax._src.input.streams import check_compression


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
        self.compression_type = check_compression(compression_type)
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
