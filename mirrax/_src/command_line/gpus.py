"""Which worker gets which GPUs."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess

_GPU_PLATFORMS = {"gpu", "cuda", "rocm"}


def environments(
    workers: int, devices: int | None, platform: str | None
) -> list[dict[str, str]]:
    """The variables that give each worker its own GPUs; on a CPU none.

    Raises:
        ValueError: If there are too few.
    """
    forced = {"JAX_PLATFORMS": _jax_name(platform)} if platform else {}
    if not _runs_on_gpus(platform):
        return [forced for _ in range(workers)]
    return [
        forced | {"CUDA_VISIBLE_DEVICES": ",".join(share)}
        for share in divide(visible_gpus(), workers, devices)
    ]


def divide(gpus: list[str], workers: int, devices: int | None) -> list[list[str]]:
    """Each worker's share: `devices` of them, or as many as there are for each."""
    count = devices or max(len(gpus) // workers, 1)
    if workers * count > len(gpus):
        found = ", ".join(gpus) or "none"
        raise ValueError(
            f"{workers} workers with {count} GPU{'s' * (count > 1)} each need "
            f"{workers * count} GPUs, but {len(gpus)} can be seen ({found}). Start fewer "
            "workers, give them fewer with --devices-per-worker, or use --platform cpu."
        )
    return [gpus[i * count : (i + 1) * count] for i in range(workers)]


def visible_gpus() -> list[str]:
    """The GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        end = next((i for i, name in enumerate(names) if name in ("", "-1")), None)
        return names[:end]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stdout.splitlines() if line.startswith("GPU ")]
    return [str(i) for i in range(len(lines))]


def _runs_on_gpus(platform: str | None) -> bool:
    """Whether JAX will choose GPUs in the workers."""
    asked = platform or os.environ.get("JAX_PLATFORMS", "")
    if asked:
        return not _GPU_PLATFORMS.isdisjoint(asked.lower().split(","))
    return _has_cuda_plugin() and bool(visible_gpus())


def _has_cuda_plugin() -> bool:
    names = [e.name for e in importlib.metadata.entry_points(group="jax_plugins")]
    return any("cuda" in name for name in names)


def _jax_name(platform: str) -> str:
    return "cuda,cpu" if platform == "gpu" else platform
