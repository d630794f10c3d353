"""The state of an optimizer in parts: each replica's device holds one and updates it.

Gradients arrive by reduce-scatter, XLA divides the update among the devices, and the new
parameters are gathered (docs/memory.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base import context
from mirrax._src.base.mesh import AXIS_NAME, ReplicaMesh
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.values import (
    Mirrored,
    PerReplica,
    PyTree,
    Sharded,
    is_array,
    is_leaf,
    to_device,
)
from mirrax._src.collectives.algorithms import NcclAllReduce
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.collectives.scattering import ScatterProgram
from mirrax._src.engines.global_view import in_global_view
from mirrax._src.train.explaining import warn_if_undivided

if TYPE_CHECKING:
    from mirrax._src.train.transforming import Transforming


class StateInParts:
    """What an optimizer does whose state lies in parts on `mesh`."""

    def __init__(self, optimizer: Transforming, mesh: ReplicaMesh) -> None:
        self._optimizer, self._mesh = optimizer, mesh

    def begin(self, params: PyTree) -> PyTree:
        """The arrays of a new state, of which no device ever has the whole."""
        begin, mesh = self._optimizer.begin, self._mesh
        whole = jax.tree.map(self._mirrored, params, is_leaf=is_leaf)
        try:
            shapes = jax.eval_shape(begin, whole)
            places = jax.tree.map(lambda x: mesh.sharded(x.shape), shapes)
            state = jax.jit(begin, out_shardings=places)(whole)
        except (TypeError, jax.errors.JAXTypeError) as error:
            raise ValueError(
                f"The state of {self._optimizer.name!r} cannot be sharded: "
                f"`{self._optimizer.describe()}` cannot be traced by JAX, which has to make each part of it "
                f"on its own device. Leave out `shard_state`. JAX says: {error}"
            ) from error
        warn_if_undivided(self._optimizer.name, shapes, mesh)
        return state

    def init(self, params: PyTree) -> PyTree:
        """A new state, in functional style."""

        def wrap(array: jax.Array) -> Mirrored:
            in_parts = self._mesh.sharded_axis(array.shape) is not None
            return (Sharded if in_parts else Mirrored).of(array, self._mesh)

        return jax.tree.map(wrap, self.begin(params))

    def update(
        self,
        gradients: PyTree,
        state: PyTree,
        params: PyTree,
        aggregate: bool,
        extra_args: dict[str, Any],
    ) -> tuple[PyTree, PyTree]:
        """In the replicas' program: the updates, and the new state."""
        extra, rest = _arrays_in(agreed(extra_args))
        if aggregate:
            gradients = self._optimizer.in_reduce_dtype(self._sum, gradients)
        trees: list[Any] = []

        def compute(
            gradients: PyTree, state: PyTree, params: PyTree, extra: list[Any]
        ) -> list[Any]:
            arguments = rest(extra)
            new, after = self._optimizer.advance(
                gradients, state, params, arguments, lambda total: (total, arguments)
            )
            wanted, of_wanted = jax.tree.flatten(new)
            kept, of_kept = jax.tree.flatten(_of_same_types(after, state))
            trees[:] = of_wanted, of_kept
            return [*wanted, *kept]

        count = len(jax.tree.leaves(gradients))
        outs = in_global_view(compute, count, gradients, state, params, extra)
        of_wanted, of_kept = trees
        return of_wanted.unflatten(outs[:count]), of_kept.unflatten(outs[count:])

    def update_eagerly(
        self,
        gradients: PyTree,
        state: PyTree,
        params: PyTree,
        aggregate: bool,
        extra_args: dict[str, Any],
    ) -> tuple[PyTree, PyTree]:
        """In an eager replica: all meet, and one compiled step does the rest."""
        replica: Any = context.current().replica
        if replica is None:
            raise RuntimeError(
                "`Optimizer.update` with `shard_state=True` must be called in a replica: inside "
                "`strategy.run`."
            )

        def merge(strategy: StrategyLike, *given: Any) -> Any:
            gradients, state, params, extra = replica.rejoined(given)
            state, params = jax.tree.map(self._as_one, (state, params), is_leaf=is_leaf)
            if not aggregate:
                gradients = jax.tree.map(self._as_one, gradients, is_leaf=is_leaf)
            compiled = self._optimizer.compiled_update
            return strategy.run(compiled, (gradients, state, params, aggregate, extra))

        given = gradients, state, params, extra_args
        return replica.merge("Optimizer.update", merge, given)

    def _sum(self, gradients: PyTree) -> PyTree:
        """The sum of all replicas' gradients; a part each, of which the whole is not computed."""
        replica: Any = context.current().replica
        extended = replica.strategy.extended
        options = self._optimizer.options
        if type(extended.cross_device_ops) is not NcclAllReduce:
            return replica.all_reduce("SUM", gradients, options)
        extended.check_options(options)
        options = options or extended.options or CommunicationOptions()
        leaves, tree = jax.tree.flatten(gradients)
        scatter = ScatterProgram(extended.cross_device_ops, options, self._mesh)
        axes = [self._mesh.sharded_axis(x.shape) for x in leaves]
        # Gathered in name only: the global view takes the parts.
        wholes = [
            part
            if axis is None
            else lax.all_gather(part, AXIS_NAME, axis=axis, tiled=True)
            for part, axis in zip(scatter(leaves), axes)
        ]
        return tree.unflatten(wholes)

    def _mirrored(self, value: Any) -> Any:
        if isinstance(value, Mirrored) and value.array is not None:
            value = value.array
        elif isinstance(value, PerReplica | Mirrored):
            value = value.values[0]
        return self._mesh.mirror(value) if is_array(value) else value

    def _as_one(self, value: Any) -> Any:
        """What replicas have brought, which is the same on all."""
        mesh = self._mesh
        if not isinstance(value, PerReplica):
            return value
        parts = list(map(to_device, value.values, mesh.local_devices))
        return Mirrored.of(mesh.join(parts, mirrored=True), mesh)


def _of_same_types(new: PyTree, old: PyTree) -> PyTree:
    """A new state of exactly the old one's dtypes, so that it is kept as it comes."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        return new
    return jax.tree.map(
        lambda x, y: lax.convert_element_type(x, jnp.result_type(y)), new, old
    )


def _arrays_in(tree: PyTree) -> tuple[list[Any], Callable[[list[Any]], PyTree]]:
    """The arrays in a structure, and what puts it together again from such."""
    leaves, structure = jax.tree.flatten(tree)
    at = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def rebuild(arrays: list[Any]) -> PyTree:
        every = list(leaves)
        for i, array in zip(at, arrays):
            every[i] = array
        return structure.unflatten(every)

    return [leaves[i] for i in at], rebuild


def agreed(extra_args: dict[str, Any]) -> dict[str, Any]:
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
