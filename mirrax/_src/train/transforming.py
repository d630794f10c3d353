"""An optimizer in functional style: a transformation that sums gradients over replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base import context
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.values import PyTree
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.engines.function import Function, function
from mirrax._src.train.learning_rate import by_name
from mirrax._src.train.parts import StateInParts, agreed


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
        shard_state: bool = False,
        name: str = "optimizer",
        **hyperparameters: Any,
    ) -> None:
        if isinstance(transformation, str):
            transformation = by_name(transformation, hyperparameters)
        elif hyperparameters:
            raise TypeError(
                f"`mx.train.Optimizer` takes {', '.join(map(repr, hyperparameters))} only with "
                f"the name of an optimizer, got {transformation!r}. Write "
                "`mx.train.Optimizer('adam', learning_rate=1e-3)`."
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
                f"`gradient_accumulation_steps` must be a positive integer, got {steps!r}."
            )
        if reduce_dtype is not None and not _is_floating(reduce_dtype):
            raise ValueError(
                f"`reduce_dtype` must be a floating-point type, got {reduce_dtype!r}."
            )
        import optax

        self.name = name
        if not isinstance(shard_state, bool):
            raise TypeError(
                f"`shard_state` must be True or False, got {shard_state!r}."
            )
        self.shard_state = shard_state
        self._takes_extra = isinstance(
            transformation, optax.GradientTransformationExtraArgs
        )
        self._transformation = optax.with_extra_args_support(transformation)
        self._steps = int(steps)
        self._reduce_dtype = reduce_dtype and jnp.dtype(reduce_dtype)
        self.options = options

    def init(self, params: PyTree) -> PyTree:
        """The state that `update` needs, for a pytree of parameters."""
        mesh = self._mesh_to_shard()
        if mesh is not None and context.current().replica is None:
            return StateInParts(self, mesh).init(params)
        return self.begin(params)

    def begin_in_scope(self, params: PyTree) -> PyTree:
        """The arrays of a new state, in parts if they are to be."""
        mesh = self._mesh_to_shard()
        return (
            self.begin(params)
            if mesh is None
            else StateInParts(self, mesh).begin(params)
        )

    @functools.cached_property
    def compiled_update(self) -> Function:
        """`update`, for eager replicas that call it together."""
        return function(self._update_in_replica)

    def _update_in_replica(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree,
        aggregate: bool,
        extra: dict[str, Any],
    ) -> tuple[PyTree, PyTree]:
        return self.update(updates, state, params, aggregate=aggregate, **extra)

    def describe(self) -> str:
        """The transformation for messages."""
        init = self._transformation.init
        return getattr(init, "__qualname__", repr(init)).partition(".<locals>")[0]

    def begin(self, params: PyTree) -> PyTree:
        """The state for these parameters, whole."""
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

        if (mesh := self._mesh_to_shard()) is not None:
            parts = StateInParts(self, mesh)
            if context.in_program(context.current()):
                return parts.update(updates, state, params, aggregate, extra_args)
            return parts.update_eagerly(updates, state, params, aggregate, extra_args)

        def combine(gradients: PyTree) -> tuple[PyTree, dict[str, Any]]:
            extra = agreed(extra_args)
            return (self._sum(gradients) if aggregate else gradients), extra

        if self.shard_state:  # also the sums of several calls are those of all replicas
            updates, extra_args = combine(updates)
            return self.advance(
                updates, state, params, extra_args, lambda x: (x, extra_args)
            )
        return self.advance(updates, state, params, extra_args, combine)

    def advance(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree,
        extra_args: dict[str, Any],
        combine: Callable[[PyTree], tuple[PyTree, dict[str, Any]]],
    ) -> tuple[PyTree, PyTree]:
        """A call's part of an update; `combine` gives all replicas' gradients and arguments."""

        def finish(gradients: PyTree, inner: PyTree) -> tuple[PyTree, PyTree]:
            gradients, extra = combine(gradients)
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

    def _mesh_to_shard(
        self, strategy: StrategyLike | None = None
    ) -> ReplicaMesh | None:
        """The mesh on which the state lies in parts, if it does."""
        if not self.shard_state:
            return None
        here = context.current()
        if strategy is None and context.is_uneven(here):
            # It is cut where replicas communicate: each computes the whole update.
            return None
        mesh = (strategy or here.strategy).replica_mesh
        return None if mesh is None or mesh.size == 1 else mesh

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
        def reduce(gradients: PyTree) -> PyTree:
            return replica.all_reduce("SUM", gradients, self.options)

        return self.in_reduce_dtype(reduce, gradients)

    def in_reduce_dtype(
        self, reduce: Callable[[PyTree], PyTree], gradients: PyTree
    ) -> PyTree:
        """`reduce(gradients)`, computed in `reduce_dtype`."""

        def cast(x: jax.Array) -> jax.Array:
            is_real = jnp.issubdtype(x.dtype, jnp.floating)
            return x.astype(self._reduce_dtype) if is_real else x

        if self._reduce_dtype is None:
            return reduce(gradients)
        total = reduce(jax.tree.map(cast, gradients))
        return jax.tree.map(lambda x, own: x.astype(own.dtype), total, gradients)


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
