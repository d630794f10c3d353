"""The algorithms that come with mirrax, each a different program on the devices."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import reduce as fold
from typing import Any

import jax
from jax import lax

from mirrax._src.base.devices import DeviceLike, device_name, resolve_devices
from mirrax._src.base.errors import warn_user
from mirrax._src.base.mesh import AXIS_NAME, ReplicaMesh
from mirrax._src.base.reduce_op import ReduceOp
from mirrax._src.base.sparse import IndexedSlices
from mirrax._src.collectives.destinations import Destinations, place
from mirrax._src.collectives.equality import declare_equal
from mirrax._src.collectives.ops import CrossDeviceOps
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.collectives.packing import BETWEEN_WORKERS, PackLimits
from mirrax._src.collectives.programs import (
    ReduceProgram,
    mesh_of,
    reduce_sparse,
    run_on_parts,
)

# A ring sends less than twice an array; a gather all others' arrays to each replica.
_MOST_BYTES_TO_GATHER = 4 * 1024 * 1024


class _ProgramOps(CrossDeviceOps):
    """Reductions that are programs on the devices; a subclass is an algorithm."""

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Any:
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Destinations]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """All dense values in one program, sparse ones by joining their rows."""
        results: list[Any] = [None] * len(value_destination_pairs)
        dense: list[int] = []
        for i, (value, destinations) in enumerate(value_destination_pairs):
            if isinstance(value, IndexedSlices):
                results[i] = reduce_sparse(reduce_op, value, destinations)
            else:
                dense.append(i)
        if dense:
            values, places = zip(*(value_destination_pairs[i] for i in dense))
            mesh = mesh_of(values[0], places[0])
            program = ReduceProgram(self, reduce_op, options, mesh)
            reduced = run_on_parts(program, mesh, values)
            for i, value, destinations in zip(dense, reduced, places):
                results[i] = place(value, mesh, destinations)
        return results

    def pack_limits(
        self, num_arrays: int, options: CommunicationOptions, mesh: ReplicaMesh
    ) -> PackLimits:
        """Which arrays travel together."""
        if options.bytes_per_pack:
            size = options.bytes_per_pack
            return PackLimits(size, size, num_arrays, mesh.spans_workers)
        return BETWEEN_WORKERS if mesh.spans_workers else PackLimits()

    def reduce_in_program(self, array: jax.Array, mesh: ReplicaMesh) -> jax.Array:
        """The sum of all replicas' `array`, computed inside the replicas' program."""
        if _is_gathered(array, mesh):
            return declare_equal(_add_all(lax.all_gather(array, AXIS_NAME)))
        return lax.psum(array, AXIS_NAME)

    # Equal algorithms share their compiled programs.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))


def _is_gathered(array: jax.Array, mesh: ReplicaMesh) -> bool:
    """Whether every replica gets all parts and adds them up: between workers on CPUs.

    Gloo's all-reduce is a ring of many small messages: 16 KiB take it 1.3 ms on one machine,
    a gather and the additions 0.5 ms. All replicas add the same parts in the same order, so
    they have the same sum to the last bit. (Pairs that exchange by `ppermute` and add are
    faster still, but XLA may fuse a replica's own part into the addition, unrounded: the sums
    then differ.)
    """
    size = array.size * array.dtype.itemsize
    is_little = mesh.size == 2 or size * (mesh.size - 1) <= _MOST_BYTES_TO_GATHER
    return mesh.spans_workers and mesh.devices[0].platform == "cpu" and is_little


class _PackedAllReduce(_ProgramOps):
    """An all-reduce whose small arrays are split into `num_packs` packs; 0 packs nothing."""

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(f"`num_packs` must be at least 0, got {num_packs}.")
        self.num_packs = num_packs
        self.limits: PackLimits | None = None  # in place of `num_packs`

    def pack_limits(
        self, num_arrays: int, options: CommunicationOptions, mesh: ReplicaMesh
    ) -> PackLimits:
        if self.limits is not None:
            return self.limits
        if self.num_packs == 0:
            return PackLimits(small_bytes=0)
        if self.num_packs == 1 or options.bytes_per_pack:
            return super().pack_limits(num_arrays, options, mesh)
        return PackLimits(pack_arrays=math.ceil(num_arrays / self.num_packs))

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
        ids = range(mesh.size)
        # As many groups as the largest divisor up to the square root: 2 of 4 for 8.
        roots = range(math.isqrt(mesh.size), 0, -1)
        size = next(mesh.size // k for k in roots if mesh.size % k == 0)
        within = [list(ids[i : i + size]) for i in range(0, mesh.size, size)]
        across = [list(ids[i::size]) for i in range(size)]
        for groups in (within, across):
            if len(groups[0]) > 1:
                array = lax.psum(array, AXIS_NAME, axis_index_groups=groups)
        return declare_equal(array)


class ReductionToOneDevice(_ProgramOps):
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
        device = resolve_devices([self.reduce_to_device])[0]
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


def _add_all(parts: Iterable[jax.Array]) -> jax.Array:
    return fold(operator.add, parts)


for _public in (NcclAllReduce, HierarchicalCopyAllReduce, ReductionToOneDevice):
    _public.__module__ = "mirrax.distribute"
