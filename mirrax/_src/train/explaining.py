"""`Optimizer.explain()`: what lies where, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from mirrax._src.base.devices import show_bytes
from mirrax._src.base.errors import warn_user
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.values import PyTree

_WORTH_A_WORD = 1024 * 1024


@dataclass(frozen=True)
class Slot:
    """One array of an optimizer's state.

    Attributes:
        name: Its place in the state.
        shape: Its shape.
        dtype: Its dtype, by name.
        axis: The axis on which it is sharded; None if every device has a copy.
        nbytes: Its size as a whole.
        bytes_per_device: What a device holds of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axis: int | None
    nbytes: int
    bytes_per_device: int


@dataclass(frozen=True)
class StatePlan:
    """What an optimizer's state takes; `print` shows it as a table."""

    slots: Sequence[Slot]
    num_replicas: int
    shard_state: bool

    @property
    def bytes_per_device(self) -> int:
        """What a device holds."""
        return sum(slot.bytes_per_device for slot in self.slots)

    @property
    def bytes_if_mirrored(self) -> int:
        """What a device would hold without `shard_state`."""
        return sum(slot.nbytes for slot in self.slots)

    def __str__(self) -> str:
        rows = [("slot", "shape", "on a device", "where")]
        for slot in sorted(self.slots, key=lambda slot: -slot.nbytes):
            where = "a copy on each device"
            if slot.axis is not None:
                where = f"axis {slot.axis} over {self.num_replicas} devices"
            kind = f"{slot.dtype}{list(slot.shape)}"
            rows.append((slot.name, kind, show_bytes(slot.bytes_per_device), where))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        now, whole = map(show_bytes, (self.bytes_per_device, self.bytes_if_mirrored))
        last = f"{now} on each of {self.num_replicas} device(s)"
        without = f"; {whole} without `shard_state`" if self.shard_state else ""
        return "\n".join([*lines, last + without])


def warn_if_undivided(name: str, shapes: PyTree, mesh: ReplicaMesh) -> None:
    """Tells when most of what a device will hold is what no axis divides."""
    plan = plan_state(shapes, mesh, mesh.size, True)
    whole = [slot for slot in plan.slots if slot.axis is None]
    held = sum(slot.nbytes for slot in whole)
    if held < _WORTH_A_WORD or held <= plan.bytes_per_device / 2:
        return
    largest = max(whole, key=lambda slot: slot.nbytes)
    longest = max(largest.shape)
    axis, padded = largest.shape.index(longest), list(largest.shape)
    padded[axis] += -longest % mesh.size
    now, before = map(show_bytes, (plan.bytes_per_device, plan.bytes_if_mirrored))
    warn_user(
        f"`shard_state=True` saves little: of the state of {name!r} each of {mesh.size} devices "
        f"holds {now}, without it {before}. An array is divided only along an axis whose length "
        f"is a multiple of {mesh.size}, and {len(whole)} have none; the largest is "
        f"{largest.name}, {list(largest.shape)}. Make its variable a little larger, {padded}, "
        "or use another number of replicas; `optimizer.explain()` shows all of it."
    )


StatePlan.__module__ = Slot.__module__ = "mirrax.train"


def shape_of(value: Any) -> jax.ShapeDtypeStruct:
    """A parameter without its values."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(
            "`explain` takes variables, or a pytree of arrays or of `jax.ShapeDtypeStruct`, got "
            f"{type(value).__name__}: {value!r:.80}."
        )
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def plan_state(
    shapes: PyTree, mesh: ReplicaMesh | None, num_replicas: int, shard_state: bool
) -> StatePlan:
    """How a state of arrays of these `shapes` lies on a mesh, or on one device."""
    slots = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        axis = mesh.sharded_axis(leaf.shape) if mesh is not None else None
        whole = math.prod(leaf.shape) * leaf.dtype.itemsize
        held = whole if axis is None else whole // num_replicas
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        known: Any = name, tuple(leaf.shape), leaf.dtype.name, axis, whole, held
        slots.append(Slot(*known))
    return StatePlan(slots, num_replicas, shard_state)
