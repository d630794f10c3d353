"""Workers of a pool that train together."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import pytest

import mirrax as mx
from mirrax.testing import WorkerError, WorkerPool


def add_up(failing: int | None = None) -> float:
    strategy = mx.distribute.MultiWorkerMirroredStrategy()
    if strategy.cluster_resolver.task_id == failing:
        raise KeyError("lr")

    def replica_fn() -> float:
        context = mx.get_replica_context()
        own = jnp.float32(1 + context.replica_id_in_sync_group)
        return context.all_reduce("SUM", own)

    return float(strategy.reduce("MEAN", strategy.run(replica_fn), axis=None))


def test_they_meet_in_every_call(worker_pool: Callable[..., WorkerPool]) -> None:
    pool = worker_pool(workers=2, devices=2)
    assert pool.run(add_up) == [10.0, 10.0]
    assert pool.run(add_up) == [10.0, 10.0]


def test_the_first_failure_is_raised(worker_pool: Callable[..., WorkerPool]) -> None:
    pool = worker_pool(workers=2, devices=2)
    with pytest.raises(WorkerError, match="Worker 1 of 2 failed: KeyError: 'lr'") as e:
        pool.run(add_up, (1,))
    assert isinstance(e.value.__cause__, KeyError)
    assert pool.run(add_up) == [10.0, 10.0]
