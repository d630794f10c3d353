"""Checkpoints that several workers write together, each its own part of the arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mirrax._src.train import pieces, storage
from mirrax._src.train.manifest import is_well_formed
from mirrax._src.train.pieces import Gathering, Pieces
from mirrax.errors import DataLossError

WHOLE = np.arange(24, dtype="float32").reshape(4, 6)


@dataclass
class TwoWorkers:
    """What a `Gathering` asks of its cluster; all has been agreed on."""

    worker: int
    answers: Any = ()
    size: int = 2
    names: Any = ("Worker 0", "Worker 1")

    def agree_numbered(self, what: str, value: Any) -> Any:
        return [value, None], 1

    def agree(self, what: str, value: Any) -> Any:
        return [value, *self.answers]

    def announce_part(self, number: int) -> None:
        pass

    def wait_for_part(self, worker: int, number: int) -> None:
        pass


def half(worker: int, axis: int = 0) -> Pieces:
    part = np.split(WHOLE, 2, axis)[worker]
    start = [0, 0]
    start[axis] = worker * part.shape[axis]
    return Pieces(WHOLE.shape, WHOLE.dtype, [(tuple(start), part)])


def of_worker(worker: int, hidden: Path) -> Gathering:
    cluster: Any = TwoWorkers(worker)
    return Gathering(cluster, hidden, 1)


def save(path: Path, is_second_there: bool = True) -> storage.Contents:
    hidden = storage.begin(path)
    if is_second_there:
        of_worker(1, hidden).write_own({"x": half(1), "y": half(1, axis=1)})
    arrays = {"x": half(0), "y": half(0, axis=1), "w": np.ones(3)}
    known = arrays, {"epoch": 1}, False, of_worker(0, hidden)
    return storage.write(hidden, path, *known)


def test_all_parts_are_in_one_checkpoint(tmp_path: Path) -> None:
    contents = save(tmp_path / "c")
    assert sorted(contents.names) == ["epoch", "w", "x", "y"]
    storage.verify(contents)
    found = storage.read_arrays(contents, ["x", "y", "w"])
    np.testing.assert_array_equal(found["x"], WHOLE)
    np.testing.assert_array_equal(found["y"], WHOLE)
    sizes = [(tmp_path / "c" / f"pieces-{k}").stat().st_size for k in range(2)]
    assert sizes == [WHOLE.nbytes, WHOLE.nbytes]  # two halves in each
    assert not list((tmp_path / "c").glob("*.json.part"))


def test_a_worker_that_could_not_write(tmp_path: Path) -> None:
    before = save(tmp_path / "c")
    with pytest.raises(OSError, match="Worker 1 could not write its part"):
        save(tmp_path / "c", is_second_there=False)
    assert storage.read_contents(tmp_path / "c") == before
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("how", ["changed", "gone", "short"])
def test_damage_is_found(tmp_path: Path, how: str) -> None:
    contents, file = save(tmp_path / "c"), tmp_path / "c" / "pieces-1"
    data = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(data[:-1] + b"\xff" if how == "changed" else data[:-4])
    with pytest.raises(DataLossError, match="is damaged"):
        storage.read_arrays(contents, ["x", "y"])
    with pytest.raises(DataLossError, match="pieces-1 is not as it was written"):
        storage.verify(contents)


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    entry = dict(save(tmp_path / "c").arrays["x"])
    entry["pieces"] = entry["pieces"][:1]
    with pytest.raises(ValueError, match="pieces missing"):
        pieces.read(tmp_path / "c", entry)


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../c/pieces-1"},
        {"file": 1},
        {"at": -1},
        {"start": [3, 0]},
        {"start": [0]},
        {"shape": "2"},
    ],
)
def test_pieces_outside_of_the_array_or_the_checkpoint(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    contents = save(tmp_path / "c")
    entry = dict(contents.arrays["x"])
    content: dict[str, Any] = {
        "sequence": 0,
        "saved_at": 0.0,
        "values": {},
        "files": {},
        "arrays": {"x": entry},
    }
    assert is_well_formed(content)
    entry["pieces"] = [entry["pieces"][0] | change]
    assert not is_well_formed(content)


def test_workers_that_do_not_share_a_directory(tmp_path: Path) -> None:
    """Then the first one writes all, as without parts."""
    cluster: Any = TwoWorkers(0, answers=[False])
    assert Gathering.begin(cluster, tmp_path) is None
    cluster.answers = [True]
    assert Gathering.begin(cluster, tmp_path) == Gathering(cluster, tmp_path, 1)
    with pytest.raises(OSError, match="Worker 0 could not begin the checkpoint"):
        Gathering.begin(cluster, None)
