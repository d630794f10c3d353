"""Batches on devices with bare JAX, for pipelines that end in NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def slice_each(devices: Sequence[Any]) -> NamedSharding:
    """A slice of the batch for each device."""
    return NamedSharding(
        Mesh(np.array(devices), ("replica",)), PartitionSpec("replica")
    )


def find_slices(replicas: int, platform: str) -> NamedSharding:
    """`slice_each` of the first devices, in a process that has not started JAX yet."""
    jax.config.update("jax_num_cpu_devices", replicas)
    return slice_each(jax.local_devices(backend=platform)[:replicas])


def deliver(batches: Iterable[Any], sharding: NamedSharding) -> int:
    """Puts each batch on the devices and returns their number."""
    return wait_for_each(jax.device_put(batch, sharding) for batch in batches)


def wait_for_each(batches: Iterable[Any]) -> int:
    """Waits for each batch while the next is under way, as a training loop does."""
    count, before = 0, None
    for batch in batches:
        jax.block_until_ready(before)
        before = batch
        count += 1
    jax.block_until_ready(before)
    return count
