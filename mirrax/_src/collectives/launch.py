"""Runs one small program on all replicas' parts: the way cross-replica code communicates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec

from mirrax._src.base.logical import after_launch, launching
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.values import Stacked

# From one replica's parts to results that are the same on all replicas.
ReplicaProgram = Callable[[list[jax.Array]], list[jax.Array]]


def launch(
    program: ReplicaProgram, mesh: ReplicaMesh, pieces: Sequence[Stacked]
) -> list[jax.Array]:
    """The results of `program`, run by every replica on its own parts.

    `program` must be hashable by value: equal ones share one compilation.
    """
    scalars = tuple(piece.is_scalar and mesh.size > 1 for piece in pieces)
    with launching:
        results = _compiled(program, mesh, scalars)([piece.array for piece in pieces])
    after_launch(results)
    return results


@functools.lru_cache(maxsize=4096)
def _compiled(
    program: ReplicaProgram, mesh: ReplicaMesh, scalars: tuple[bool, ...]
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    def body(arrays: list[jax.Array]) -> list[jax.Array]:
        return program([a[0] if s else a for a, s in zip(arrays, scalars)])

    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh.mesh,
            in_specs=mesh.split_spec,
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
