"""What this process uses: memory, its devices' memory, and how hot they are."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path
from typing import Any

import jax

from mirrax._src.base import jax_compat

_PAUSE_SECONDS = 5.0


class Vitals:
    """Measured now and then by a thread of its own: a driver that hangs keeps nobody else."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}
        self._is_over = threading.Event()

    def start(self) -> None:
        """Begins to measure."""
        threading.Thread(target=self._work, name="mirrax-vitals", daemon=True).start()

    def stop(self) -> None:
        """Asks JAX nothing any more: it would start again to answer, once it has ended."""
        self._is_over.set()

    def _work(self) -> None:
        nvml = Nvml.load()
        while not self._is_over.is_set():
            with contextlib.suppress(Exception):  # a look at it must not cost the job
                self.last = measure(nvml)
            self._is_over.wait(_PAUSE_SECONDS)


def measure(nvml: Nvml | None) -> dict[str, Any]:
    """Bytes and degrees; what cannot be known is left out."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["memory"] = pages * os.sysconf("SC_PAGE_SIZE")
    if not jax_compat.backend_started():
        return found
    devices = jax.local_devices()
    stats = [each for d in devices if (each := d.memory_stats())]
    if stats:
        found["device_memory"] = max(each.get("bytes_in_use", 0) for each in stats)
        found["device_limit"] = max(each.get("bytes_limit", 0) for each in stats)
    if nvml is not None and devices[0].platform == "gpu":
        names = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES", ""), len(devices))
        degrees = [c for name in names if (c := nvml.celsius(name)) is not None]
        if degrees:
            found["celsius"] = max(degrees)
    return found


def visible_gpus(variable: str, count: int) -> list[str]:
    """The GPUs of this process, by number or by name, as `CUDA_VISIBLE_DEVICES` has them."""
    names = [name.strip() for name in variable.split(",") if name.strip()]
    return names[:count] or [str(k) for k in range(count)]


class Nvml:
    """NVIDIA's management library, which comes with the driver."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def load(cls) -> Nvml | None:
        """The library; None where there is none, or no GPU."""
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        return cls(library) if library.nvmlInit_v2() == 0 else None

    def celsius(self, gpu: str) -> int | None:
        """The temperature of a GPU, by its number or its UUID."""
        library, handle, degrees = self._library, ctypes.c_void_p(), ctypes.c_uint()
        if gpu.isdigit():
            code = library.nvmlDeviceGetHandleByIndex_v2(
                ctypes.c_uint(int(gpu)), ctypes.byref(handle)
            )
        else:
            code = library.nvmlDeviceGetHandleByUUID(gpu.encode(), ctypes.byref(handle))
        if code:
            return None
        code = library.nvmlDeviceGetTemperature(handle, 0, ctypes.byref(degrees))
        return None if code else degrees.value
