"""Datasets of records in files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from mirrax._src.base.hiding import all_brief
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.reading import FileReader
from mirrax._src.input.record_forms import FixedLengths, Lines, TFRecords
from mirrax._src.input.streams import BUFFER_BYTES, check_compression


@all_brief
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


@all_brief
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


@all_brief
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


@all_brief
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
