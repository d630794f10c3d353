"""Towers and loops of steps on two real workers: as in one process with as many towers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cluster.workers import start
from helpers.waiting import SECONDS_TO_HANG
from workers.comparing import Pool, error_of, worker_of

import mirrax as mx
from mirrax.testing import WorkerPool
from mirrax.testing import worker_pool as worker_pool

from .towers import MEAN, ON_READ, ONLY_FIRST_TOWER, SUM, older_names, tower, tower_id

pytestmark = [older_names, pytest.mark.slow]

Pools = Callable[..., WorkerPool]


@pytest.fixture
def two_by_one(worker_pool: Pools) -> Pool:
    """Two workers of one replica each."""
    return Pool(worker_pool(2, 1))


@pytest.fixture
def two_by_two(worker_pool: Pools) -> Pool:
    """Two workers of two replicas each."""
    return Pool(worker_pool(2, 2))


def batches(strategy: Any, rows: Any, batch: int) -> Any:
    dataset = mx.data.Dataset.from_tensor_slices(rows).batch(batch)
    return iter(strategy.experimental_distribute_dataset(dataset))


# run_steps ------------------------------------------------------------------------------


def test_steps_give_the_same_as_in_one_process(two_by_one: Pool) -> None:
    def run(strategy):
        with strategy.scope():
            w = mx.Variable(np.ones(3, "float32") * (1 + worker_of(strategy)))
            local = mx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
            optimizer = mx.train.Optimizer(optax.sgd(0.1, momentum=0.9))
        rows = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
        iterator = batches(strategy, rows, 4)

        def step(x):
            loss, gradient = mx.value_and_grad(lambda: jnp.sum((x @ w - 1) ** 2), w)()
            optimizer.apply_gradients([(gradient, w)])
            local.assign_add(loss)
            total = mx.get_replica_context().all_reduce("SUM", loss)
            return {"own": loss, "total": total, "rows": x}

        first = strategy.run_steps(step, iterator, 3)
        second = strategy.run_steps(step, iterator, 3)
        return first, second, w, local.numpy(), optimizer.iterations.numpy()

    two_by_one.assert_as_one(run, rtol=1e-5)


def test_uneven_steps_and_the_end_of_data(two_by_two: Pool) -> None:
    def run(strategy):
        with strategy.scope():
            v = mx.Variable(0.0, aggregation=SUM)
        iterator = batches(strategy, np.arange(29.0, dtype="float32"), 8)

        def step(x):
            v.assign_add(jnp.sum(x))
            return jnp.sum(x)

        found = [strategy.run_steps(step, iterator, 2) for _ in range(2)]
        ended = error_of(lambda: strategy.run_steps(step, iterator, 2))
        # Which rows a replica gets depends on the workers; the sums do not.
        return strategy.reduce("SUM", found, axis=None), v.numpy(), ended[0]

    sums, total, ended = two_by_two.assert_as_one(run)
    assert np.concatenate(sums).tolist() == [28, 92, 156, 24 + 25 + 26 + 27 + 28]
    assert total == 29 * 28 / 2
    assert ended == "OutOfRangeError"


@pytest.mark.parametrize(
    "sizes", [([2, 2, 2, 2], [2, 1, 2, 2]), ([2, 2, 2, 2], [2, 2])]
)
def test_batches_that_are_uneven_on_one_worker_only(
    two_by_one: Pool, sizes: tuple[list[int], list[int]]
) -> None:
    def run(strategy):
        def dataset_fn(context):
            own = sizes[context.input_pipeline_id]
            return mx.data.Dataset.from_generator(
                lambda: (np.ones(size, "float32") for size in own),
                output_signature=mx.TensorSpec((None,), np.float32),
            )

        def step(x):
            return mx.get_replica_context().all_reduce("SUM", jnp.sum(x))

        iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))
        found = [strategy.run_steps(step, iterator, 2) for _ in range(2)]
        return [np.asarray(x) for r in found for x in strategy.gather(r, 0)[:2]]

    first, second = sizes
    second = second + [0] * (len(first) - len(second))
    sums = two_by_one.run_alike(run)
    assert [float(x) for x in sums] == [a + b for a, b in zip(first, second)]


def test_a_step_that_fails_on_all_workers(two_by_one: Pool) -> None:
    def run(strategy):
        def broken(x):
            raise ZeroDivisionError("in the step")

        iterator = batches(strategy, np.arange(16.0, dtype="float32"), 4)
        error = error_of(lambda: strategy.run_steps(broken, iterator, 2))
        return error[0], strategy.run_steps(jnp.sum, iterator, 2)

    assert two_by_one.assert_as_one(run)[0] == "ZeroDivisionError"


STEPS = """
strategy = join(step_timeout=100)
with strategy.scope():
    v = mx.Variable(0.0)
dataset = mx.data.Dataset.from_tensor_slices(np.ones(400, "float32")).batch(4)
iterator = iter(strategy.experimental_distribute_dataset(dataset))

def fn(x):
    return v.assign_add(all_sum(jnp.sum(x))).read_value()

try:
    {body}
except mx.errors.UnavailableError as error:
    say("stopped:", error)
"""


def test_workers_that_take_different_numbers_of_steps() -> None:
    script = STEPS.format(body="strategy.run_steps(fn, iterator, 2 + me); float(v)")
    with start(script, workers=2) as workers:
        workers.expect_end(0, 0, within=SECONDS_TO_HANG)
        assert "stopped: Worker 0 " in workers[1].output
        assert "All workers have to take the same steps" in workers[1].output


def test_a_worker_that_ends_between_loops_is_named() -> None:
    body = """
    for k in range(20):
        strategy.run_steps(fn, iterator, 2)
        if float(v) == 24.0 and me == 1:
            os._exit(3)
    """
    with start(STEPS.format(body=body.strip()), workers=2) as workers:
        workers.expect_end(0, 3, within=SECONDS_TO_HANG)
        assert "stopped: Worker 1 " in workers[0].output


# Towers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_towers_of_all_workers(two_by_two: Pool, engine: str) -> None:
    def run(strategy):
        distribution = mx.contrib.distribute.DistributionStrategy(strategy)
        with distribution.scope():
            v = mx.Variable(0.0, aggregation=MEAN)
            local = mx.Variable(1.0, synchronization=ON_READ, aggregation=SUM)

            def fn(three):
                own = three + tower_id() + jnp.float32(0)
                v.assign_add(own)
                local.assign_add(own)
                merged = tower().merge_call(lambda d, x: d.reduce(SUM, x, x), own)
                return own, merged

            own, merged = distribution.call_for_each_tower(
                mx.function(fn) if engine == "compiled" else fn, 3
            )
            reduced = [
                distribution.reduce(a, own, distribution.worker_devices)
                for a in (SUM, MEAN, ONLY_FIRST_TOWER)
            ]
            distribution.update(v, lambda v, x: v.assign_add(x), reduced[0])
        return (
            distribution.num_towers,
            own,
            merged,
            [float(distribution.unwrap(x)[0]) for x in reduced],
            v,
            distribution.read_var(local),
        )

    found = two_by_two.assert_as_one(run)
    assert found[0] == 4
    assert [float(x) for x in found[1].parts] == [3, 4, 5, 6]
    assert found[3] == [18.0, 4.5, 3.0]
    assert found[5] == 22.0


def test_the_index_counts_the_devices_of_a_worker(two_by_two: Pool) -> None:
    def run(strategy):
        distribution = mx.contrib.distribute.DistributionStrategy(strategy)
        index = distribution.worker_device_index
        devices = distribution.worker_devices
        found = distribution.call_for_each_tower(lambda i: 1 * i, index)
        ids = [int(x) for x in distribution.unwrap(found)]
        return ids, len(devices), distribution.is_single_tower

    for found in two_by_two.run(run):
        assert found == ([0, 1], 2, False)


def test_a_loop_with_outputs(two_by_one: Pool) -> None:
    def run(strategy):
        distribution = mx.contrib.distribute.DistributionStrategy(strategy)
        with distribution.scope():
            v = mx.Variable(0.0, aggregation=SUM)

        def tower_fn(context, x):
            context.set_last_step_output("tower", x, aggregation=SUM)
            context.set_last_step_output("first", x, aggregation=ONLY_FIRST_TOWER)
            context.set_non_tensor_output("foo", "bar")
            return v.assign_add(x).read_value()

        def step_fn(context, x):
            y = distribution.call_for_each_tower(tower_fn, context, x)
            context.set_last_step_output("cross", y, aggregation=MEAN)
            context.set_last_step_output("none", x)

        # Each tower's own numbers, in one process as well as on two workers.
        iterator = (
            strategy.experimental_distribute_values_from_function(
                lambda ctx, k=k: jnp.float32(10 * k + ctx.replica_id_in_sync_group)
            )
            for k in range(8)
        )
        context = distribution.run_steps_on_dataset(step_fn, iterator, 3)
        before = dict(context.last_step_outputs)
        context.run_op()
        return before, context.last_step_outputs, context.non_tensor_outputs, v

    before, after, others, _ = two_by_one.assert_as_one(run)
    assert before["tower"] == 41.0 and before["first"] == 20.0
    assert after["tower"] == 101.0 and after["cross"] == 306.0
    assert others == {"foo": ["bar"]}


# configure ------------------------------------------------------------------------------

CONFIGURED = """
import json, warnings
warnings.simplefilter("ignore", DeprecationWarning)
addresses = json.loads(os.environ.pop("TF_CONFIG"))["cluster"]["worker"]
contrib = mx.contrib.distribute
distribution = contrib.MirroredStrategy({arguments})
config = mx.compat.v1.ConfigProto()
distribution.configure(
    session_config=config, cluster_spec={{"worker": addresses}},
    task_type="worker", task_id=me,
)
"""
TOWERS = """
assert config.isolate_session_state
assert isinstance(distribution.core, mx.distribute.MultiWorkerMirroredStrategy)
say("towers", distribution.num_towers, len(distribution.worker_devices))
with distribution.scope():
    v = mx.Variable(5.0 + me)
    ids = distribution.call_for_each_tower(
        lambda: mx.contrib.get_tower_context().tower_id + jnp.float32(0))
    total = distribution.reduce(mx.VariableAggregation.SUM, ids, v)
    distribution.update(v, lambda v, x: v.assign_add(x), total)
    say("ids", [int(x) for x in distribution.unwrap(ids)], "v", float(v))
    data = distribution.distribute_dataset(lambda: mx.data.Dataset.range(8))
    context = distribution.run_steps_on_dataset(
        lambda c, x: c.set_last_step_output("x", x, mx.VariableAggregation.SUM),
        data.make_one_shot_iterator(), 2)
    say("output", int(context.last_step_outputs["x"]))
try:
    distribution.configure(cluster_spec={"worker": addresses}, task_type="worker", task_id=me)
except RuntimeError as error:
    say("again:", error)
"""


@pytest.mark.parametrize(
    ("arguments", "devices"), [("num_gpus=0", 1), ("num_gpus_per_worker=0", 2)]
)
def test_configure_joins_a_cluster(arguments: str, devices: int) -> None:
    script = CONFIGURED.format(arguments=arguments) + TOWERS
    with start(script, workers=2, devices=devices) as workers:
        workers.expect_end(0, 0, within=SECONDS_TO_HANG)
        outputs = [worker.own_output for worker in workers]
    towers = 2 * devices
    for k, output in enumerate(outputs):
        ids = list(range(devices * k, devices * (k + 1)))
        assert f"towers {towers} {devices}" in output
        # The first worker's initial value, and the sum of all ids.
        assert f"ids {ids} v {5.0 + sum(range(towers))}" in output
        # Each worker reads all data: its towers take it in turn.
        assert f"output {2 * sum(range(devices, 2 * devices))}" in output
        assert "again: `configure` with a `cluster_spec` comes first" in output


def test_configure_with_a_wrong_number_of_gpus() -> None:
    script = CONFIGURED.format(arguments="num_gpus=3")
    with start(script, workers=2) as workers:
        workers.expect_end(1, 1, within=SECONDS_TO_HANG)
        for worker in workers:
            assert "`num_gpus` is 3, but this worker has 1 device(s)" in worker.output
