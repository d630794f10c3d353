"""The algorithms that come with mirrax, each a different program on the devices."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base import context
from mirrax._src.base.devices import DeviceLike, device_name, resolve_devices
from mirrax._src.base.errors import warn_user
from mirrax._src.base.mesh import AXIS_NAME, ReplicaMesh
from mirrax._src.base.reduce_op import ReduceOp
from mirrax._src.base.sparse import IndexedSlices
from mirrax._src.collectives.destinations import Destinations, mesh_of, place
from mirrax._src.collectives.ops import CrossDeviceOps
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.collectives.packing import (
    BETWEEN_TWO,
    BETWEEN_WORKERS,
    PackLimits,
    reduce_packed,
)
from mirrax._src.collectives.programs import declare_equal, reduce_sparse, run_on_parts

# A ring sends less than twice an array; a gather all others' arrays to each replica.
_MOST_BYTES_TO_GATHER = 4 * 1024 * 1024


def add_all(parts: Any) -> jax.Array:
    """The sum of the replicas' parts, in their order."""
    return functools.reduce(operator.add, parts)


class _ProgramOps(CrossDeviceOps):
    """Reductions that are programs on the devices; a subclass is an algorithm.

    Small arrays are split into `num_packs` packs; 0 packs nothing.
    """

    num_packs = 1
    limits: PackLimits | None = None  # in place of `num_packs`

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(f"`num_packs` must be at least 0, got {num_packs}.")
        self.num_packs = num_packs

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
        pairs = value_destination_pairs
        dense = [(v, d) for v, d in pairs if not isinstance(v, IndexedSlices)]
        placed = iter(())
        if dense:
            mesh = mesh_of(*dense[0])
            frame = context.current().frame
            later = (
                self._may_wait(options) and frame is not None and frame.mode.is_whole
            )
            program = ReduceProgram(self, reduce_op, options, mesh, later)
            reduced = run_on_parts(program, mesh, [v for v, _ in dense])
            placed = (place(r, mesh, d) for r, (_, d) in zip(reduced, dense))
        return [
            reduce_sparse(reduce_op, v, d)
            if isinstance(v, IndexedSlices)
            else next(placed)
            for v, d in pairs
        ]

    def pack_limits(
        self, num_arrays: int, options: CommunicationOptions, mesh: ReplicaMesh
    ) -> PackLimits:
        """Which arrays travel together."""
        if self.limits is not None:
            return self.limits
        if self.num_packs == 0:
            return PackLimits(small_bytes=0)
        if options.bytes_per_pack:
            size = options.bytes_per_pack
            return PackLimits(size, size, num_arrays, mesh.spans_workers)
        if self.num_packs > 1:
            return PackLimits(pack_arrays=math.ceil(num_arrays / self.num_packs))
        if not mesh.spans_workers:
            return PackLimits()
        is_pair = mesh.size == 2 and mesh.devices[0].platform == "cpu"
        return BETWEEN_TWO if is_pair else BETWEEN_WORKERS

    def _may_wait(self, options: CommunicationOptions) -> bool:
        """Whether sums may travel with others of the same program, packed as measured best."""
        is_ours = type(self).reduce_in_program is _ProgramOps.reduce_in_program
        is_default = self.limits is None and self.num_packs == 1
        return is_ours and is_default and not options.bytes_per_pack

    def reduce_in_program(self, array: jax.Array, mesh: ReplicaMesh) -> jax.Array:
        """The sum of all replicas' `array`, computed inside the replicas' program."""
        if _is_gathered(array, mesh):
            return declare_equal(add_all(lax.all_gather(array, AXIS_NAME)))
        # In a group, so that it is not merged with other sums (engines/merging.py).
        groups = [list(range(mesh.size))]
        return lax.psum(array, AXIS_NAME, axis_index_groups=groups)

    # Equal algorithms share their compiled programs.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_packs={self.num_packs})"


@dataclass(frozen=True)
class ReduceProgram:
    """What one replica does in a reduction of many arrays."""

    ops: _ProgramOps
    op: ReduceOp
    options: CommunicationOptions
    mesh: ReplicaMesh
    is_packed_later: bool = False  # with the other sums of the program it is a part of

    def __call__(self, arrays: list[jax.Array]) -> list[jax.Array]:
        def reduce(array: jax.Array) -> jax.Array:
            if array.dtype == jnp.bool_:
                raise TypeError(
                    f"Booleans cannot be summed, and a value of shape {array.shape} holds them; "
                    "convert them first: `value.astype(int)`."
                )
            if self.is_packed_later:
                total = lax.psum(array, AXIS_NAME)
            else:
                total = self.ops.reduce_in_program(array, self.mesh)
            return total / self.mesh.size if self.op is ReduceOp.MEAN else total

        if self.is_packed_later:
            return list(map(reduce, arrays))
        limits = self.ops.pack_limits(len(arrays), self.options, self.mesh)
        return reduce_packed(arrays, limits, reduce)


def sum_together(arrays: list[jax.Array], mesh: ReplicaMesh) -> list[jax.Array]:
    """The sums of all replicas' `arrays`, packed as measured best, inside their program."""
    ops, options = NcclAllReduce(), CommunicationOptions()
    return ReduceProgram(ops, ReduceOp.SUM, options, mesh)(arrays)


def _is_gathered(array: jax.Array, mesh: ReplicaMesh) -> bool:
    """Whether every replica gets all parts and adds them up: between workers on CPUs.

    Gloo's all-reduce is a ring of many small messages (docs/design_around.md). All replicas
    add the same parts in the same order, so they have the same sum to the last bit; pairs that
    exchange by `ppermute` would not: XLA may fuse a replica's own part in, unrounded.
    """
    size = array.size * array.dtype.itemsize
    is_little = mesh.size == 2 or size * (mesh.size - 1) <= _MOST_BYTES_TO_GATHER
    return mesh.spans_workers and mesh.devices[0].platform == "cpu" and is_little


class NcclAllReduce(_ProgramOps):
    """All replicas reduce together in one collective; NCCL carries it on GPUs.

    The default. On CPUs and TPUs the same program runs on JAX's own collectives.

    Args:
        num_packs: 1 packs small arrays as measured best, more splits them into that many
            packs, 0 packs nothing.
    """


class HierarchicalCopyAllReduce(_ProgramOps):
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
        total = (self.accumulation_fn or add_all)(parts)
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


for _public in (NcclAllReduce, HierarchicalCopyAllReduce, ReductionToOneDevice):
    _public.__module__ = "mirrax.distribute"
