"""The arrays of a checkpoint: written with Orbax, read with TensorStore, with checksums."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

_CACHE_BYTES = 100_000_000
_CHUNK_BYTES = 16 * 1024 * 1024  # one array is read by several threads
_PIECE_BYTES = 1024 * 1024


def crc_of_file(file: Path) -> int:
    import google_crc32c

    crc = 0
    with open(file, "rb", buffering=0) as stream:
        while piece := stream.read(_PIECE_BYTES):
            crc = google_crc32c.extend(crc, piece)
    return crc


def crc_of(array: np.ndarray, before: int = 0) -> int:
    """The checksum of an array, or of what had the checksum `before` and the array."""
    import google_crc32c

    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    data.flags.writeable = False  # what the library asks for
    return google_crc32c.extend(before, data)


def crc(data: Any) -> int:
    import google_crc32c

    return google_crc32c.value(data)


class _Uncopied(np.ndarray):
    """An array that Orbax need not copy before it writes: nobody changes it meanwhile."""

    def __deepcopy__(self, memo: Any) -> _Uncopied:
        return self


def save_arrays(path: Path, tree: Mapping[str, Any]) -> None:
    import orbax.checkpoint as ocp

    def uncopied(leaf: Any) -> Any:
        return leaf.view(_Uncopied) if type(leaf) is np.ndarray else leaf

    tree = jax.tree.map(uncopied, dict(tree))
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    # Of several workers one writes, and must not wait for the others.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix=path.parent.name,
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_compression=False, multiprocessing_options=alone
    )
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.CRITICAL)  # an error is raised, no need to print it as well
    try:
        ocp.Checkpointer(handler, multiprocessing_options=alone).save(
            path.absolute(), args=ocp.args.PyTreeSave(tree, save_args=chunks)
        )
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
        _save_at_exit(path, tree)
    finally:
        log.setLevel(level)


def _save_at_exit(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays when the program is ending, so that Orbax can start no more threads.

    TensorStore, which Orbax writes with, has threads of its own. What is missing are Orbax's
    descriptions, for those who read the arrays without mirrax.
    """
    import tensorstore as ts

    for each in path.parent.iterdir():
        shutil.rmtree(each)  # what Orbax has begun
    writing = []
    for name, array in arrays.items():
        spec = _array_spec(path, name) | {"metadata": {"compressor": None}}
        store = ts.open(
            spec, create=True, dtype=array.dtype, shape=array.shape
        ).result()
        writing.append(store.write(array))
    for each in writing:
        each.result()


def _array_spec(path: Path, name: str) -> dict[str, Any]:
    """Where TensorStore finds an array of Orbax's."""
    base = {"driver": "file", "path": f"{path.absolute()}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    return {"driver": "zarr", "kvstore": kvstore}


def load_arrays(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    """Arrays that Orbax has written, by its names.

    Read by TensorStore, which Orbax reads with, because that takes half the time.
    """
    import tensorstore as ts

    # A context of its own: another one may remember files that are gone.
    context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": _CACHE_BYTES}})

    def spec(name: str) -> dict[str, Any]:
        found = _array_spec(path, name)
        found |= {"recheck_cached_data": False, "recheck_cached_metadata": False}
        found["kvstore"]["cache_pool"] = "cache_pool#ocdbt"
        return found

    opening = [ts.open(spec(n), open=True, read=True, context=context) for n in names]
    stores = [each.result() for each in opening]
    arrays = [np.empty(store.shape, store.dtype.numpy_dtype) for store in stores]
    reading = [ts.array(a).write(store) for a, store in zip(arrays, stores)]
    for each in reading:
        each.result()
    return arrays
