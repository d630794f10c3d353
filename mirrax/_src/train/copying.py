"""Copies of arrays, before the next step takes over their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def out_of_reach(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays that no later step can change, with as little waiting as memory allows.

    On an accelerator that has room for them they are copied there, which takes no time and
    is not waited for; whoever writes them brings the copies to the host. Else they are on
    the host on return.
    """
    there = [a for a in arrays.values() if isinstance(a, jax.Array)]
    on_devices = [a for a in there if not _is_on_host(a)]
    if on_devices and _have_room(on_devices):
        return {name: _copied_in_place(a) for name, a in arrays.items()}
    for array in there:
        array.copy_to_host_async()  # all at once
    return {name: _copied_to_host(a) for name, a in arrays.items()}


def _is_on_host(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


def _have_room(arrays: Iterable[jax.Array]) -> bool:
    """Whether the devices can hold a copy of all arrays even while a step runs.

    The peak of what was in use includes the steps so far, and the copies of earlier saves:
    there is room only if the memory is that much larger, so that no step fails for a save.
    """
    needed: dict[Any, int] = {}
    for array in arrays:
        for shard in array.addressable_shards:
            size = needed.get(shard.device, 0) + shard.data.nbytes
            needed[shard.device] = size
    for device, size in needed.items():
        stats = device.memory_stats() or {}
        free = stats.get("bytes_limit", 0) - stats.get("peak_bytes_in_use", 0)
        if free < size:
            return False
    return True


def _copied_in_place(array: Any) -> Any:
    if not isinstance(array, jax.Array) or _is_on_host(array):
        return _copied_to_host(array)
    return jax.device_put(array, array.sharding, may_alias=False)


def _copied_to_host(array: Any) -> Any:
    if not isinstance(array, jax.Array):
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jnp.copy(array)
    # On CPUs NumPy would get a view.
    return np.array(array) if _is_on_host(array) else np.asarray(array)
