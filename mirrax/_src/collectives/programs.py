"""What replicas do together in a reduction or a gather, and how it is started.

The same programs serve both engines: inside a compiled step they are a part of it, from
cross-replica code they are launched on the parts of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base import context
from mirrax._src.base.errors import RunEagerly
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.mesh import AXIS_NAME, Layout, ReplicaMesh
from mirrax._src.base.reduce_op import ReduceOp
from mirrax._src.base.sparse import IndexedSlices
from mirrax._src.base.values import (
    PerReplica,
    ReplicaValues,
    UnevenError,
    copies_of,
    join,
    on_device,
)
from mirrax._src.collectives.destinations import (
    Destinations,
    destination_devices,
    mesh_of_destinations,
    place,
)
from mirrax._src.collectives.launch import launch
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.collectives.packing import reduce_packed


@dataclass(frozen=True)
class ReduceProgram:
    """What one replica does in a reduction of many arrays."""

    ops: Any
    op: ReduceOp
    options: CommunicationOptions
    mesh: ReplicaMesh

    def __call__(self, arrays: list[jax.Array]) -> list[jax.Array]:
        def reduce(array: jax.Array) -> jax.Array:
            if array.dtype == jnp.bool_:
                raise TypeError(
                    "Booleans cannot be summed; convert them first: `value.astype(int)`."
                )
            total = self.ops.reduce_in_program(array, self.mesh)
            return total / self.mesh.size if self.op is ReduceOp.MEAN else total

        limits = self.ops.pack_limits(len(arrays), self.options, self.mesh)
        return reduce_packed(arrays, limits, reduce)


@dataclass(frozen=True)
class FirstProgram:
    """What one replica does to give every replica the first one's arrays."""

    def __call__(self, arrays: list[jax.Array]) -> list[jax.Array]:
        return [first_of_all(a) for a in arrays]


def first_of_all(local: jax.Array) -> jax.Array:
    """The first replica's array, on all replicas of their program."""
    if jnp.issubdtype(local.dtype, jax.dtypes.prng_key):
        data = first_of_all(jax.random.key_data(local))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(local))
    is_first = lax.axis_index(AXIS_NAME) == 0
    numeric = local.astype(jnp.int32) if local.dtype == jnp.bool_ else local
    total = lax.psum(jnp.where(is_first, numeric, 0), AXIS_NAME)
    return total.astype(local.dtype)


@dataclass(frozen=True)
class GatherProgram:
    """What one replica does to give every replica all replicas' arrays, joined on `axis`."""

    axis: int

    def __call__(self, arrays: list[jax.Array]) -> list[jax.Array]:
        return [self._gather(a) for a in arrays]

    def _gather(self, array: jax.Array) -> jax.Array:
        if array.size == 0:  # XLA does not gather nothing
            shape = list(array.shape)
            shape[self.axis] *= lax.axis_size(AXIS_NAME)
            return jnp.zeros(shape, array.dtype)
        return lax.all_gather(array, AXIS_NAME, axis=self.axis, tiled=True)


def reduce_sparse(
    op: ReduceOp, value: IndexedSlices, destinations: Destinations
) -> IndexedSlices:
    """All replicas' rows and indices, joined; the rows stay as few as they are."""
    mesh = mesh_of(value.values, destinations)
    rows = gather_parts(value.values, mesh, axis=0)
    indices = gather_parts(value.indices, mesh, axis=0)
    if op is ReduceOp.MEAN:
        rows = rows / mesh.size
    placed = (place(part, mesh, destinations) for part in (rows, indices))
    shape = value.dense_shape
    if isinstance(shape, ReplicaValues):  # a shape that is being traced
        shape = shape.array
    return IndexedSlices(*placed, dense_shape=shape)


def run_on_parts(
    program: Any, mesh: ReplicaMesh, values: Sequence[ReplicaValues]
) -> list[Any]:
    """The results of `program` on all replicas' parts, wherever those are."""
    if values[0].layout is Layout.OWN:
        return program([v.array for v in values])
    joined = []
    for value in values:
        try:
            joined.append(join(value, mesh))
        except UnevenError:
            raise ValueError(_explain_uneven(value, mesh)) from None
    return launch(program, mesh, joined)


def gather_parts(value: ReplicaValues, mesh: ReplicaMesh, axis: int) -> jax.Array:
    """All replicas' parts joined along `axis`; they may differ in length there."""
    if value.layout is Layout.OWN:
        if context.is_uneven(context.current()):
            reason = "a gather, whose result depends on the other replicas' shapes"
            raise RunEagerly(reason)
        return GatherProgram(axis)([value.array])[0]
    try:
        return launch(GatherProgram(axis), mesh, [join(value, mesh)])[0]
    except UnevenError:
        join_uneven = _join_over_workers if mesh.spans_workers else _join
        return join_uneven(value, mesh, axis)


def _join(value: ReplicaValues, mesh: ReplicaMesh, axis: int) -> jax.Array:
    """Parts of unequal length, joined on one device and copied to all."""
    first = mesh.local_devices[0]
    parts = [on_device(jnp.asarray(part), first) for part in value.values]
    rest = {(part.shape[:axis], part.shape[axis + 1 :]) for part in parts}
    if len(rest) > 1:
        raise ValueError(_explain_uneven(value, mesh, axis))
    joined = jnp.concatenate(parts, axis=axis)
    return joined if isinstance(joined, Tracer) else mesh.mirror(joined)


def _join_over_workers(value: ReplicaValues, mesh: ReplicaMesh, axis: int) -> jax.Array:
    """Parts of unequal length of all workers: filled up, gathered, and cut to size."""
    assert value.shapes is not None
    rest = {(shape[:axis], shape[axis + 1 :], dtype) for shape, dtype in value.shapes}
    if len(rest) > 1:
        raise ValueError(_explain_uneven(value, mesh, axis))
    lengths = [shape[axis] for shape, _ in value.shapes]
    longest = max(lengths)

    def filled(part: Any, device: Any) -> jax.Array:
        gap = [(0, 0)] * part.ndim
        gap[axis] = (0, longest - part.shape[axis])
        with jax.default_device(device):
            return jnp.pad(part, gap)

    parts = [filled(p, d) for p, d in zip(value.values, mesh.local_devices)]
    joined = join(PerReplica(parts, mesh.equal_shapes(parts[0])), mesh)
    whole = copies_of(launch(GatherProgram(axis), mesh, [joined])[0])[0]
    pieces = [
        lax.slice_in_dim(whole, i * longest, i * longest + n, axis=axis)
        for i, n in enumerate(lengths)
    ]
    return mesh.mirror(jnp.concatenate(pieces, axis=axis))


def mesh_of(value: ReplicaValues, destinations: Destinations) -> ReplicaMesh:
    """The mesh that `value` lies on: its own, or where its result goes, or its devices'."""
    if value.mesh is not None:
        return value.mesh
    count = len(value.values)
    mesh = mesh_of_destinations(destinations)
    if mesh is not None and len(mesh.local_ids) == count:
        return mesh
    devices = destination_devices(value)
    if len(set(devices)) != count:
        devices = destination_devices(destinations)
    if len(set(devices)) != count:
        raise ValueError(
            f"A value with {count} parts on {len(set(devices))} device(s) cannot be reduced: "
            "each part has to be on a device of its own."
        )
    return ReplicaMesh(devices)


def _explain_uneven(
    value: ReplicaValues, mesh: ReplicaMesh, axis: int | None = None
) -> str:
    ids = range(mesh.size) if value.shapes else mesh.local_ids
    shapes = value.shapes or [
        (getattr(part, "shape", ()), getattr(part, "dtype", type(part).__name__))
        for part in value.values
    ]
    rows = "\n".join(
        f"  {mesh.describe(i)}: {shape} {dtype}"
        for i, (shape, dtype) in zip(ids, shapes)
    )
    if axis is not None:
        return (
            f"Gathering along axis {axis} needs parts that agree on all other axes, but "
            f"found\n{rows}"
        )
    return (
        f"A reduction needs equal shapes and dtypes on all replicas, but found\n{rows}\n"
        "This is usually a partial last batch: reduce each replica's examples first, or "
        "use `strategy.reduce(op, value, axis=0)`."
    )
