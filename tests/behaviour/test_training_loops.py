"""Complete training loops, the way people write them, with weights that can be checked."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers.engines import (
    all_sum,
    both_engines,
    compile_if,
    mirrored,
    per_replica,
    split,
)

import mirrax as mx

# y = 2x. With the mean squared error and a learning rate of 0.1 a step takes the distance
# of the weight from 2 times -1/2: 0 -> 3 -> 1.5 -> 2.25 -> 1.875, exact in float32.
X = np.array([1.0, 2.0, 3.0, 4.0] * 2, np.float32)
Y = 2 * X
EXAMPLES = len(X)
WEIGHTS = [3.0, 1.5, 2.25, 1.875]
replica_counts = pytest.mark.parametrize("n", [1, 2, 4])


def regression_step(w):
    """A step of gradient descent in a replica, which returns its share of the loss."""

    def step(x, y):
        loss, gradient = mx.value_and_grad(
            lambda: jnp.sum((w * x - y) ** 2) / EXAMPLES, w
        )()
        w.assign_sub(0.1 * all_sum(gradient))
        return loss

    return step


@both_engines
@pytest.mark.parametrize("n", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_linear_regression_with_a_variable(engine, n):
    strategy = mirrored(n)
    with strategy.scope():
        w = mx.Variable(0.0)
    step = compile_if(engine, regression_step(w))
    x, y = split(strategy, X), split(strategy, Y)
    seen, losses = [], []
    for _ in range(4):
        loss = strategy.run(step, (x, y))
        losses.append(float(strategy.reduce("SUM", loss, axis=None)))
        seen.append(float(w))
    assert seen == WEIGHTS
    assert losses == [30.0, 7.5, 1.875, 0.46875]


@replica_counts
def test_linear_regression_with_a_function_around_run_and_reduce(n):
    strategy = mirrored(n)
    with strategy.scope():
        w = mx.Variable(0.0)
    replica_step = regression_step(w)

    @mx.function
    def step(x, y):
        losses = strategy.run(replica_step, (x, y))
        return strategy.reduce("SUM", losses, axis=None)

    x, y = split(strategy, X), split(strategy, Y)
    assert [float(step(x, y)) for _ in range(4)] == [30.0, 7.5, 1.875, 0.46875]
    assert float(w) == WEIGHTS[-1]
    assert step.trace_count == 1


@replica_counts
def test_several_runs_in_one_function_see_each_others_assignments(n):
    strategy = mirrored(n)
    with strategy.scope():
        w = mx.Variable(0.0)
    replica_step = regression_step(w)

    @mx.function
    def two_steps(x, y):
        strategy.run(replica_step, (x, y))
        between = w.read_value()
        strategy.run(replica_step, (x, y))
        return between

    x, y = split(strategy, X), split(strategy, Y)
    assert float(two_steps(x, y)) == 3.0
    assert float(w) == 1.5
    assert float(two_steps(x, y)) == 2.25
    assert float(w) == 1.875


def trainer_class():
    """A new class each time, so that each test counts its own traces."""

    class Trainer:
        """A model, its optimizer and their compiled step in one class."""

        def __init__(self, strategy, learning_rate=0.1):
            self.strategy = strategy
            self.learning_rate = learning_rate
            self.w: Any = None
            with strategy.scope():
                self.count = mx.Variable(0, dtype=jnp.int32)

        def _replica_step(self, x, y):
            if self.w is None:
                self.w = mx.Variable(0.0, name="w")
            w = self.w
            loss, gradient = mx.value_and_grad(
                lambda: jnp.sum((w * x - y) ** 2) / EXAMPLES, w
            )()
            w.assign_sub(self.learning_rate * all_sum(gradient))
            self.count.assign_add(1)
            return loss

        @mx.function
        def step(self, x, y):
            losses = self.strategy.run(self._replica_step, (x, y))
            return self.strategy.reduce("SUM", losses, axis=None)

        @mx.function
        def replica_step(self, x, y):
            return self._replica_step(x, y)

    return Trainer


@replica_counts
def test_a_method_can_be_the_compiled_step(n):
    strategy = mirrored(n)
    trainer = trainer_class()(strategy)
    x, y = split(strategy, X), split(strategy, Y)
    assert [float(trainer.step(x, y)) for _ in range(3)] == [30.0, 7.5, 1.875]
    assert float(trainer.w) == WEIGHTS[2]
    assert int(trainer.count) == 3


@replica_counts
def test_a_method_can_be_the_replica_function(n):
    strategy = mirrored(n)
    trainer = trainer_class()(strategy)
    x, y = split(strategy, X), split(strategy, Y)
    for _ in range(2):
        strategy.run(trainer.replica_step, (x, y))
    assert float(trainer.w) == WEIGHTS[1]


def test_two_objects_with_a_compiled_method_keep_their_own_variables():
    strategy = mirrored(2)
    trainer = trainer_class()
    slow, fast = trainer(strategy, 0.05), trainer(strategy, 0.1)
    x, y = split(strategy, X), split(strategy, Y)
    slow.step(x, y)
    fast.step(x, y)
    fast.step(x, y)
    assert float(slow.w) == 1.5
    assert float(fast.w) == 1.5
    assert (int(slow.count), int(fast.count)) == (1, 2)


# A small MLP ---------------------------------------------------------------------------


def mlp_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 3)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


def mlp_weights():
    rng = np.random.default_rng(1)
    return {
        "hidden": {
            "w": 0.5 * rng.normal(size=(3, 8)).astype(np.float32),
            "b": np.zeros(8, np.float32),
        },
        "out": {
            "w": 0.5 * rng.normal(size=(8, 1)).astype(np.float32),
            "b": np.zeros(1, np.float32),
        },
    }


def predict(weights, x):
    hidden = jnp.tanh(x @ weights["hidden"]["w"] + weights["hidden"]["b"])
    return hidden @ weights["out"]["w"] + weights["out"]["b"]


def mlp_loss(weights, x, y):
    """The replica's share of the mean over the 16 examples."""
    return jnp.sum((predict(weights, x) - y) ** 2) / 16


@functools.cache
def train_on_one_device(steps):
    x, y = mlp_data()
    weights = jax.tree.map(jnp.asarray, mlp_weights())
    losses = []
    differentiate = jax.jit(jax.value_and_grad(mlp_loss))
    for _ in range(steps):
        loss, gradients = differentiate(weights, x, y)
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
        losses.append(float(loss))
    return losses, weights


def train_mlp(strategy, engine, steps=5):
    x, y = (split(strategy, array) for array in mlp_data())
    with strategy.scope():
        weights = jax.tree.map(mx.Variable, mlp_weights())

    def step(x, y):
        loss, gradients = mx.value_and_grad(lambda: mlp_loss(weights, x, y), weights)()
        gradients = all_sum(gradients)
        jax.tree.map(
            lambda w, g: w.assign_sub(0.1 * g),
            weights,
            gradients,
            is_leaf=lambda leaf: isinstance(leaf, mx.Variable),
        )
        return loss

    step = compile_if(engine, step)
    losses = [
        float(strategy.reduce("SUM", strategy.run(step, (x, y)), axis=None))
        for _ in range(steps)
    ]
    return losses, jax.tree.map(np.asarray, weights)


@pytest.mark.parametrize(
    "n, engine",
    [
        (2, "compiled"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(2, "eager"), *((n, "compiled") for n in (1, 4, 8))]
        ),
    ],
)
def test_an_mlp_trains_the_same_on_any_number_of_replicas(n, engine):
    losses, weights = train_mlp(mirrored(n), engine)
    expected_losses, expected_weights = train_on_one_device(5)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        weights,
        expected_weights,
    )


@pytest.mark.slow
@both_engines
def test_the_same_training_twice_is_bit_identical(engine):
    first_losses, first = train_mlp(mirrored(2), engine)
    second_losses, second = train_mlp(mirrored(2), engine)
    assert first_losses == second_losses
    jax.tree.map(np.testing.assert_array_equal, first, second)


# Functional style ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4])
def test_functional_style_with_optax_and_donated_state(n):
    strategy = mirrored(n)
    optimizer = optax.sgd(0.1)
    initial = {"w": jnp.float32(0.0)}
    state = strategy.replicate((initial, optimizer.init(initial)))

    @mx.function(donate_argnums=0)
    def step(state, x, y):
        weights, slots = state
        gradients = jax.grad(lambda p: jnp.sum((p["w"] * x - y) ** 2) / EXAMPLES)(
            weights
        )
        updates, slots = optimizer.update(all_sum(gradients), slots)
        return optax.apply_updates(weights, updates), slots

    x, y = split(strategy, X), split(strategy, Y)
    seen = []
    for _ in range(4):
        state = strategy.run(step, (state, x, y))
        seen.append(float(state[0]["w"]))
    assert seen == WEIGHTS
    assert step.trace_count == 1
    assert float(initial["w"]) == 0.0, "the user's own array is never donated"


@pytest.mark.slow
@both_engines
def test_functional_style_with_momentum_in_both_engines(engine):
    strategy = mirrored(2)
    optimizer = optax.sgd(0.1, momentum=0.5)
    weights = {"w": jnp.float32(0.0)}
    state = strategy.replicate((weights, optimizer.init(weights)))

    def step(state, x, y):
        weights, slots = state
        gradients = jax.grad(lambda p: jnp.sum((p["w"] * x - y) ** 2) / EXAMPLES)(
            weights
        )
        updates, slots = optimizer.update(all_sum(gradients), slots)
        return optax.apply_updates(weights, updates), slots

    step = compile_if(engine, step)
    x, y = split(strategy, X), split(strategy, Y)
    seen = []
    for _ in range(3):
        state = strategy.run(step, (state, x, y))
        seen.append(float(strategy.experimental_local_results(state[0]["w"])[1]))
    # gradient -30: 3; gradient 15 and half of -30: 3 - 0 = 3; then 15 + 0: 1.5.
    np.testing.assert_allclose(seen, [3.0, 3.0, 1.5], rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2])
def test_functional_style_inside_a_function_around_the_caller(n):
    strategy = mirrored(n)
    state = strategy.replicate({"w": jnp.float32(0.0)})

    def replica_step(state, x, y):
        gradient = jax.grad(lambda w: jnp.sum((w * x - y) ** 2) / EXAMPLES)(state["w"])
        return {"w": state["w"] - 0.1 * all_sum(gradient)}

    @mx.function(donate_argnums=0)
    def step(state, x, y):
        return strategy.run(replica_step, (state, x, y))

    x, y = split(strategy, X), split(strategy, Y)
    for expected in WEIGHTS:
        state = step(state, x, y)
        assert float(state["w"]) == expected
    assert step.trace_count == 1


@pytest.mark.slow
@both_engines
def test_a_flax_linen_module_trains_in_a_replica(engine):
    strategy = mirrored(2)
    model = nn.Dense(1, use_bias=False)
    x, y = X[:, None], Y[:, None]
    params = strategy.replicate({"params": {"kernel": jnp.zeros((1, 1))}})

    def step(params, x, y):
        def loss(params):
            return jnp.sum((model.apply(params, x) - y) ** 2) / EXAMPLES

        gradients = all_sum(jax.grad(loss)(params))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    step = compile_if(engine, step)
    x, y = split(strategy, x), split(strategy, y)
    for expected in WEIGHTS:
        params = strategy.run(step, (params, x, y))
        kernel = params["params"]["kernel"]
        copies = strategy.experimental_local_results(kernel)
        assert [copy.item() for copy in copies] == [expected] * 2


def test_a_flax_linen_module_applies_to_a_tree_of_variables():
    strategy = mirrored(2)
    model = nn.Dense(1, use_bias=False)
    with strategy.scope():
        params = {"params": {"kernel": mx.Variable(jnp.zeros((1, 1)))}}
    kernel = params["params"]["kernel"]

    @mx.function
    def step(x, y):
        gradients = mx.grad(
            lambda: jnp.sum((model.apply(params, x) - y) ** 2) / EXAMPLES, params
        )()
        kernel.assign_sub(0.1 * all_sum(gradients)["params"]["kernel"])

    x, y = split(strategy, X[:, None]), split(strategy, Y[:, None])
    for expected in WEIGHTS:
        strategy.run(step, (x, y))
        assert kernel.numpy().item() == expected


def test_the_same_code_trains_on_one_device_and_without_a_strategy():
    for strategy in (mx.OneDeviceStrategy("CPU:1"), mx.get_strategy()):
        with strategy.scope():
            w = mx.Variable(0.0)
        for step in (regression_step(w), mx.function(regression_step(w))):
            w.assign(0.0)
            for expected in WEIGHTS:
                strategy.run(step, (X, Y))
                assert float(w) == expected


def test_a_python_generator_of_batches_feeds_a_compiled_step():
    strategy = mirrored(2)
    with strategy.scope():
        total = mx.Variable(0.0, aggregation=mx.VariableAggregation.SUM)

    def batches():
        for k in range(3):
            yield per_replica(strategy, [1.0 * k], [10.0 * k])

    step = mx.function(lambda x: total.assign_add(jnp.sum(x)).read_value())
    for batch in batches():
        strategy.run(step, (batch,))
    assert float(total) == 33.0
    assert step.trace_count == 1
