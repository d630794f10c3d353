"""`Strategy.memory()`: what is alive on the devices, and whose it is."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from mirrax._src.base.devices import device_name, show_bytes
from mirrax._src.base.launching import launching
from mirrax._src.base.mesh import ReplicaMesh, shards_of
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.state.variable import live_variables

_KINDS = ("variables", "slots", "batches", "others")


@dataclass(frozen=True)
class MemoryReport:
    """Live bytes on each of this worker's devices; `print` shows them as a table.

    Attributes:
        devices: By the device's name, the bytes of variables, of optimizers' slots, of
            batches and other per-replica values, and of other arrays.
        variables: By the name of a variable or slot, its bytes on one device.
    """

    devices: Mapping[str, Mapping[str, int]]
    variables: Mapping[str, int]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("device", *_KINDS)]
        for device, held in self.devices.items():
            rows.append((device, *(show_bytes(held[kind]) for kind in _KINDS)))
        largest = Counter(self.variables).most_common(10)
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        names = [f"  {show_bytes(size)}  {name}" for name, size in largest]
        return "\n".join([*lines, "largest on a device:", *names])


MemoryReport.__module__ = "mirrax.distribute"


def report_memory(strategy: StrategyLike, mesh: ReplicaMesh) -> MemoryReport:
    """What is alive on the devices of `mesh` now."""
    held: dict[Any, Counter[str]] = {d: Counter() for d in mesh.local_devices}
    sizes: dict[str, int] = defaultdict(int)
    seen: set[Any] = set()  # buffers: several arrays may share one

    def add(arrays: Any, kind: str) -> int:
        first = 0
        for device, buffer, size in _buffers(arrays):
            if device in held and (device, buffer) not in seen:
                seen.add((device, buffer))
                held[device][kind] += size
                first += size if device == mesh.local_devices[0] else 0
        return first

    with launching():  # no step on another thread may donate what is looked at
        for variable in live_variables():
            if variable.strategy is strategy:
                kind = "slots" if variable.is_slot else "variables"
                home, place, part = variable.lives_at
                if part is None:
                    sizes[variable.name] += add(jax.tree.leaves(variable.stored), kind)
                    continue
                size = math.prod(variable.shape) * variable.dtype.itemsize
                sizes[variable.name] += size
                for device, buffer, _ in _buffers([home.arrays[place]]):  # of a pack
                    seen.add((device, buffer))
                    held[device][kind] += size
        for array in jax.live_arrays():
            is_split = array.sharding == mesh.split and mesh.size > 1
            add([array], "batches" if is_split else "others")
    by_name = {
        device_name(d): {kind: held[d][kind] for kind in _KINDS}
        for d in mesh.local_devices
    }
    return MemoryReport(by_name, dict(sizes))


def _buffers(arrays: Any) -> Iterator[tuple[Any, int, int]]:
    for array in arrays:
        if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        if not array.is_deleted():
            for shard in shards_of(array):
                data = shard.data
                yield shard.device, data.unsafe_buffer_pointer(), data.nbytes
