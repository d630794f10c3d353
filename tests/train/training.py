"""The same training twice: by `mx.train.Optimizer`, and by Optax on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers.engines import compile_if, mirrored, per_replica

import mirrax as mx

STRATEGIES = {n: mirrored(n) for n in range(1, 5)}

SHAPES = {"b": (3,), "w": (2, 3)}


def gradients_of(num_replicas: int, step: int, shapes: Any = None) -> list[dict]:
    """Every replica's gradients: numbers that add up without rounding."""
    rng = np.random.default_rng(step)
    return [
        {
            name: (rng.integers(-8, 9, shape) / 4).astype("float32")
            for name, shape in (shapes or SHAPES).items()
        }
        for _ in range(num_replicas)
    ]


def initial_values(shapes: Any = None) -> dict[str, np.ndarray]:
    """Where the variables begin."""
    return {
        name: np.linspace(-1, 2, int(np.prod(shape)), dtype="float32").reshape(shape)
        for name, shape in (shapes or SHAPES).items()
    }


def make_variables(strategy: Any, values: Any = None, **kwargs: Any) -> dict[str, Any]:
    """A variable in the strategy's scope for each initial value, by its name."""
    with strategy.scope():
        return {
            name: mx.Variable(value, name=name, **kwargs)
            for name, value in (values or initial_values()).items()
        }


def distribute(strategy: Any, parts: Sequence[dict]) -> dict[str, Any]:
    """The replicas' dicts as one dict of per-replica values."""
    return {k: per_replica(strategy, *(p[k] for p in parts)) for k in parts[0]}


def pairs(gradients: dict[str, Any], variables: dict[str, Any]) -> list[Any]:
    """Gradients with their variables."""
    return [(gradient, variables[name]) for name, gradient in gradients.items()]


def sum_of(parts: Sequence[dict]) -> dict[str, np.ndarray]:
    """The gradients of the whole batch."""
    return jax.tree.map(lambda *xs: np.sum(xs, axis=0, dtype=xs[0].dtype), *parts)


class Plain:
    """Optax on one device, with the gradients of the whole batch."""

    def __init__(self, transformation: Any, values: Any = None) -> None:
        self.transformation: Any = optax.with_extra_args_support(transformation)
        self.params: Any = values or initial_values()
        self.state: Any = self.transformation.init(self.params)
        self._step = jax.jit(self._update)

    def _update(self, gradients: Any, state: Any, params: Any, extra: Any) -> Any:
        updates, state = self.transformation.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state

    def step(self, gradients: dict[str, Any], **extra: Any) -> None:
        """One update."""
        self.params, self.state = self._step(gradients, self.state, self.params, extra)


def step_of(engine: str, optimizer: Any, variables: dict[str, Any]) -> Callable:
    """A replica function that applies the gradients it gets."""

    def step(gradients: dict[str, Any], **extra: Any) -> None:
        optimizer.apply_gradients(pairs(gradients, variables), **extra)

    return compile_if(engine, step)


def assert_trained(
    optimizer: Any,
    variables: dict[str, Any],
    plain: Plain,
    rtol: float = 2e-6,
) -> None:
    """Variables and slots have the numbers of `plain`, and lie in one piece."""
    for variable in (*variables.values(), *optimizer.variables):
        assert_in_step(variable)
    assert_close(optimizer, variables, plain, rtol)


def assert_close(
    optimizer: Any, variables: dict[str, Any], plain: Plain, rtol: float = 2e-6
) -> None:
    """Variables and slots have the numbers of `plain`, the same on every replica."""
    for name, variable in variables.items():
        assert len(set(copies(variable))) == 1, name
        np.testing.assert_allclose(
            variable.numpy(), plain.params[name], rtol, 1e-6, err_msg=name
        )
    assert_slots(optimizer, plain, rtol)


def assert_slots(optimizer: Any, plain: Plain, rtol: float = 2e-6) -> None:
    """The slots have the numbers of `plain`, the same on every replica."""
    mine, theirs = optimizer.variables[1:], jax.tree.leaves(plain.state)
    assert len(mine) == len(theirs)
    for slot, expected in zip(mine, theirs):
        assert len(set(copies(slot))) == 1, slot.name
        assert slot.dtype == expected.dtype
        np.testing.assert_allclose(
            _numbers(slot.read_value()),
            _numbers(expected),
            rtol,
            1e-6,
            err_msg=slot.name,
        )


def assert_in_step(variable: Any) -> None:
    """All copies are equal to the last bit, and lie together in one global array."""
    assert not isinstance(variable.stored, mx.distribute.PerReplica), variable.name
    assert len(copies(variable)) == variable.strategy.num_replicas_in_sync
    assert len(set(copies(variable))) == 1, variable.name


def copies(variable: Any) -> list[bytes]:
    """The bits of every copy."""
    found = variable.strategy.experimental_local_results(variable)
    return [_numbers(copy).tobytes() for copy in found]


def _numbers(value: Any) -> np.ndarray:
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)
