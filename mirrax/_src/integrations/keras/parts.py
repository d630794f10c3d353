"""Keras' parts in replicas: optimizers, random seeds, batch normalisation."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from mirrax._src.base.protocols import StrategyLike
from mirrax._src.integrations.keras.private import (
    BaseOptimizer,
    in_stateless_scope,
    seed_generator,
    wrap,
)
from mirrax._src.integrations.keras.variables import (
    current_replica,
    doing,
    held_variable,
    here,
    made_elsewhere,
)

_Original = Callable[..., Any]


def install() -> None:
    wrap(BaseOptimizer, "apply", _apply)
    wrap(keras.optimizers.LossScaleOptimizer, "apply", _apply_scaled)
    if hasattr(keras.optimizers, "MultiOptimizer"):  # of other optimizers
        wrap(keras.optimizers.MultiOptimizer, "apply", _apply)
    wrap(keras.random.SeedGenerator, "next", _next_seed)
    wrap(seed_generator, "global_seed_generator", _global_seed_generator)
    norm = keras.layers.BatchNormalization
    wrap(norm, "__init__", _initialize_norm)
    wrap(norm, "add_weight", _add_weight)
    wrap(norm, "_moments", _moments)


# Optimizers --------------------------------------------------------------------------------


def _apply(
    original: _Original,
    self: Any,
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None = None,
) -> None:
    """In a replica: applies the sum of all replicas' gradients, once."""
    replica = current_replica()
    if replica is None or here.is_agreed or in_stateless_scope():
        return original(self, grads, trainable_variables)
    iterations = self.variables[0]  # with accumulation `self.iterations` is a quotient
    if held_variable(iterations) is None:  # before anything has changed
        raise made_elsewhere(iterations, is_new=False)
    if not self.built and trainable_variables is not None:
        variables = list(trainable_variables)

        def build(strategy: StrategyLike) -> None:
            if not self.built:
                with jax.ensure_compile_time_eval():
                    self.build(variables)

        replica.merge("optimizer.build", build, ())
    grads = list(grads)
    known = [i for i, gradient in enumerate(grads) if gradient is not None]
    sums = replica.all_reduce("SUM", [grads[i] for i in known]) if known else []
    for i, total in zip(known, sums):
        grads[i] = total
    with doing(is_agreed=True):
        return original(self, grads, trainable_variables)


def _apply_scaled(
    original: _Original,
    self: Any,
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None = None,
) -> None:
    """In a replica: whether gradients are finite is asked of their sum.

    Keras assigns variables in the branches of a `cond`, which JAX traces: here the branches give
    new values, which are assigned after it.
    """
    if current_replica() is None or in_stateless_scope():
        return original(self, grads, trainable_variables)

    def update(self: Any, grads: Sequence[Any], given: Sequence[Any] | None) -> None:
        trained = list(given or self._trainable_variables)
        groups = trained, self.variables
        weights, own = ([v.value for v in group] for group in groups)
        for group, values in zip(groups, self.stateless_apply(own, grads, weights)):
            for variable, value in zip(group, values):
                variable.assign(value)

    _apply(update, self, grads, trainable_variables)


# Random seeds ------------------------------------------------------------------------------


def _next_seed(original: _Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """In a replica: a seed of its own."""
    replica: Any = current_replica()
    if replica is None or in_stateless_scope():
        return original(self, *args, **kwargs)
    with doing(is_agreed=True):
        seed = original(self, *args, **kwargs)
    if replica.num_replicas_in_sync == 1:
        return seed
    return jax.random.fold_in(seed, replica.replica_id_in_sync_group)


def _global_seed_generator(original: _Original) -> Any:
    """The generator of the process, which belongs to no strategy."""
    with doing(adopts=False):
        return original()


# Batch normalisation -----------------------------------------------------------------------


def _initialize_norm(original: _Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """`synchronized=True` is accepted: in `fit` it always is, in replicas see `_moments`."""
    is_synchronized = kwargs.pop("synchronized", False)
    original(self, *args, **kwargs)
    self.synchronized = is_synchronized


def _add_weight(original: _Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Moving averages are each replica's own, and their mean where they are read."""
    if kwargs.get("trainable") is False:
        kwargs.setdefault("aggregation", "mean")
    return original(self, *args, **kwargs)


def _moments(original: _Original, self: Any, inputs: Any, mask: Any) -> Any:
    """Mean and variance; of all replicas' examples, if the layer is synchronised."""
    if mask is None:
        axes = self._reduction_axes
        mean, variance = keras.ops.moments(inputs, axes=axes)
        count = jnp.asarray(inputs.size // mean.size, inputs.dtype)
    else:
        mean, variance = original(self, inputs, mask)
        count = jnp.sum(jnp.asarray(mask, inputs.dtype))
    replica = current_replica()
    if replica is None or not self.synchronized or replica.num_replicas_in_sync == 1:
        return mean, variance
    mean, variance = jnp.where(count > 0, jnp.stack([mean, variance]), 0)
    total, count_of_all = replica.all_reduce("SUM", [count * mean, count])
    safe = jnp.maximum(count_of_all, 1)
    mean_of_all = total / safe
    spread = count * (variance + (mean - mean_of_all) ** 2)
    return mean_of_all, replica.all_reduce("SUM", spread) / safe
