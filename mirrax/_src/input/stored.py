"""Elements in a directory: what `save` and `snapshot` write, `load` and `snapshot` read.

A directory has `metadata.json` and the files of one run: for each shard a TFRecord file, a
record for each element (encoding.py). The metadata is put into its place last, in one step,
so that a directory holds all elements or none. Reading runs no code and checks checksums.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from mirrax._src.base.errors import DataLossError
from mirrax._src.input.encoding import decode, encode, spec_from_json, spec_to_json
from mirrax._src.input.node import (
    Cursor,
    Node,
    Path,
    State,
    merge_specs,
    node,
    open_cursor,
)
from mirrax._src.input.reading import FileReader
from mirrax._src.input.record_forms import TFRecords
from mirrax._src.input.streams import BUFFER_BYTES
from mirrax._src.input.structure import (
    DatasetSpec,
    PyTree,
    leaves_of,
    map_leaves,
    show,
    spec_of,
)
from mirrax._src.input.transforms.selecting import START, Through, check_alike
from mirrax._src.input.writing import TFRecordOptions, TFRecordWriter

_METADATA = "metadata.json"
_FORMAT = "mirrax elements 1"
_COMPRESSIONS = {"NONE": "", "AUTO": "", "": "", "GZIP": "GZIP", "ZLIB": "ZLIB"}


def checked_compression(compression: str | None) -> str:
    """The compression's name; "" for none, which is also what "AUTO" chooses."""
    if (compression or "") not in _COMPRESSIONS:
        raise ValueError(
            f"`compression` must be None, 'AUTO', 'GZIP' or 'ZLIB', got {compression!r}."
        )
    return _COMPRESSIONS[compression or ""]


# Writing ----------------------------------------------------------------------------------


class Writer:
    """Writes elements into a directory, where they are to be seen when all are written.

    Args:
        directory: Where; what is there is replaced.
        compression: As `checked_compression` gives it.
        source: Where they come from.
    """

    def __init__(self, directory: FilePath, compression: str, source: Node) -> None:
        self._directory, self._compression = directory, compression
        self._run = f"run-{uuid.uuid4().hex[:12]}"
        self._source = source
        self._spec: PyTree = None  # of the elements so far
        self._shards: dict[int, tuple[TFRecordWriter, int]] = {}
        self._is_over = False

    def write(self, element: PyTree, shard: int) -> None:
        """Adds an element to a shard."""
        self._check(element)
        if shard not in self._shards:
            folder = self._directory / self._run
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / _shard_name(shard)
            options = TFRecordOptions(self._compression)
            self._shards[shard] = TFRecordWriter(file, options), 0
        writer, count = self._shards[shard]
        writer.write(encode(element))
        self._shards[shard] = writer, count + 1

    def _check(self, element: PyTree) -> None:
        spec = spec_of(element)
        if self._spec is None:
            _check_storable(spec)
            self._spec = spec
        elif spec != self._spec:
            check_alike(self._spec, spec, "Elements that are saved")
            self._spec = merge_specs([self._spec, spec])

    def finish(self, replaces: bool) -> None:
        """Shows what was written, unless others were first and it `replaces` nothing."""
        spec = self._whole_spec()
        _check_storable(spec)
        shards = []
        for number in sorted(self._shards, key=lambda n: n & (2**64 - 1)):
            writer, count = self._shards[number]
            writer.close()
            shards.append([_shard_name(number), count])
        metadata = {
            "format": _FORMAT,
            "run": self._run,
            "compression": self._compression,
            "element_spec": spec_to_json(spec),
            "shards": shards,
        }
        before = None
        with contextlib.suppress(OSError, DataLossError):
            before = read_metadata(self._directory).run
            if not replaces:
                return self.discard()
        self._directory.mkdir(parents=True, exist_ok=True)
        new = self._directory / f".{self._run}.json"
        new.write_text(json.dumps(metadata, indent=1))
        os.replace(new, self._directory / _METADATA)
        self._is_over = True
        if before is not None:
            shutil.rmtree(self._directory / before, ignore_errors=True)

    def _whole_spec(self) -> PyTree:
        """What is known of the elements without looking at the first ones once more."""
        if self._spec is None:
            return self._source.spec()
        known = self._source.outline()
        return self._spec if known is None else merge_specs([known, self._spec])

    def discard(self) -> None:
        """Removes what was written, unless it was finished."""
        if not self._is_over:
            self._is_over = True
            for writer, _ in self._shards.values():
                writer.close()
            shutil.rmtree(self._directory / self._run, ignore_errors=True)


def _shard_name(number: int) -> str:
    return f"{number & (2**64 - 1):08d}.tfrecord"


def _check_storable(spec: PyTree) -> None:
    if any(isinstance(leaf, DatasetSpec) for leaf in leaves_of(spec)):
        raise TypeError(
            f"Datasets in elements cannot be saved: {spec}. Make arrays of them first: "
            "`flat_map(lambda window: window.batch(n))`."
        )
    spec_to_json(spec)


# Reading ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metadata:
    """What a directory says of its elements."""

    run: str
    compression: str
    element_spec: PyTree
    shards: tuple[tuple[str, int], ...]  # their names and numbers of elements


def read_metadata(directory: FilePath) -> Metadata:
    """What is in a directory.

    Raises:
        FileNotFoundError: If nothing was saved there.
        mx.errors.DataLossError: If its metadata is damaged.
    """
    file = directory / _METADATA
    try:
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"No dataset is saved in {directory}: there is no file {file}."
        ) from None
    try:
        found = json.loads(text)
        if found["format"] != _FORMAT:
            raise ValueError(f"the format is {found['format']!r}, not {_FORMAT!r}")
        names = [found["run"], *(name for name, _ in found["shards"])]
        if any(os.path.basename(name) != name or not name for name in names):
            raise ValueError(f"{names} are not file names")
        return Metadata(
            found["run"],
            checked_compression(found["compression"]),
            spec_from_json(found["element_spec"]),
            tuple((name, int(count)) for name, count in found["shards"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataLossError(
            f"{file} is damaged, or was not written by `save` or `snapshot`: {error!r}. Write "
            "the dataset again."
        ) from error


@node
class SavedShard(Node):
    """The elements of one shard."""

    file: str
    compression: str
    count: int
    stored_spec: PyTree
    element_spec: PyTree

    def open(self, path: Path, state: State = None) -> Cursor:
        return _ShardCursor(self, path, *(state or START))

    def cardinality(self) -> int:
        return self.count

    def spec(self) -> PyTree:
        return self.element_spec

    def describe(self) -> str:
        return "saved"


class _ShardCursor(Cursor):
    def __init__(self, shard: SavedShard, path: Path, given: int, inner: State) -> None:
        self._shard, self._given = shard, given
        files = FileReader((shard.file,), shard.compression, BUFFER_BYTES, TFRecords())
        self._records = files.open(path, inner)

    def __next__(self) -> Any:
        shard = self._shard
        try:
            record = next(self._records)
        except StopIteration:
            if self._given < shard.count:
                raise DataLossError(
                    f"{shard.file} is damaged: it has {self._given} of {shard.count} "
                    "elements. Write the dataset again."
                ) from None
            raise
        self._given += 1
        try:
            element = decode(record, shard.stored_spec)
        except ValueError as error:
            raise DataLossError(
                f"{shard.file} is damaged: element {self._given - 1} cannot be read, {error}. "
                "Write the dataset again."
            ) from error
        map_leaves(self._check, shard.element_spec, element)
        return element

    def _check(self, spec: Any, leaf: Any) -> None:
        if not spec.is_compatible_with(leaf):
            raise ValueError(
                f"`element_spec` says {spec}, but element {self._given - 1} of "
                f"{self._shard.file} holds {show(leaf)}."
            )

    def state(self) -> State:
        return [self._given, self._records.state()]

    def close(self) -> None:
        self._records.close()


@node
class Stored(Through):
    """The elements of a directory, as a `reader_func` gives them."""

    input: Node
    length: int
    element_spec: PyTree
    label: str

    def open(self, path: Path, state: State = None) -> Cursor:
        return open_cursor(self.input, path, state)

    def cardinality(self) -> int:
        return self.length

    def spec(self) -> PyTree:
        return self.element_spec

    def outline(self) -> PyTree | None:
        return self.element_spec

    def batch_size(self) -> int | None:
        return None

    def describe(self) -> str:
        return self.label


def shards_of(directory: FilePath, found: Metadata, spec: PyTree) -> list[SavedShard]:
    """The shards of a directory; `spec` describes their elements."""
    return [
        SavedShard(
            str(directory / found.run / name),
            found.compression,
            count,
            found.element_spec,
            spec,
        )
        for name, count in found.shards
    ]
