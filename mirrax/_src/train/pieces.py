"""Arrays that lie in parts on the devices of several workers: each worker saves its own part.

    ckpt-7/pieces-1      what worker 1 has of each, one piece after another
    ckpt-7/pieces-1.json what these are; it becomes a part of the manifest

All workers write into the hidden directory of the first one, which waits for the others before
it gives the checkpoint its name. Where not all see that directory nothing is saved so.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.cluster.runtime import Cluster
from mirrax._src.train import array_files


@dataclass(frozen=True)
class Pieces:
    """What this worker has of an array: where each piece begins, and the piece."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    held: Sequence[tuple[tuple[int, ...], np.ndarray]]

    @classmethod
    def of(cls, array: jax.Array) -> Pieces:
        """Copied, since the next step may take the memory."""
        held = [
            (tuple(at.start or 0 for at in shard.index), np.array(shard.data))
            for shard in array.addressable_shards
            if shard.replica_id == 0
        ]
        return cls(array.shape, array.dtype, held)


def is_spread(value: Any) -> bool:
    """Whether no worker has the whole of an array."""
    return (
        isinstance(value, jax.Array)
        and not value.is_fully_addressable
        and not value.is_fully_replicated
    )


@dataclass(frozen=True)
class Gathering:
    """A checkpoint that all workers write together."""

    cluster: Cluster
    hidden: Path
    number: int

    @classmethod
    def begin(cls, cluster: Cluster, hidden: Path | None) -> Gathering | None:
        """Agrees on the directory that the first worker has made; None if not all see it.

        Raises:
            OSError: On the others, if the first worker has none (None).
        """
        told, number = cluster.agree_numbered(
            "where a checkpoint is put together", hidden and str(hidden)
        )
        if told[0] is None:
            raise OSError(
                f"{cluster.names[0]} could not begin the checkpoint, and says why. Nothing has "
                "been saved"
            )
        place = Path(told[0])
        all_see = all(cluster.agree("who sees a checkpoint", place.is_dir()))
        return cls(cluster, place, number) if all_see else None

    def write_own(self, arrays: Mapping[str, Any]) -> None:
        """Writes this worker's pieces, and tells the first worker when it is done with it."""
        own = {n: a for n, a in arrays.items() if isinstance(a, Pieces)}
        try:
            _write(self.hidden, self.cluster.worker, own)
        finally:
            self.end()

    def end(self) -> None:
        """Tells the first worker that there will be no more of this one."""
        self.cluster.announce_part(self.number)

    def collect(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """On the first worker: what all have written, for the manifest: arrays and files."""
        arrays: dict[str, Any] = {}
        files = {}
        for worker in range(self.cluster.size):
            if worker != self.cluster.worker:
                self.cluster.wait_for_part(worker, self.number)
            table = _table(self.hidden, worker)
            try:
                told = json.loads(table.read_text())
            except FileNotFoundError:
                raise OSError(
                    f"{self.cluster.names[worker]} could not write its part of the checkpoint, "
                    "and says why. Nothing has been saved; earlier checkpoints are untouched"
                ) from None
            table.unlink()
            files[_file(self.hidden, worker).name] = told["file"]
            for name, entry in told["arrays"].items():
                known = arrays.setdefault(name, entry | {"pieces": []})
                known["pieces"] += entry["pieces"]
        return arrays, files


def _write(folder: Path, worker: int, arrays: Mapping[str, Pieces]) -> None:
    entries, end, checksum = {}, 0, 0
    file = _file(folder, worker)
    with file.open("xb") as out:
        for name, array in arrays.items():
            pieces = []
            for start, data in array.held:
                raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
                out.write(raw.data)
                place = {"file": file.name, "at": end, "crc": array_files.crc_of(raw)}
                pieces.append(place | {"start": start, "shape": data.shape})
                checksum = array_files.crc_of(raw, checksum)
                end += raw.size
            known = {"shape": array.shape, "dtype": array.dtype.name, "crc": None}
            entries[name] = known | {"pieces": pieces}
        out.flush()
        os.fsync(out.fileno())
    # Under its name when it is whole.
    table = _table(folder, worker)
    part = table.with_suffix(".part")
    part.write_text(json.dumps({"arrays": entries, "file": (end, checksum)}))
    part.rename(table)


def read(folder: Path, entry: Mapping[str, Any]) -> np.ndarray:
    """An array from its pieces.

    Raises:
        ValueError: If they are not as they were written.
    """
    dtype = jnp.dtype(entry["dtype"])
    array, count = np.empty(entry["shape"], dtype), 0
    for piece in entry["pieces"]:
        shape, start = piece["shape"], piece["start"]
        size = math.prod(shape)
        data = np.fromfile(
            folder / piece["file"],
            np.uint8,
            size * dtype.itemsize,
            offset=piece["at"],
        )
        place = tuple(slice(s, s + d) for s, d in zip(start, shape, strict=True))
        if data.size != size * dtype.itemsize or (
            array_files.crc_of(data) != piece["crc"]
        ):
            raise ValueError(f"{piece['file']} is not as it was written.")
        array[place] = data.view(dtype).reshape(shape)
        count += size
    if count != array.size:
        raise ValueError("There are pieces missing.")
    return array


def _file(folder: Path, worker: int) -> Path:
    return folder / f"pieces-{worker}"


def _table(folder: Path, worker: int) -> Path:
    return folder / f"pieces-{worker}.json"
