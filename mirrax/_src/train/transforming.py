"""An optimizer in functional style: a transformation that sums gradients over replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base import context
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.values import PyTree
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.train.learning_rate import by_name


class Accumulating(NamedTuple):
    """The state of an optimizer that updates once in several calls."""

    micro_step: Any
    accumulated: PyTree
    inner: PyTree


class Transforming:
    """`init` and `update`, like those of Optax."""

    # Those that the transformation trains, in the order in which they were made.
    _variables: Mapping[str, Any] = {}

    def __init__(
        self,
        transformation: Any,
        *,
        gradient_accumulation_steps: int = 1,
        reduce_dtype: Any = None,
        options: CommunicationOptions | None = None,
        name: str = "optimizer",
        **hyperparameters: Any,
    ) -> None:
        if isinstance(transformation, str):
            transformation = by_name(transformation, hyperparameters)
        elif hyperparameters:
            raise TypeError(
                f"`mx.train.Optimizer` takes {', '.join(map(repr, hyperparameters))} only with "
                "the name of an optimizer: `mx.train.Optimizer('adam', learning_rate=1e-3)`."
            )
        methods = (getattr(transformation, each, None) for each in ("init", "update"))
        if not all(map(callable, methods)) or isinstance(transformation, Transforming):
            raise TypeError(
                "`mx.train.Optimizer` needs an Optax transformation, such as "
                f"`optax.adam(1e-3)`, got {transformation!r}."
            )
        steps = gradient_accumulation_steps
        if not hasattr(steps, "__index__") or isinstance(steps, bool) or steps < 1:
            raise ValueError(
                f"`gradient_accumulation_steps` must be a number from 1 on, got {steps!r}."
            )
        if reduce_dtype is not None and not _is_floating(reduce_dtype):
            raise ValueError(
                f"`reduce_dtype` must be a floating-point type, got {reduce_dtype!r}."
            )
        import optax

        self.name = name
        self._takes_extra = isinstance(
            transformation, optax.GradientTransformationExtraArgs
        )
        self._transformation = optax.with_extra_args_support(transformation)
        self._steps = int(steps)
        self._reduce_dtype = reduce_dtype and jnp.dtype(reduce_dtype)
        self._options = options

    def init(self, params: PyTree) -> PyTree:
        """The state that `update` needs, for a pytree of parameters."""
        inner = self._transformation.init(params)
        if self._steps == 1:
            return inner
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Accumulating(jnp.zeros((), jnp.int32), zeros, inner)

    def update(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        aggregate: bool = True,
        **extra_args: Any,
    ) -> tuple[PyTree, PyTree]:
        """What to add to the parameters (`optax.apply_updates`), and the new state.

        Args:
            updates: This replica's gradients.
            state: What `init` or the last `update` returned.
            params: The parameters, for transformations that look at them (weight decay).
            aggregate: Whether to sum the gradients over the replicas.
            **extra_args: What the transformation takes beyond that. Floating-point arrays,
                such as a loss, are averaged over the replicas.
        """

        def finish(gradients: PyTree, inner: PyTree) -> tuple[PyTree, PyTree]:
            extra = _agreed(extra_args)
            if aggregate:
                gradients = self._sum(gradients)
            return self._transformation.update(gradients, inner, params, **extra)

        if self._steps == 1:
            return finish(updates, state)
        total = jax.tree.map(jnp.add, state.accumulated, updates)

        def update() -> tuple[PyTree, PyTree]:
            mean = jax.tree.map(lambda x: x / self._steps, total)
            new, inner = finish(mean, state.inner)
            return new, Accumulating(
                jnp.zeros_like(state.micro_step),
                jax.tree.map(jnp.zeros_like, total),
                inner,
            )

        def wait() -> tuple[PyTree, PyTree]:
            shapes, _ = jax.eval_shape(
                lambda: self._transformation.update(
                    total, state.inner, params, **extra_args
                )
            )
            new = jax.tree.map(jnp.zeros_like, shapes)
            return new, Accumulating(state.micro_step + 1, total, state.inner)

        is_last = state.micro_step == self._steps - 1
        if not isinstance(is_last, Tracer):
            return update() if is_last else wait()
        if context.is_uneven(context.current()):
            # Such a step is cut where replicas communicate, which it cannot be in a branch.
            return jax.tree.map(lambda x, y: jnp.where(is_last, x, y), update(), wait())
        return lax.cond(is_last, update, wait)

    def _sum(self, gradients: PyTree) -> PyTree:
        """The gradients of all replicas, summed in `reduce_dtype`."""
        replica = context.current().replica
        if replica is None:
            raise RuntimeError(
                "`Optimizer.update` sums gradients over replicas, so it must be called in a "
                "replica: inside `strategy.run`. Pass `aggregate=False` for gradients that "
                "are summed already."
            )
        is_ours = (
            isinstance(gradients, dict) and gradients.keys() == self._variables.keys()
        )
        if is_ours:
            # In the order in which they are made, not that of their names, which JAX takes.
            ordered = [gradients[key] for key in self._variables]
            return dict(zip(self._variables, self._sum_in(replica, ordered)))
        return self._sum_in(replica, gradients)

    def _sum_in(self, replica: Any, gradients: PyTree) -> PyTree:
        def cast(x: jax.Array) -> jax.Array:
            is_real = jnp.issubdtype(x.dtype, jnp.floating)
            return x.astype(self._reduce_dtype) if is_real else x

        if self._reduce_dtype is None:
            return replica.all_reduce("SUM", gradients, self._options)
        total = replica.all_reduce("SUM", jax.tree.map(cast, gradients), self._options)
        return jax.tree.map(lambda x, own: x.astype(own.dtype), total, gradients)


def _agreed(extra_args: dict[str, Any]) -> dict[str, Any]:
    """Arguments of which all replicas have the same, so that copies never drift apart."""
    leaves, tree = jax.tree.flatten(extra_args)
    own = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    replica = context.current().replica
    if own and replica is not None:
        mean = replica.all_reduce("MEAN", [leaves[i] for i in own])
        for i, value in zip(own, mean):
            leaves[i] = value
    return jax.tree.unflatten(tree, leaves)


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
