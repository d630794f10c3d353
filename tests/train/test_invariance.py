"""The same training on 1, 2, 4 and 8 replicas."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import compile_if, mirrored, per_replica

import mirrax as mx

from .training import assert_in_step, make_variables, pairs

TRANSFORMATIONS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
}
BATCH = 16
LAST = 5  # rows of the last batch of an epoch: some of 8 replicas get none


def initial_params():
    rng = np.random.default_rng(0)
    shapes = {"w1": (4, 8), "b1": (8,), "w2": (8, 1), "b2": (1,)}
    return {k: rng.normal(0, 0.5, s).astype("float32") for k, s in shapes.items()}


def errors_of(params, x, y):
    """The squared error of each example."""
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.sum((hidden @ params["w2"] + params["b2"] - y) ** 2, axis=1)


@functools.cache
def batches_of(sizes, steps):
    rng = np.random.default_rng(1)
    found = []
    for i in range(steps):
        x = rng.normal(size=(sizes[i % len(sizes)], 4)).astype("float32")
        found.append((x, np.sin(x[:, :1] * 2) + x[:, 1:2]))
    return found


@functools.cache
def expected(name, sizes, steps):
    """The losses and the final parameters of one device, by JAX and Optax alone."""
    transformation, params = TRANSFORMATIONS[name](), initial_params()
    state, losses = transformation.init(params), []

    @jax.jit
    def step(params, state, x, y):
        loss, gradients = jax.value_and_grad(
            lambda params: jnp.mean(errors_of(params, x, y))
        )(params)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    for x, y in batches_of(sizes, steps):
        params, state, loss = step(params, state, x, y)
        losses.append(float(loss))
    return losses, params


def train(name, n, sizes, steps, engine="compiled"):
    """The losses and the final variables of `n` replicas."""
    strategy = mirrored(n)
    variables = make_variables(strategy, initial_params())
    optimizer = mx.train.Optimizer(TRANSFORMATIONS[name]())

    def replica_fn(x, y, size=None):
        loss, gradients = mx.value_and_grad(
            lambda: mx.nn.compute_average_loss(
                errors_of(variables, x, y), global_batch_size=size
            ),
            variables,
        )()
        optimizer.apply_gradients(pairs(gradients, variables))
        return loss

    step = compile_if(engine, replica_fn)
    losses = []
    for x, y in batches_of(sizes, steps):
        parts = [per_replica(strategy, *np.array_split(a, n)) for a in (x, y)]
        # Counting the examples is slow in eager code, where replicas have to wait for it.
        size = {"size": jnp.int32(len(x))} if engine == "eager" else {}
        shares = strategy.run(step, tuple(parts), size)
        losses.append(float(strategy.reduce("SUM", shares, axis=None)))
    for variable in (*variables.values(), *optimizer.variables):
        assert_in_step(variable)
    assert int(optimizer.iterations) == steps
    return losses, {name: v.numpy() for name, v in variables.items()}


def assert_as_on_one_device(name, n, sizes, steps, engine="compiled"):
    losses, values = train(name, n, sizes, steps, engine)
    expected_losses, params = expected(name, sizes, steps)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-3, atol=1e-4)
    for key, value in values.items():
        np.testing.assert_allclose(value, params[key], rtol=1e-3, atol=1e-4)
    assert losses[-1] < losses[0]


def test_two_replicas():
    assert_as_on_one_device("momentum", 2, (BATCH,), 20)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_two_replicas_with_uneven_batches(engine):
    assert_as_on_one_device("momentum", 2, (BATCH, LAST), 4, engine)


@pytest.mark.slow
@pytest.mark.parametrize("name, n", [("sgd", 1), ("adam", 4)])
def test_any_number_of_replicas(name, n):
    assert_as_on_one_device(name, n, (BATCH,), 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, n", [("adam", 1), ("adam", 2), ("sgd", 4), ("momentum", 8)]
)
def test_a_partial_batch_at_the_end_of_every_epoch(name, n):
    assert_as_on_one_device(name, n, (BATCH, BATCH, BATCH, BATCH, LAST), 20)


@pytest.mark.slow
@pytest.mark.parametrize("name, n", [("momentum", 4), ("adam", 2)])
def test_eager_replicas(name, n):
    assert_as_on_one_device(name, n, (BATCH, BATCH, LAST), 6, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_the_same_run_twice_is_the_same_to_the_last_bit(engine):
    runs = [train("momentum", 2, (BATCH,), 4, engine) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    for key, value in runs[0][1].items():
        assert value.tobytes() == runs[1][1][key].tobytes()


@pytest.mark.slow
def test_a_long_run_twice_is_the_same_to_the_last_bit():
    runs = [train("adam", 4, (BATCH, LAST), 20) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    for key, value in runs[0][1].items():
        assert value.tobytes() == runs[1][1][key].tobytes()
