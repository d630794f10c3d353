"""The pages of TensorFlow 2.0's `MirroredStrategy` and `MultiWorkerMirroredStrategy`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx

pytestmark = pytest.mark.filterwarnings("ignore:.*is the older name")
experimental = mx.distribute.experimental


@pytest.fixture(params=[1, 2, "workers"])
def strategy(request: Any) -> Any:
    if request.param == "workers":  # by default a single worker
        return experimental.MultiWorkerMirroredStrategy()
    devices = [f"CPU:{i}" for i in range(request.param)]
    return mx.distribute.MirroredStrategy(devices=devices)


def gathered(strategy: Any, value: Any) -> list[Any]:
    """The parts of all replicas, one after another."""
    return np.concatenate(strategy.experimental_local_results(value)).tolist()


# The constructors


@pytest.mark.parametrize(
    "communication",
    [
        experimental.CollectiveCommunication.AUTO,
        experimental.CollectiveCommunication.RING,
    ],
)
def test_the_communication_can_be_chosen(communication):
    strategy = experimental.MultiWorkerMirroredStrategy(communication=communication)
    total = strategy.reduce("SUM", strategy.run(lambda: jnp.float32(2)), axis=None)
    assert float(total) == 2 * strategy.num_replicas_in_sync


def test_nccl_needs_gpus():
    if mx.config.list_logical_devices("GPU"):
        pytest.skip("there are GPUs here")
    with pytest.raises(ValueError, match="needs GPUs"):
        experimental.MultiWorkerMirroredStrategy(
            communication=experimental.CollectiveCommunication.NCCL
        )


def test_without_devices_all_available_ones_are_used():
    available = mx.config.list_logical_devices("GPU")
    available = available or mx.config.list_logical_devices("CPU")
    strategy = mx.distribute.MirroredStrategy(devices=None)
    assert strategy.num_replicas_in_sync == len(available)


def test_cross_device_ops_can_be_chosen():
    ops = mx.distribute.ReductionToOneDevice()
    strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops)
    result = strategy.experimental_run_v2(lambda: jnp.float32(2))
    assert strategy.extended.cross_device_ops is ops
    assert float(strategy.reduce("SUM", result, axis=None)) == 4


# experimental_distribute_dataset, experimental_distribute_datasets_from_function


def test_a_distributed_dataset_is_iterated_over(strategy):
    dataset = mx.data.Dataset.range(8).batch(4)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    seen = []
    for x in dist_dataset:
        result = strategy.experimental_run_v2(lambda x: x * 2, args=(x,))
        seen.append(gathered(strategy, result))
    assert seen == [[0, 2, 4, 6], [8, 10, 12, 14]]


def test_a_distributed_dataset_takes_no_more_transformations(strategy):
    dataset = mx.data.Dataset.range(8).batch(4)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    with pytest.raises(AttributeError):
        dist_dataset.map(lambda x: x)


def test_files_are_read_as_in_the_example(strategy, tmp_path):
    paths = [str(tmp_path / f"{i}.tfr") for i in range(4)]
    for path in paths:
        with mx.io.TFRecordWriter(path) as writer:
            writer.write(path.encode())
    dataset = mx.data.TFRecordDataset(paths).map(len).batch(2)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    steps = [gathered(strategy, x) for x in dist_dataset]
    assert steps == [[len(paths[0]), len(paths[1])], [len(paths[2]), len(paths[3])]]


def test_the_example_of_a_dataset_function(strategy):
    global_batch_size = 4

    def dataset_fn(input_context: Any) -> Any:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = mx.data.Dataset.from_tensors([[1.0]]).repeat().batch(batch_size)
        return d.shard(
            input_context.num_input_pipelines, input_context.input_pipeline_id
        )

    inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    iterator = iter(inputs)
    for _ in range(2):
        replica_results = strategy.experimental_run_v2(jnp.sum, args=(next(iterator),))
        assert float(strategy.reduce("SUM", replica_results, axis=None)) == 4.0


def test_a_dataset_function_is_called_once_and_each_replica_takes_a_batch():
    strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    contexts = []

    def dataset_fn(input_context: Any) -> Any:
        contexts.append(input_context)
        return mx.data.Dataset.range(4).batch(1)

    inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    assert [gathered(strategy, x) for x in inputs] == [[0, 1], [2, 3]]
    assert len(contexts) == 1


# experimental_local_results, experimental_make_numpy_dataset


def test_local_results_of_a_run_of_a_variable_and_of_a_plain_value(strategy):
    count = strategy.num_replicas_in_sync
    value = strategy.extended.call_for_each_replica(lambda: jnp.float32(3))
    with strategy.scope():
        variable = mx.Variable(4.0)
    assert strategy.experimental_local_results(value) == (3.0,) * count
    assert strategy.experimental_local_results(variable) == (4.0,) * count
    assert strategy.experimental_local_results(5) == (5,)


def test_the_example_of_a_numpy_dataset(strategy):
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input).batch(4)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    sizes = [len(gathered(strategy, x)) for x in dist_dataset]
    assert sizes == [4, 4, 2]


# experimental_run_v2, reduce, scope


def test_run_v2_passes_arguments_and_keywords(strategy):
    def fn(x: Any, y: Any) -> Any:
        context = mx.distribute.get_replica_context()
        return context.all_reduce("SUM", x * y)

    result = strategy.experimental_run_v2(fn, (jnp.float32(2),), {"y": 3})
    total = strategy.num_replicas_in_sync * 6.0
    assert {float(x) for x in strategy.experimental_local_results(result)} == {total}


def test_reduce_over_replicas_and_over_the_batch():
    strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    batch = mx.distribute.PerReplica([jnp.arange(4), jnp.arange(4, 8)])
    losses = strategy.experimental_run_v2(lambda x: x, args=(batch,))
    op = mx.distribute.ReduceOp.SUM
    assert strategy.reduce(op, losses, axis=None).tolist() == [4, 6, 8, 10]
    assert int(strategy.reduce(op, losses, axis=0)) == sum(range(8))


def test_the_mean_of_a_partial_batch_of_six_divides_by_six():
    strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    last = mx.distribute.PerReplica([jnp.arange(4.0), jnp.arange(4.0, 6.0)])
    mean = strategy.reduce(mx.distribute.ReduceOp.MEAN, last, axis=0)
    assert float(mean) == sum(range(6)) / 6


def test_reduce_needs_an_axis_to_be_said(strategy):
    with pytest.raises(TypeError, match="axis"):
        strategy.reduce("SUM", jnp.ones(2))


def test_the_scope_mirrors_variables_and_makes_the_strategy_current(strategy):
    with strategy.scope():
        variable = mx.Variable(1.0)
        assert mx.distribute.get_strategy() is strategy
        assert mx.distribute.in_cross_replica_context()
    count = strategy.num_replicas_in_sync
    assert len(strategy.experimental_local_results(variable)) == count
