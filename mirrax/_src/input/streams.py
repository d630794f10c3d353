"""The bytes of files, compressed or not, and what to say when they are damaged."""

from __future__ import annotations

import io
import os
import zlib
from typing import Any, BinaryIO

from mirrax._src.base.errors import DataLossError

BUFFER_BYTES = 1 << 18
COMPRESSIONS = ("", "GZIP", "ZLIB")
_LARGE_BYTES = 1 << 26


def check_compression(compression_type: str | None) -> str:
    """The compression's name; "" for none.

    Raises:
        ValueError: If there is no such compression.
    """
    if (compression_type or "") not in COMPRESSIONS:
        raise ValueError(
            f"`compression_type` must be one of {', '.join(map(repr, COMPRESSIONS))} or None, "
            f"got {compression_type!r}."
        )
    return compression_type or ""


def open_stream(
    name: str, compression: str, buffer_bytes: int = BUFFER_BYTES
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
                rest = self._inflate.unused_data or self._raw.read(BUFFER_BYTES)
                if not rest.strip(b"\0"):
                    return 0
                self._inflate = zlib.decompressobj(self._bits)
            else:
                rest = self._inflate.unconsumed_tail or self._raw.read(BUFFER_BYTES)
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


def skip_to(stream: Any, offset: int, name: str) -> None:
    size = plain_size(stream)
    if size is not None and size >= offset:
        stream.seek(offset)
        return
    left = offset
    while left:
        found = len(read(stream, min(left, BUFFER_BYTES), name, offset - left))
        if not found:
            raise lost(
                name, offset - left, "the file is shorter than when it was saved"
            )
        left -= found


def plain_size(stream: Any) -> int | None:
    """The bytes of a file that is not compressed."""
    is_plain = isinstance(getattr(stream, "raw", None), io.FileIO)
    return os.fstat(stream.fileno()).st_size if is_plain else None


def read(stream: BinaryIO, size: int, name: str, offset: int) -> bytes:
    try:
        return stream.read(size)
    except (EOFError, zlib.error) as error:
        raise lost(name, offset, f"its compression is damaged ({error})") from error


def read_large(stream: BinaryIO, size: int, name: str, offset: int) -> bytes:
    """As `_read`, for a size that a damaged file may have made up."""
    if size <= _LARGE_BYTES:
        return read(stream, size, name, offset)
    parts = []
    while size and (part := read(stream, min(size, _LARGE_BYTES), name, offset)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def lost(name: str, offset: int, what: str) -> DataLossError:
    return DataLossError(
        f"{name} is damaged at byte {offset}: {what}. Write the file again, or leave it out."
    )
