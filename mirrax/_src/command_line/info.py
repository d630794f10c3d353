"""What `mirrax info` finds out, as plain data.

What cannot be found out is an `{"error": ...}` in its place: this is the command for a
machine on which something does not work.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import mirrax as mx
from mirrax._src.base.devices import all_local_devices, device_name
from mirrax._src.cluster.resolver_jax import JaxClusterResolver
from mirrax._src.cluster.resolver_slurm import SlurmClusterResolver
from mirrax._src.cluster.resolver_tf_config import TFConfigClusterResolver
from mirrax._src.cluster.resolvers import ClusterResolver
from mirrax._src.cluster.spec import training_cluster
from mirrax._src.command_line import measuring
from mirrax._src.command_line.run import RunOptions, launch

_PACKAGES = ("jax", "jaxlib", "numpy")
_OPTIONAL = (
    *("optax", "orbax-checkpoint", "flax", "keras", "grain", "tensorflow", "torch"),
    *(
        "datasets",
        "tensorboard",
        "safetensors",
        "click",
        "rich",
        "cloudpickle",
        "mpi4py",
    ),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu"),
)
_VARIABLES = (
    *("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES"),
    *("PJRT_NPROC", "NPROC", "OMP_NUM_THREADS"),
)
# Where a cluster may be described, who reads it, and what there is if it is there.
_SOURCES: tuple[tuple[str, Callable[[], bool], Callable[[], ClusterResolver]], ...] = (
    ("TF_CONFIG", lambda: bool(os.environ.get("TF_CONFIG")), TFConfigClusterResolver),
    (
        "Slurm",
        lambda: "SLURM_STEP_NUM_TASKS" in os.environ,
        lambda: SlurmClusterResolver(auto_set_gpu=False),
    ),
    (
        "JAX's detection",
        lambda: True,
        lambda: JaxClusterResolver(None, None, None, initialization_timeout=5),
    ),
)


def collect(devices: int | None = None) -> dict[str, Any]:
    """All that is known without measuring."""
    if devices is not None:
        mx.config.set_logical_device_configuration(cpu=devices)
    return {
        "versions": _versions(),
        "devices": _or_error(_devices),
        "cluster": _cluster(),
        "threads": {"cores": _cores(), "environment": _environment()},
    }


def measure_here() -> dict[str, Any]:
    """All-reduces over the devices of this process."""
    return _or_error(_measure_here)


def measure_between(workers: int, devices: int | None) -> tuple[dict[str, Any], int]:
    """All-reduces between so many new workers, and the launcher's exit code."""
    with tempfile.TemporaryDirectory(prefix="mirrax-info-") as folder:
        result = Path(folder) / "result.json"
        options = RunOptions(measuring.command(result), workers, workers, devices)
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the answer alone
            code = launch(options)
        if code:
            return {}, code
        return {"workers": workers, **json.loads(result.read_text())}, 0


def _versions() -> dict[str, str]:
    found = {"mirrax": mx.__version__, "python": platform.python_version()}
    for name in (*_PACKAGES, *_OPTIONAL):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _devices() -> list[dict[str, Any]]:
    return [
        {
            "name": device_name(device),
            "kind": device.device_kind,
            "bytes": (device.memory_stats() or {}).get("bytes_limit"),
        }
        for device in all_local_devices()
    ]


def _cluster() -> dict[str, Any] | None:
    for source, is_there, resolver in _SOURCES:
        if not is_there():
            continue
        try:
            cluster = training_cluster(resolver())
        except RuntimeError as error:
            if "found no cluster" in str(error):
                continue
            return {"source": source, "error": str(error)}
        except Exception as error:
            return {"source": source, "error": f"{type(error).__name__}: {error}"}
        own = f"{cluster.task_type} {cluster.task_id}"
        workers = dict(zip(cluster.names, cluster.addresses))
        return {"source": source, "workers": workers, "this": own}
    return None


def _cores() -> dict[str, int]:
    machine = os.cpu_count() or 1
    try:
        return {"machine": machine, "usable": len(os.sched_getaffinity(0))}
    except AttributeError:
        return {"machine": machine, "usable": machine}


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def _measure_here() -> dict[str, Any]:
    count = len(jax.local_devices())
    rows = measuring.measure(mx.MirroredStrategy()) if count > 1 else []
    return {"workers": 1, "replicas": count, "all_reduce": rows}


def _or_error(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
