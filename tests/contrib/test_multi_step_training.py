"""Loops of training steps: the values of single steps, in one dispatch."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrax as mx
from mirrax._src.engines.program import Program

from .towers import (
    MEAN,
    ON_READ,
    SUM,
    Counter,
    all_sizes,
    batches,
    older_names,
    parts,
    tower,
    tower_id,
    towers,
)

pytestmark = older_names


# The library's own tests ----------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_training_with_outputs_of_all_kinds(n: int) -> None:
    distribution = towers(n)
    with distribution.scope():
        kernel, bias = mx.Variable([[0.0]]), mx.Variable([0.0])
        optimizer = mx.train.Optimizer(optax.sgd(0.2 / n))

    def model_fn(context, x):
        def loss_fn():
            return jnp.sum((x @ kernel + bias - 1.0) ** 2)

        loss, gradients = mx.value_and_grad(loss_fn, [kernel, bias])()
        optimizer.apply_gradients(zip(gradients, [kernel, bias]))
        context.set_last_step_output("tower_loss_agg", loss, aggregation=MEAN)
        context.set_non_tensor_output("foo", "bar")
        return None, loss

    def step_fn(context, x):
        train_op, loss = distribution.call_for_each_tower(
            model_fn, context, x, run_concurrently=False
        )
        context.set_last_step_output("cross_tower_loss_agg", loss, aggregation=MEAN)
        context.set_last_step_output("cross_tower_loss_noagg", loss)
        return distribution.group(train_op)

    with distribution.scope():
        rows = np.ones((40 * n, 1, 1), "float32")
        iterator = batches(distribution, rows)
        initial = {
            "tower_loss_agg": jnp.float32(1e7),
            "cross_tower_loss_agg": jnp.float32(1e7),
            "cross_tower_loss_noagg": distribution.unwrap(distribution.broadcast(1e7)),
        }
        assert len(initial["cross_tower_loss_noagg"]) == n
        distribution.initialize()
        losses = []
        for _ in range(5):
            context = distribution.run_steps_on_dataset(step_fn, iterator, 2, initial)
            outputs = context.last_step_outputs
            assert context.non_tensor_outputs == {"foo": ["bar"]}
            assert set(outputs) == set(initial)
            aggregated = distribution.unwrap(outputs["cross_tower_loss_agg"])
            assert len(aggregated) == 1 and aggregated[0].dtype == jnp.float32
            apart = outputs["cross_tower_loss_noagg"]
            assert len(distribution.unwrap(apart)) == n
            reduced = distribution.reduce(MEAN, apart, "/device:CPU:0")
            np.testing.assert_allclose(reduced, aggregated[0], rtol=1e-6)
            np.testing.assert_allclose(outputs["tower_loss_agg"], aggregated[0], 1e-6)
            losses.append(float(aggregated[0]))
        distribution.finalize()
    # Both weights move by 0.4 of the error in a step, so that it shrinks to a fifth.
    np.testing.assert_allclose(losses, [0.04 * 0.0016**k for k in range(5)], 1e-3, 1e-9)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@all_sizes
def test_a_sum_or_a_mean_of_losses(n: int, reduction: str) -> None:
    distribution = towers(n)
    x, y = np.asarray([[2.0], [7.0]]), np.asarray([[6.0], [21.0]])
    with distribution.scope():
        w = mx.Variable([[2.0]])
        optimizer = mx.train.Optimizer(optax.sgd(0.2))

    def model_fn(x, y):
        def loss_fn():
            errors = (x @ w - y) ** 2
            if reduction == "sum":
                return jnp.sum(errors)
            return jnp.mean(errors) / tower().num_towers

        optimizer.apply_gradients([(mx.grad(loss_fn, w)(), w)])

    def dataset_fn():
        data = mx.data.Dataset.from_tensor_slices((x, y)).repeat().batch(2)
        return data.take(n)

    with distribution.scope():
        distribution.run_steps_on_dataset(
            lambda context, x, y: distribution.call_for_each_tower(model_fn, x, y),
            distribution.distribute_dataset(dataset_fn).make_one_shot_iterator(),
        )
    expected = 2 + 21.2 * n if reduction == "sum" else 2 + 10.6
    np.testing.assert_allclose(parts(distribution, w), [[[expected]]] * n, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_moving_means_see_the_mean_over_all_towers(n: int) -> None:
    distribution, momentum = towers(n), 0.9
    rng = np.random.default_rng(0)
    rows = rng.normal(3.0, 1.0, (4 * n, 4, 2)).astype("float32")
    with distribution.scope():
        moving = mx.Variable(np.zeros(2, "float32"), aggregation=MEAN)

    def model_fn(x):
        moving.assign(moving * momentum + jnp.mean(x, axis=0) * (1 - momentum))

    expected = np.zeros(2)
    iterator = batches(distribution, rows)
    for k in range(2):
        distribution.run_steps_on_dataset(
            lambda context, x: distribution.call_for_each_tower(model_fn, x),
            iterator,
            2,
        )
        for step in range(2 * k, 2 * k + 2):
            sample = rows[step * n : (step + 1) * n].mean(axis=(0, 1))
            expected = expected * momentum + sample * (1 - momentum)
        for copy in parts(distribution, moving):
            np.testing.assert_allclose(copy, expected, rtol=1e-5)


# The same as single steps, in one dispatch ----------------------------------------------


@pytest.mark.slow
@all_sizes
def test_variables_and_outputs_are_those_of_single_steps(n: int) -> None:
    distribution = towers(n)

    def run(rounds: list[int]) -> tuple[Any, Any]:
        with distribution.scope():
            total = mx.Variable(np.zeros(2, "float32"), aggregation=SUM)
            local = mx.Variable(1.0, synchronization=ON_READ, aggregation=SUM)
            own = mx.Variable(1.0)
        ordinary = mx.Variable(0)
        made: list[mx.Variable] = []

        def tower_fn(x):
            if not made:
                made.append(mx.Variable(5.0))
            total.assign_add(x)
            local.assign_add(jnp.sum(x) + tower_id())
            own.assign(own * 2 + tower_id())
            made[0].assign_add(own)
            return total.read_value() * local

        def step_fn(context, x):
            ordinary.assign_add(1)
            context.set_last_step_output(
                "y", distribution.call_for_each_tower(tower_fn, x)
            )

        iterator = batches(
            distribution, np.arange(24.0 * n, dtype="float32").reshape(-1, 2)
        )
        outputs = None
        for count in rounds:
            outputs = distribution.run_steps_on_dataset(
                step_fn, iterator, count
            ).last_step_outputs["y"]
        variables = (total, local, own, made[0])
        assert int(ordinary) == sum(rounds)
        return [parts(distribution, v) for v in variables], parts(distribution, outputs)

    assert run([6]) == run([1] * 6) == run([2, 4])


def test_many_steps_are_one_dispatch_and_one_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    distribution, traces, started = towers(2), Counter(), []
    launch = Program._run

    def note(self: Program, *args: Any) -> Any:
        started.append(self)
        return launch(self, *args)

    monkeypatch.setattr(Program, "_run", note)
    with distribution.scope():
        v = mx.Variable(0.0, aggregation=SUM)
    iterator = batches(distribution, np.ones(200, "float32"))

    def run_round(scale: float) -> Any:
        def tower_fn(context, x):
            traces.note()
            v.assign_add(scale * x)
            context.set_last_step_output("v", v.read_value(), aggregation=MEAN)

        def step_fn(context, x):
            distribution.call_for_each_tower(tower_fn, context, x)

        return distribution.run_steps_on_dataset(step_fn, iterator, 20)

    run_round(2.0)
    first = traces.count
    started.clear()
    for _ in range(2):  # functions that are defined anew
        context = run_round(2.0)
    context.run_op()
    assert traces.count == first <= 3
    assert len(started) == 3 and len(set(map(id, started))) == 1
    assert float(context.last_step_outputs["v"]) == float(v) == 4 * 80


def test_the_program_is_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    distribution, texts = towers(2), []
    launch = Program._run

    def note(self: Program, inputs: Any) -> Any:
        groups = self._reused, self._kept
        arrays = [each.arrays(self._array_of)[0] for each in groups]
        lowered = self._jitted.lower(*arrays, *inputs)
        texts.append(lowered.compile().as_text())
        return launch(self, inputs)

    monkeypatch.setattr(Program, "_run", note)

    def step_fn(context, x):
        context.set_last_step_output("x", x, aggregation=SUM)

    distribution.run_steps_on_dataset(
        step_fn, batches(distribution, np.ones(40, "float32")), 10
    )
    assert len(texts) == 1 and len(re.findall(r" while\(", texts[0])) == 1
