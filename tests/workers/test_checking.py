"""Drift and NaN on another worker are named on all; weights are exported by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from helpers.engines import per_replica

import mirrax as mx

from .comparing import Pool


def message_of(fn, *args):
    try:
        fn(*args)
    except (AssertionError, FloatingPointError, OSError) as error:
        return str(error)


def look(strategy):
    """Messages: all is well; one copy of worker 1 is damaged; a part of it is NaN."""
    with strategy.scope():
        w = mx.Variable(np.ones(3, "f4"), name="w")
    worker = strategy.cluster_resolver.task_id
    well = message_of(strategy.assert_in_sync, w)
    copies = [shard.data for shard in w.stored.addressable_shards]
    if worker == 1:
        copies[0] = jax.device_put(np.array([1, 1, 2], "f4"), copies[0].device)
    w.stored = jax.make_array_from_single_device_arrays(
        w.shape, w.stored.sharding, copies
    )
    drifted = message_of(strategy.assert_in_sync, {"w": w})
    x = per_replica(strategy, *[1.0, 1.0, -1.0, 1.0])
    logs = strategy.run(mx.function(jnp.log), (x,))
    return well, drifted, message_of(strategy.check_numerics, {"log": logs}, 7)


def test_drift_and_nan_of_another_worker(two_by_two: Pool) -> None:
    two = two_by_two.run(look)
    assert two[0] == two[1]
    well, drifted, nan = two[0]
    assert well is None
    assert (
        "variable 'w' at ['w'] (float32[3]): replica 2 (CPU:0 of worker 1) differs from "
        "the other 3\n" in drifted
    )
    assert nan == (
        "Found NaN or infinite values at step 7:\n"
        "  ['log'] (float32[]): 1 NaN on replica 2 (CPU:0 of worker 1)"
    )


def export(strategy, path):
    with strategy.scope():
        w, mean = mx.Variable(np.arange(3.0), name="w"), mx.metrics.Mean()
    strategy.run(lambda: mean.update_state([1.0, 3.0]))
    checkpoint = mx.train.Checkpoint(w=w, mean=mean)
    checkpoint.export(path, "orbax")
    return message_of(checkpoint.export, path, "orbax")


def test_the_first_worker_exports(two_by_one: Pool, tmp_path) -> None:
    path = str(tmp_path / "weights")
    first, second = two_by_one.run(export, path)
    assert "nothing has been exported" in first
    assert second.endswith(first) and second.startswith("worker 0 could not export")
    found = ocp.StandardCheckpointer().restore(path)
    assert np.asarray(found["w"]).tolist() == [0, 1, 2]
    assert np.asarray(found["mean"]["total"]).sum() == 8
