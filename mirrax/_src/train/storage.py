"""A checkpoint on disk: a directory that is there as a whole or not at all.

    ckpt-7/mirrax.json   names, shapes and dtypes, values that are not arrays, checksums
    ckpt-7/arrays/       the arrays, written by TensorStore
    ckpt-7/pieces-1      what worker 1 has of arrays that lie in parts (`pieces.py`)

It is written under a hidden name and renamed when all of it is on the disk. Arrays under
256 KiB are packed into one, because each array has a price, however small.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.base.errors import DataLossError
from mirrax._src.train import array_files, pieces
from mirrax._src.train.manifest import is_well_formed
from mirrax._src.train.pieces import Gathering, Pieces

FORMAT = 2  # 1 has no pieces, and is what is written without them
_MANIFEST = "mirrax.json"
_ARRAYS = "arrays"
_PACKED = "packed"
_KEPT = "kept"
_SMALL_BYTES = 256 * 1024
_ALIGNMENT = 64
_ABANDONED_SECONDS = 3600
_REMOVALS, _BETWEEN_REMOVALS_SECONDS = 40, 0.05
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(tmp|old)-(?P<host>.*)-(?P<pid>\d+)-[0-9a-f]+")

# The hidden directories of this process.
_in_work: set[str] = set()

# The newest checkpoint's place in the order, by directory.
_last_sequence: dict[Path, int] = {}

# Files that were read and found to be sound, as they were then.
_verified: dict[Path, Any] = {}


@dataclass(frozen=True)
class Contents:
    """What the manifest of a checkpoint says.

    Attributes:
        path: The directory.
        sequence: Its place among the checkpoints of its parent directory, by time; 0 if it
            is not one in a series.
        saved_at: When it was saved, in seconds since 1970.
        arrays: Each array's shape, dtype and where it is packed.
        values: Numbers, strings and states, by name.
        files: Each file's size and checksum.
    """

    path: Path
    sequence: int
    saved_at: float
    arrays: Mapping[str, Any]
    values: Mapping[str, Any]
    files: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """What is in the checkpoint."""
        return [*self.arrays, *self.values]


# Writing ------------------------------------------------------------------------------


def begin(path: Path) -> Path:
    """Makes the directory in which the checkpoint `path` is put together."""
    _check_replaceable(path)
    hidden = _hidden(path, "tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden.mkdir()
    except OSError as error:
        raise type(error)(
            error.errno,
            f"The checkpoint {path} cannot be written: {error.strerror}. Nothing has been "
            "saved",
            error.filename,
        ) from None
    return hidden


def write(
    hidden: Path,
    path: Path,
    arrays: Mapping[str, Any],
    values: Mapping[str, Any],
    is_one_of_many: bool,
    gathering: Gathering | None = None,
) -> Contents:
    """Writes a checkpoint that was begun, and gives it its name."""
    try:
        _write_files(hidden, path, arrays, values, is_one_of_many, gathering)
        _take_place(hidden, path)
        return read_contents(path)
    except Exception as error:
        raise _explained(error, path) from error
    finally:
        abandon(hidden)


def abandon(hidden: Path) -> None:
    """Removes what is left of a checkpoint that was begun."""
    # When one array fails TensorStore may still be writing others, into what is removed.
    for _ in range(_REMOVALS):
        shutil.rmtree(hidden, ignore_errors=True)
        if not hidden.exists():
            break
        time.sleep(_BETWEEN_REMOVALS_SECONDS)
    _in_work.discard(hidden.name)


def _write_files(
    hidden: Path,
    path: Path,
    arrays: Mapping[str, Any],
    values: Mapping[str, Any],
    is_one_of_many: bool,
    gathering: Gathering | None,
) -> None:
    if gathering is not None:
        gathering.write_own(arrays)
    entries, written = _write_arrays(hidden, arrays), {}
    if gathering is not None:
        in_pieces, written = gathering.collect()
        entries |= in_pieces
    files = {
        str(f.relative_to(hidden)): (f.stat().st_size, array_files.crc_of_file(f))
        for f in sorted(hidden.rglob("*"))
        if f.is_file() and f.name not in written
    }
    content = {
        "format": FORMAT if gathering else 1,
        "sequence": _next_sequence(path.parent) if is_one_of_many else 0,
        "saved_at": time.time(),
        "arrays": entries,
        "values": dict(values),
        "files": files | written,
    }
    text = json.dumps(content)
    whole = json.dumps({"crc": array_files.crc(text.encode()), "content": content})
    (hidden / _MANIFEST).write_text(whole)
    places = sorted(hidden.rglob("*"), key=Path.is_dir)  # files first
    for each in (*places, hidden):
        _sync_to_disk(each)


def _write_arrays(hidden: Path, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the arrays that the first worker has as a whole; what the manifest says of them."""
    entries, found, large, packed = {}, [], {}, bytearray()
    for name, value in arrays.items():
        if isinstance(value, Pieces):
            continue
        entry: dict[str, Any] = {}
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            entry["key"] = {
                "impl": str(jax.random.key_impl(value)),
                "shape": value.shape,
                "dtype": str(value.dtype),
            }
            value = jax.random.key_data(value)
        array = _in_native_order(np.asarray(value))
        entry |= {"shape": array.shape, "dtype": array.dtype.name}
        if array.nbytes < _SMALL_BYTES:
            packed += bytes(-len(packed) % _ALIGNMENT)
            entry["at"] = len(packed)
            packed += np.ascontiguousarray(array).tobytes()
        else:
            # Not the name: not all names can be those of files.
            entry["file"] = str(len(large))
            large[entry["file"]] = array
        entries[name] = entry
        found.append((entry, array))
    if packed:
        large[_PACKED] = np.frombuffer(packed, np.uint8)
    with array_files.saving(hidden / _ARRAYS, large):
        for entry, array in found:
            entry["crc"] = array_files.crc_of(array)
    return entries


def _take_place(hidden: Path, path: Path) -> None:
    """Renames a finished directory; an older checkpoint of that name goes."""
    if path.exists():
        old = _hidden(path, "old")
        path.rename(old)
        os.utime(old)  # in work since now, also to other machines
        try:
            hidden.rename(path)
        except OSError:
            old.rename(path)
            raise
        abandon(old)
    else:
        hidden.rename(path)
    _sync_to_disk(path.parent)


def remove(path: Path) -> None:
    """Deletes a checkpoint; what is left if that is interrupted is no checkpoint."""
    for file in [file for file in _verified if path in file.parents]:
        del _verified[file]
    hidden = _hidden(path, "tmp")
    with contextlib.suppress(FileNotFoundError):
        path.rename(hidden)
    abandon(hidden)


def recover(directory: Path) -> None:
    """Puts back checkpoints that a process was killed in the middle of replacing."""
    for each, place in _leftovers(directory):
        if ".old-" in each.name and not place.exists():
            with contextlib.suppress(OSError):  # a reader may not be able to
                each.rename(place)


def remove_leftovers(directory: Path) -> None:
    """Deletes what killed processes have left half written."""
    recover(directory)
    for each, _ in _leftovers(directory):
        shutil.rmtree(each, ignore_errors=True)


def _leftovers(directory: Path) -> list[tuple[Path, Path]]:
    """Hidden directories that nobody works on, each with the place that it was for."""
    found = [(each, _HIDDEN.fullmatch(each.name)) for each in directory.glob(".*-*")]
    return [
        (each, directory / match["name"])
        for each, match in found
        if match is not None and not _is_in_use(each, match)
    ]


def _hidden(path: Path, kind: str) -> Path:
    who = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    hidden = path.parent / f".{path.name}.{kind}-{who}"
    _in_work.add(hidden.name)
    return hidden


def _is_in_use(path: Path, match: re.Match[str]) -> bool:
    if path.name in _in_work:
        return True
    if match["host"] != socket.gethostname():
        try:
            return time.time() - path.stat().st_mtime < _ABANDONED_SECONDS
        except FileNotFoundError:
            return True
    if int(match["pid"]) == os.getpid():  # another process, before this one
        return False
    try:
        os.kill(int(match["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _in_native_order(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _check_replaceable(path: Path) -> None:
    is_empty = path.is_dir() and not any(path.iterdir())
    if path.exists() and not is_empty and not (path / _MANIFEST).exists():
        raise FileExistsError(
            errno.EEXIST,
            f"There is already something at {path} that is not a checkpoint; nothing has been "
            "saved, nothing overwritten",
        )


def _next_sequence(directory: Path) -> int:
    if directory not in _last_sequence:
        found = [contents.sequence for contents in checkpoints_in(directory)]
        _last_sequence[directory] = max(found, default=0)
    _last_sequence[directory] += 1
    return _last_sequence[directory]


def check_sizes(contents: Contents) -> None:
    """Raises DataLossError if a file is missing or its size has changed."""
    for name, (size, _) in contents.files.items():
        file = contents.path / name
        if not file.is_file() or file.stat().st_size != size:
            raise _gone_or_damaged(contents.path, name)


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explained(error: Exception, path: Path) -> Exception:
    """An error of the disk as what it is: TensorStore's are all ValueErrors."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    number = int(code[1]) if code else getattr(error, "errno", None)
    if number is None:
        return error
    return OSError(
        number,
        f"The checkpoint {path} could not be written: {os.strerror(number)}. Earlier "
        "checkpoints are untouched; make room or choose another directory, and save again",
    )


# Reading ------------------------------------------------------------------------------


def read_contents(path: Path) -> Contents:
    """The manifest of a checkpoint.

    Raises:
        FileNotFoundError: If there is no checkpoint at `path`.
        DataLossError: If the manifest is damaged.
    """
    try:
        text = (path / _MANIFEST).read_text()
    except (FileNotFoundError, NotADirectoryError):
        raise _not_there(path) from None
    except UnicodeDecodeError:
        raise _damaged(path, _MANIFEST) from None
    try:
        whole = json.loads(text)
        content = whole["content"]
        is_sound = whole["crc"] == array_files.crc(json.dumps(content).encode())
        is_known = is_sound and content["format"] <= FORMAT
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(path, _MANIFEST) from None
    if not is_sound:
        raise _damaged(path, _MANIFEST)
    if not is_known:
        raise ValueError(
            f"The checkpoint {path} was written by a newer mirrax (format "
            f"{content['format']}, this one knows {FORMAT}). Update mirrax to read it."
        )
    if not is_well_formed(content):
        raise _damaged(path, _MANIFEST)
    fields = ("sequence", "saved_at", "arrays", "values", "files")
    return Contents(path, *(content[field] for field in fields))


def verify(contents: Contents) -> None:
    """Reads all files of a checkpoint, but for those that have not changed since.

    Raises:
        DataLossError: If one is not as it was written.
    """
    for name, (size, checksum) in contents.files.items():
        file = contents.path / name
        try:
            facts = file.stat()
            known = (checksum, facts.st_size, facts.st_mtime_ns, facts.st_ino)
            if _verified.get(file) == known:
                continue
            is_sound = (
                facts.st_size == size and array_files.crc_of_file(file) == checksum
            )
        except OSError:
            is_sound = False
        if not is_sound:
            raise _gone_or_damaged(contents.path, name)
        _verified[file] = known


def read_arrays(contents: Contents, names: Collection[str]) -> dict[str, Any]:
    """Some of the arrays, as NumPy arrays (keys of random numbers as JAX's).

    Raises:
        DataLossError: If one is not as it was written.
    """
    entries = {name: contents.arrays[name] for name in names}
    stored = [entry["file"] for entry in entries.values() if "file" in entry]
    if any("at" in e and math.prod(e["shape"]) for e in entries.values()):
        stored.append(_PACKED)
    try:
        found = dict(
            zip(stored, array_files.load_arrays(contents.path / _ARRAYS, stored))
        )
    except ValueError as error:
        raise _gone_or_damaged(contents.path, _ARRAYS) from error
    packed = found.get(_PACKED, np.empty(0, np.uint8))
    arrays = {}
    for name, entry in entries.items():
        try:
            if "pieces" in entry:
                arrays[name] = pieces.read(contents.path, entry)
                continue
            is_large = "file" in entry
            array = found[entry["file"]] if is_large else _unpacked(entry, packed)
        except (ValueError, FileNotFoundError):  # it is not there
            array = np.empty(0)
        as_told = array.shape == tuple(entry["shape"])
        if not as_told or array_files.crc_of(array) != entry["crc"]:
            raise _damaged(contents.path, f"the array {name!r}")
        arrays[name] = (
            jax.random.wrap_key_data(jnp.asarray(array), impl=entry["key"]["impl"])
            if "key" in entry
            else array
        )
    return arrays


def _unpacked(entry: Mapping[str, Any], packed: np.ndarray) -> np.ndarray:
    dtype, shape = _dtype(entry["dtype"]), tuple(entry["shape"])
    end = entry["at"] + math.prod(shape) * dtype.itemsize
    return packed[entry["at"] : end].view(dtype).reshape(shape)


_dtype = functools.cache(jnp.dtype)


def checkpoints_in(
    directory: Path, tell: Callable[[Exception], None] = lambda _: None
) -> list[Contents]:
    """The checkpoints of a directory, in the order in which they were saved.

    Files are not looked at yet; `tell` hears of manifests that cannot be read.
    """
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if _HIDDEN.fullmatch(path.name) or not path.is_dir():
            continue
        try:
            found.append(read_contents(path))
        except (DataLossError, ValueError) as error:
            tell(error)
        except OSError:
            continue  # no checkpoint
    in_series = [contents for contents in found if contents.sequence]
    return sorted(in_series, key=lambda each: (each.sequence, each.saved_at))


def keep(path: Path) -> None:
    """Marks a checkpoint as one that no manager deletes."""
    (path / _KEPT).touch()


def is_kept(path: Path) -> bool:
    """Whether `keep` has marked the checkpoint."""
    return (path / _KEPT).exists()


def _gone_or_damaged(path: Path, file: str) -> Exception:
    """What is wrong with a file; another process may have deleted the whole checkpoint."""
    return _damaged(path, file) if (path / _MANIFEST).exists() else _not_there(path)


def _damaged(path: Path, file: str) -> DataLossError:
    return DataLossError(
        f"The checkpoint {path} is damaged: {file} is not as it was written. Restore an "
        "earlier checkpoint; `CheckpointManager` and `latest_checkpoint` pass over this one."
    )


def _not_there(path: Path) -> FileNotFoundError:
    for directory in (path, path.parent):
        names = sorted(at.parent.name for at in directory.glob(f"[!.]*/{_MANIFEST}"))
        if names:
            nearby = (
                f"; {directory} has {', '.join(names)}: restore one of them, or what "
                f"`mx.train.latest_checkpoint({str(directory)!r})` returns"
            )
            break
    else:
        nearby = ""
    return FileNotFoundError(errno.ENOENT, f"There is no checkpoint at {path}{nearby}")
