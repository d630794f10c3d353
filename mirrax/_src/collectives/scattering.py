"""Sums of which each replica gets a part, and parts that every replica gets back as a whole.

Together they are an all-reduce, cut in two: what lies between is computed on parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base.mesh import AXIS_NAME, ReplicaMesh
from mirrax._src.base.reduce_op import ReduceOp
from mirrax._src.collectives.algorithms import (
    NcclAllReduce,
    ReduceProgram,
    add_all,
)
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.collectives.packing import BETWEEN_WORKERS, PackLimits, plan_packs
from mirrax._src.collectives.programs import declare_equal

_SMALL_BYTES = 4 * 1024


@dataclass(frozen=True)
class ScatterProgram:
    """What one replica does to get its part of the sum of all replicas' arrays."""

    ops: NcclAllReduce
    options: CommunicationOptions
    mesh: ReplicaMesh

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The sums: a part where an axis divides, else the whole."""
        size = self.mesh.size
        axes = [self.mesh.sharded_axis(array.shape) for array in arrays]
        whole = [
            i
            for i, axis in enumerate(axes)
            if axis is None and not self._joins(arrays[i])
        ]
        reduce = ReduceProgram(self.ops, ReduceOp.SUM, self.options, self.mesh)
        results = dict(zip(whole, reduce([arrays[i] for i in whole])))
        rest = [i for i in range(len(arrays)) if i not in results]
        rows = [_in_rows(arrays[i], axes[i], size) for i in rest]
        for i, row in zip(rest, self._scatter(rows)):
            if axes[i] is None:
                results[i] = declare_equal(row.reshape(arrays[i].shape))
            else:
                results[i] = _part_of_row(row, arrays[i].shape, axes[i], size)
        return [results[i] for i in range(len(arrays))]

    @property
    def _is_direct(self) -> bool:
        """Whether replicas send parts to each other and add them in order: over Gloo."""
        mesh = self.mesh
        return mesh.spans_workers and mesh.devices[0].platform == "cpu"

    def _joins(self, array: jax.Array) -> bool:
        """Whether a small array that no axis divides travels with the parts, to everybody.

        All replicas add the same numbers in the same order, so that they have the same sum to
        the last bit.
        """
        is_small = 0 < array.size * array.dtype.itemsize <= _SMALL_BYTES
        return self._is_direct and is_small

    def _scatter(self, rows: list[jax.Array]) -> list[jax.Array]:
        """The sum of each replica's row; small arrays travel together."""
        limits = self.ops.pack_limits(len(rows), self.options, self.mesh)
        parts: dict[int, jax.Array] = {}
        for pack in plan_packs(rows, limits):
            joined = rows[pack[0]]
            if len(pack) > 1:
                every = jnp.concatenate([rows[i] for i in pack], axis=1)
                joined = lax.optimization_barrier(every)
            part = self._exchange(joined)
            if len(pack) > 1:
                part = lax.optimization_barrier(part)
            parts.update(zip(pack, lax.split(part, [rows[i].shape[1] for i in pack])))
        return [parts[i] for i in range(len(rows))]

    def _exchange(self, rows: jax.Array) -> jax.Array:
        if self._is_direct:
            # As for sums (`algorithms.py`), whose ring in Gloo is slow; not measured here.
            return add_all(lax.all_to_all(rows, AXIS_NAME, 0, 0))
        return lax.psum_scatter(rows, AXIS_NAME, scatter_dimension=0)


@dataclass(frozen=True)
class JoinProgram:
    """What one replica does to get whole arrays of `shapes`, of which it has a part of each."""

    mesh: ReplicaMesh
    shapes: tuple[tuple[int, ...], ...]

    def __call__(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        limits = BETWEEN_WORKERS if self.mesh.spans_workers else PackLimits()
        flat = [part.reshape(-1) for part in parts]
        results: dict[int, jax.Array] = {}
        for pack in plan_packs(flat, limits):
            joined = flat[pack[0]]
            if len(pack) > 1:
                joined = jnp.concatenate([flat[i] for i in pack])
            joined = lax.optimization_barrier(joined)
            rows = lax.optimization_barrier(lax.all_gather(joined, AXIS_NAME))
            pieces = lax.split(rows, [flat[i].size for i in pack], axis=1)
            for i, piece in zip(pack, pieces):
                results[i] = self._whole(piece, parts[i].shape, self.shapes[i])
        return [results[i] for i in range(len(parts))]

    def _whole(self, rows: jax.Array, part: Any, shape: tuple[int, ...]) -> jax.Array:
        axis = self.mesh.sharded_axis(shape)
        assert axis is not None
        return jnp.moveaxis(rows.reshape(-1, *part), 0, axis).reshape(shape)


def _in_rows(array: jax.Array, axis: Any, count: int) -> jax.Array:
    """A row for each of `count` replicas: its part of `array`, or all of it."""
    if axis is None:
        return jnp.broadcast_to(array.reshape(1, -1), (count, array.size))
    return jnp.moveaxis(array, axis, 0).reshape(count, -1)


def _part_of_row(
    row: jax.Array, shape: tuple[int, ...], axis: Any, count: int
) -> jax.Array:
    """A replica's part of an array of `shape`, from its row."""
    rest = (*shape[:axis], *shape[axis + 1 :])
    return jnp.moveaxis(row.reshape(shape[axis] // count, *rest), 0, axis)
