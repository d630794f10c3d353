"""The page of `tf.compat.v1.distribute.MirroredStrategy` (2.4), member by member.

Its examples about variables, running and reducing are in
tests/conformance/test_reference_pages.py, for the main strategy.
"""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is the older name", "ignore:.*in mirrax; leave it out"
)
v1 = mx.compat.v1.distribute


@pytest.fixture
def strategy() -> Any:
    return v1.MirroredStrategy(devices=["CPU:0", "CPU:1"])


def parts(strategy: Any, value: Any) -> list[Any]:
    local = strategy.experimental_local_results(value)
    return [np.asarray(part).tolist() for part in local]


# The class, its arguments and attributes


def test_it_is_a_strategy_of_both_generations(strategy):
    assert isinstance(strategy, v1.Strategy)
    assert isinstance(strategy, mx.distribute.MirroredStrategy)
    assert strategy.num_replicas_in_sync == 2
    assert isinstance(strategy.extended, v1.StrategyExtended)


def test_the_main_strategies_have_no_names_of_tensorflow_1():
    main = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for name in ("experimental_run", "make_dataset_iterator", "make_input_fn_iterator"):
        assert hasattr(v1.Strategy, name)
        with pytest.raises(AttributeError, match=name):
            getattr(main, name)
    name = "experimental_run_steps_on_iterator"
    assert hasattr(v1.StrategyExtended, name)
    with pytest.raises(AttributeError, match=name):
        getattr(main.extended, name)


@pytest.mark.parametrize(
    ("of_v1", "main", "args"),
    [
        (v1.MirroredStrategy, mx.distribute.MirroredStrategy, [["CPU:0"]]),
        (v1.OneDeviceStrategy, mx.distribute.OneDeviceStrategy, ["CPU:0"]),
        (
            v1.experimental.MultiWorkerMirroredStrategy,
            mx.distribute.experimental.MultiWorkerMirroredStrategy,
            [],
        ),
    ],
)
def test_the_loop_comes_on_top_of_what_extended_has(of_v1, main, args):
    strategy, plain = of_v1(*args), main(*args)
    assert isinstance(strategy.extended, v1.StrategyExtended)
    assert isinstance(strategy.extended, type(plain.extended))
    assert not isinstance(plain.extended, v1.StrategyExtended)
    assert strategy.extended is strategy.extended


def test_cross_device_ops_can_be_chosen():
    ops = v1.HierarchicalCopyAllReduce()
    strategy = v1.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops)
    assert strategy.extended.cross_device_ops is ops


def test_one_worker_has_no_cluster_resolver(strategy):
    assert strategy.cluster_resolver is None


def test_the_task_of_tf_config_is_known_to_its_resolver(monkeypatch):
    cluster = {
        "worker": ["localhost:12345", "localhost:23456"],
        "ps": ["localhost:34567"],
    }
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    cluster_resolver = v1.cluster_resolver.TFConfigClusterResolver()
    assert cluster_resolver.task_type == "worker"


# Datasets


def test_the_example_of_an_epoch(strategy):
    dataset = mx.data.Dataset.range(8).batch(4)
    with strategy.scope():

        @mx.function
        def distribute_train_epoch(dataset: Any) -> Any:
            def replica_fn(input: Any) -> Any:
                return jnp.sum(input)

            total_result = 0
            for x in dataset:
                per_replica_result = strategy.run(replica_fn, args=(x,))
                total_result += strategy.reduce(
                    mx.distribute.ReduceOp.SUM, per_replica_result, axis=None
                )
            return total_result

        dist_dataset = strategy.experimental_distribute_dataset(dataset)
        for _ in range(2):
            assert int(distribute_train_epoch(dist_dataset)) == sum(range(8))


def test_the_example_of_a_distributed_dataset(strategy):
    global_batch_size = 2
    dataset = mx.data.Dataset.range(4).batch(global_batch_size)
    dist_dataset = strategy.experimental_distribute_dataset(dataset, options=None)

    @mx.function
    def replica_fn(input: Any) -> Any:
        return input * 2

    result = [strategy.run(replica_fn, args=(x,)) for x in dist_dataset]
    assert [parts(strategy, each) for each in result] == [[[0], [2]], [[4], [6]]]


def test_datasets_of_a_function_are_neither_batched_nor_sharded(strategy):
    dataset = strategy.distribute_datasets_from_function(
        lambda input_context: mx.data.Dataset.range(4).batch(1),
        options=mx.distribute.InputOptions(),
    )
    assert [parts(strategy, x) for x in dataset] == [[[0], [1]], [[2], [3]]]
    specs = dataset.element_spec.values
    assert [spec.shape for spec in specs] == [(None,), (None,)]


def test_sharding_can_be_turned_off(strategy):
    options = mx.data.Options()
    policy = mx.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy
    dataset = mx.data.Dataset.range(4).batch(2).with_options(options)
    plan = strategy.experimental_distribute_dataset(dataset).explain()
    assert "OFF" in plan


def test_a_numpy_dataset_has_the_rows_and_no_session(strategy):
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input, session=None)
    assert len(list(dataset)) == 10
    stacked = strategy.experimental_make_numpy_dataset([np.zeros(2), np.ones(2)])
    assert [row.tolist() for row in stacked] == [[0.0, 0.0], [1.0, 1.0]]


# Iterators


def test_each_replica_takes_its_part_of_the_next_batch(strategy):
    iterator = strategy.make_dataset_iterator(mx.data.Dataset.range(8).batch(4))
    iterator.initialize()

    def fn(x: Any) -> Any:
        context = mx.distribute.get_replica_context()
        return x + 10 * context.replica_id_in_sync_group

    result = strategy.experimental_run(fn, iterator)
    assert parts(strategy, result) == [[0, 1], [12, 13]]
    assert parts(strategy, iterator.get_next()) == [[4, 5], [6, 7]]
    with pytest.raises(mx.errors.OutOfRangeError):
        strategy.experimental_run(fn, iterator)
    iterator.initialize()
    assert parts(strategy, iterator.get_next()) == [[0, 1], [2, 3]]


def test_a_run_needs_no_iterator(strategy):
    result = strategy.experimental_run(lambda: jnp.float32(1), input_iterator=None)
    assert parts(strategy, result) == [1.0, 1.0]


def test_the_example_of_an_input_function(strategy):
    global_batch_size = 4
    mode = v1.InputReplicationMode.PER_WORKER

    def input_fn(input_context: Any) -> Any:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = mx.data.Dataset.from_tensors([[1.0]]).repeat().batch(batch_size)
        return d.shard(
            input_context.num_input_pipelines, input_context.input_pipeline_id
        )

    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(input_fn, replication_mode=mode)
        iterator.initialize()
        replica_results = strategy.experimental_run(jnp.sum, iterator)
        assert parts(strategy, replica_results) == [2.0, 2.0]
        more = strategy.extended.call_for_each_replica(
            jnp.shape, args=(iterator.get_next(),)
        )
    assert more == (2, 1, 1)


# Running, reducing, values


def test_reduce_takes_no_axis_one_or_none(strategy):
    def value_fn(value_context: Any) -> Any:
        first = value_context.replica_id_in_sync_group
        return jnp.arange(first, first + value_context.num_replicas_in_sync)

    value = strategy.experimental_distribute_values_from_function(value_fn)
    assert strategy.reduce("sum", value).tolist() == [1, 3]
    assert strategy.reduce("sum", value, axis=None).tolist() == [1, 3]
    assert int(strategy.reduce("sum", value, axis=0)) == 4


def test_run_takes_options(strategy):
    options = v1.RunOptions()
    result = strategy.run(lambda x, y: x + y, (1,), {"y": 2}, options)
    assert set(parts(strategy, result)) == {3}


def test_a_config_is_copied_and_changed(strategy):
    config = mx.compat.v1.ConfigProto(allow_soft_placement=True)
    updated = strategy.update_config_proto(config_proto=config)
    assert updated is not config
    assert updated.allow_soft_placement and updated.isolate_session_state
    assert not config.isolate_session_state
