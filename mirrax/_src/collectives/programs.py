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
from mirrax._src.collectives.sparse import IndexedSlices


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

        limits = self.ops.pack_limits(arrays, self.options, self.mesh)
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
    zero = jnp.zeros_like(numeric)
    total = lax.psum(jnp.where(is_first, numeric, zero), AXIS_NAME)
    return total.astype(local.dtype)


@dataclass(frozen=True)
class GatherProgram:
    """What one replica does to give every replica all replicas' arrays, joined on `axis`."""

    axis: int

    def __call__(self, arrays: list[jax.Array]) -> list[jax.Array]:
        return [self._gather(a) for a in arrays]

    def _gather(self, array: jax.Array) -> jax.Array:
        if array.size == 0:  # XLA does not gather nothing
            count = lax.axis_size(AXIS_NAME)
            shape = [
                n * count if i == self.axis else n for i, n in enumerate(array.shape)
            ]
            return jnp.zeros(shape, array.dtype)
        return lax.all_gather(array, AXIS_NAME, axis=self.axis, tiled=True)


def reduce_all(
    ops: Any,
    op: ReduceOp,
    pairs: Sequence[tuple[Any, Destinations]],
    options: CommunicationOptions,
) -> list[Any]:
    """All dense values in one program, sparse ones by joining their rows."""
    results: list[Any] = [None] * len(pairs)
    dense: list[int] = []
    for i, (value, destinations) in enumerate(pairs):
        if isinstance(value, IndexedSlices):
            results[i] = _reduce_sparse(op, value, destinations)
        else:
            dense.append(i)
    if dense:
        mesh = mesh_of(*pairs[dense[0]])
        program = ReduceProgram(ops, op, options, mesh)
        reduced = run_on_parts(program, mesh, [pairs[i][0] for i in dense])
        for i, value in zip(dense, reduced):
            results[i] = place(value, mesh, pairs[i][1])
    return results


def _reduce_sparse(
    op: ReduceOp, value: IndexedSlices, destinations: Destinations
) -> IndexedSlices:
    mesh = mesh_of(value.values, destinations)
    rows, indices = (
        gather_parts(part, mesh, axis=0) for part in (value.values, value.indices)
    )
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
            raise RunEagerly(
                "a gather, whose result depends on the other replicas' shapes"
            )
        return GatherProgram(axis)([value.array])[0]
    try:
        return launch(GatherProgram(axis), mesh, [join(value, mesh)])[0]
    except UnevenError:
        whole = _join_over_workers if mesh.is_shared else _join
        return whole(value, mesh, axis)


def _join(value: ReplicaValues, mesh: ReplicaMesh, axis: int) -> jax.Array:
    """Parts of unequal length, joined on one device and copied to all."""
    first = mesh.local_devices[0]
    parts = [on_device(jnp.asarray(part), first) for part in value.values]
    rest = [[n for i, n in enumerate(part.shape) if i != axis] for part in parts]
    if any(shape != rest[0] for shape in rest):
        raise ValueError(_explain_uneven(value, mesh, f"Gathering along axis {axis}"))
    joined = jnp.concatenate(parts, axis=axis)
    return joined if isinstance(joined, Tracer) else mesh.mirror(joined)


def _join_over_workers(value: ReplicaValues, mesh: ReplicaMesh, axis: int) -> jax.Array:
    """Parts of unequal length of all workers: filled up, gathered, and cut to size."""
    assert value.shapes is not None
    rest = [(s[:axis], s[axis + 1 :], dtype) for s, dtype in value.shapes]
    if any(each != rest[0] for each in rest):
        raise ValueError(_explain_uneven(value, mesh, f"Gathering along axis {axis}"))
    lengths = [shape[axis] for shape, _ in value.shapes]
    longest = max(lengths)

    def filled(part: Any, device: Any) -> jax.Array:
        gap = [
            (0, longest - part.shape[axis] if i == axis else 0)
            for i in range(part.ndim)
        ]
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
    arrays = [part for part in value.values if isinstance(part, jax.Array)]
    devices = tuple(d for array in arrays for d in array.devices())
    if len(set(devices)) != count:
        devices = destination_devices(destinations)
    if len(set(devices)) != count:
        raise ValueError(
            f"A value with {count} parts on {len(set(devices))} device(s) cannot be reduced: "
            "each part has to be on a device of its own."
        )
    return ReplicaMesh(devices)


def _explain_uneven(
    value: ReplicaValues, mesh: ReplicaMesh, what: str | None = None
) -> str:
    rows = "\n".join(
        f"  {mesh.describe(i)}: {getattr(part, 'shape', ())} "
        f"{getattr(part, 'dtype', type(part).__name__)}"
        for i, part in zip(mesh.local_ids, value.values)
    )
    if value.shapes is not None:
        rows = "\n".join(
            f"  {mesh.describe(i)}: {shape} {dtype}"
            for i, (shape, dtype) in enumerate(value.shapes)
        )
    if what is not None:
        return f"{what} needs parts that agree on all other axes, but found\n{rows}"
    return (
        f"A reduction needs equal shapes and dtypes on all replicas, but found\n{rows}\n"
        "This is usually a partial last batch: reduce each replica's examples first, or "
        "use `strategy.reduce(op, value, axis=0)`."
    )
