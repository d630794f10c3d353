"""How records lie in files: TFRecords with their checksums, lines of text, fixed lengths.

A form has a label and `records(stream, name, offset)`, which gives each record with the
offset where the next one starts.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from mirrax._src.input.streams import lost, plain_size, read, read_large

_HEAD = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")


class TFRecords:
    """Length, its checksum, the record, its checksum."""

    label = "TFRecordDataset"

    def records(
        self, stream: BinaryIO, name: str, offset: int
    ) -> Iterator[tuple[bytes, int]]:
        checksum = _crc32c()
        while head := read(stream, _HEAD.size, name, offset):
            if len(head) < _HEAD.size:
                raise lost(name, offset, "the file ends inside the length of a record")
            length, expected = _HEAD.unpack(head)
            if _masked(checksum(head[:8])) != expected:
                raise lost(name, offset, "the length of a record has a wrong checksum")
            body = read_large(stream, length + _CHECKSUM.size, name, offset)
            if len(body) < length + _CHECKSUM.size:
                raise lost(
                    name,
                    offset,
                    f"the file ends inside a record of {length} bytes, of which "
                    f"{len(body)} are there",
                )
            record = body[:length]
            if _masked(checksum(record)) != _CHECKSUM.unpack_from(body, length)[0]:
                raise lost(
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
            raise lost(name, offset, f"its compression is damaged ({error})") from error


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
            offset = len(read(stream, self.header, name, 0))
            if offset < self.header:
                raise lost(
                    name, 0, f"it is shorter than its header of {self.header} bytes"
                )
        # A record is kept back as long as what follows may be the footer.
        waiting = b""
        while True:
            waiting += read(
                stream, self.record + self.footer - len(waiting), name, offset
            )
            if len(waiting) < self.record + self.footer:
                break
            offset += self.record
            yield waiting[: self.record], offset
            waiting = waiting[self.record :]
        if len(waiting) != self.footer:
            raise lost(
                name,
                offset,
                f"the {len(waiting)} bytes that are left are neither a record of "
                f"{self.record} bytes nor the footer of {self.footer}",
            )

    def _check_size(self, stream: Any, name: str) -> None:
        """Raises at once if a file that is not compressed cannot be right."""
        size = plain_size(stream)
        if size is None:
            return
        records = size - self.header - self.footer
        if records < 0 or records % self.record:
            raise ValueError(
                f"{name} has {size} bytes, which is not a header of {self.header}, whole records "
                f"of {self.record} and footer of {self.footer} bytes. Check `record_bytes`, "
                "`header_bytes` and `footer_bytes`, or whether the file is damaged."
            )
