"""The page of `tf.contrib.distribute.MirroredStrategy` (1.11), member by member."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx
from mirrax.testing import run_workers

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is the older name", "ignore:.*in mirrax; leave it out"
)
SUM = mx.VariableAggregation.SUM
MEAN = mx.VariableAggregation.MEAN
ONLY_FIRST_TOWER = mx.VariableAggregation.ONLY_FIRST_TOWER
DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in (0, 1)]


def towers(count: int = 2, **arguments: Any) -> Any:
    devices = [f"CPU:{i}" for i in range(count)]
    return mx.contrib.distribute.MirroredStrategy(devices=devices, **arguments)


@pytest.fixture
def distribution() -> Any:
    return towers()


def ids(distribution: Any) -> Any:
    """0.0 in the first tower, 1.0 in the second one."""
    return distribution.call_for_each_tower(
        jnp.float32, distribution.worker_device_index
    )


def numbers(distribution: Any, value: Any) -> list[Any]:
    return [np.asarray(part).tolist() for part in distribution.unwrap(value)]


# The class and its arguments


def test_the_base_is_distribution_strategy(distribution):
    base = mx.contrib.distribute.DistributionStrategy
    assert isinstance(distribution, base)
    assert isinstance(mx.contrib.distribute.OneDeviceStrategy("CPU:0"), base)


def test_a_number_of_gpus_stands_for_devices():
    make = mx.contrib.distribute.MirroredStrategy
    for distribution in (make(num_gpus=0), make(num_gpus_per_worker=0)):
        assert distribution.worker_devices == DEVICES[:1]


def test_only_one_of_the_numbers_of_gpus_can_be_given():
    with pytest.raises(ValueError, match="give one of them"):
        mx.contrib.distribute.MirroredStrategy(num_gpus=1, num_gpus_per_worker=1)


def test_either_devices_or_a_number_of_gpus_is_given():
    with pytest.raises(ValueError, match="`devices` or `num_gpus`"):
        towers(num_gpus=1)


def test_values_are_reduced_by_the_cross_tower_ops_that_were_given():
    asked = []

    class Ops(mx.contrib.distribute.CrossTowerOps):
        def _reduce(
            self, aggregation: Any, per_device_value: Any, destinations: Any
        ) -> Any:
            asked.append(aggregation)
            known = mx.contrib.distribute.AllReduceCrossTowerOps()
            return known.reduce(aggregation, per_device_value, destinations)

    distribution = towers(cross_tower_ops=Ops())
    with distribution.scope():
        value = ids(distribution)
        total = distribution.reduce(SUM, value, destinations=value)
    assert numbers(distribution, total) == [1.0, 1.0]
    assert asked == [SUM]


@pytest.mark.parametrize("prefetch", [None, True, False])
def test_data_is_the_same_with_and_without_prefetching(prefetch):
    distribution = towers(prefetch_on_device=prefetch)
    dataset = distribution.distribute_dataset(lambda: mx.data.Dataset.range(4).batch(1))
    assert [numbers(distribution, x) for x in dataset] == [[[0], [1]], [[2], [3]]]


# Properties


@pytest.mark.parametrize("count", [1, 2])
def test_towers_are_counted(count):
    distribution = towers(count)
    assert distribution.num_towers == count
    assert distribution.is_single_tower == (count == 1)
    assert distribution.worker_devices == DEVICES[:count]
    assert distribution.parameter_devices == DEVICES[:count]


def test_one_worker_does_everything(distribution):
    assert distribution.should_checkpoint
    assert distribution.should_init
    assert distribution.should_save_summary
    assert not distribution.between_graph


def test_the_worker_device_index_tells_a_tower_its_device(distribution):
    seen = []

    def fn(device_id: int) -> None:
        tower = mx.contrib.get_tower_context()
        assert tower is not None
        name = distribution.worker_devices[device_id]
        seen.append((device_id, name == tower.device))

    with distribution.scope():
        distribution.call_for_each_tower(fn, distribution.worker_device_index)
    assert seen == [(0, True), (1, True)]


def test_the_worker_device_index_of_a_single_tower_is_zero():
    assert towers(1).worker_device_index == 0


# batch_reduce, broadcast, reduce


@pytest.mark.parametrize(
    ("aggregation", "expected"), [(SUM, 1.0), (MEAN, 0.5), (ONLY_FIRST_TOWER, 0.0)]
)
def test_reduce_combines_the_towers_on_all_destinations(
    distribution, aggregation, expected
):
    with distribution.scope():
        variable = mx.Variable(0.0)
        value = ids(distribution)
        for destinations in (value, variable, ["CPU:0", "CPU:1"]):
            mirrored = distribution.reduce(aggregation, value, destinations)
            assert numbers(distribution, mirrored) == [expected, expected]
        one = distribution.reduce(aggregation, value, "CPU:1")
        assert numbers(distribution, one) == [expected]


def test_batch_reduce_gives_one_mirrored_value_for_each_pair(distribution):
    with distribution.scope():
        first = ids(distribution)
        second = distribution.call_for_each_tower(lambda x: x + 10, first)
        results = distribution.batch_reduce(SUM, [(first, first), (second, first)])
    assert [numbers(distribution, each) for each in results] == [[1, 1], [21, 21]]


def test_broadcast_copies_to_all_towers_or_to_destinations(distribution):
    with distribution.scope():
        everywhere = distribution.broadcast(jnp.arange(2))
        assert numbers(distribution, everywhere) == [[0, 1], [0, 1]]
        there = distribution.broadcast(jnp.arange(2), destinations=["CPU:1"])
        (part,) = distribution.unwrap(there)
        assert part.devices() == {jax.devices("cpu")[1]}


# call_for_each_tower


@pytest.mark.parametrize("compile_fn", [lambda fn: fn, mx.function])
@pytest.mark.parametrize("keywords", [{}, {"run_concurrently": False}])
def test_the_example_of_merge_call(distribution, compile_fn, keywords):
    def merge_fn(strategy: Any, three_plus_tower_id: Any) -> Any:
        assert strategy is distribution
        return sum(strategy.unwrap(three_plus_tower_id))

    def fn(three: Any) -> Any:
        tower_ctx: Any = mx.contrib.get_tower_context()
        v = three + tower_ctx.tower_id
        s = tower_ctx.merge_call(merge_fn, v)
        return s + v

    with distribution.scope():
        merged_results = distribution.call_for_each_tower(compile_fn(fn), 3, **keywords)
        assert numbers(distribution, merged_results) == [10, 11]


def test_arguments_and_keywords_reach_the_tower(distribution):
    with distribution.scope():
        result = distribution.call_for_each_tower(
            lambda a, b, c: a + b + c, ids(distribution), 10, c=100
        )
    assert numbers(distribution, result) == [110, 111]


# Variables: colocate_vars_with, read_var, update, update_non_slot, value_container


def test_the_example_of_colocate_vars_with(distribution):
    with distribution.scope():
        var1 = mx.Variable(1.0)
        with distribution.colocate_vars_with(var1):
            var2 = mx.Variable(2.0)
            var3 = mx.Variable(3.0)

        def fn(v1: Any, v2: Any, v3: Any) -> Any:
            return v1.assign_add(v2 + v3)

        distribution.update(var1, fn, var2, var3)
    assert numbers(distribution, var1) == [6.0, 6.0]


def test_update_runs_on_every_device_with_mirrored_arguments(distribution):
    with distribution.scope():
        variable = mx.Variable(1.0)
        value = ids(distribution)
        total = distribution.reduce(SUM, value, destinations=variable)
        distribution.update(variable, lambda v, x, y: v.assign(x + y), total, y=4.0)
        assert numbers(distribution, variable) == [5.0, 5.0]
        with pytest.raises(TypeError, match="Reduce it first"):
            distribution.update(variable, lambda v, x: v.assign(x), value)


def test_update_non_slot_runs_on_the_devices_of_non_slot_devices(distribution):
    with distribution.scope():
        variable = mx.Variable(1.0)
        devices = distribution.non_slot_devices([variable])
        result = distribution.update_non_slot(
            devices, lambda x, y: jnp.float32(x * y), 3, y=2
        )
    assert devices == distribution.worker_devices
    assert numbers(distribution, result) == [6.0] * len(distribution.unwrap(result))


def test_read_var_gives_the_aggregate_of_a_tower_local_variable(distribution):
    with distribution.scope():
        local = mx.Variable(
            0.0, synchronization=mx.VariableSynchronization.ON_READ, aggregation=SUM
        )
        distribution.call_for_each_tower(
            lambda x: local.assign_add(x + 1), ids(distribution)
        )
        assert float(distribution.read_var(local)) == 3.0


def test_value_container_finds_the_variable_of_a_copy(distribution):
    with distribution.scope():
        variable = mx.Variable(1.0)
    for copy in distribution.unwrap(variable):
        assert distribution.value_container(copy) is variable
    assert distribution.value_container(3) == 3


# configure, initialize, finalize


def test_configure_sets_what_a_session_would_need(distribution):
    config = mx.compat.v1.ConfigProto()
    assert distribution.configure(session_config=config) is None
    assert config.isolate_session_state


@pytest.mark.slow
def test_a_cluster_makes_a_tower_on_each_device_of_all_workers():
    def program() -> Any:
        import json
        import os
        import warnings

        import jax.numpy as jnp

        import mirrax as mx

        warnings.simplefilter("ignore", DeprecationWarning)
        found = json.loads(os.environ.pop("TF_CONFIG"))
        task = found["task"]
        distribution = mx.contrib.distribute.MirroredStrategy(num_gpus=0)
        distribution.configure(
            cluster_spec=found["cluster"], task_type=task["type"], task_id=task["index"]
        )
        with distribution.scope():
            variable = mx.Variable(1.0, aggregation=mx.VariableAggregation.SUM)

            def fn() -> Any:
                tower_ctx: Any = mx.contrib.get_tower_context()
                return variable.assign_add(jnp.float32(tower_ctx.tower_id))

            distribution.call_for_each_tower(fn)
        return (
            distribution.num_towers,
            float(variable.numpy()),
            distribution.should_checkpoint,
        )

    results = run_workers(program, workers=2, devices=2)
    assert results == [(4, 7.0, True), (4, 7.0, False)]


def test_nothing_is_to_be_done_before_and_after(distribution):
    assert distribution.initialize() is None
    assert distribution.finalize() is None


# distribute_dataset, run_steps_on_dataset


def test_an_element_goes_to_each_tower_in_turn(distribution):
    dataset = distribution.distribute_dataset(lambda: mx.data.Dataset.range(5).batch(1))
    iterator = dataset.make_one_shot_iterator()
    assert numbers(distribution, iterator.get_next()) == [[0], [1]]
    assert numbers(distribution, iterator.get_next()) == [[2], [3]]
    with pytest.raises(mx.errors.OutOfRangeError):
        iterator.get_next()


def pairs() -> mx.data.Dataset:
    x = np.arange(12, dtype=np.float32)
    return mx.data.Dataset.from_tensor_slices((x, -x)).repeat().batch(2)


def test_steps_run_on_a_dataset(distribution):
    def fn(context: Any, x: Any, y: Any) -> Any:
        sums = distribution.call_for_each_tower(lambda a, b: jnp.sum(a - b), x, y)
        context.set_last_step_output("total", sums, aggregation=SUM)
        context.set_last_step_output("each", sums)
        context.set_non_tensor_output("what", "a sum")
        return distribution.group(sums)

    with distribution.scope():
        iterator = distribution.distribute_dataset(pairs).make_one_shot_iterator()
        context = distribution.run_steps_on_dataset(fn, iterator, iterations=2)
        outputs = context.last_step_outputs
        assert float(outputs["total"]) == 2 * (4 + 5 + 6 + 7)
        assert numbers(distribution, outputs["each"]) == [18.0, 26.0]
        assert context.non_tensor_outputs == {"what": "a sum"}
        context.run_op()  # two more: the last one begins anew
        outputs = context.last_step_outputs
        assert numbers(distribution, outputs["each"]) == [2.0, 10.0]


def test_a_single_value_is_passed_as_it_is(distribution):
    def fn(context: Any, x: Any) -> None:
        def tower_fn(x: Any) -> None:
            context.set_last_step_output("mean", jnp.sum(x), aggregation=MEAN)

        distribution.call_for_each_tower(tower_fn, x)

    with distribution.scope():
        dataset = distribution.distribute_dataset(
            lambda: mx.data.Dataset.range(4).batch(2)
        )
        context = distribution.run_steps_on_dataset(
            fn,
            dataset.make_one_shot_iterator(),
            initial_loop_values={"mean": jnp.float32(0)},
        )
    assert float(context.last_step_outputs["mean"]) == (1 + 5) / 2


# group, map, scope, unwrap


def test_group_waits_for_nothing_and_gives_a_single_value(distribution):
    with distribution.scope():
        assert distribution.group(ids(distribution)) is None
        assert distribution.group(3) == 3


def test_map_spreads_over_the_towers_and_reduce_brings_together(distribution):
    with distribution.scope():
        mapped = distribution.map(range(10), lambda x, y: jnp.int32(x * y), 2)
        total = distribution.reduce(SUM, mapped, "CPU:0")
    assert int(total) == 90


def test_the_scope_makes_the_strategy_current(distribution):
    contrib = mx.contrib.distribute
    with distribution.scope():
        assert contrib.get_distribution_strategy() is distribution
        assert contrib.get_cross_tower_context() is distribution
        assert contrib.get_tower_context() is None
    assert not contrib.has_distribution_strategy()


def test_unwrap_gives_a_list(distribution):
    with distribution.scope():
        assert distribution.unwrap(ids(distribution)) == [0.0, 1.0]
        variable = mx.Variable(2.0)
        assert [float(copy) for copy in distribution.unwrap(variable)] == [2.0, 2.0]
    assert distribution.unwrap(5) == [5]
