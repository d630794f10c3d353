"""Runs one small program on all replicas' parts: the way cross-replica code communicates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.logical import after_launch, launching
from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.cluster import launches

# From one replica's parts to one replica's results.
ReplicaProgram = Callable[[list[jax.Array]], Any]
_EQUAL = PartitionSpec()


def launch(
    program: ReplicaProgram,
    mesh: ReplicaMesh,
    joined: Sequence[tuple[jax.Array, Layout]],
    specs: Any = _EQUAL,
) -> list[jax.Array]:
    """The results of `program`, run by every replica on its own parts.

    `program` must be hashable by value: equal ones share one compilation. `specs` says how
    its results lie on the mesh, which by default are equal on all replicas.
    """
    arrays = [array for array, _ in joined]
    rows = tuple(mesh.has_row(layout) for _, layout in joined)
    # Inside a function that is being traced it is a part of that one's program.
    is_own = mesh.spans_workers and not any(isinstance(a, Tracer) for a in arrays)
    with launching:
        compiled = _compiled(program, mesh, rows, specs)
        if is_own:
            label = describe_program(program, arrays)
            _compare_once(mesh, label)
            results = launches.last.watch(label, compiled, arrays)
        else:
            results = compiled(arrays)
    after_launch(results)
    return results


def describe_program(program: Any, arrays: Sequence[Any]) -> str:
    """A program for messages and comparisons: what it is, and of which arrays."""
    name = getattr(program, "__name__", None) or type(program).__name__
    kinds = ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in arrays)
    return f"{name}({kinds})"


def _equal_on_all_replicas(array: jax.Array) -> jax.Array:
    """`array`, a mark in traced code that does not show that all replicas have the same."""
    return array


EQUALITY_MARK = _equal_on_all_replicas.__name__
declare_equal = jax.jit(_equal_on_all_replicas)


@functools.lru_cache(maxsize=4096)
def _compare_once(mesh: ReplicaMesh, label: str) -> None:
    mesh.cluster.compare(label)


@functools.lru_cache(maxsize=4096)
def _compiled(
    program: ReplicaProgram, mesh: ReplicaMesh, rows: tuple[bool, ...], specs: Any
) -> ReplicaProgram:
    def body(arrays: list[jax.Array]) -> list[jax.Array]:
        return program([a[0] if has_row else a for a, has_row in zip(arrays, rows)])

    mapped = jax.shard_map(
        body, mesh=mesh.mesh, in_specs=mesh.split_spec, out_specs=specs, check_vma=False
    )
    return jax.jit(mapped)
