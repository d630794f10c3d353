"""`dir` and completion show what users may use: TensorFlow's names and documented additions."""

from __future__ import annotations

import importlib
import inspect
import tempfile
import types
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import pytest
from reference.members import recorded
from test_package import DOORS

import mirrax as mx

OF_TENSORFLOW = recorded()["members"]


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def of_tensorflow(name: str) -> set[str]:
    return set(OF_TENSORFLOW[f"tf.{name}"])


@pytest.mark.parametrize("door", DOORS)
def test_modules_show_what_they_export(door: str) -> None:
    for name in public(module := importlib.import_module(door)):
        value = getattr(module, name)
        home = value if inspect.ismodule(value) else getattr(value, "__module__", door)
        shown = home.__name__ if isinstance(home, types.ModuleType) else home
        assert shown.startswith("mirrax"), f"{door}.{name} is {value!r}"


ADDED: dict[str, Iterable[str]] = {
    "distribute.Strategy": (
        *("axis_name", "mesh", "replicate", "request_stop", "run_steps", "should_stop"),
        *("assert_in_sync", "check_numerics", "memory"),
        # of TensorFlow 2.0
        *("experimental_make_numpy_dataset", "experimental_run_v2"),
        "experimental_distribute_datasets_from_function",
    ),
    "distribute.StrategyExtended": (
        *("call_for_each_replica", "create_variable", "read_var", "non_slot_devices"),
        "worker_devices_by_replica",
        *("broadcast_to", "experimental_between_graph", "experimental_should_init"),
        *("should_checkpoint", "should_save_summary", "update_non_slot"),
        "experimental_make_numpy_dataset",
    ),
    "distribute.ReplicaContext": (),
    "distribute.DistributedDataset": ("cardinality", "explain"),
    "distribute.DistributedIterator": ("close", "get_state", "set_state"),
    "Variable": ("distribute_strategy", "ndim", "numpy", "values"),
    "data.Dataset": (),
}


def things() -> dict[str, list[Any]]:
    """Objects as users hold them, by the class of TensorFlow that they stand for."""
    strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
    sync, aggregation = mx.VariableSynchronization.ON_READ, mx.VariableAggregation.SUM
    with strategy.scope():
        mirrored = mx.Variable(1.0)
        on_read = mx.Variable(1.0, synchronization=sync, aggregation=aggregation)
    dataset = mx.data.Dataset.range(4).batch(2)
    distributed = strategy.experimental_distribute_dataset(dataset)
    contexts: list[Any] = []
    strategy.run(lambda: contexts.append(mx.get_replica_context()))
    strategy.run(mx.function(lambda: contexts.append(mx.get_replica_context())))
    return {
        "distribute.Strategy": [
            *(strategy, mx.OneDeviceStrategy("CPU:0"), mx.distribute.get_strategy()),
            mx.distribute.MultiWorkerMirroredStrategy(),
        ],
        "distribute.StrategyExtended": [strategy.extended],
        "distribute.ReplicaContext": contexts,
        "distribute.DistributedDataset": [distributed],
        "distribute.DistributedIterator": [iter(distributed)],
        "Variable": [mx.Variable(1.0), mirrored, on_read, *mirrored.values],
        "data.Dataset": [dataset, mx.data.TextLineDataset("a")],
    }


def test_objects_show_tensorflow_s_names_and_documented_additions() -> None:
    for owner, objects in things().items():
        for thing in objects:
            extra = public(thing) - of_tensorflow(owner) - set(ADDED[owner])
            assert not extra, f"{thing!r} shows {sorted(extra)}"
            assert public(thing) & of_tensorflow(owner)


def test_other_objects_show_what_is_documented() -> None:
    strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        checkpoint = mx.train.Checkpoint(v=mx.Variable(1.0))
        optimizer = mx.train.Optimizer("sgd", learning_rate=0.1)
        mean = mx.metrics.Mean()
    values = strategy.run(lambda: jnp.ones(()))
    status = checkpoint.restore(checkpoint.save(tempfile.mkdtemp() + "/c"))
    assert public(values) == {"values"}
    assert public(mx.function(lambda: 1)) == {"input_signature", "trace_count"}
    assert public(mx.Variable(jnp.zeros(3))[0]) == {
        *("assign", "assign_add", "assign_sub")
    }
    assert public(checkpoint) == {
        *("export", "read", "restore", "save", "save_counter", "sync", "write")
    }
    assert public(status) == {
        *("assert_consumed", "assert_existing_objects_matched"),
        *("assert_nontrivial_match", "expect_partial", "missing", "unused"),
    }
    assert public(optimizer) == {
        *("apply_gradients", "build", "explain", "gradient_accumulation_steps"),
        *("init", "iterations", "learning_rate", "name", "shard_state", "state"),
        *("update", "variables"),
    }
    assert public(mean) == {
        *("add_sum", "count", "dtype", "name", "reset_state", "result", "total"),
        *("update_state", "variables"),
    }
    ops = public(mx.distribute.NcclAllReduce())
    assert ops == {
        *("batch_reduce", "batch_reduce_implementation", "broadcast"),
        *("broadcast_implementation", "num_packs", "reduce", "reduce_implementation"),
    }
