"""Copies of arrays, before the next step takes over their memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_PINNED = "pinned_host"
# How much of it XLA takes at most, in GB, and where that is set.
_LIMIT, _DEFAULT_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64


def out_of_reach(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays that no later step can change.

    Those of an accelerator go to pinned memory of the host, which is not waited for here: it
    runs at the speed of the bus, and a step that takes over their memory waits for it. More
    than there is of it is on the host on return.
    """
    there = [
        a for a in arrays.values() if isinstance(a, jax.Array) and not _is_on_host(a)
    ]
    is_pinned = all(map(_has_pinned_memory, there)) and _fits_pinned_memory(there)
    if not is_pinned:
        for array in there:
            array.copy_to_host_async()  # all at once
    return {name: _copied(array, is_pinned) for name, array in arrays.items()}


def _copied(array: Any, is_pinned: bool) -> Any:
    if not isinstance(array, jax.Array):
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jnp.copy(array)
    if _is_on_host(array):
        return np.array(array)  # NumPy's own conversion would give a view
    if is_pinned:
        return jax.device_put(array, array.sharding.with_memory_kind(_PINNED))
    return np.asarray(array)


def _is_on_host(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


def _has_pinned_memory(array: jax.Array) -> bool:
    return all(
        any(memory.kind == _PINNED for memory in device.addressable_memories())
        for device in array.sharding.addressable_devices
    )


def _fits_pinned_memory(arrays: Iterable[jax.Array]) -> bool:
    """Whether half of it is enough, so that there is some left for others."""
    limit = float(os.environ.get(_LIMIT, _DEFAULT_LIMIT)) * 1e9
    held = (s.data.nbytes for a in arrays for s in a.addressable_shards)
    return sum(held) <= limit / 2
