"""The values of all replicas side by side: what `Strategy.gather` does with each leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.base.values import PerReplica, ReplicaValues, first_copy
from mirrax._src.collectives.programs import gather_parts
from mirrax._src.collectives.sparse import IndexedSlices
from mirrax._src.engines.replica_context import check_gather_axis
from mirrax._src.state.distributed import DistributedVariable
from mirrax._src.strategies.reducing import one_of_each_worker


def gather_leaf(mesh: ReplicaMesh | None, value: Any, axis: int) -> Any:
    """One leaf of `strategy.gather`."""
    if isinstance(value, IndexedSlices):
        raise NotImplementedError(
            "`gather` takes arrays; gather the values and indices of IndexedSlices "
            "one by one."
        )
    if isinstance(value, DistributedVariable):
        value = value.copies()
    if not isinstance(value, ReplicaValues):
        if mesh is None or not mesh.is_shared:
            return value
        value = one_of_each_worker(mesh, jnp.asarray(value), axis)
    return first_copy(gather_everywhere(mesh, value, axis))


def gather_everywhere(mesh: ReplicaMesh | None, value: Any, axis: int) -> jax.Array:
    """The parts of `value` joined along `axis`, on all replicas."""
    if not isinstance(value, ReplicaValues):
        value = PerReplica([value] * (mesh.size if mesh else 1))
    first = value.array if value.layout is Layout.OWN else value.values[0]
    first = first if hasattr(first, "ndim") else jnp.asarray(first)
    check_gather_axis(first, axis)
    if mesh is None or mesh.size == 1:
        return jnp.asarray(first)
    return gather_parts(value, mesh, axis % first.ndim)
