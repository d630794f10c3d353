"""The arrays of a checkpoint, written and read by TensorStore, and checksums."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_CACHE_BYTES = 100_000_000
_CHUNK_BYTES = 16 * 1024 * 1024  # one array is read by several threads
_PIECE_BYTES = 1024 * 1024
_PIECES_IN_A_ROW = 4


def crc_of_file(file: Path) -> int:
    with open(file, "rb", buffering=0) as stream:
        return _crc_of_pieces(iter(lambda: stream.read(_PIECE_BYTES), b""))


def crc_of(array: np.ndarray, before: int = 0) -> int:
    """The checksum of an array, or of what had the checksum `before` and the array."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    data.flags.writeable = False  # what the library asks for
    starts = range(0, data.size, _PIECE_BYTES)
    return _crc_of_pieces((data[i : i + _PIECE_BYTES] for i in starts), before)


def _crc_of_pieces(pieces: Iterable[Any], crc: int = 0) -> int:
    import google_crc32c

    is_beside_training = threading.current_thread() is not threading.main_thread()
    for number, piece in enumerate(pieces, 1):
        crc = google_crc32c.extend(crc, piece)
        if is_beside_training and number % _PIECES_IN_A_ROW == 0:
            # Releases the interpreter's lock, which the library holds: a training step that
            # asks for it would get it after 5 ms, many times, 240 ms beside a save of 1.2 GB.
            time.sleep(1e-5)
    return crc


def crc(data: Any) -> int:
    import google_crc32c

    return google_crc32c.value(data)


@contextlib.contextmanager
def saving(path: Path, arrays: Mapping[str, np.ndarray]) -> Iterator[None]:
    """Writes arrays, which nobody may change, during a `with` block and until its end.

    In one transaction, so that there are two files whatever the number of arrays. The caller
    syncs them.
    """
    if not arrays:
        yield
        return
    import tensorstore as ts

    # Else each file is synced when it is written, one after the other.
    context = ts.Context({"file_io_sync": False})
    transaction = ts.Transaction()
    opening = []
    for name, array in arrays.items():
        chunk = max(1, _CHUNK_BYTES // array.dtype.itemsize)
        store = ts.open(
            _array_spec(path, name) | {"metadata": {"compressor": None}},
            create=True,
            dtype=array.dtype,
            shape=array.shape,
            chunk_layout=ts.ChunkLayout(
                write_chunk=ts.ChunkLayout.Grid(elements=chunk)
            ),
            context=context,
            transaction=transaction,
        )
        opening.append((store, array))
    writing = [  # kept: a write whose future is dropped does not happen
        store.result().write(array, can_reference_source_data_indefinitely=True)
        for store, array in opening
    ]
    for each in writing:
        each.copy.result()
    committing = transaction.commit_async()
    try:
        yield
    except BaseException:
        committing.exception()  # nothing may be written after the block
        raise
    committing.result()
    for each in writing:
        each.result()


def _array_spec(path: Path, name: str) -> dict[str, Any]:
    """Where TensorStore finds an array; Orbax wrote those of older checkpoints there, too."""
    base = {"driver": "file", "path": f"{path.absolute()}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    return {"driver": "zarr", "kvstore": kvstore}


def load_arrays(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    """Arrays by the names that `saving` was given."""
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
