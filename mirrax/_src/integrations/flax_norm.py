"""The statistics of Flax's normalisation layers over replicas, also where parts are unequal.

Flax averages the replicas' means, which is the mean of all rows only if all replicas have
equally many. Here sums and counts travel instead.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.mesh import AXIS_NAME
from mirrax._src.base.values import Fn


def synchronised(compute_stats: Fn) -> Fn:
    """Flax's function for the mean and the variance, exact over the replicas of a strategy."""

    @functools.wraps(compute_stats)
    def compute(
        x: Any,
        axes: Any,
        dtype: Any,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_mean: bool = True,
        use_fast_variance: bool = True,
        mask: Any = None,
        **options: Any,
    ) -> Any:
        replica = context.current().replica
        if axis_name != AXIS_NAME or replica is None or context.is_default():
            if axis_name == AXIS_NAME and not _is_bound():
                axis_name = None  # outside replicas all rows are here
            groups = axis_index_groups
            known = x, axes, dtype, axis_name, groups, use_mean, use_fast_variance, mask
            return compute_stats(*known, **options)
        if axis_index_groups is not None:
            raise ValueError(
                f"A normalisation with `axis_name={AXIS_NAME!r}` takes all replicas together: "
                f"`axis_index_groups` must be None, got {axis_index_groups!r}."
            )
        dtype = jnp.result_type(x) if dtype is None else dtype
        if options.pop("force_float32_reductions", True):
            dtype = jnp.promote_types(dtype, jnp.float32)
        return _stats(
            replica, jnp.asarray(x, dtype), axes, use_mean, use_fast_variance, mask
        )

    return compute


def _is_bound() -> bool:
    """Whether the code is in a `shard_map` of the user's with such an axis."""
    try:
        jax.lax.axis_size(AXIS_NAME)
        return True
    except NameError:
        return False


def _stats(
    replica: Any, x: jax.Array, axes: Any, use_mean: bool, is_fast: bool, mask: Any
) -> tuple[jax.Array, jax.Array]:
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    axes = tuple(axis % x.ndim for axis in axes)
    present = jnp.ones((), jnp.float32) if mask is None else mask
    ones = jnp.broadcast_to(present, x.shape).astype(jnp.real(x).dtype)

    def means(*values: jax.Array) -> list[jax.Array]:
        totals = [v.sum(axes, where=mask) for v in values]
        *sums, count = replica.all_reduce("SUM", [*totals, ones.sum(axes)])
        return [total / count for total in sums]

    if not use_mean:
        (variance,) = means(_square(x))
        return jnp.zeros_like(variance), variance
    if is_fast:
        mean, square = means(x, _square(x))
        return mean, jnp.maximum(0.0, square - _square(mean))
    (mean,) = means(x)
    (variance,) = means(_square(x - jnp.expand_dims(mean, axes)))
    return mean, variance


def _square(x: jax.Array) -> jax.Array:
    return (
        jnp.square(jnp.real(x)) + jnp.square(jnp.imag(x))
        if jnp.iscomplexobj(x)
        else jnp.square(x)
    )
