"""The methods of `Dataset` that keep elements, in memory or in files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mirrax._src.base.hiding import all_brief
from mirrax._src.input.arguments import check_arguments, integer
from mirrax._src.input.element_fn import ElementFn
from mirrax._src.input.methods.base import Steps, check_callable, node_of
from mirrax._src.input.node import INFINITE, Node
from mirrax._src.input.options import AUTOTUNE
from mirrax._src.input.stored import (
    Metadata,
    Stored,
    Writer,
    checked_compression,
    read_metadata,
    shards_of,
)
from mirrax._src.input.structure import DatasetSpec, PyTree
from mirrax._src.input.transforms.buffering import Cache, Prefetch
from mirrax._src.input.transforms.grouping import whole_number
from mirrax._src.input.transforms.selecting import check_alike
from mirrax._src.input.transforms.snapshots import Snapshot
from mirrax._src.input.transforms.windows import kept_datasets

if TYPE_CHECKING:
    from mirrax._src.input.dataset import Dataset


_RETRY_SECONDS = 1.0


@all_brief
class Keeping(Steps):
    """Elements that wait, in memory or in files."""

    def cache(self, filename: str = "", name: str | None = None) -> Dataset:
        """The elements of the first whole pass, kept in memory or in a file.

        Args:
            filename: The file; it is read by later programs too. Empty: in memory.
            name: Unused, as in TensorFlow's eager mode.
        """
        return self._then(Cache(self.node, os.fspath(filename)))

    def prefetch(self, buffer_size: int, name: str | None = None) -> Dataset:
        """The same elements, up to `buffer_size` of them made ahead in a thread.

        Args:
            buffer_size: How many; `AUTOTUNE` is 2, 0 is none.
            name: Unused, as in TensorFlow's eager mode.
        """
        buffer_size = integer(buffer_size, "buffer_size")
        if buffer_size < 0 and buffer_size != AUTOTUNE:
            raise ValueError(f"`buffer_size` cannot be negative, got {buffer_size}.")
        size = 2 if buffer_size == AUTOTUNE else buffer_size
        return self._then(Prefetch(self.node, size))

    def snapshot(
        self,
        path: str | os.PathLike[str],
        compression: str | None = "AUTO",
        reader_func: Callable[..., Any] | None = None,
        shard_func: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> Dataset:
        """The elements, which the first whole pass writes into a directory for all later ones.

        >>> calls = []
        >>> dataset = mx.data.Dataset.range(3).map(lambda x: calls.append(1) or x * x)
        >>> dataset = dataset.snapshot(tempfile.mkdtemp())
        >>> list(dataset) == list(dataset), len(calls)
        (True, 3)

        Later programs read it too. A directory may hold snapshots of several pipelines: one
        that differs in its steps, functions or data in memory writes another. What a function
        reads from outside, files for example, is not seen: delete the directory if that has
        changed. The files hold plain data and are checked as they are read.

        Args:
            path: The directory.
            compression: "GZIP" or "ZLIB"; "AUTO" and None are none.
            reader_func: Makes the dataset of a dataset of the shards' datasets; their
                elements take turns if it is not given.
            shard_func: The number of an element's shard; the shards take turns if it is not
                given.
            name: Unused, as in TensorFlow's eager mode.
        """
        shard_fn = None
        if shard_func is not None:
            check_callable(shard_func, "snapshot")
            check_arguments(shard_func, self.node, "snapshot")
            shard_fn = ElementFn(shard_func, "snapshot")

        def read(directory: Path, found: Metadata) -> Node:
            return _reader(directory, found, found.element_spec, reader_func, self)

        step = Snapshot(
            self.node, os.fspath(path), checked_compression(compression), shard_fn, read
        )
        return self._then(step)

    def save(
        self,
        path: str | os.PathLike[str],
        compression: str | None = None,
        shard_func: Callable[..., Any] | None = None,
        checkpoint_args: None = None,
    ) -> None:
        """Writes all elements into a directory, for `Dataset.load`.

        >>> path = tempfile.mkdtemp() + "/squares"
        >>> mx.data.Dataset.range(4).map(lambda x: x * x).save(path)
        >>> list(mx.data.Dataset.load(path))
        [np.int64(0), np.int64(1), np.int64(4), np.int64(9)]

        A dataset that was saved there before is replaced when all elements are written. The
        files are mirrax's own: they hold plain data, and TensorFlow does not read them.

        Args:
            path: The directory.
            compression: "GZIP" or "ZLIB"; "AUTO" and None are none.
            shard_func: The number of an element's shard: each shard is a file.
            checkpoint_args: Not supported; only None.
        """
        if checkpoint_args is not None:
            raise ValueError(
                "`checkpoint_args` is not supported: `save` writes all elements or none. Got "
                f"{checkpoint_args!r}."
            )
        if self.node.cardinality() == INFINITE:
            raise ValueError(
                f"This dataset never ends and cannot be saved in {path}: `save` a part of it, "
                "`take(n)`."
            )
        if shard_func is not None:
            check_callable(shard_func, "save")
            check_arguments(shard_func, self.node, "save")
        shard_fn = ElementFn(shard_func, "save") if shard_func else None
        directory = Path(path)
        writer = Writer(directory, checked_compression(compression), self.node)
        try:
            for element in self:
                shard = 0
                if shard_fn is not None:
                    shard = whole_number(shard_fn.raw(element), "shard_func")
                writer.write(element, shard)
            writer.finish(replaces=True)
        finally:
            writer.discard()


def load(
    wrap: Any,
    path: str | os.PathLike[str],
    element_spec: PyTree,
    compression: str | None,
    reader_func: Callable[..., Any] | None,
    wait: bool,
) -> Dataset:
    """What `save` has written; `wrap` makes a dataset of a step."""
    directory = Path(path)
    while wait and not directory.joinpath("metadata.json").exists():
        time.sleep(_RETRY_SECONDS)
    found = read_metadata(directory)
    if (
        compression is not None
        and checked_compression(compression) != found.compression
    ):
        raise ValueError(
            f"{directory} was saved with the compression {found.compression or None!r}, and "
            f"`compression` is {compression!r}. Leave it out."
        )
    if element_spec is None:
        element_spec = found.element_spec
    else:
        check_alike(
            found.element_spec, element_spec, "`element_spec` and the saved one"
        )
    empty = wrap(kept_datasets([], element_spec, "load"))
    return wrap(_reader(directory, found, element_spec, reader_func, empty))


def _reader(
    directory: Path,
    found: Metadata,
    spec: PyTree,
    reader_func: Callable[..., Any] | None,
    like: Steps,
) -> Node:
    """The steps that read a directory."""
    shards = [like._wrap(shard) for shard in shards_of(directory, found, spec)]
    length = sum(count for _, count in found.shards)
    datasets = like._wrap(kept_datasets(shards, DatasetSpec(spec), "shards"))
    if reader_func is not None:
        made = node_of(reader_func(datasets), "reader_func")
    elif len(shards) == 1:
        made = shards[0].node
    else:
        cycle = max(1, len(shards))
        made = datasets.interleave(lambda shard: shard, cycle_length=cycle).node
    return Stored(made, length, spec, "load")
