"""`CheckpointManager` keeps some checkpoints, the newest ones, and finds them again."""

from __future__ import annotations

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import mirrored, parts

import mirrax as mx
from mirrax._src.train import array_files, storage
from mirrax.train import (
    Checkpoint,
    CheckpointManager,
    latest_checkpoint,
    load_checkpoint,
)


class Counting:
    """A variable that says how often it was saved."""

    def __init__(self, directory, max_to_keep=None, **kwargs):
        self.v = mx.Variable(0.0)
        self.checkpoint = Checkpoint(v=self.v)
        self.directory = directory
        self.manager = CheckpointManager(
            self.checkpoint, directory, max_to_keep, **kwargs
        )

    def save(self, *args, **kwargs):
        self.v.assign_add(1.0)
        path = self.manager.save(*args, **kwargs)
        return path and os.path.basename(path)

    @property
    def names(self):
        return [os.path.basename(path) for path in self.manager.checkpoints]


def on_disk(directory):
    return sorted(os.listdir(directory))


# Keeping ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "max_to_keep, kept",
    [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4]), (None, [1, 2, 3, 4])],
)
def test_the_newest_are_kept(max_to_keep, kept, tmp_path):
    t = Counting(tmp_path / "new" / "deep", max_to_keep)
    assert t.manager.checkpoints == [] and t.manager.latest_checkpoint is None
    assert not (tmp_path / "new").exists()
    assert [t.save() for _ in range(4)] == [f"ckpt-{n}" for n in (1, 2, 3, 4)]
    assert t.names == on_disk(t.directory) == [f"ckpt-{n}" for n in kept]
    assert t.manager.latest_checkpoint == str(t.directory / "ckpt-4")
    assert [load_checkpoint(p)["v"] for p in t.manager.checkpoints] == kept


def test_numbers_by_hand_and_the_order_of_saving(tmp_path):
    t = Counting(tmp_path)
    assert [t.save(10), t.save(5), t.save()] == ["ckpt-10", "ckpt-5", "ckpt-3"]
    assert t.names == ["ckpt-10", "ckpt-5", "ckpt-3"]
    assert t.manager.latest_checkpoint == str(tmp_path / "ckpt-3")
    assert latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-3")
    again = Counting(tmp_path)
    assert again.names == ["ckpt-10", "ckpt-5", "ckpt-3"]


def test_the_oldest_by_time_goes_first(tmp_path):
    t = Counting(tmp_path, 2)
    for number in (10, 5, 7):
        t.save(number)
    assert t.names == ["ckpt-5", "ckpt-7"]
    assert on_disk(tmp_path) == ["ckpt-5", "ckpt-7"]


def test_saving_a_number_again_moves_it_to_the_end(tmp_path):
    t = Counting(tmp_path, 2)
    for number in (5, 7, 5):
        t.save(number)
    assert t.names == ["ckpt-7", "ckpt-5"]
    assert load_checkpoint(tmp_path / "ckpt-5")["v"] == 3.0
    t.save(9)
    assert t.names == ["ckpt-5", "ckpt-9"]
    assert on_disk(tmp_path) == ["ckpt-5", "ckpt-9"]


@pytest.mark.parametrize(
    "number, name",
    [
        (0, "ckpt-0"),
        (-1, "ckpt--1"),
        (np.int64(6), "ckpt-6"),
        (jnp.int32(7), "ckpt-7"),
    ],
)
def test_kinds_of_numbers(number, name, tmp_path):
    t = Counting(tmp_path)
    assert t.save(number) == name
    assert t.names == [name]
    assert Counting(tmp_path).names == [name]


def test_a_variable_as_number(tmp_path):
    strategy = mirrored(2)
    with strategy.scope():
        step = mx.Variable(12)
    assert Counting(tmp_path).save(step) == "ckpt-12"


@pytest.mark.parametrize("number", [1.5, "3", jnp.ones(2)], ids=["float", "str", "two"])
def test_what_is_no_number(number, tmp_path):
    t = Counting(tmp_path)
    with pytest.raises(TypeError):
        t.save(number)
    assert not t.names and t.checkpoint.save_counter.numpy() == 0


# Arguments --------------------------------------------------------------------------------


def test_arguments_that_make_no_sense(tmp_path):
    checkpoint = Checkpoint(v=mx.Variable(1.0))
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="`max_to_keep` must be at least 1"):
            CheckpointManager(checkpoint, tmp_path, wrong)
    for wrong in ("2", 1.5):
        with pytest.raises(TypeError):
            CheckpointManager(checkpoint, tmp_path, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        CheckpointManager(checkpoint, tmp_path)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="must be an mx.train.Checkpoint, got <mx.Var"):
        CheckpointManager(mx.Variable(1.0), tmp_path, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a `step_counter`"):
        CheckpointManager(checkpoint, tmp_path, 1, checkpoint_interval=5)
    for wrong in ("", "a/b", "/abs"):
        with pytest.raises(ValueError, match="`checkpoint_name` must be the name"):
            CheckpointManager(checkpoint, tmp_path, 1, checkpoint_name=wrong)
    assert on_disk(tmp_path) == []


def test_what_a_manager_says_of_itself(tmp_path):
    step = mx.Variable(0)
    checkpoint = Checkpoint(v=mx.Variable(1.0))
    manager = CheckpointManager(
        checkpoint, tmp_path, 1, step_counter=step, checkpoint_interval=5
    )
    assert manager.checkpoint is checkpoint
    assert manager.directory == str(tmp_path)
    assert manager.checkpoint_interval == 5
    assert repr(manager) == f"<mx.train.CheckpointManager of {tmp_path}>"
    assert CheckpointManager(checkpoint, tmp_path, 1).checkpoint_interval is None


# Intervals --------------------------------------------------------------------------------


def saves_at(manager, step, steps):
    found = []
    for number in steps:
        step.assign(number)
        if manager.save(checkpoint_number=step) is not None:
            found.append(number)
    return found


@pytest.mark.parametrize(
    "interval, steps, saved",
    [
        (2, [0, 1, 2, 3, 4, 7, 8, 9], [0, 2, 4, 7, 9]),
        (2, [4, 1, 5, 6], [4, 6]),
        (0, [1, 1, 2], [1, 1, 2]),
        (None, [1, 2], [1, 2]),
    ],
)
def test_intervals(interval, steps, saved, tmp_path):
    step = mx.Variable(0)
    t = Counting(tmp_path, step_counter=step, checkpoint_interval=interval)
    assert saves_at(t.manager, step, steps) == saved


def test_an_interval_can_be_passed_over(tmp_path):
    step = mx.Variable(0)
    t = Counting(tmp_path, step_counter=step, checkpoint_interval=10)
    assert t.save() == "ckpt-1"
    step.assign(3)
    assert t.save() is None
    assert t.save(check_interval=False) == "ckpt-2"
    step.assign(12)
    assert t.save() is None
    step.assign(13)
    assert t.save() == "ckpt-3"


def test_an_interval_goes_on_after_restoring(tmp_path):
    def make():
        step = mx.Variable(0)
        checkpoint = Checkpoint(step=step)
        return step, CheckpointManager(
            checkpoint, tmp_path, 3, step_counter=step, checkpoint_interval=5
        )

    step, manager = make()
    assert saves_at(manager, step, [10]) == [10]
    step, manager = make()
    manager.restore_or_initialize()
    assert step.numpy() == 10
    assert saves_at(manager, step, [12, 15]) == [15]


def test_a_save_that_failed_does_not_count_for_the_interval(tmp_path):
    step = mx.Variable(0)
    (tmp_path / "file").write_text("x")
    t = Counting(tmp_path / "file", step_counter=step, checkpoint_interval=5)
    with pytest.raises(OSError, match="cannot be written"):
        t.save()
    (tmp_path / "file").unlink()
    assert t.save() == "ckpt-1"


# Every n hours ------------------------------------------------------------------------------


def test_one_in_so_many_hours_stays(tmp_path, monkeypatch):
    now = [1_000_000.0]
    monkeypatch.setattr(storage.time, "time", lambda: now[0])
    t = Counting(tmp_path, 1, keep_checkpoint_every_n_hours=2)
    for _ in range(7):
        now[0] += 3600
        t.save()
        t.manager.sync()
    assert t.names == ["ckpt-7"]
    assert on_disk(tmp_path) == ["ckpt-2", "ckpt-4", "ckpt-6", "ckpt-7"]
    again = Counting(tmp_path, 1, keep_checkpoint_every_n_hours=2)
    assert again.names == ["ckpt-7"]
    again.manager.restore_or_initialize()
    for _ in range(2):
        now[0] += 3600
        again.save()
        again.manager.sync()
    assert again.names == ["ckpt-9"]
    assert on_disk(tmp_path) == ["ckpt-2", "ckpt-4", "ckpt-6", "ckpt-8", "ckpt-9"]
    assert load_checkpoint(tmp_path / "ckpt-2")["v"] == 2.0


@pytest.mark.parametrize("hours, kept", [(1e-9, 3), (1000, 1), (None, 1)])
def test_few_or_many_hours(hours, kept, tmp_path):
    t = Counting(tmp_path, 1, keep_checkpoint_every_n_hours=hours)
    for _ in range(3):
        t.save()
    assert t.names == ["ckpt-3"]
    assert len(on_disk(tmp_path)) == kept


# Starting again -----------------------------------------------------------------------------


def test_a_new_manager_takes_over(tmp_path):
    t = Counting(tmp_path)
    for _ in range(3):
        t.save()
    t.manager.sync()
    again = Counting(tmp_path, 2)
    assert again.names == ["ckpt-1", "ckpt-2", "ckpt-3"]
    assert again.manager.restore_or_initialize() == str(tmp_path / "ckpt-3")
    assert again.v.numpy() == 3.0
    assert on_disk(tmp_path) == ["ckpt-1", "ckpt-2", "ckpt-3"]
    assert again.save() == "ckpt-4"
    assert again.names == on_disk(tmp_path) == ["ckpt-3", "ckpt-4"]


def test_a_new_manager_that_does_not_restore_begins_to_count_again(tmp_path):
    t = Counting(tmp_path)
    for _ in range(3):
        t.save()
    again = Counting(tmp_path, 2)
    assert again.save() == "ckpt-1"
    assert again.names == ["ckpt-3", "ckpt-1"]
    assert again.manager.latest_checkpoint == str(tmp_path / "ckpt-1")
    assert latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-1")
    assert load_checkpoint(tmp_path / "ckpt-1")["v"] == 1.0


def test_on_another_number_of_replicas(tmp_path):
    def make(n):
        strategy = mirrored(n)
        with strategy.scope():
            v = mx.Variable(0.0)
        return strategy, v, CheckpointManager(Checkpoint(v=v), tmp_path, 2)

    _, v, manager = make(2)
    v.assign(5.0)
    manager.save()
    strategy, v, manager = make(3)
    manager.restore_or_initialize()
    assert parts(strategy, v) == [5.0] * 3


def test_initializing(tmp_path):
    calls = []
    t = Counting(tmp_path, 2, init_fn=lambda: calls.append(1))
    assert t.manager.restore_or_initialize() is None
    assert t.manager.restore_or_initialize() is None
    assert calls == [1, 1]
    t.save()
    assert t.manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert calls == [1, 1]
    assert Counting(tmp_path / "none").manager.restore_or_initialize() is None


def test_restoring_in_part_warns_by_name(tmp_path):
    Counting(tmp_path).save()
    checkpoint = Checkpoint(v=mx.Variable(0.0), new=mx.Variable(0.0))
    manager = CheckpointManager(checkpoint, tmp_path, 2)
    with pytest.warns(UserWarning, match="not in the checkpoint .unchanged.: new"):
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert checkpoint.v.numpy() == 1.0


def test_a_checkpoint_that_does_not_fit_is_an_error_and_not_passed_over(tmp_path):
    Counting(tmp_path).save()
    checkpoint = Checkpoint(v=mx.Variable(jnp.zeros(2)))
    manager = CheckpointManager(checkpoint, tmp_path, 2)
    with pytest.raises(ValueError, match=r"v: its shape is \(2,\) here, \(\) in"):
        manager.restore_or_initialize()


# Others in the same directory -----------------------------------------------------------------


def test_two_managers_of_different_names(tmp_path):
    a = Counting(tmp_path, 1, checkpoint_name="a")
    b = Counting(tmp_path, 2, checkpoint_name="a-b")
    for _ in range(3):
        a.save()
        b.save()
    assert a.names == ["a-3"] and b.names == ["a-b-2", "a-b-3"]
    assert on_disk(tmp_path) == ["a-3", "a-b-2", "a-b-3"]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "a-b-3")
    a.save()
    assert latest_checkpoint(tmp_path) == str(tmp_path / "a-4")
    assert Counting(tmp_path, 1, checkpoint_name="a").names == ["a-4"]
    assert Counting(tmp_path, 1, checkpoint_name="a-b").names == ["a-b-2", "a-b-3"]


@pytest.mark.parametrize("name", ["a.b", "a+", "x[1]", "ckpt (1)", "ü", "10"])
def test_odd_names(name, tmp_path):
    Counting(tmp_path, 1, checkpoint_name=name).save()
    t = Counting(tmp_path, 1, checkpoint_name=name)
    assert t.names == [f"{name}-1"]


def test_what_is_saved_by_hand_is_never_deleted(tmp_path):
    t = Counting(tmp_path, 1)
    t.checkpoint.save(tmp_path / "mine")
    t.checkpoint.write(tmp_path / "ckpt-best")
    for _ in range(3):
        t.save()
    assert t.names == ["ckpt-4"]
    assert on_disk(tmp_path) == ["ckpt-4", "ckpt-best", "mine-1"]


def test_two_managers_of_the_same_checkpoint(tmp_path):
    t = Counting(tmp_path / "often", 1)
    rarely = CheckpointManager(t.checkpoint, tmp_path / "rarely", None)
    for _ in range(2):
        t.save()
    rarely.save()
    t.save()
    assert t.names == ["ckpt-4"]
    assert rarely.checkpoints == [str(tmp_path / "rarely" / "ckpt-3")]
    assert load_checkpoint(rarely.checkpoints[0])["v"] == 2.0


# Deleting -------------------------------------------------------------------------------------


def test_nothing_is_deleted_before_the_new_one_is_on_the_disk(tmp_path, monkeypatch):
    t = Counting(tmp_path, 1)
    t.save()
    t.manager.sync()
    remove, seen = storage.remove, []

    def look_and_remove(path):
        seen.append((path.name, float(load_from_disk(tmp_path / "ckpt-2")["v"])))
        remove(path)

    monkeypatch.setattr(storage, "remove", look_and_remove)
    t.save()
    t.manager.sync()
    assert seen == [("ckpt-1", 2.0)]
    assert on_disk(tmp_path) == ["ckpt-2"]


def load_from_disk(path: Path):
    """What is there now; does not wait for saves."""
    contents = storage.read_contents(path)
    storage.verify(contents)
    return storage.read_arrays(contents, contents.arrays)


def test_nothing_is_deleted_when_the_new_one_fails(tmp_path, monkeypatch):
    t = Counting(tmp_path, 1)
    t.save()
    t.manager.sync()

    def fail(*args):
        raise ValueError("x [os_error_code='28']")

    with monkeypatch.context() as patch:
        patch.setattr(array_files, "saving", fail)
        t.save()
        assert t.names == ["ckpt-1"]
    with pytest.raises(OSError, match="No space left"):
        t.manager.sync()
    assert t.manager.latest_checkpoint == str(tmp_path / "ckpt-1")
    assert load_checkpoint(tmp_path / "ckpt-1")["v"] == 1.0
    t.save()
    assert len(t.names) == 1 and on_disk(tmp_path) == t.names
    assert load_checkpoint(t.manager.checkpoints[0])["v"] == 3.0


def test_checkpoints_that_were_deleted_by_hand(tmp_path):
    t = Counting(tmp_path, 2)
    for _ in range(2):
        t.save()
    t.manager.sync()
    storage.remove(tmp_path / "ckpt-1")
    t.save()
    t.manager.sync()
    assert on_disk(tmp_path) == ["ckpt-2", "ckpt-3"]
    assert t.names == ["ckpt-2", "ckpt-3"]


def test_a_save_is_seen_at_once(tmp_path):
    t = Counting(tmp_path, 3)
    path = t.manager.save()
    assert t.manager.latest_checkpoint == path
    assert t.manager.checkpoints == [path]
    assert t.manager.restore_or_initialize() == path
