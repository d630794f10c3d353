"""Where a result goes: devices named by a variable, a value, or by themselves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.devices import DeviceLike, resolve_devices
from mirrax._src.base.jax_compat import Device, Tracer
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.sparse import IndexedSlices
from mirrax._src.base.values import (
    Mirrored,
    ReplicaValues,
    first_copy,
    is_numeric,
    to_device,
)

Destinations = Any


def place(value: Any, mesh: ReplicaMesh, destinations: Destinations) -> Any:
    """A result that all replicas have, with copies where `destinations` says."""
    at_home = ((), mesh.local_devices)
    if isinstance(value, Tracer) or destination_devices(destinations) in at_home:
        return Mirrored.of(value, mesh)
    return copy_to(value, destinations)


def copy_to(value: Any, destinations: Destinations) -> Any:
    """A copy of `value` on each destination: one array, or a `Mirrored` of several."""
    mesh = _known_mesh(destinations)
    whole = value.array if isinstance(value, Mirrored) else value
    if isinstance(whole, Tracer):
        return value if isinstance(value, Mirrored) else Mirrored.of(value, mesh)
    if context.in_program(context.current()):
        return Mirrored.of(jnp.asarray(value), mesh)
    value = value.values[0] if isinstance(value, Mirrored) else first_copy(value)
    value = value if is_numeric(value) else jnp.asarray(value)
    if mesh is not None and mesh.size > 1:
        return Mirrored.of(mesh.mirror(value), mesh)
    copies = [to_device(value, device) for device in destination_devices(destinations)]
    return copies[0] if len(copies) == 1 else Mirrored(copies)


def mesh_of(value: ReplicaValues, destinations: Destinations) -> ReplicaMesh:
    """The mesh that `value` lies on: its own, or where its result goes, or its devices'."""
    if value.mesh is not None:
        return value.mesh
    count = len(value.values)
    mesh = _known_mesh(destinations)
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


def _known_mesh(destinations: Destinations) -> ReplicaMesh | None:
    """The mesh that a variable or a value lies on, if it knows one."""
    if isinstance(destinations, IndexedSlices):
        return _known_mesh(destinations.values)
    if isinstance(destinations, ReplicaValues):
        return destinations.mesh
    return getattr(getattr(destinations, "strategy", None), "replica_mesh", None)


def destination_devices(destinations: Destinations) -> tuple[Device, ...]:
    """The devices that `destinations` means: of a variable, a value, or named ones."""
    named = destinations if isinstance(destinations, tuple | list) else [destinations]
    if all(isinstance(d, DeviceLike) for d in named):
        return resolve_devices(named)
    mesh = _known_mesh(destinations)
    if mesh is not None:
        return mesh.local_devices
    if isinstance(destinations, IndexedSlices):
        return destination_devices(destinations.values)
    if isinstance(destinations, ReplicaValues):
        arrays = [v for v in destinations.values if isinstance(v, jax.Array)]
        return tuple(device for array in arrays for device in array.devices())
    return tuple(sorted(jnp.asarray(destinations).devices(), key=lambda d: d.id))
