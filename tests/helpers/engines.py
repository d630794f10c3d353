"""One way to write a test for both engines.

@both_engines
def test_a_sum(engine):
    strategy = mirrored(2)
    x = per_replica(strategy, 1.0, 2.0)
    total = strategy.reduce("SUM", run(strategy, square, x, engine=engine), axis=None)
    assert total == 5.0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx

both_engines = pytest.mark.parametrize("engine", ["eager", "compiled"])

# The third way to compile: `mx.function` around the code that calls `run`.
all_styles = pytest.mark.parametrize(
    "engine", ["eager", "compiled", pytest.param("caller", marks=pytest.mark.slow)]
)


def mirrored(num_replicas: int, **kwargs: Any) -> mx.MirroredStrategy:
    """A strategy with that many replicas, on logical CPUs."""
    return mx.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)], **kwargs)


def per_replica(strategy: Any, *parts: Any, dtype: Any = None) -> Any:
    """A per-replica value of these parts, each on its replica's device."""
    assert len(parts) == strategy.num_replicas_in_sync
    return strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.asarray(parts[ctx.replica_id_in_sync_group], dtype)
    )


def split(strategy: Any, batch: Any) -> Any:
    """A global batch in equal slices, one for each replica."""
    return per_replica(strategy, *np.split(batch, strategy.num_replicas_in_sync))


def compile_if(engine: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` for that engine."""
    return fn if engine == "eager" else mx.function(fn)


def run(
    strategy: Any, fn: Callable[..., Any], *args: Any, engine: str, **kwargs: Any
) -> Any:
    """`strategy.run(fn, args, kwargs)` by that engine."""
    if engine == "caller":
        caller = mx.function(lambda args, kwargs: strategy.run(fn, args, kwargs))
        return caller(args, kwargs)
    return strategy.run(compile_if(engine, fn), args, kwargs)


def parts(strategy: Any, value: Any) -> list[Any]:
    """Every replica's part of a value, as NumPy sees it (lists, numbers)."""
    return [
        np.asarray(part).tolist() for part in strategy.experimental_local_results(value)
    ]


def replica_id() -> Any:
    """The id of the replica that asks."""
    return mx.get_replica_context().replica_id_in_sync_group


def all_sum(value: Any) -> Any:
    """`value` summed over all replicas, inside a replica function."""
    return mx.get_replica_context().all_reduce("SUM", value)
