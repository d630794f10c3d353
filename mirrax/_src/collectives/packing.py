"""Many small arrays travel as few: an all-reduce costs more per call than per byte.

Only small arrays are packed. Packing large ones copies them, and XLA fuses the products
that make them into the copy, which made whole steps 3x slower (docs/design_around.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base.logical import has_one_thread


@dataclass(frozen=True)
class PackLimits:
    """Which arrays are packed, how much goes into one pack, and for which transport."""

    small_bytes: int = 64 * 1024
    # One huge pack takes XLA longer to compile than several of this size: each place in it is
    # an offset of its own in the code that uses the result.
    pack_bytes: int = 1024 * 1024
    pack_arrays: int = 64
    is_between_workers: bool = False


# Over Gloo a message costs about a millisecond, however small: as much as to copy a MiB.
BETWEEN_WORKERS = PackLimits(1024 * 1024, 4 * 1024 * 1024, is_between_workers=True)
# Two workers gather all in one message; a large copy costs less than a second one (2 of
# 30 ms a step for 7 MiB of gradients).
BETWEEN_TWO = PackLimits(32 * 1024 * 1024, 32 * 1024 * 1024, is_between_workers=True)


def plan_packs(arrays: Sequence[jax.Array], limits: PackLimits) -> list[list[int]]:
    """Groups of positions in `arrays` that travel together; empty ones stay at home."""
    packs: list[list[int]] = []
    open_packs: dict[jnp.dtype, tuple[list[int], int]] = {}
    for i, array in enumerate(arrays):
        size = array.size * array.dtype.itemsize
        if size == 0:
            continue
        if size >= limits.small_bytes:
            packs.append([i])
            continue
        pack, used = open_packs.get(array.dtype, ([], 0))
        is_full = used + size > limits.pack_bytes or len(pack) >= limits.pack_arrays
        if not pack or is_full:
            pack, used = [], 0
            packs.append(pack)
        pack.append(i)
        open_packs[array.dtype] = pack, used + size
    return packs


def reduce_packed(
    arrays: Sequence[jax.Array],
    limits: PackLimits,
    reduce: Callable[[jax.Array], jax.Array],
) -> list[jax.Array]:
    """`reduce` of each array, with small ones packed."""

    def reduce_each(flats: list[jax.Array]) -> list[jax.Array]:
        return list(map(reduce, flats))

    if not limits.is_between_workers:
        return _in_packs(arrays, limits, reduce, reduce_each)

    # Packs of packs: 1000 arrays compile in 7 s of processor time, in one pack in 46 s.
    def reduce_packs(flats: list[jax.Array]) -> list[jax.Array]:
        return _in_packs(flats, limits, reduce, reduce_each)

    small = min(PackLimits.small_bytes, limits.small_bytes)
    inner = PackLimits(small, min(PackLimits.pack_bytes, limits.small_bytes))
    return _in_packs(arrays, inner, reduce, reduce_packs)


def _in_packs(
    arrays: Sequence[jax.Array],
    limits: PackLimits,
    reduce: Callable[[jax.Array], jax.Array],
    reduce_all: Callable[[list[jax.Array]], list[jax.Array]],
) -> list[jax.Array]:
    # XLA of JAX 0.11 crashes on an empty array in an all-reduce, which needs none.
    results: list[jax.Array | None] = [
        None if a.size else jnp.zeros(a.shape, jax.eval_shape(reduce, a).dtype)
        for a in arrays
    ]
    packs = plan_packs(arrays, limits)
    # Without the barriers XLA fuses the products that make the arrays into the
    # concatenation, and the concatenation into what uses the results.
    barrier = lax.optimization_barrier
    flats = [
        barrier(_in_one([arrays[i] for i in pack], limits))
        if len(pack) > 1
        else arrays[pack[0]]
        for pack in packs
    ]
    for pack, reduced in zip(packs, reduce_all(flats)):
        if len(pack) == 1:
            results[pack[0]] = reduced
            continue
        pieces = lax.split(barrier(reduced), [arrays[i].size for i in pack])
        for i, piece in zip(pack, pieces):
            results[i] = piece.reshape(arrays[i].shape)
    return results  # type: ignore[return-value]


def _in_one(arrays: Sequence[jax.Array], limits: PackLimits) -> jax.Array:
    """All elements of all arrays."""
    if not limits.is_between_workers or has_one_thread():
        return jnp.concatenate([array.reshape(-1) for array in arrays])
    # These packs are large. `concatenate` of so much is split over threads by XLA's CPU
    # compiler, into loops that choose the operand for each element: 60 ns each. With one thread
    # it is the faster way: the other one copies a pack twice.
    flat = jnp.zeros(sum(array.size for array in arrays), arrays[0].dtype)
    offset = 0
    for array in arrays:
        flat = lax.dynamic_update_slice(flat, array.reshape(-1), (offset,))
        offset += array.size
    return flat
