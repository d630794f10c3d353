"""A training that is the same for any number of workers and replicas, and by JAX alone."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers.engines import all_sum, compile_if

import mirrax as mx

ROWS, BATCH = 70, 16  # four full batches, and one of 6 rows
STEPS = 25  # five passes

TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
}
SHAPES = {
    "mlp": {"w1": (36, 8), "b1": (8,), "w2": (8, 1), "b2": (1,)},
    "cnn": {"k1": (3, 3, 1, 4), "c1": (4,), "w2": (16, 1), "b2": (1,)},
}


def errors_of(model: str, params: Any, x: Any, y: Any) -> jax.Array:
    """The squared error of each example."""
    if model == "mlp":
        hidden = jnp.tanh(x.reshape(len(x), 36) @ params["w1"] + params["b1"])
    else:
        hidden = jax.lax.conv_general_dilated(
            x[..., None],
            jnp.asarray(params["k1"]),
            (2, 2),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        hidden = jax.nn.relu(hidden + params["c1"]).reshape(len(x), 16)
    return jnp.sum((hidden @ params["w2"] + params["b2"] - y) ** 2, axis=1)


def initial_params(model: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(0, 0.3, shape).astype("float32")
        for name, shape in SHAPES[model].items()
    }


@functools.cache
def rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, 6, 6)).astype("float32")
    return x, np.sin(x[:, 0, :1] * 2) + x[:, 1, 1:2]


def dataset(seed: int | None = 3) -> mx.data.Dataset:
    """Batches in a new order in every pass, the last one smaller."""
    return (
        mx.data.Dataset.from_tensor_slices(rows()).shuffle(ROWS, seed=seed).batch(BATCH)
    )


def train_alone(model: str, name: str, steps: int = STEPS) -> Any:
    """The losses and the weights of one device, by JAX and Optax alone."""
    transformation, params = TRANSFORMATIONS[name](), initial_params(model)
    state, losses = transformation.init(params), []

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(
            lambda params: jnp.mean(errors_of(model, params, x, y))
        )(params)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    batches = iter(dataset().repeat().take(steps))
    for x, y in batches:
        params, state, loss = step(params, state, x, y)
        losses.append(float(loss))
    return losses, {name: np.asarray(value) for name, value in params.items()}


def train(
    strategy: Any, model: str, name: str, engine: str, steps: int = STEPS
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same on a strategy's replicas; the first worker's weights count."""
    factor = 1.0 + strategy.input_share.worker
    with strategy.scope():
        variables = {
            key: mx.Variable(factor * value)
            for key, value in initial_params(model).items()
        }
        optimizer = mx.train.Optimizer(TRANSFORMATIONS[name]())

    def replica_fn(x: Any, y: Any) -> jax.Array:
        # Counting inside would keep an eager replica from compiling the gradient.
        size = all_sum(len(x)) if engine == "eager" else None
        loss, gradients = mx.value_and_grad(
            lambda: mx.nn.compute_average_loss(
                errors_of(model, variables, x, y), global_batch_size=size
            ),
            variables,
        )()
        optimizer.apply_gradients([(gradients[k], v) for k, v in variables.items()])
        return loss

    step, losses = compile_if(engine, replica_fn), []
    distributed = strategy.experimental_distribute_dataset(
        dataset().repeat().take(steps)
    )
    for x, y in distributed:
        share = strategy.run(step, (x, y))
        losses.append(float(strategy.reduce("SUM", share, axis=None)))
    return losses, {name: v.numpy() for name, v in variables.items()}


def train_on(
    strategy: Any, folder: Path, steps: int, signal_at: int
) -> tuple[int, float, np.ndarray]:
    """Goes on with the training in a folder, up to `steps`; worker 1 gets a signal in one."""
    with strategy.scope():
        variables = {k: mx.Variable(v) for k, v in initial_params("mlp").items()}
        optimizer = mx.train.Optimizer(optax.adam(0.01))
        mean = mx.metrics.Mean()
    iterator = iter(strategy.experimental_distribute_dataset(dataset().repeat()))
    checkpoint = mx.train.Checkpoint(
        variables=variables, optimizer=optimizer, mean=mean, iterator=iterator
    )
    manager = mx.train.CheckpointManager(checkpoint, folder, max_to_keep=1)

    @mx.function
    def replica_fn(x: Any, y: Any) -> None:
        loss, gradients = mx.value_and_grad(
            lambda: mx.nn.compute_average_loss(errors_of("mlp", variables, x, y)),
            variables,
        )()
        optimizer.apply_gradients([(gradients[k], v) for k, v in variables.items()])
        mean.update_state(loss)

    def step() -> None:
        x, y = next(iterator)
        strategy.run(replica_fn, (x, y))
        if (handler.total_run_calls, strategy.input_share.worker) == (signal_at, 1):
            os.kill(os.getpid(), signal.SIGTERM)

    with mx.train.PreemptionCheckpointHandler(
        strategy.cluster_resolver, manager
    ) as handler:
        started = handler.total_run_calls
        while handler.total_run_calls < steps:
            handler.run(step)
    weights = np.concatenate([v.numpy().ravel() for v in variables.values()])
    return started, float(mean.result()), weights
