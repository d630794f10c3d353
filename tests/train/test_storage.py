"""Directories that are there as a whole or not at all, whoever is killed when."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx
from mirrax._src.train import storage
from mirrax.train import (
    Checkpoint,
    CheckpointManager,
    latest_checkpoint,
    load_checkpoint,
)

HOST = socket.gethostname()


def write(path, **arrays):
    """A checkpoint of these arrays."""
    storage.write(storage.begin(path), path, arrays, {}, True)


def value(path):
    return float(load_checkpoint(path)["v"])


@pytest.fixture(scope="module")
def dead():
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        return process.pid


@pytest.fixture(scope="module")
def alive():
    """The id of another process that is there."""
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process.pid
        process.kill()


def leave(directory, name, pid, kind="tmp", host=HOST, number="0"):
    """What a process leaves that was killed in the middle of a save."""
    place = directory / f".{name}.{kind}-{host}-{pid}-{number}"
    (place / "arrays").mkdir(parents=True)
    (place / "arrays" / "half").write_text("x")
    return place


def save(directory, name="ckpt"):
    manager = CheckpointManager(
        Checkpoint(v=mx.Variable(1.0)), directory, None, checkpoint_name=name
    )
    manager.save()
    manager.sync()
    return manager


# Half-written directories -----------------------------------------------------------------


def test_half_written_directories_are_not_seen(dead, alive, tmp_path):
    for pid in (dead, alive, os.getpid()):
        leave(tmp_path, "ckpt-9", pid)
    v = mx.Variable(1.0)
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, None)
    assert manager.checkpoints == []
    assert manager.latest_checkpoint is None
    assert latest_checkpoint(tmp_path) is None
    assert manager.restore_or_initialize() is None
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at"):
        Checkpoint(v=v).restore(tmp_path / "ckpt-9")


def test_what_the_dead_have_left_is_cleaned_up_by_the_first_save(dead, alive, tmp_path):
    gone = [leave(tmp_path, "ckpt-1", dead), leave(tmp_path, "other-7", dead)]
    stays = leave(tmp_path, "ckpt-2", alive)
    manager = CheckpointManager(Checkpoint(v=mx.Variable(1.0)), tmp_path, None)
    assert all(path.exists() for path in gone)
    manager.save()
    manager.sync()
    assert not any(path.exists() for path in gone)
    assert stays.exists()
    assert sorted(os.listdir(tmp_path)) == [stays.name, "ckpt-1"]


def test_what_another_machine_is_writing_is_left_alone_for_an_hour(dead, tmp_path):
    new = leave(tmp_path, "ckpt-1", dead, host="elsewhere")
    old = leave(tmp_path, "ckpt-2", dead, host="else-where-2")
    hours_ago = time.time() - 2 * 3600
    os.utime(old, (hours_ago, hours_ago))
    save(tmp_path)
    assert new.exists() and not old.exists()


def test_a_restart_in_a_container_has_the_same_process_id(tmp_path):
    """An earlier process of this id on this machine, killed in its first save."""
    path = leave(tmp_path, "ckpt-1", os.getpid())
    manager = save(tmp_path)
    assert not path.exists()
    assert value(manager.checkpoints[0]) == 1.0


def test_what_others_have_hidden_there_is_left_alone(tmp_path):
    for name in (".git-x", ".x.tmp-host", ".hidden.tmp-a-b-c"):
        (tmp_path / name).mkdir()
    (tmp_path / ".file-1").write_text("mine")
    save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(
        [".git-x", ".x.tmp-host", ".hidden.tmp-a-b-c", ".file-1", "ckpt-1"]
    )


# Overwriting ------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a kill: nothing cleans up after it."""


def killed_between_the_renames(path, dead, monkeypatch):
    """Overwrites `path` in a process that dies when the old one has been moved away."""
    rename = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "getpid", lambda: dead)

        def rename_once(self, target):
            if ".old-" not in Path(target).name:
                raise Killed
            return rename(self, target)

        patch.setattr(Path, "rename", rename_once)
        with pytest.raises(Killed):
            write(path, v=np.float32(2.0))
    storage._in_work.clear()  # of a process that is gone
    assert not path.exists()


def test_overwriting(tmp_path):
    write(tmp_path / "c", v=np.float32(1.0))
    write(tmp_path / "c", v=np.float32(2.0))
    assert value(tmp_path / "c") == 2.0
    assert os.listdir(tmp_path) == ["c"]


def test_the_old_one_is_there_until_the_new_one_is_whole(tmp_path, monkeypatch):
    write(tmp_path / "c", v=np.float32(1.0))
    sync, seen = storage._sync_to_disk, []

    def look(path):
        if path.parent.name.startswith(".c.tmp"):
            seen.append(value(tmp_path / "c"))
        sync(path)

    monkeypatch.setattr(storage, "_sync_to_disk", look)
    write(tmp_path / "c", v=np.float32(2.0))
    assert seen and set(seen) == {1.0}
    assert value(tmp_path / "c") == 2.0


@pytest.mark.parametrize(
    "who", ["manager", "latest", "restore", "load", "restore_or_initialize"]
)
def test_a_kill_between_the_two_renames_is_recovered(who, dead, tmp_path, monkeypatch):
    path = tmp_path / "ckpt-1"
    write(path, v=np.float32(1.0))
    killed_between_the_renames(path, dead, monkeypatch)
    v = mx.Variable(np.float32(0.0))
    if who == "latest":
        assert latest_checkpoint(tmp_path) == str(path)
    elif who == "restore":
        Checkpoint(v=v).read(path).assert_consumed()
        assert v.numpy() == 1.0
    elif who == "load":
        assert load_checkpoint(path)["v"] == 1.0
    else:
        manager = CheckpointManager(Checkpoint(v=v), tmp_path, None)
        if who == "manager":
            assert manager.latest_checkpoint == str(path)
            assert manager.checkpoints == [str(path)]
        else:
            with pytest.warns(UserWarning, match="save_counter"):
                assert manager.restore_or_initialize() == str(path)
            assert v.numpy() == 1.0
    assert value(path) in (1.0, 2.0)
    save(tmp_path, "other")
    assert sorted(os.listdir(tmp_path)) == ["ckpt-1", "other-1"]


def test_what_is_being_replaced_by_a_living_process_is_left_alone(
    alive, tmp_path, monkeypatch
):
    path = tmp_path / "ckpt-1"
    write(path, v=np.float32(1.0))
    killed_between_the_renames(path, alive, monkeypatch)
    before = sorted(os.listdir(tmp_path))
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path, "other")
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "other-1"])


def test_a_kill_in_the_middle_of_a_deletion(dead, tmp_path, monkeypatch):
    """What is left is no checkpoint, is cleaned up, and is in nobody's way."""
    path = tmp_path / "ckpt-1"
    write(path, v=np.float32(1.0))

    def kill(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "getpid", lambda: dead)
        patch.setattr(shutil, "rmtree", kill)
        with pytest.raises(Killed):
            storage.remove(path)
    storage._in_work.clear()
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path)
    assert os.listdir(tmp_path) == ["ckpt-1"]
    assert value(path) == 1.0


# What is on the disk ------------------------------------------------------------------------


def test_everything_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    events = []
    sync, rename = storage._sync_to_disk, Path.rename

    def synced(path):
        events.append(("sync", path.name))
        sync(path)

    def renamed(self, target):
        events.append(("rename", Path(target).name))
        return rename(self, target)

    monkeypatch.setattr(storage, "_sync_to_disk", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    write(tmp_path / "c", v=np.float32(1.0))
    at = events.index(("rename", "c"))
    before = [name for what, name in events[:at] if what == "sync"]
    files = [p.name for p in (tmp_path / "c").rglob("*")]
    assert set(files) <= set(before)
    assert before[-1].startswith(".c.tmp-")
    assert events[at + 1 :] == [("sync", tmp_path.name)]


def test_the_manifest_can_be_read_by_people(tmp_path):
    path = Checkpoint(v=mx.Variable(jnp.ones((2, 3), "bfloat16")), n=7).save(
        tmp_path / "c"
    )
    load_checkpoint(path)
    content = json.loads((Path(path) / "mirrax.json").read_text())["content"]
    assert content["arrays"]["v"]["shape"] == [2, 3]
    assert content["arrays"]["v"]["dtype"] == "bfloat16"
    assert content["values"] == {"n": 7}
    assert content["format"] == 1  # older versions read it


def test_small_arrays_make_few_files(tmp_path):
    write(tmp_path / "one", v=np.ones(3))
    write(tmp_path / "many", **{f"v{i}": np.ones(3) for i in range(500)})
    counts = [len(list((tmp_path / d).rglob("*"))) for d in ("one", "many")]
    assert counts[1] <= counts[0] + 2


def test_checkpoints_are_ordered_by_time_of_saving_and_not_by_name(tmp_path):
    for name in ("z", "a-10", "a-9"):
        write(tmp_path / name, v=np.ones(1))
    names = [c.path.name for c in storage.checkpoints_in(tmp_path)]
    assert names == ["z", "a-10", "a-9"]
    write(tmp_path / "z", v=np.ones(1))
    names = [c.path.name for c in storage.checkpoints_in(tmp_path)]
    assert names == ["a-10", "a-9", "z"]


def test_a_copy_of_a_directory_is_as_good(tmp_path):
    write(tmp_path / "a" / "c", v=np.float32(1.0))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert latest_checkpoint(tmp_path / "b") == str(tmp_path / "b" / "c")
    assert value(tmp_path / "b" / "c") == 1.0


def test_only_a_part_of_the_arrays_is_read(tmp_path):
    write(
        tmp_path / "c", small=np.ones(3), large=np.ones(70_000), other=np.zeros(70_000)
    )
    contents = storage.read_contents(tmp_path / "c")
    for names in (["small"], ["large"], ["small", "other"], []):
        found = storage.read_arrays(contents, names)
        assert sorted(found) == sorted(names)
    np.testing.assert_array_equal(found.get("small", np.ones(3)), np.ones(3))


def test_links_to_checkpoints(tmp_path):
    write(tmp_path / "real" / "c", v=np.float32(1.0))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert latest_checkpoint(tmp_path / "link") == str(tmp_path / "link" / "c")
    write(tmp_path / "link" / "d", v=np.float32(2.0))
    assert value(tmp_path / "real" / "d") == 2.0


def test_nothing_is_written_after_a_failure(tmp_path, monkeypatch):
    """TensorStore writes while checksums are computed."""

    def fail(array):
        raise MemoryError("no memory for a checksum")

    monkeypatch.setattr(storage.array_files, "crc_of", fail)
    with pytest.raises(MemoryError, match="no memory"):
        write(tmp_path / "ckpt", v=np.zeros(2**21))
    time.sleep(0.5)
    assert list(tmp_path.iterdir()) == []
