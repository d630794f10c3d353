"""What a strategy says of itself on each worker, and how all stop at one step."""

from __future__ import annotations

import time

import jax.numpy as jnp
import pytest
from helpers.engines import all_sum, replica_id
from helpers.forked_workers import forked_workers

import mirrax as mx
from mirrax.testing import run_workers

from .comparing import Pool, own_strategy, worker_of


@pytest.mark.parametrize("name", ["two_by_two", "three_by_one"])
def test_facts(name: str, request: pytest.FixtureRequest) -> None:
    pool: Pool = request.getfixturevalue(name)

    def facts(strategy):
        resolver, extended = strategy.cluster_resolver, strategy.extended
        return {
            "replicas": strategy.num_replicas_in_sync,
            "task": (resolver.task_type, resolver.task_id),
            "workers": resolver.cluster_spec().num_tasks("worker"),
            "chief": (extended.should_checkpoint, extended.should_save_summary),
            "devices": extended.worker_devices,
            "same devices": extended.parameter_devices == extended.worker_devices,
            "between graph": extended.experimental_between_graph,
            "mesh": strategy.mesh.shape,
            "repr": repr(strategy),
            "current": mx.distribute.has_strategy(),
        }

    for k, found in enumerate(pool.run(facts)):
        names = [f"CPU:{i}" for i in range(pool.local)]
        where = f"/job:worker/replica:0/task:{k}/device:"
        assert found == {
            "replicas": pool.replicas,
            "task": ("worker", k),
            "workers": pool.workers,
            "chief": (k == 0, k == 0),
            "devices": tuple(where + name for name in names),
            "same devices": True,
            "between graph": True,
            "mesh": {"replica": pool.replicas},
            "repr": f"MultiWorkerMirroredStrategy({names})",
            "current": False,
        }


def test_values_are_made_for_the_replicas_of_the_worker(two_by_two: Pool) -> None:
    def make(strategy):
        seen = []

        def value_fn(context):
            seen.append(
                (context.replica_id_in_sync_group, context.num_replicas_in_sync)
            )
            return {"x": jnp.full(2, context.replica_id_in_sync_group)}

        value = strategy.experimental_distribute_values_from_function(value_fn)
        local = strategy.experimental_local_results(value)
        return seen, [part["x"].tolist() for part in local], value["x"]

    first, second = two_by_two.run(make)
    assert first[:2] == ([(0, 4), (1, 4)], [[0, 0], [1, 1]])
    assert second[:2] == ([(2, 4), (3, 4)], [[2, 2], [3, 3]])


def test_a_second_strategy_is_of_the_same_cluster(two_by_two: Pool) -> None:
    def make(strategy):
        other = mx.distribute.experimental.MultiWorkerMirroredStrategy()
        with other.scope():
            v = mx.Variable(1.0 + worker_of(strategy))
        mirrored = mx.MirroredStrategy()  # of this worker alone
        own = mirrored.run(replica_id)
        return (
            other.run(mx.function(lambda: all_sum(v.read_value()))),
            mirrored.num_replicas_in_sync,
            mirrored.reduce("SUM", own, axis=None),
        )

    total, local, own = two_by_two.run_alike(make)
    assert (total.parts[0], local, own) == (4.0, 2, 1)


def test_all_stop_at_one_step() -> None:
    """In processes of their own: who was told to stop does not forget it."""

    def train(asking, at):
        strategy = own_strategy()
        worker = worker_of(strategy)
        step = mx.function(lambda: all_sum(replica_id()))
        count = 0
        while not strategy.should_stop():
            strategy.run(step)
            count += 1
            if (worker, count) == (asking, at):
                strategy.request_stop("enough")
            if worker == asking:
                time.sleep(0.005)  # the others are ahead
            assert count < 5000
        return count, strategy.should_stop()

    for asking in (0, 1):
        with forked_workers():
            found = run_workers(train, workers=2, devices=1, args=(asking, 5))
        assert found[0] == found[1]
        assert found[0][0] >= 5 and found[0][1]
