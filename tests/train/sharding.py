"""Training with `shard_state=True`, beside Optax on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import compile_if, per_replica
from property.examples import IS_THOROUGH

import mirrax as mx

# What divides on the first axis, on another one, and on none.
SHAPES = {"a": (8, 3), "b": (8,), "c": (3, 16), "odd": (3,), "scalar": (), "k": (16, 8)}
STEPS = 4

TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(1e-2),
    "masked": lambda: optax.masked(optax.adam(1e-2), {k: k != "a" for k in SHAPES}),
    "multi": lambda: optax.multi_transform(
        {"x": optax.adam(1e-2), "y": optax.sgd(0.1)},
        {k: "x" if k in "ac" else "y" for k in SHAPES},
    ),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(1e-2),
    "multi_steps": lambda: optax.MultiSteps(
        optax.adam(1e-2), 2
    ).gradient_transformation(),
}
QUICK = ("clip",)


def transformations(turn: int) -> Any:
    """Every other one, from the first or the second on; all with `MIRRAX_THOROUGH`."""
    every = list(TRANSFORMATIONS)
    taken = every if IS_THOROUGH else every[turn::2]
    cases = [pytest.param(x, marks=pytest.mark.slow) for x in taken if x not in QUICK]
    return pytest.mark.parametrize("name", [*QUICK, *cases])


def initial_values(dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=shape).astype(dtype) for k, shape in SHAPES.items()}


def gradients_of(
    num_replicas: int, step: int, dtype: str = "float32"
) -> list[dict[str, np.ndarray]]:
    """Every replica's gradients: numbers that add up without rounding."""
    rng = np.random.default_rng(step)
    return [
        {k: (rng.integers(-8, 9, s) / 4).astype(dtype) for k, s in SHAPES.items()}
        for _ in range(num_replicas)
    ]


def distribute(strategy: Any, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {k: per_replica(strategy, *(part[k] for part in parts)) for k in SHAPES}


def by_optax(
    num_replicas: int,
    name: str,
    steps: int = STEPS,
    calls: int = 1,
    dtype: str = "float32",
) -> dict[str, np.ndarray]:
    """The weights by Optax on one device; an update has the mean of `calls` gradients."""
    transformation = TRANSFORMATIONS[name]()
    params: Any = {k: jnp.asarray(v) for k, v in initial_values(dtype).items()}
    state, update = transformation.init(params), jax.jit(transformation.update)
    for first in range(0, steps - calls + 1, calls):
        each = [
            part
            for step in range(first, first + calls)
            for part in gradients_of(num_replicas, step, dtype)
        ]
        total = {k: jnp.asarray(sum(g[k] for g in each)) / calls for k in SHAPES}
        updates, state = update(total, state, params)
        params = optax.apply_updates(params, updates)
    return {k: np.asarray(v) for k, v in params.items()}


def variables_in(strategy: Any, dtype: str = "float32") -> dict[str, Any]:
    with strategy.scope():
        return {k: mx.Variable(v, name=k) for k, v in initial_values(dtype).items()}


def train_variables(
    strategy: Any,
    optimizer: Any,
    engine: str = "compiled",
    steps: range = range(STEPS),
    variables: Any = None,
    dtype: str = "float32",
) -> dict[str, np.ndarray]:
    variables = variables or variables_in(strategy, dtype)

    def replica_fn(gradients: Any) -> None:
        optimizer.apply_gradients([(gradients[k], variables[k]) for k in SHAPES])

    step, size = compile_if(engine, replica_fn), strategy.num_replicas_in_sync
    for i in steps:
        strategy.run(step, (distribute(strategy, gradients_of(size, i, dtype)),))
    return {k: v.numpy() for k, v in variables.items()}


def train_functionally(
    strategy: Any, optimizer: Any, engine: str = "compiled"
) -> tuple[dict[str, np.ndarray], Any]:
    with strategy.scope():
        params: Any = {k: jnp.asarray(v) for k, v in initial_values().items()}
        state = optimizer.init(params)

    def replica_fn(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    step, size = compile_if(engine, replica_fn), strategy.num_replicas_in_sync
    for i in range(STEPS):
        gradients = distribute(strategy, gradients_of(size, i))
        params, state = strategy.run(step, (params, state, gradients))
    own = {k: strategy.experimental_local_results(v) for k, v in params.items()}
    return {k: np.asarray(v[0]) for k, v in own.items()}, state


def assert_close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=tolerance, atol=tolerance)


def state_bytes(optimizer: Any) -> dict[Any, int]:
    """What the state takes on each device."""
    held: Counter[Any] = Counter()
    for variable in optimizer.variables:
        for shard in variable.in_one_array()[0].addressable_shards:
            held[shard.device] += shard.data.nbytes
    return held


def live_bytes() -> dict[Any, int]:
    """What all arrays take on each device; a part of an array is an array, too."""
    buffers = {
        (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
    }
    held: Counter[Any] = Counter()
    for (device, _), size in buffers.items():
        held[device] += size
    return held
