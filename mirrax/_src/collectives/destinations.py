"""Where a result goes: devices named by a variable, a value, or by themselves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.devices import DeviceLike, resolve_devices
from mirrax._src.base.jax_compat import Device, Tracer
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.values import (
    Mirrored,
    ReplicaValues,
    copies_of,
    is_array,
    is_number,
    to_device,
)
from mirrax._src.collectives.sparse import IndexedSlices

Destinations = Any


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
