"""Copies of arrays, before the next step takes over their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_PINNED = "pinned_host"


def out_of_reach(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays that no later step can change.

    Those of an accelerator go to pinned memory of the host, which is not waited for here: it
    runs at the speed of the bus, and a step that takes over their memory waits for it.
    """
    return {name: _copied(array) for name, array in arrays.items()}


def _copied(array: Any) -> Any:
    if not isinstance(array, jax.Array):
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jnp.copy(array)
    if _is_on_host(array):
        return np.array(array)  # NumPy's own conversion would give a view
    if _has_pinned_memory(array):
        return jax.device_put(array, array.sharding.with_memory_kind(_PINNED))
    return np.asarray(array)


def _is_on_host(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


def _has_pinned_memory(array: jax.Array) -> bool:
    return all(
        any(memory.kind == _PINNED for memory in device.addressable_memories())
        for device in array.sharding.addressable_devices
    )
