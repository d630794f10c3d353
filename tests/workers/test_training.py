"""The same weights on any number of workers and replicas, and the programs that make them."""

from __future__ import annotations

import functools
import re
import time

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import all_sum, per_replica
from helpers.forked_workers import forked_workers
from helpers.hlo import arrays_in, compiled_text, count
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx
from mirrax.distribute.experimental import CommunicationOptions
from mirrax.testing import WorkerError, run_workers

from .comparing import Pool, error_of
from .training import STEPS, train, train_alone

CASES = [("mlp", "adam"), ("cnn", "momentum")]


@functools.cache
def alone(model: str, name: str, steps: int):
    return train_alone(model, name, steps)


def assert_as_alone(found, model: str, name: str, steps: int = STEPS) -> None:
    losses, weights = found
    expected, params = alone(model, name, steps)
    assert len(losses) == steps and losses[-1] < losses[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-3, atol=1e-5)
    for key, value in weights.items():
        np.testing.assert_allclose(value, params[key], rtol=1e-3, atol=1e-5)


def train_all(strategy, cases):
    return [train(strategy, case[0], case[1], "compiled", *case[2:]) for case in cases]


def test_two_workers_of_two(two_by_two: Pool) -> None:
    """As on one device; and twice the same to the last bit."""
    *found, again = two_by_two.run_alike(train_all, [*CASES, CASES[0]])
    for each, case in zip(found, CASES):
        assert_as_alone(each, *case)
    losses, weights = found[0]
    assert losses == again[0]
    for key, value in weights.items():
        assert value.tobytes() == again[1][key].tobytes()


@pytest.mark.parametrize(
    ("pool", "cases"),
    [
        ("two_by_one", [("mlp", "momentum")]),
        ("three_by_one", [("cnn", "sgd")]),
        ("four_by_one", [("mlp", "adam")]),
    ],
)
def test_other_numbers_of_workers(pool, cases, request) -> None:
    for found, case in zip(
        request.getfixturevalue(pool).run_alike(train_all, cases), cases
    ):
        assert_as_alone(found, *case)


def test_eager_replicas(two_by_two: Pool) -> None:
    found = two_by_two.run_alike(lambda s: train(s, "mlp", "momentum", "eager", 6))
    assert_as_alone(found, "mlp", "momentum", 6)


# Programs -------------------------------------------------------------------------------


def step_text(strategy, options=None, arrays=12) -> str:
    """The program of a step that sums the gradients of some small variables."""
    with strategy.scope():
        weights = [mx.Variable(jnp.ones(5)) for _ in range(arrays)]

    @mx.function
    def step(x):
        gradients = mx.grad(lambda: sum(jnp.sum(w * w) * x for w in weights), weights)()
        summed = mx.get_replica_context().all_reduce("SUM", gradients, options)
        for w, g in zip(weights, summed):
            w.assign_sub(0.125 * g)

    x = per_replica(strategy, *[1.0] * strategy.num_replicas_in_sync)
    strategy.run(step, (x,))
    return compiled_text(step, strategy, x)


def collectives(text: str) -> dict[str, int]:
    names = ("all-reduce", "collective-permute", "all-gather", "all-to-all")
    return {name: n for name in names if (n := arrays_in(text, name))}


@pytest.mark.parametrize("pool", ["two_by_two", "two_by_one", "three_by_one"])
def test_small_gradients_travel_together(pool, request) -> None:
    texts = request.getfixturevalue(pool).run(step_text)
    # Everybody gets all parts and adds them up, in the same order.
    assert [collectives(text) for text in texts] == [{"all-gather": 1}] * len(texts)


@pytest.mark.parametrize(("size", "packs"), [(80, 3), (4000, 1), (1, 12)])
def test_the_size_of_packs_can_be_chosen(two_by_two: Pool, size, packs) -> None:
    options = CommunicationOptions(bytes_per_pack=size)
    for text in two_by_two.run(step_text, options):
        assert collectives(text) == {"all-gather": packs}


def test_the_options_of_the_strategy_hold_for_its_collectives(two_by_two: Pool) -> None:
    def text(_):
        options = CommunicationOptions(bytes_per_pack=40)  # two variables
        strategy = mx.distribute.MultiWorkerMirroredStrategy(
            communication_options=options
        )
        return step_text(strategy)

    for text_of_worker in two_by_two.run(text):
        assert collectives(text_of_worker) == {"all-gather": 6}


def test_large_gradients_travel_alone(two_by_two: Pool) -> None:
    """Each replica sends 2 MiB in a ring, and not three times."""

    def text(strategy):
        @mx.function
        def step(x):
            arrays = [jnp.full((512, 1024), x), jnp.full((300, 300), x), x]
            return [jnp.sum(a) for a in all_sum(arrays)]

        x = per_replica(strategy, 1.0, 2.0, 3.0, 4.0)
        out = strategy.run(step, (x,))
        return compiled_text(step, strategy, x), out

    for found, out in two_by_two.run(text):
        assert collectives(found) == {"all-reduce": 1, "all-gather": 1}
        assert [float(x.parts[0]) for x in out] == [512 * 10240.0, 900000.0, 10.0]


def test_what_replicas_do_alone_needs_no_collective(two_by_two: Pool) -> None:
    def text(strategy):
        with strategy.scope():
            v = mx.Variable(jnp.ones(3))
            own = mx.Variable(0.0, synchronization=mx.VariableSynchronization.ON_READ)

        @mx.function
        def step(x):
            own.assign_add(x)
            return mx.value_and_grad(lambda: jnp.sum(v * x), v)()

        x = per_replica(strategy, 1.0, 2.0, 3.0, 4.0)
        strategy.run(step, (x,))
        return compiled_text(step, strategy, x)

    for found in two_by_two.run(text):
        assert collectives(found) == {} and count(found, "all-reduce") == 0


# Options --------------------------------------------------------------------------------


def test_nccl_needs_gpus(two_by_two: Pool) -> None:
    def make(strategy):
        nccl = CommunicationOptions(implementation="NCCL")
        return [
            error_of(
                lambda: mx.distribute.MultiWorkerMirroredStrategy(
                    communication_options=nccl
                )
            ),
            error_of(
                lambda: strategy.run(
                    lambda: mx.get_replica_context().all_reduce("SUM", 1.0, nccl)
                )
            ),
        ]

    for kind, text in two_by_two.run_alike(make):
        assert kind == "ValueError" and "`implementation=NCCL` needs GPUs" in text


def test_a_time_limit_names_the_worker_that_does_not_come() -> None:
    def wait(limit):
        options = CommunicationOptions(timeout_seconds=limit)
        strategy = mx.distribute.MultiWorkerMirroredStrategy(
            communication_options=options
        )
        if strategy.cluster_resolver.task_id == 1:
            time.sleep(SECONDS_TO_HANG)
        started = time.monotonic()
        try:
            strategy.reduce("SUM", 1.0, axis=None)
        except mx.errors.UnavailableError as error:
            seconds = time.monotonic() - started
            raise RuntimeError(f"after {seconds:.1f} s: {error}") from None

    with forked_workers(), pytest.raises(WorkerError) as caught:
        run_workers(wait, workers=2, devices=1, args=(3,))
    found = re.search(r"RuntimeError: after ([\d.]+) s: Worker 1 ", str(caught.value))
    assert found and float(found[1]) > 2.9
