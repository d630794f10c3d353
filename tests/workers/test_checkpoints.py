"""Checkpoints: one worker writes, all restore, on any number of workers."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers.engines import per_replica, replica_id
from helpers.forked_workers import forked_workers

import mirrax as mx
from mirrax import VariableAggregation, VariableSynchronization
from mirrax._src.cluster.local_cluster import LocalCluster
from mirrax.train import (
    Checkpoint,
    CheckpointManager,
    CheckpointOptions,
    latest_checkpoint,
    load_checkpoint,
)

from .comparing import Pool, error_of, one_process, per_worker, worker_of
from .training import train_on

NOW = CheckpointOptions(experimental_enable_async_checkpoint=False)


def files_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


# Who writes -----------------------------------------------------------------------------


def test_the_first_worker_writes_alone(two_by_two: Pool, tmp_path: Path) -> None:
    """Also where each worker has a path of its own, as TensorFlow wants it."""

    def save(strategy):
        with strategy.scope():
            v = mx.Variable([1.0, 2.0])
        folder = tmp_path / str(worker_of(strategy))
        paths = [Checkpoint(v=v, epoch=3).save(folder / "c", NOW) for _ in range(2)]
        return [os.path.relpath(path, tmp_path) for path in paths]

    assert two_by_two.run(save) == [["0/c-1"] * 2, ["1/c-1"] * 2]
    assert files_in(tmp_path / "0") == ["c-1"]
    assert files_in(tmp_path / "1") == []
    saved = load_checkpoint(tmp_path / "0" / "c-1")
    assert saved["v"].tolist() == [1.0, 2.0] and saved["epoch"] == 3


def test_different_checkpoints_are_an_error_on_all_workers(
    two_by_two: Pool, tmp_path: Path
) -> None:
    def restore(strategy):
        with strategy.scope():
            v = mx.Variable(1.0)
        checkpoint = Checkpoint(v=v)
        paths = [checkpoint.save(tmp_path / "c", NOW) for _ in range(2)]
        v.assign(5.0)
        error = error_of(lambda: checkpoint.restore(per_worker(strategy, paths)))
        return error, v.numpy()

    (kind, text), v = two_by_two.run_alike(restore)
    assert kind == "ValueError" and v == 5.0
    assert f"{tmp_path}/c-1 on worker 0" in text
    assert f"{tmp_path}/c-2 on worker 1" in text


def test_a_checkpoint_that_is_not_there_or_does_not_fit(
    two_by_two: Pool, tmp_path: Path
) -> None:
    def restore(strategy):
        with strategy.scope():
            v, w = mx.Variable(1.0), mx.Variable([1.0, 2.0])
        path = Checkpoint(v=v).save(tmp_path / "c", NOW)
        return [
            error_of(lambda: Checkpoint(v=v).restore(tmp_path / "none")),
            error_of(lambda: Checkpoint(v=w).restore(path)),
        ]

    missing, misfit = two_by_two.run_alike(restore)
    assert missing[0] == "FileNotFoundError" and misfit[0] == "ValueError"
    assert "its shape is (2,) here, () in the checkpoint" in misfit[1]


# What is in it --------------------------------------------------------------------------


class Everything:
    """What a checkpoint can hold, some of it different on each replica."""

    def __init__(self, strategy: Any, scale: float) -> None:
        self.strategy = strategy
        n = strategy.num_replicas_in_sync
        with strategy.scope():
            self.w = mx.Variable(scale * np.arange(6, dtype="float32").reshape(2, 3))
            self.half = mx.Variable(jnp.full(3, scale, jnp.bfloat16))
            self.flag = mx.Variable(scale > 1)
            self.summed = mx.Variable(
                jnp.zeros(2),
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
            self.optimizer = mx.train.Optimizer(
                optax.adam(0.1), gradient_accumulation_steps=2
            )
            self.mean = mx.metrics.Mean()
        self.iterator = iter(
            strategy.experimental_distribute_dataset(
                mx.data.Dataset.range(48).shuffle(48).batch(12)
            )
        )
        self.checkpoint = Checkpoint(
            w=self.w,
            half=self.half,
            flag=self.flag,
            summed=self.summed,
            optimizer=self.optimizer,
            mean=self.mean,
            iterator=self.iterator,
            params=strategy.replicate({"a": [jnp.full(2, scale)]}),
            same=per_replica(strategy, *[np.full(2, scale)] * n),
            number=scale,
        )

        @mx.function
        def step(x: Any) -> None:
            self.summed.assign_add(jnp.full(2, replica_id() + 1.0))
            self.mean.update_state(x.astype(jnp.float32))
            gradient = jnp.ones((2, 3)) * jnp.sum(x).astype(jnp.float32)
            self.optimizer.apply_gradients([(gradient, self.w)])

        self._step = step

    def step(self) -> list[int]:
        """The rows of a step, of all replicas."""
        x = next(self.iterator)
        self.strategy.run(self._step, (x,))
        return sorted(np.asarray(self.strategy.gather(x, axis=0)).tolist())

    def values(self) -> dict[str, Any]:
        """What is the same for any number of workers."""
        return {
            "w": self.w.numpy(),
            "half": self.half.numpy(),
            "flag": bool(self.flag.numpy()),
            "summed": self.summed.numpy(),
            "mean": float(self.mean.result()),
            "iterations": int(self.optimizer.iterations),
            "params": np.asarray(self.checkpoint.params["a"][0]),
            "same": [
                np.asarray(part)
                for part in self.strategy.experimental_local_results(
                    self.checkpoint.same
                )
            ][0],
            "number": self.checkpoint.number,
        }


def save_everything(strategy, folder):
    """Three steps: the middle of a pass, and of accumulating a gradient."""
    own = Everything(strategy, 2.0)
    rows = [own.step() for _ in range(3)]
    path = own.checkpoint.save(folder / "c")
    values = own.values()
    own.checkpoint.sync()
    return path, rows, values, own.step(), own.w.numpy()


def restore_everything(strategy, path):
    own = Everything(strategy, 1.0)
    own.checkpoint.restore(path).assert_consumed()
    return own.values(), own.step(), own.w.numpy()


def assert_restored(saved, restored):
    _, rows, values, next_rows, w = saved
    assert sorted([*itertools.chain(*rows), *next_rows]) == list(range(48))
    for key, value in values.items():
        np.testing.assert_array_equal(restored[0][key], value, key)
    assert restored[1] == next_rows
    np.testing.assert_allclose(restored[2], w, rtol=1e-5)


def test_everything_on_as_many_workers_and_in_one_process(
    two_by_two: Pool, tmp_path: Path
) -> None:
    saved = two_by_two.run_alike(save_everything, tmp_path)
    assert_restored(saved, two_by_two.run_alike(restore_everything, saved[0]))
    assert_restored(saved, restore_everything(one_process(4), saved[0]))


def test_everything_on_other_numbers_of_workers(
    two_by_one: Pool, three_by_one: Pool, tmp_path: Path
) -> None:
    saved = two_by_one.run_alike(save_everything, tmp_path)
    assert_restored(saved, three_by_one.run_alike(restore_everything, saved[0]))


def test_what_one_process_saved(two_by_two: Pool, tmp_path: Path) -> None:
    saved = save_everything(one_process(4), tmp_path)
    assert_restored(saved, two_by_two.run_alike(restore_everything, saved[0]))


def test_values_that_differ_between_replicas(two_by_two: Pool, tmp_path: Path) -> None:
    def save(strategy):
        checkpoint = Checkpoint(
            tree={"x": per_replica(strategy, *np.arange(8.0).reshape(4, 2))},
            half=per_replica(strategy, *np.arange(4).astype(jnp.bfloat16)),
            flags=per_replica(strategy, True, False, True, True),
        )
        path = checkpoint.save(tmp_path / "c", NOW)
        checkpoint.tree = {"x": per_replica(strategy, *np.zeros((4, 2)))}
        checkpoint.half = per_replica(strategy, *np.zeros(4).astype(jnp.bfloat16))
        checkpoint.flags = per_replica(strategy, *[False] * 4)
        checkpoint.restore(path).assert_consumed()
        return checkpoint.tree, checkpoint.half, checkpoint.flags

    two_by_two.assert_as_one(save)
    saved = load_checkpoint(tmp_path / "c-1")
    assert saved["tree/x"].tolist() == np.arange(8.0).reshape(4, 2).tolist()


def test_large_values_of_each_replica(two_by_one: Pool, tmp_path: Path) -> None:
    """20 MB on each worker: more than the roster takes in a line."""

    def save(strategy):
        rows = np.arange(5_100_000, dtype="float32").reshape(3, -1)
        x = per_replica(strategy, rows, rows + 1)
        checkpoint = Checkpoint(x=x)
        path = checkpoint.save(tmp_path / "c", NOW)
        checkpoint.x = per_replica(strategy, rows * 0, rows * 0)
        checkpoint.restore(path).assert_consumed()
        [part] = strategy.experimental_local_results(checkpoint.x)
        return bool((np.asarray(part) == rows + worker_of(strategy)).all())

    assert two_by_one.run(save) == [True, True]
    saved = load_checkpoint(tmp_path / "c-1")["x"]
    assert saved.shape == (2, 3, 1_700_000)
    assert (saved[1] - saved[0] == 1.0).all()


def test_values_that_differ_need_as_many_replicas(
    two_by_one: Pool, three_by_one: Pool, tmp_path: Path
) -> None:
    def save(strategy):
        n = strategy.num_replicas_in_sync
        x = per_replica(strategy, *np.arange(2.0 * n).reshape(n, 2))
        return Checkpoint(x=x).save(tmp_path / str(n), NOW)

    def restore(strategy, path):
        n = strategy.num_replicas_in_sync
        x = per_replica(strategy, *np.zeros((n, 2)))
        return error_of(lambda: Checkpoint(x=x).restore(path))

    path = three_by_one.run_alike(save)
    kind, text = two_by_one.run_alike(restore, path)
    assert kind == "ValueError"
    assert "it differs between the 3 replicas that saved it; here are 2" in text


def test_random_keys(two_by_two: Pool, tmp_path: Path) -> None:
    def save(strategy):
        with strategy.scope():
            key = mx.Variable(jax.random.key(5))
        checkpoint = Checkpoint(key=key)
        path = checkpoint.save(tmp_path / "c", NOW)
        key.assign(jax.random.key(6))
        checkpoint.restore(path)
        return key

    two_by_two.assert_as_one(save)


# Data of each worker's own --------------------------------------------------------------


def own_iterator(strategy):
    return iter(
        strategy.distribute_datasets_from_function(
            lambda ctx: mx.data.Dataset.range(
                100 * ctx.input_pipeline_id, 100 * ctx.input_pipeline_id + 8
            ).batch(1)
        )
    )


def test_iterators_over_data_of_ones_own(
    two_by_one: Pool, three_by_one: Pool, tmp_path: Path
) -> None:
    def save(strategy):
        iterator = own_iterator(strategy)
        checkpoint = Checkpoint(iterator=iterator)
        for _ in range(3):
            next(iterator)
        path = checkpoint.save(tmp_path / "c", NOW)
        for _ in range(2):
            next(iterator)
        checkpoint.restore(path)
        return path, next(iterator)

    def restore(strategy, path):
        iterator = own_iterator(strategy)
        error = error_of(lambda: Checkpoint(iterator=iterator).restore(path))
        return error, next(iterator)

    found = two_by_one.run(save)
    assert [x.parts[0].tolist() for _, x in found] == [[3], [103]]
    path = found[0][0]
    others = [*three_by_one.run(restore, path), restore(one_process(2), path)]
    for (kind, text), _ in others:
        assert kind == "ValueError"
        assert "it was saved by 2 worker(s), each with data of its own" in text


# Managers -------------------------------------------------------------------------------


def test_a_manager_keeps_the_newest_on_all_workers(
    two_by_two: Pool, tmp_path: Path
) -> None:
    def save(strategy):
        with strategy.scope():
            v = mx.Variable(0.0)
        manager = CheckpointManager(Checkpoint(v=v), tmp_path, max_to_keep=2)
        made = manager.restore_or_initialize()
        for i in range(4):
            v.assign(float(i))
            manager.save()
        manager.sync()
        v.assign(9.0)
        restored = manager.restore_or_initialize()
        return (
            made,
            v.numpy(),
            [os.path.basename(path) for path in manager.checkpoints],
            [
                path and os.path.basename(path)
                for path in (
                    restored,
                    manager.latest_checkpoint,
                    latest_checkpoint(tmp_path),
                )
            ],
        )

    made, v, checkpoints, newest = two_by_two.run_alike(save)
    assert made is None and v == 3.0
    assert checkpoints == ["ckpt-3", "ckpt-4"] and newest == ["ckpt-4"] * 3
    assert files_in(tmp_path) == ["ckpt-3", "ckpt-4"]


def test_the_newest_one_is_known_to_all_after_sync(
    two_by_two: Pool, tmp_path: Path
) -> None:
    """Other workers do not look before the first one has written."""

    def save(strategy):
        with strategy.scope():
            v = mx.Variable(np.zeros((1000, 1000), "float32"))
        checkpoint = Checkpoint(v=v)
        manager = CheckpointManager(checkpoint, tmp_path / "m", max_to_keep=1)
        found = []
        for _ in range(3):
            paths = [checkpoint.save(tmp_path / "c"), manager.save()]
            manager.sync()
            newest = [latest_checkpoint(tmp_path), manager.latest_checkpoint]
            found.append((paths, newest, manager.checkpoints))
        return found

    for paths, newest, kept in two_by_two.run_alike(save):
        assert paths == newest and kept == [paths[1]]


def test_what_a_manager_does_without_a_checkpoint(
    two_by_two: Pool, tmp_path: Path
) -> None:
    def start(strategy):
        with strategy.scope():
            v, steps = mx.Variable(0.0), mx.Variable(0)
        manager = CheckpointManager(
            Checkpoint(v=v),
            tmp_path,
            max_to_keep=None,
            step_counter=steps,
            checkpoint_interval=2,
            init_fn=lambda: v.assign(7.0),
        )
        made = manager.restore_or_initialize()
        saved = []
        for _ in range(4):
            steps.assign_add(1)
            saved.append(manager.save() is not None)
        return made, v.numpy(), saved

    made, v, saved = two_by_two.run_alike(start)
    assert (made, v, saved) == (None, 7.0, [True, False, True, False])


def test_a_damaged_checkpoint_is_passed_over_by_all(
    two_by_two: Pool, tmp_path: Path
) -> None:
    def save(strategy):
        with strategy.scope():
            v = mx.Variable(np.arange(1000, dtype="float32"))
        manager = CheckpointManager(Checkpoint(v=v), tmp_path, max_to_keep=5)
        for i in range(3):
            v.assign(np.full(1000, float(i), "float32"))
            manager.save()
        manager.sync()

    def restore(strategy):
        import warnings

        with strategy.scope():
            v = mx.Variable(np.zeros(1000, "float32"))
        manager = CheckpointManager(Checkpoint(v=v), tmp_path, max_to_keep=5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = manager.restore_or_initialize()
        return path and os.path.basename(path), v.numpy()[0]

    two_by_two.run_alike(save)
    largest = max((tmp_path / "ckpt-3").rglob("*"), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 255
    largest.write_bytes(bytes(data))
    assert two_by_two.run_alike(restore) == ("ckpt-2", 1.0)


# Going on -------------------------------------------------------------------------------


def test_a_signal_to_one_worker_stops_all_at_one_step(
    two_by_one: Pool, tmp_path: Path
) -> None:
    """Exit code 42 on all, one checkpoint, and afterwards to the last bit as if nothing was."""
    script = Path(__file__).with_name("preempted.py")

    def start(steps: int, signal_at: int) -> tuple[list[int], list[str]]:
        command = [sys.executable, str(script), str(tmp_path / "c")]
        logs = tmp_path / f"logs {signal_at}"
        logs.mkdir()
        codes = {}
        command += [str(steps), str(signal_at)]
        with forked_workers(), LocalCluster(command, 2, logs, 1) as cluster:
            while cluster.running:
                ends = cluster.wait(timeout_seconds=60)
                assert ends, "it hangs"
                codes.update({end.worker: end.returncode for end in ends})
        return [codes[0], codes[1]], [log.read_text() for log in cluster.logs]

    codes, texts = start(steps=100_000, signal_at=4)
    assert codes == [42, 42], texts
    saved = load_checkpoint(latest_checkpoint(tmp_path / "c") or "")
    assert files_in(tmp_path / "c") == ["ckpt-1"]
    stopped = saved["checkpointed_runs"]
    assert 4 < stopped == saved["optimizer/iterations"]

    codes, texts = start(steps=stopped + 5, signal_at=-1)
    assert codes == [0, 0], texts
    results = [text.strip().splitlines()[-1].split() for text in texts]
    assert results[0] == results[1]

    def whole(strategy):
        return train_on(strategy, tmp_path / "other", stopped + 5, -1)

    _, mean, weights = two_by_one.run_alike(whole)
    assert results[0] == [
        *("started", "at", str(stopped)),
        *("mean", mean.hex(), "weights", weights.tobytes().hex()),
    ]
