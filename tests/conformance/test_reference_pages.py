"""The examples of TensorFlow's API pages, on CPU devices, with the values they state.

Only those about strategies, variables and running; the ones that read datasets,
clusters or towers come with those parts. Comments name the page and the section.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx

pytestmark = pytest.mark.filterwarnings("ignore:.*is the older name")
CPUS = ["CPU:0", "CPU:1"]
COMPONENTS = r"(?s)MirroredVariable:\{\s+0: <.*1\.0.*>,\s+1: <.*1\.0.*>\s+\}"


@pytest.fixture
def strategy() -> Any:
    return mx.distribute.MirroredStrategy(CPUS)


def parts(value: Any) -> list[Any]:
    return [np.asarray(part).tolist() for part in value.values]


# tf.compat.v1.distribute.MirroredStrategy, the introduction


def test_a_variable_created_in_the_scope_is_a_mirrored_variable(strategy):
    with strategy.scope():
        x = mx.Variable(1.0)
    assert re.fullmatch(COMPONENTS, repr(x))


def test_a_variable_created_in_a_function_is_a_mirrored_variable(strategy):
    x = []

    @mx.function
    def create_variable():
        if not x:
            x.append(mx.Variable(1.0))
        return x[0]

    with strategy.scope():
        _ = create_variable()
    assert re.fullmatch(COMPONENTS, str(x[0]))


def test_the_number_of_replicas_is_the_number_of_devices(strategy):
    assert strategy.num_replicas_in_sync == 2


def test_without_devices_all_available_ones_are_used():
    available = mx.config.list_logical_devices("GPU")
    available = available or mx.config.list_logical_devices("CPU")
    strategy = mx.distribute.MirroredStrategy()
    assert strategy.num_replicas_in_sync == len(available)


def test_devices_may_be_spelled_with_a_slash():
    strategy = mx.distribute.MirroredStrategy(devices=["/cpu:0", "/cpu:1"])
    assert strategy.num_replicas_in_sync == 2


# ... cluster_resolver


def test_single_worker_strategies_have_no_cluster_resolver(strategy):
    assert strategy.cluster_resolver is None


# ... experimental_local_results


def test_local_results_are_a_tuple_of_the_values(strategy):
    value = strategy.run(lambda x: x * 2.0, args=(jnp.float32(3.0),))
    results = strategy.experimental_local_results(value)
    assert isinstance(results, tuple)
    assert [float(each) for each in results] == [6.0, 6.0]


def test_local_results_of_a_single_value_are_a_tuple_of_one(strategy):
    assert strategy.experimental_local_results(3.0) == (3.0,)


# ... reduce


@pytest.fixture
def replica_ids(strategy) -> Any:
    def step_fn():
        i = mx.distribute.get_replica_context().replica_id_in_sync_group
        return jnp.asarray(i)

    return strategy.run(step_fn)


def test_reduce_sums_the_replica_ids(strategy, replica_ids):
    total = strategy.reduce("SUM", replica_ids, axis=None)
    assert total.shape == ()
    assert total.dtype == np.int32
    assert int(total) == 1


def test_per_replica_results_are_on_their_devices(strategy, replica_ids):
    local = strategy.experimental_local_results(replica_ids)
    assert [part.device for part in local] == jax.devices("cpu")[:2]


@pytest.fixture
def examples(strategy) -> Any:
    def value_fn(context):
        first = 4 * context.replica_id_in_sync_group
        return jnp.arange(first, first + 4)

    return strategy.experimental_distribute_values_from_function(value_fn)


def test_reduce_without_an_axis_combines_replicas_only(strategy, examples):
    total = strategy.reduce("sum", examples, axis=None)
    assert total.tolist() == [0 + 4, 1 + 5, 2 + 6, 3 + 7]


def test_reduce_with_an_axis_combines_the_global_batch(strategy, examples):
    total = strategy.reduce("sum", examples, axis=0)
    assert int(total) == 0 + 1 + 2 + 3 + 4 + 5 + 6 + 7


@pytest.fixture
def partial_batch(strategy) -> Any:
    batch = [jnp.float32([0.0, 1.0, 2.0, 3.0]), jnp.float32([4.0, 5.0])]
    return strategy.experimental_distribute_values_from_function(
        lambda context: batch[context.replica_id_in_sync_group]
    )


def test_a_partial_batch_needs_an_axis(strategy, partial_batch):
    with pytest.raises(ValueError, match="axis"):
        strategy.reduce("SUM", partial_batch, axis=None)


def test_the_mean_of_a_partial_batch_divides_by_six(strategy, partial_batch):
    mean = strategy.reduce(mx.distribute.ReduceOp.MEAN, partial_batch, axis=0)
    assert float(mean) == 15 / 6


# ... run


def test_run_with_a_constant_input(strategy):
    tensor_input = jnp.float32(3.0)

    @mx.function
    def replica_fn(input):
        return input * 2.0

    result = strategy.run(replica_fn, args=(tensor_input,))
    assert parts(result) == [6.0, 6.0]


def test_run_with_distributed_values(strategy):
    @mx.function
    def run():
        def value_fn(value_context):
            return value_context.num_replicas_in_sync

        distributed_values = strategy.experimental_distribute_values_from_function(
            value_fn
        )

        def replica_fn2(input):
            return input * 2

        return strategy.run(replica_fn2, args=(distributed_values,))

    result = run()
    assert int(result) == 4


def test_run_with_an_all_reduce(strategy):
    @mx.function
    def run():
        def value_fn(value_context):
            return jnp.asarray(value_context.replica_id_in_sync_group)

        distributed_values = strategy.experimental_distribute_values_from_function(
            value_fn
        )

        def replica_fn(input):
            return mx.distribute.get_replica_context().all_reduce("sum", input)

        return strategy.run(replica_fn, args=(distributed_values,))

    assert parts(run()) == [1, 1]


# ... scope


def test_variables_inside_and_outside_of_the_scope(strategy):
    with strategy.scope():
        mirrored_variable = mx.Variable(1.0)
    assert re.fullmatch(COMPONENTS, repr(mirrored_variable))
    regular_variable = mx.Variable(1.0)
    assert "MirroredVariable" not in repr(regular_variable)
    assert "1.0" in repr(regular_variable)


def test_the_scope_makes_the_strategy_current(strategy):
    default = mx.distribute.get_strategy()
    with strategy.scope():
        assert mx.distribute.get_strategy() is strategy
        assert mx.distribute.in_cross_replica_context()
    assert mx.distribute.get_strategy() is default


def test_a_variable_is_read_and_written_outside_of_its_scope(strategy):
    with strategy.scope():
        variable = mx.Variable(1.0)
    variable.assign_add(2.0)
    assert float(variable.read_value()) == 3.0
    assert parts(variable) == [3.0, 3.0]


# tf.distribute.MirroredStrategy and MultiWorkerMirroredStrategy of TensorFlow 2.0


def test_experimental_run_v2_runs_the_function_on_each_replica(strategy):
    result = strategy.experimental_run_v2(lambda x: x + 1, args=(jnp.int32(1),))
    assert parts(result) == [2, 2]


def test_experimental_run_v2_takes_per_replica_values(strategy, examples):
    result = strategy.experimental_run_v2(lambda x: x * 2, kwargs={"x": examples})
    assert parts(result) == [[0, 2, 4, 6], [8, 10, 12, 14]]


def test_the_extended_methods_are_an_attribute(strategy):
    assert strategy.extended is not None
