"""The one-dimensional mesh of a strategy, and the ways in which an array lies on it."""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mirrax._src.base.devices import device_name
from mirrax._src.base.jax_compat import Device, Tracer
from mirrax._src.base.launching import launching
from mirrax._src.base.logical import after_launch
from mirrax._src.base.protocols import ClusterLike

AXIS_NAME = "replica"


class Layout(enum.Enum):
    """How one array holds what all replicas have, from arguments to programs to results."""

    PLAIN = "an array"  # tied to no mesh
    MIRRORED = "a mirrored value"  # a copy on every device
    SHARDED = "a sharded value"  # one value for all, of which each device holds a part
    SPLIT = "a per-replica value"  # replica i's part is slice i of the first axis
    STACKED = "a per-replica scalar"  # replica i's part is element i
    # In the replicas' program: of the replica that runs it.
    OWN = "a replica's own value"

    @property
    def is_split(self) -> bool:
        """Whether each replica has a part of its own."""
        return self is Layout.SPLIT or self is Layout.STACKED

    @property
    def in_parts(self) -> bool:
        """Whether no device holds the whole array."""
        return self is Layout.SHARDED or self.is_split

    # By identity, as members compare; the default hashes the name, and programs are looked up often.
    __hash__ = object.__hash__


# JAX puts together an array's shards when they are first asked for, and keeps what two threads
# have put together at the same time: too many.
_putting_together = threading.Lock()


def shards_of(array: jax.Array) -> Sequence[Any]:
    """The shards of `array` on this worker, in the order of its mesh."""
    with _putting_together:
        return array.addressable_shards


@dataclass(frozen=True)
class ReplicaMesh:
    """The devices of a strategy in order, of all workers: replica i runs on `devices[i]`."""

    devices: tuple[Device, ...]
    # How workers agree on what no program can tell them; None where there is one worker.
    cluster: ClusterLike = field(default=None, compare=False, repr=False)  # type: ignore[assignment]

    @property
    def size(self) -> int:
        return len(self.devices)

    def __deepcopy__(self, memo: object) -> ReplicaMesh:
        return self  # devices are not copied

    @functools.cached_property
    def mesh(self) -> Mesh:
        # Written out, because `jax.make_mesh` may reorder devices.
        return Mesh(np.array(self.devices), (AXIS_NAME,), axis_types=(AxisType.Auto,))

    @functools.cached_property
    def mirrored(self) -> NamedSharding:
        """The same array on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def split(self) -> NamedSharding:
        """Replica i's part at position i of the first axis."""
        # One replica has the whole, so scalars need no axis to be split on.
        axes = (AXIS_NAME,) if self.size > 1 else ()
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def sharded_axis(self, shape: tuple[int, ...]) -> int | None:
        """The axis on which a value is sharded: the first that divides; None if none does."""
        if self.size == 1 or 0 in shape:
            return None
        return next((i for i, d in enumerate(shape) if d % self.size == 0), None)

    def sharded(self, shape: tuple[int, ...]) -> NamedSharding:
        """A part of an array of `shape` on each device, or a copy where no axis divides."""
        axis = self.sharded_axis(shape)
        if axis is None:
            return self.mirrored
        spec = PartitionSpec(*[None] * axis, AXIS_NAME)
        return NamedSharding(self.mesh, spec)

    def spec(self, layout: Layout) -> PartitionSpec:
        """`layout` as JAX writes it."""
        return (self.split if layout.is_split else self.mirrored).spec

    def has_row(self, layout: Layout) -> bool:
        """Whether a replica's scalar has an axis in the whole that it has not by itself."""
        return layout is Layout.STACKED and self.size > 1

    def part_shape(self, layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one replica's part of an array of `shape`."""
        if self.size == 1 or not layout.is_split:
            return shape
        rows = () if layout is Layout.STACKED else (shape[0] // self.size,)
        return (*rows, *shape[1:])

    def whole_shape(self, layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the array whose parts have `shape`."""
        if self.size == 1 or not layout.is_split:
            return shape
        return (self.size, *shape) if not shape else (self.size * shape[0], *shape[1:])

    def split_layout(self, ndim: int) -> Layout:
        """How parts with `ndim` axes lie in one array."""
        return Layout.SPLIT if ndim else Layout.STACKED

    @functools.cached_property
    def local_ids(self) -> tuple[int, ...]:
        """The replicas that this process runs."""
        return tuple(
            i
            for i, device in enumerate(self.devices)
            if device.process_index == jax.process_index(device.client)
        )

    @functools.cached_property
    def spans_workers(self) -> bool:
        """Whether other workers have replicas, too."""
        return len(self.local_ids) < self.size

    @functools.cached_property
    def local_devices(self) -> tuple[Device, ...]:
        return tuple(self.devices[i] for i in self.local_ids)

    def mirror(self, value: Any) -> jax.Array:
        """`value` with a copy on every device."""
        if isinstance(value, jax.Array) and value.sharding == self.mirrored:
            return value
        if self.spans_workers:
            # JAX would compare the value on all workers each time.
            copies = [jax.device_put(value, device) for device in self.local_devices]
            return self.join(copies, mirrored=True)
        return jax.device_put(value, self.mirrored)

    def local_view(self, value: Any, local_index: int) -> Any:
        """`value` as this worker's replica number `local_index` may use it: its own copy."""
        is_real = isinstance(value, jax.Array) and not isinstance(value, Tracer)
        if not is_real or not value.committed:
            return value
        device = self.local_devices[local_index]
        if value.sharding.device_set == {device}:
            return value
        if value.is_fully_replicated:
            for shard in shards_of(value):
                if shard.device == device:
                    return shard.data
        return jax.device_put(value, device)

    def join(self, parts: Sequence[jax.Array], *, mirrored: bool) -> jax.Array:
        """One global array of this worker's parts, each on its device already; no copy."""
        layout = Layout.MIRRORED if mirrored else Layout.SPLIT
        shape = self.whole_shape(layout, parts[0].shape)
        sharding = self.mirrored if mirrored else self.split
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    def describe(self, replica_id: int) -> str:
        """A replica for messages: `replica 1 (CPU:1)`, `replica 1 (CPU:0 of worker 1)`."""
        device = self.devices[replica_id]
        worker = f" of worker {device.process_index}" if self.spans_workers else ""
        return f"replica {replica_id} ({device_name(device)}{worker})"

    def equal_shapes(self, part: Any) -> tuple[Any, ...] | None:
        """Every replica's shape and dtype where they are known to be those of `part`."""
        known = (part.shape, part.dtype.name)
        return (known,) * self.size if self.spans_workers else None

    def agreed_shapes(self, parts: Sequence[Any]) -> tuple[Any, ...]:
        """The shape and dtype of every replica's part, from this worker's own ones."""
        own = [(p.shape, p.dtype.name) for p in parts]
        if not self.spans_workers:
            return tuple(own)
        found = self.cluster.agree("the shapes of a per-replica value", own)
        return tuple((tuple(shape), dtype) for each in found for shape, dtype in each)


def gathered(array: jax.Array, mesh: ReplicaMesh | None) -> jax.Array:
    """A sharded array with a copy of the whole on every device."""
    return array if mesh is None else _resharded(array, mesh.mirrored)


def on_host(array: jax.Array) -> np.ndarray:
    """A sharded array as NumPy's; every worker has to call it."""
    if not array.is_fully_addressable:
        sharding: Any = array.sharding
        whole = NamedSharding(sharding.mesh, PartitionSpec())
        array = _resharded(array, whole).addressable_data(0)
    return np.array(array)


def shard(value: Any, mesh: ReplicaMesh) -> jax.Array:
    """`value`, the same on all workers, with a part on each device."""
    sharding = mesh.sharded(np.shape(value))
    if isinstance(value, jax.Array) and value.sharding.device_set == set(mesh.devices):
        return _resharded(value, sharding)
    if not mesh.spans_workers:
        return jax.device_put(value, sharding)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])


def _resharded(array: jax.Array, sharding: Any) -> jax.Array:
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    with launching(), jax.ensure_compile_time_eval():
        result = _copying_to(sharding)(array)
    after_launch(result)
    return result


@functools.lru_cache(maxsize=256)
def _copying_to(sharding: Any) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=sharding)
