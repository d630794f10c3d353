"""`CrossDeviceOps`: how values of several devices are reduced and copied.

A user's subclass overrides the `*_implementation` hooks and sees `PerReplica` values. The
algorithms that come with mirrax override `reduce_in_program` instead: what one replica
does, inside the program that all replicas run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base import context
from mirrax._src.base.devices import DeviceLike, device_name, resolve_devices
from mirrax._src.base.jax_compat import Device, Tracer
from mirrax._src.base.mesh import AXIS_NAME, ReplicaMesh
from mirrax._src.base.reduce_op import ReduceOp, parse_reduce_op
from mirrax._src.base.values import (
    InProgram,
    Mirrored,
    PerReplica,
    ReplicaValues,
    UnevenError,
    copies_of,
    is_array,
    is_number,
    stack,
    to_device,
)
from mirrax._src.collectives.launch import launch
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.collectives.packing import PackLimits, reduce_packed
from mirrax._src.collectives.sparse import IndexedSlices
from mirrax._src.state.frame import RunEagerly

Destinations = Any


class CrossDeviceOps:
    """How a strategy reduces and copies values; subclass it to bring an algorithm of your own.

    A subclass overrides `reduce_implementation`, `batch_reduce_implementation` and
    `broadcast_implementation`; they are called in cross-replica context with `PerReplica`
    values, in both engines.
    """

    __module__ = "mirrax.distribute"

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Destinations,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """`per_replica_value` reduced, with a copy on each device of `destinations`."""
        return self.reduce_implementation(
            parse_reduce_op(reduce_op),
            _as_per_replica(per_replica_value),
            _check_destinations(destinations),
            options or CommunicationOptions(),
        )

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Destinations]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Several reductions in one, so that small values can travel together."""
        pairs = list(value_destination_pairs)
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise ValueError(
                "`value_destination_pairs` must be a list of (value, destinations) pairs."
            )
        return self.batch_reduce_implementation(
            parse_reduce_op(reduce_op),
            [(_as_per_replica(v), _check_destinations(d)) for v, d in pairs],
            options or CommunicationOptions(),
        )

    def broadcast(self, tensor: Any, destinations: Destinations) -> Any:
        """`tensor` with a copy on each device of `destinations`."""
        return self.broadcast_implementation(tensor, _check_destinations(destinations))

    # The hooks of a subclass -----------------------------------------------------------

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Any:
        """One reduction; a subclass has to bring it."""
        raise NotImplementedError(
            f"{type(self).__name__} does not override `reduce_implementation`."
        )

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Destinations]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Several reductions: one after another, unless a subclass does better."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Destinations) -> Any:
        """A copy on each destination; a subclass may do it its own way."""
        return copy_to(tensor, destinations)


class ProgramOps(CrossDeviceOps):
    """Reductions that are programs on the devices; a subclass is an algorithm."""

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Any:
        return _reduce_all(
            self, reduce_op, [(per_replica_value, destinations)], options
        )[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Destinations]],
        options: CommunicationOptions,
    ) -> list[Any]:
        return _reduce_all(self, reduce_op, value_destination_pairs, options)

    def pack_limits(
        self, arrays: Sequence[jax.Array], options: CommunicationOptions
    ) -> PackLimits:
        """Which of `arrays` travel together."""
        if options.bytes_per_pack:
            size = options.bytes_per_pack
            return PackLimits(
                small_bytes=size, pack_bytes=size, pack_arrays=len(arrays)
            )
        return PackLimits()

    def reduce_in_program(self, array: jax.Array, mesh: ReplicaMesh) -> jax.Array:
        """The sum of all replicas' `array`, computed inside the replicas' program."""
        return lax.psum(array, AXIS_NAME)

    # Equal algorithms share their compiled programs.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))


@dataclass(frozen=True)
class ReduceProgram:
    """What one replica does in a reduction of many arrays."""

    ops: ProgramOps
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

        limits = self.ops.pack_limits(arrays, self.options)
        return reduce_packed(arrays, limits, reduce)


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


def _reduce_all(
    ops: ProgramOps,
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
        mesh = mesh_of([pairs[i][0] for i in dense])
        program = ReduceProgram(ops, op, options, mesh)
        reduced = run_on_parts(program, mesh, [pairs[i][0] for i in dense])
        for i, value in zip(dense, reduced):
            results[i] = place(value, mesh, pairs[i][1])
    return results


def _reduce_sparse(
    op: ReduceOp, value: IndexedSlices, destinations: Destinations
) -> IndexedSlices:
    mesh = mesh_of([value.values])
    rows, indices = (
        gather_parts(part, mesh, axis=0) for part in (value.values, value.indices)
    )
    if op is ReduceOp.MEAN:
        rows = rows / mesh.size
    placed = (place(part, mesh, destinations) for part in (rows, indices))
    shape = value.dense_shape
    if isinstance(shape, ReplicaValues):  # a shape that is being traced
        shape = shape.piece.array
    return IndexedSlices(*placed, dense_shape=shape)


def run_on_parts(
    program: Any, mesh: ReplicaMesh, values: Sequence[ReplicaValues]
) -> list[Any]:
    """The results of `program` on all replicas' parts, wherever those are."""
    if isinstance(values[0].piece, InProgram):
        return program([v.piece.array for v in values])
    pieces = []
    for value in values:
        try:
            pieces.append(stack(value, mesh))
        except UnevenError:
            raise ValueError(_explain_uneven(value, mesh)) from None
    return launch(program, mesh, pieces)


def gather_parts(value: ReplicaValues, mesh: ReplicaMesh, axis: int) -> jax.Array:
    """All replicas' parts joined along `axis`; they may differ in length there."""
    if isinstance(value.piece, InProgram):
        if context.current().frame.is_uneven:
            raise RunEagerly(
                "a gather, whose result depends on the other replicas' shapes"
            )
        return GatherProgram(axis)([value.piece.array])[0]
    try:
        return launch(GatherProgram(axis), mesh, [stack(value, mesh)])[0]
    except UnevenError:
        joined = jnp.concatenate(
            [jnp.asarray(part) for part in value.values], axis=axis
        )
        return joined if isinstance(joined, Tracer) else mesh.mirror(joined)


def mesh_of(values: Sequence[ReplicaValues]) -> ReplicaMesh:
    """The mesh that `values` live on: the current strategy's, or that of their devices."""
    here = context.current().strategy.replica_mesh
    value = values[0]
    if isinstance(value.piece, InProgram) or any(
        isinstance(v, Tracer) for v in _known_parts(value)
    ):
        return here
    piece = value.piece
    mesh = getattr(piece, "mesh", None)
    if mesh is not None:
        return mesh
    parts = value.values
    if here is not None and len(parts) == len(here.local_ids):
        return here
    devices = [
        d for part in parts if isinstance(part, jax.Array) for d in part.devices()
    ]
    if len(set(devices)) != len(parts):
        raise ValueError(
            f"A value with {len(parts)} parts on {len(set(devices))} device(s) cannot be "
            "reduced: each part has to be on a device of its own."
        )
    return ReplicaMesh(tuple(devices))


def _known_parts(value: ReplicaValues) -> tuple[Any, ...]:
    if value._values is not None:
        return value._values
    return (getattr(value.piece, "array", value.piece),)


def place(value: Any, mesh: ReplicaMesh, destinations: Destinations) -> Any:
    """A result that all replicas have, with copies where `destinations` says."""
    if isinstance(value, Tracer):
        return Mirrored.of(value)
    devices = destination_devices(destinations, mesh)
    if devices == mesh.local_devices:
        return Mirrored.of(value)
    return copy_to(value, devices)


def copy_to(value: Any, destinations: Destinations) -> Any:
    """A copy of `value` on each destination: one array, or a `Mirrored` of several."""
    if isinstance(value, Tracer) or (
        isinstance(value, Mirrored) and isinstance(value.piece, Tracer)
    ):
        return value if isinstance(value, Mirrored) else Mirrored.of(value)
    mesh = context.current().strategy.replica_mesh
    if context.in_program(context.current()):
        return Mirrored.of(jnp.asarray(value))
    devices = destination_devices(destinations, mesh)
    if mesh is not None and devices == mesh.local_devices and mesh.size > 1:
        return Mirrored.of(mesh.mirror(_first_copy(value)))
    value = _first_copy(value)
    copies = [to_device(value, device) for device in devices]
    return copies[0] if len(copies) == 1 else Mirrored(copies)


def _first_copy(value: Any) -> Any:
    if isinstance(value, Mirrored):
        return value.values[0]
    if isinstance(value, jax.Array) and len(value.sharding.device_set) > 1:
        return copies_of(value)[0]
    return value if is_array(value) or is_number(value) else jnp.asarray(value)


def destination_devices(
    destinations: Destinations, mesh: ReplicaMesh | None
) -> tuple[Device, ...]:
    """The devices that `destinations` means: of a variable, a value, or named ones."""
    if isinstance(destinations, DeviceLike):
        return resolve_devices([destinations])
    if isinstance(destinations, IndexedSlices):
        return destination_devices(destinations.values, mesh)
    if isinstance(destinations, ReplicaValues):
        if mesh is not None and (
            destinations.piece is not None
            or len(destinations.values) == len(mesh.local_ids)
        ):
            return mesh.local_devices
        arrays = [v for v in destinations.values if isinstance(v, jax.Array)]
        devices = [device for array in arrays for device in array.devices()]
        return tuple(devices) or (mesh.local_devices if mesh else ())
    strategy_mesh = getattr(
        getattr(destinations, "strategy", None), "replica_mesh", None
    )
    if strategy_mesh is not None:
        return strategy_mesh.local_devices
    if isinstance(destinations, jax.Array) and not isinstance(destinations, Tracer):
        return tuple(sorted(destinations.devices(), key=lambda d: d.id))
    if isinstance(destinations, tuple | list) and all(
        isinstance(d, DeviceLike) for d in destinations
    ):
        return resolve_devices(destinations)
    array = jnp.asarray(destinations)
    return tuple(array.devices())


def _check_destinations(destinations: Destinations) -> Destinations:
    if destinations is None or (
        isinstance(destinations, tuple | list) and not destinations
    ):
        raise ValueError(
            "`destinations` must name where the result goes: a variable, a distributed "
            "value, a device or a list of devices."
        )
    return destinations


def _as_per_replica(value: Any) -> Any:
    if isinstance(value, IndexedSlices):
        return IndexedSlices(
            _as_per_replica(value.values),
            _as_per_replica(value.indices),
            value.dense_shape,
        )
    if isinstance(value, PerReplica) and value._values is not None:
        if isinstance(value.values[0], IndexedSlices):
            return IndexedSlices(
                PerReplica([s.values for s in value.values]),
                PerReplica([s.indices for s in value.values]),
                value.values[0].dense_shape,
            )
    if isinstance(value, ReplicaValues):
        return value
    return PerReplica([value])


def _explain_uneven(value: ReplicaValues, mesh: ReplicaMesh) -> str:
    rows = "\n".join(
        f"  replica {i} ({device_name(mesh.devices[i])}): "
        f"{getattr(part, 'shape', ())} {getattr(part, 'dtype', type(part).__name__)}"
        for i, part in zip(mesh.local_ids, value.values)
    )
    return (
        f"A reduction needs equal shapes and dtypes on all replicas, but found\n{rows}\n"
        "This is usually a partial last batch: reduce each replica's examples first, or "
        "use `strategy.reduce(op, value, axis=0)`."
    )
