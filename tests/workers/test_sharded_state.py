"""An optimizer whose state lies in parts on the devices of several workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from helpers.forked_workers import forked_workers
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx
from mirrax._src.train import pieces
from mirrax.testing import WorkerError, run_workers
from mirrax.train import Checkpoint, load_checkpoint

from .comparing import Pool
from .training import dataset, errors_of, initial_params

STEPS = 7  # the fifth is uneven


def train(
    strategy: Any, shard: bool, folder: str | None = None, steps: int = STEPS
) -> tuple[dict[str, np.ndarray], int, float]:
    """The weights, the bytes of the state on a device, and what a slot adds up to."""
    with strategy.scope():
        variables = {k: mx.Variable(v) for k, v in initial_params("mlp").items()}
        optimizer = mx.train.Optimizer(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01)),
            shard_state=shard,
        )

    @mx.function
    def step(x: Any, y: Any) -> None:
        gradients = mx.grad(
            lambda: mx.nn.compute_average_loss(errors_of("mlp", variables, x, y)),
            variables,
        )()
        optimizer.apply_gradients([(gradients[k], v) for k, v in variables.items()])

    checkpoint = Checkpoint(variables=variables, optimizer=optimizer)
    if folder and (Path(folder) / "c").exists():
        checkpoint.read(Path(folder) / "c")
    optimizer.build(list(variables.values()))
    batches = dataset().repeat().take(steps)
    for x, y in strategy.experimental_distribute_dataset(batches):
        strategy.run(step, (x, y))
    if folder:
        checkpoint.write(Path(folder) / "c", wait=True)
    arrays = [v.in_one_array()[0] for v in optimizer.variables]
    held = sum(a.addressable_shards[0].data.nbytes for a in arrays)
    slot = next(v for v in optimizer.variables if "mu" in v.name and v.ndim == 2)
    weights = {k: v.numpy() for k, v in variables.items()}
    return weights, held, float(np.sum(slot.numpy()))


def assert_close(found: Any, expected: Any) -> None:
    for key, value in expected[0].items():
        np.testing.assert_allclose(found[0][key], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-4, atol=1e-6)


def test_as_with_whole_copies(two_by_two: Pool) -> None:
    def both(strategy):
        return train(strategy, True), train(strategy, False)

    sharded, whole = two_by_two.run_alike(both)
    assert_close(sharded, whole)
    assert sharded[1] < 0.3 * whole[1]  # a quarter, and a bias that no axis divides


@pytest.mark.parametrize("now", [True, False], ids=["sharded", "whole"])
def test_checkpoints_go_to_any_number_of_replicas(
    two_by_one: Pool, tmp_path: Path, now: bool
) -> None:
    """Saved by two workers in parts, restored in one process, and the other way round."""
    two_by_one.run_alike(lambda s: train(s, now, str(tmp_path), 3))
    saved = load_checkpoint(tmp_path / "c")
    assert any(v.shape == (36, 8) for k, v in saved.items() if "mu" in k)
    sizes = [f.stat().st_size for f in sorted((tmp_path / "c").glob("pieces-*"))]
    if now:  # each worker has written its half, and nothing but that
        weights = initial_params("mlp").values()
        divided = sum(v.nbytes for v in weights if any(d % 2 == 0 for d in v.shape))
        assert sizes == [divided, divided]  # of two slots for each
    else:
        assert not sizes
    alone = train(mx.MirroredStrategy(["CPU:0", "CPU:1"]), not now, str(tmp_path), 2)
    found = two_by_one.run_alike(lambda s: train(s, now, str(tmp_path), 0))
    assert_close(found, alone)


def save_twice(strategy: Any, folder: str, what: str) -> tuple[str, float]:
    """What a worker hears of its second save, and a slot that is restored then."""
    with strategy.scope():
        v = mx.Variable(np.ones((8, 4), "float32"))
        optimizer = mx.train.Optimizer(optax.adam(0.1), shard_state=True)
    optimizer.build([v])
    checkpoint = Checkpoint(v=v, optimizer=optimizer)
    slot = optimizer.state[0].mu[v.name]
    path = Path(folder) / "c"
    slot.assign(np.full((8, 4), 1.0, "float32"))
    checkpoint.write(path, wait=True)
    slot.assign(np.full((8, 4), 2.0, "float32"))
    is_second = strategy.cluster_resolver.task_id == 1
    name, method = {
        "disk": ("mirrax._src.train.pieces._write", no_space),
        "unseen": ("pathlib.Path.is_dir", lambda path: ".tmp-" not in path.name),
    }[what]
    with pytest.MonkeyPatch.context() as patch:
        if is_second:
            patch.setattr(name, method)
        try:
            checkpoint.write(path, wait=True)
            heard = "saved"
        except OSError as error:
            heard = str(error)
    checkpoint.read(path)
    return heard, float(slot.numpy()[0, 0])


def no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_worker_that_cannot_write_its_part(two_by_one: Pool, tmp_path: Path) -> None:
    """The checkpoint from before stays, and both workers hear of it."""
    first, second = two_by_one.run(save_twice, str(tmp_path), "disk")
    assert "1 could not write its part of the checkpoint" in first[0]
    assert "No space left" in second[0]
    assert first[1] == second[1] == 1.0


def test_workers_without_a_common_directory(two_by_one: Pool, tmp_path: Path) -> None:
    """The parts are gathered, and the first worker writes."""
    for answer in two_by_one.run(save_twice, str(tmp_path), "unseen"):
        assert answer == ("saved", 2.0)
    assert not list((tmp_path / "c").glob("pieces-*"))


def die_while_saving(folder: str, victim: int) -> None:
    """Saves, and is killed in the middle of the next save."""
    strategy = mx.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = mx.Variable(np.ones((8, 4), "float32"))
        optimizer = mx.train.Optimizer(optax.adam(0.1), shard_state=True)
    optimizer.build([v])
    checkpoint = Checkpoint(v=v, optimizer=optimizer)
    checkpoint.write(Path(folder) / "c", wait=True)
    v.assign(np.zeros((8, 4), "float32"))
    if strategy.cluster_resolver.task_id == victim:
        pieces._write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    checkpoint.write(Path(folder) / "c", wait=True)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_is_killed_while_it_saves(victim: int, tmp_path: Path) -> None:
    """The checkpoint from before stays, whole."""
    with forked_workers(), pytest.raises(WorkerError, match="SIGKILL"):
        run_workers(
            die_while_saving,
            args=(str(tmp_path), victim),
            workers=2,
            devices=1,
            timeout=SECONDS_TO_HANG,
        )
    saved = load_checkpoint(tmp_path / "c")
    np.testing.assert_array_equal(saved["v"], np.ones((8, 4)))
    assert any(v.shape == (8, 4) for k, v in saved.items() if "/mu/" in k)
