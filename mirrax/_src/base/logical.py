"""Logical CPU devices, safe by default.

Programs on n CPU devices can dead-lock in XLA unless its pool has 2n threads, so mirrax
sizes it when the CPU client starts (docs/design_around.md has the cause and the evidence). It
also has the C library keep the memory that each step frees for the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from mirrax._src.base import hooks, jax_compat
from mirrax._src.base.errors import warn_user
from mirrax._src.base.hiding import brief
from mirrax._src.base.jax_compat import Device

# The first of these that is set sizes the pool.
_POOL_VARIABLES = ("PJRT_NPROC", "NPROC")
_THREAD_NAME = b"tf_XLAEigen"
_STEPS_BEFORE_WAIT = 8

# If one of these is set, the user has chosen how memory is kept.
_MALLOC_VARIABLES = (
    *("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_"),
    *("MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"),
)
# XLA takes the buffers of each step from glibc, which by default gives them back to the system:
# the page faults of the next step take up to a fifth of its time. Numbers as in <malloc.h>.
_KEEP_FREED = {
    -1: 256 * 2**20,  # M_TRIM_THRESHOLD: so much may be free at the end of a heap
    -2: 48 * 2**20,  # M_TOP_PAD: of a thread's heaps, of 64 MiB each, one or two stay
    -3: 32 * 2**20,  # M_MMAP_THRESHOLD: larger blocks are returned at once
}


class Pool:
    """What is known of the pool."""

    is_small = False
    enough_for = 1  # so many devices, as far as is known
    launches = 0  # where it is small
    workers_here = 1  # that share this machine's cores; set before JAX starts


def install() -> None:
    """Sees to the pool when JAX starts its CPU client; called when mirrax is imported."""
    hooks.around_cpu_start(_sized_pool)


@contextlib.contextmanager
def _sized_pool() -> Iterator[None]:
    """Sizes the pool of a CPU client that starts inside the `with` block."""
    count = requested_cpu_devices()
    is_alone = count < 2 and Pool.workers_here < 2
    if not is_alone:
        _keep_freed_memory()
    if is_alone or any(name in os.environ for name in _POOL_VARIABLES):
        yield
        return
    name = _POOL_VARIABLES[0]
    share = max(1, _cores() // Pool.workers_here)
    os.environ[name] = str(max(share, 2 * count if count > 1 else 1))
    try:
        yield
    finally:
        del os.environ[name]  # child processes size their own


def _keep_freed_memory() -> None:
    """Sets up glibc's malloc, unless the user has."""
    is_set = any(name in os.environ for name in _MALLOC_VARIABLES)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not is_set and hasattr(libc, "mallopt"):  # other C libraries have none
        for option, value in _KEEP_FREED.items():
            libc.mallopt(option, value)  # pyright: ignore[reportOptionalMemberAccess]


def requested_cpu_devices() -> int:
    """How many CPU devices JAX has been asked for."""
    flag = re.search(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    asked = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    return max(asked, int(flag[1]) if flag else 1)


def check_pool(devices: Sequence[Device]) -> None:
    """Warns where the pool is too small for programs on `devices`, and makes steps wait."""
    count = sum(device.platform == "cpu" for device in devices)
    if count <= Pool.enough_for or Pool.is_small:
        return
    size = _pool_size()
    if size is not None:
        Pool.enough_for = size // 2
    if size is None or count <= Pool.enough_for:
        return
    Pool.is_small = True
    set_by_user = next((name for name in _POOL_VARIABLES if name in os.environ), None)
    cause = (
        f"{set_by_user}={os.environ[set_by_user]} sets its size; set it to {2 * count} or more"
        if set_by_user
        else "JAX had started its devices before mirrax was imported; import mirrax first"
    )
    warn_user(
        f"JAX's CPU thread pool has {size} threads, but {count} CPU devices need {2 * count} "
        f"to be safe from a dead-lock in XLA. {cause}. Until then mirrax waits for every "
        f"{_STEPS_BEFORE_WAIT}th step, which is slower, and JAX code of your own that runs on "
        "several CPU devices can still hang.",
        RuntimeWarning,
    )


def after_launch(results: Any) -> None:
    """Called after each program on several devices: keeps few in flight on a small pool."""
    if Pool.is_small:
        Pool.launches += 1
        if Pool.launches % _STEPS_BEFORE_WAIT == 0:
            jax.block_until_ready(results)


def takes_all_cores(devices: Sequence[Device]) -> bool:
    """Whether programs on `devices` of this worker leave no core of the machine free."""
    count = sum(device.platform == "cpu" for device in devices)
    return count * Pool.workers_here >= _cores()


def ensure_cpu_devices(count: int) -> None:
    """Makes `count` logical CPU devices if JAX has not started yet; else does nothing."""
    if not jax_compat.backend_started() and requested_cpu_devices() < count:
        jax.config.update("jax_num_cpu_devices", count)


@brief
def set_logical_device_configuration(cpu: int) -> None:
    """Splits this machine's CPU into `cpu` logical devices, `CPU:0` to `CPU:n-1`.

    >>> mx.config.set_logical_device_configuration(cpu=8)
    >>> len(mx.config.list_logical_devices("CPU"))
    8

    Call it before anything uses JAX's devices.
    """
    if cpu < 1:
        raise ValueError(f"`cpu` must be at least 1, got {cpu}.")
    if not jax_compat.backend_started():
        jax.config.update("jax_num_cpu_devices", cpu)
        return
    found = len(jax.local_devices(backend="cpu"))
    if found != cpu:
        raise RuntimeError(
            f"JAX has already started with {found} CPU device(s), which cannot become {cpu}. "
            f"Call mx.config.set_logical_device_configuration(cpu={cpu}) at the top of the "
            "program, before arrays are made or devices are listed."
        )


def has_one_thread() -> bool:
    """Whether XLA's CPU compiler has no threads to split an operation over, as far as is known."""
    return _pool_size() == 1


def _pool_size() -> int | None:
    """The threads of the pool, by their names; None where they cannot be counted."""
    names = Path("/proc/self/task").glob("*/comm")
    try:
        count = sum(path.read_bytes().strip() == _THREAD_NAME for path in names)
    except OSError:
        return None
    return count or None


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
