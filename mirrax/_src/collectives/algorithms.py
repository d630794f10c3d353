"""The algorithms that come with mirrax, each a different program on the devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce as fold

import jax
from jax import lax

from mirrax._src.base.devices import DeviceLike, device_name, resolve_device
from mirrax._src.base.errors import warn_user
from mirrax._src.base.mesh import AXIS_NAME, ReplicaMesh
from mirrax._src.collectives.equality import declare_equal
from mirrax._src.collectives.ops import ProgramOps
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.collectives.packing import PackLimits


class _PackedAllReduce(ProgramOps):
    """An all-reduce whose small arrays are split into `num_packs` packs; 0 packs nothing."""

    __module__ = "mirrax.distribute"

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(f"`num_packs` must be at least 0, got {num_packs}.")
        self.num_packs = num_packs
        self.limits: PackLimits | None = None  # in place of `num_packs`

    def pack_limits(
        self,
        arrays: Sequence[jax.Array],
        options: CommunicationOptions,
        mesh: ReplicaMesh,
    ) -> PackLimits:
        if self.limits is not None:
            return self.limits
        if self.num_packs == 0:
            return PackLimits(small_bytes=0)
        if self.num_packs == 1 or options.bytes_per_pack:
            return super().pack_limits(arrays, options, mesh)
        return PackLimits(pack_arrays=math.ceil(len(arrays) / self.num_packs))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_packs={self.num_packs})"


class NcclAllReduce(_PackedAllReduce):
    """All replicas reduce together in one collective; NCCL carries it on GPUs.

    The default. On CPUs and TPUs the same program runs on JAX's own collectives.

    Args:
        num_packs: 1 packs small arrays as measured best, more splits them into that many
            packs, 0 packs nothing.
    """


class HierarchicalCopyAllReduce(_PackedAllReduce):
    """Two levels: replicas reduce within groups first, then the groups among each other.

    Args:
        num_packs: As in `NcclAllReduce`.
    """

    def reduce_in_program(self, array: jax.Array, mesh: ReplicaMesh) -> jax.Array:
        size = _group_size(mesh.size)
        ids = range(mesh.size)
        within = [list(ids[i : i + size]) for i in range(0, mesh.size, size)]
        across = [list(ids[i::size]) for i in range(size)]
        for groups in (within, across):
            if len(groups[0]) > 1:
                array = lax.psum(array, AXIS_NAME, axis_index_groups=groups)
        return declare_equal(array)


class ReductionToOneDevice(ProgramOps):
    """All parts are copied to one device, reduced there, and the result is copied back.

    Args:
        reduce_to_device: The device that reduces; the first replica's by default.
        accumulation_fn: Takes the list of parts and returns their sum; `sum` by default.
    """

    def __init__(
        self,
        reduce_to_device: DeviceLike | None = None,
        accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None,
    ) -> None:
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn

    def reduce_in_program(self, array: jax.Array, mesh: ReplicaMesh) -> jax.Array:
        root = self._root(mesh)
        others = [i for i in range(mesh.size) if i != root]
        copies = {i: lax.ppermute(array, AXIS_NAME, [(i, root)]) for i in others}
        parts = [copies.get(i, array) for i in range(mesh.size)]
        total = (self.accumulation_fn or _add_all)(parts)
        here = lax.axis_index(AXIS_NAME)
        result = total
        for i in others:
            sent = lax.ppermute(total, AXIS_NAME, [(root, i)])
            result = lax.select(here == i, sent, result)
        return declare_equal(result)

    def _root(self, mesh: ReplicaMesh) -> int:
        if self.reduce_to_device is None:
            return 0
        device = resolve_device(self.reduce_to_device)
        if device.platform == "cpu" and mesh.devices[0].platform != "cpu":
            warn_user(
                f"`reduce_to_device` is {device_name(device)}, but the replicas run on "
                f"{device_name(mesh.devices[0])} and others, which reduce among themselves: "
                "the first of them does it."
            )
            return 0
        if device not in mesh.devices:
            raise ValueError(
                f"`reduce_to_device` is {device_name(device)}, which runs no replica; it "
                f"must be one of {', '.join(map(device_name, mesh.devices))}."
            )
        return mesh.devices.index(device)

    def __repr__(self) -> str:
        return f"ReductionToOneDevice(reduce_to_device={self.reduce_to_device!r})"


def _add_all(parts: list[jax.Array]) -> jax.Array:
    return fold(lambda a, b: a + b, parts)


def _group_size(num_replicas: int) -> int:
    """The largest divisor up to the square root: 2 groups of 2 for 4, 4 of 2 for 8."""
    return next(
        num_replicas // k
        for k in range(math.isqrt(num_replicas), 0, -1)
        if num_replicas % k == 0
    )


for _public in (NcclAllReduce, HierarchicalCopyAllReduce, ReductionToOneDevice):
    _public.__module__ = "mirrax.distribute"
