"""`mx.nn`: losses of parts of a batch that add up to the loss of the whole batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.base import context
from mirrax._src.base.hiding import brief
from mirrax._src.base.jax_compat import Tracer


@brief
def compute_average_loss(
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> jax.Array:
    """This replica's share of the mean loss of the global batch.

    >>> strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> losses = strategy.experimental_distribute_values_from_function(
    ...     lambda context: jnp.array([[1.0, 2.0, 3.0], [6.0]][context.replica_id_in_sync_group])
    ... )
    >>> shares = strategy.run(mx.nn.compute_average_loss, args=(losses,))
    >>> strategy.reduce("SUM", shares, axis=None)  # (1 + 2 + 3 + 6) / 4
    Array(3., dtype=float32)

    The sum of all replicas' shares, and so of their gradients, is that of the whole batch. If
    `global_batch_size` is not given the examples of all replicas are counted; in eager code
    that makes replicas wait for each other, so give it there if you know it.

    Args:
        per_example_loss: Losses, one for each example along the first axis.
        sample_weight: Factors of the losses. The number that is divided by stays the number of
            examples.
        global_batch_size: The number of examples on all replicas.
    """
    losses = jnp.asarray(per_example_loss)
    if losses.ndim == 0:
        raise ValueError(
            "`per_example_loss` must have a loss for each example along its first axis, got "
            f"one number ({losses.dtype}). Do not average the losses before; "
            "`mx.nn.scale_regularization_loss` "
            "is for losses of the model as a whole."
        )
    if losses.dtype == jnp.bool_:
        raise TypeError(f"`per_example_loss` must be numbers, got {losses.dtype}.")
    dtype = losses.dtype
    # Half precision overflows at 65504, integers stay integers until they are divided.
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    precise = jnp.promote_types(dtype, jnp.float32)
    if sample_weight is not None:
        weights = match_rank(jnp.asarray(sample_weight, precise), losses)
        weighted = losses.astype(precise) * weights
        losses = weighted if is_float else weighted.astype(dtype)
    count = (
        _count_examples(len(losses))
        if global_batch_size is None
        else _check_batch_size(global_batch_size)
    )
    total = jnp.sum(losses, dtype=precise if is_float else dtype)
    # Without examples the loss is 0, not NaN.
    safe = jnp.where(count == 0, 1, count).astype(total.dtype)
    mean = jnp.where(count == 0, jnp.zeros_like(total), total) / safe
    return mean.astype(dtype) if is_float else mean


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """A loss that does not depend on the batch, divided by the number of replicas.

    >>> strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> strategy.run(mx.nn.scale_regularization_loss, args=(6.0,))
    PerReplica:{
      0: Array(3., dtype=float32),
      1: Array(3., dtype=float32)
    }

    Args:
        regularization_loss: A number, an array or a list of them, which are added up.
    """
    replica = context.current().replica
    if replica is None:
        raise RuntimeError(
            "`scale_regularization_loss` is called outside of replicas, where nothing is "
            "added up later. Call it inside the function that `strategy.run` runs."
        )
    parts = [jnp.asarray(part) for part in jax.tree.leaves(regularization_loss)]
    if any(part.dtype == jnp.bool_ for part in parts):
        found = ", ".join(str(part.dtype) for part in parts)
        raise TypeError(f"`regularization_loss` must be numbers, got {found}.")
    total = sum((jnp.sum(part) for part in parts), start=jnp.zeros((), jnp.int32))
    total = total if parts else jnp.zeros(())
    return total / replica.num_replicas_in_sync


def match_rank(weights: jax.Array, values: jax.Array) -> jax.Array:
    """`weights` for `values`: a last axis of one too many is dropped, a missing one added."""
    shape = weights.shape
    if weights.ndim == values.ndim + 1 and shape[-1] == 1:
        weights = weights[..., 0]
    elif 0 < weights.ndim == values.ndim - 1:
        weights = weights[..., None]
    try:
        if weights.ndim == values.ndim + 1:
            raise ValueError
        jnp.broadcast_shapes(weights.shape, values.shape)
    except ValueError:
        raise ValueError(
            f"`sample_weight` of shape {shape} does not fit values of shape {values.shape}."
        ) from None
    return weights


def _count_examples(here: int) -> jax.Array:
    """The number of examples on all replicas, of which `here` are on this one."""
    place = context.current()
    if place.replica is None:
        raise RuntimeError(
            "`compute_average_loss` is called outside of replicas, where the number of "
            f"examples on each is not known. Pass `global_batch_size` ({here} if these are all), "
            "or call it inside the function that `strategy.run` runs."
        )
    if context.in_program(place) and not context.is_uneven(place):
        return jnp.int32(here * place.replica.num_replicas_in_sync)
    return place.replica.all_reduce("SUM", jnp.int32(here))


def _check_batch_size(size: Any) -> jax.Array:
    known = None if isinstance(size, Tracer) else np.asarray(size)
    like = size if known is None else known
    if like.ndim:
        raise ValueError(
            f"`global_batch_size` must be one number, got an array of shape {like.shape}."
        )
    if not jnp.issubdtype(like.dtype, jnp.integer):
        raise TypeError(f"`global_batch_size` must be an integer, got {size!r}.")
    if known is not None and known < 0:
        raise ValueError(f"`global_batch_size` must not be negative, got {size}.")
    return jnp.asarray(size)
