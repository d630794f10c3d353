"""Device strings, as TensorFlow writes them, and the `jax.Device`s that they mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax

from mirrax._src.base import logical
from mirrax._src.base.jax_compat import Device


@dataclass(frozen=True)
class LogicalDevice:
    """A device by name, as `list_logical_devices` gives it."""

    name: str
    device_type: str


DeviceLike = str | Device | LogicalDevice

_PATTERN = re.compile(
    r"(?:/job:[^/]+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?"
    r"(?P<kind>cpu|gpu|tpu):(?P<index>\d+)",
    re.IGNORECASE,
)


def device_kind(device: Device) -> str:
    """`CPU`, `GPU` or `TPU`."""
    platform = device.platform.upper()
    return "GPU" if platform in ("CUDA", "ROCM") else platform


def device_name(device: Device) -> str:
    """The short name of a device: `CPU:0`."""
    peers = jax.local_devices(
        process_index=device.process_index, backend=device.platform
    )
    return f"{device_kind(device)}:{peers.index(device)}"


def all_local_devices() -> list[Device]:
    """The devices of this worker, accelerators first."""
    default, cpus = jax.local_devices(), jax.local_devices(backend="cpu")
    return cpus if default[0].platform == "cpu" else [*default, *cpus]


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """The devices of this worker, accelerators first; `device_type` as in `"CPU"`."""
    return [
        LogicalDevice(f"/device:{device_name(d)}", device_kind(d))
        for d in all_local_devices()
        if device_type is None or device_kind(d) == device_type.upper()
    ]


def resolve_devices(devices: Sequence[DeviceLike] | None) -> tuple[Device, ...]:
    """The devices for a strategy: those named, or all accelerators, or all CPUs."""
    if isinstance(devices, DeviceLike):
        devices = [devices]
    if not isinstance(devices, Iterable | None):
        raise TypeError(
            f"`devices` must be a list such as ['GPU:0', 'GPU:1'], got {devices!r}."
        )
    devices = devices or jax.local_devices()
    parsed = [_parse(device) for device in devices]
    cpus = [p[1] for p in parsed if isinstance(p, tuple) and p[0] == "CPU"]
    num_cpus = 1 + max(cpus, default=0)
    logical.ensure_cpu_devices(num_cpus)
    found: dict[Device, DeviceLike] = {}
    for spec, given in zip(parsed, devices):
        device = _find(spec, given, num_cpus)
        if device in found:
            raise ValueError(
                f"Duplicate in `devices`: {device_name(device)} is given twice, as {_show(found[device])} "
                f"and {_show(given)}. Each replica needs a device of its own."
            )
        found[device] = given
    logical.check_pool(tuple(found))
    return tuple(found)


def _parse(device: DeviceLike) -> tuple[str, int] | Device:
    if isinstance(device, Device):
        return device
    text = device.name if isinstance(device, LogicalDevice) else device
    match = _PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f"{text!r} is not a device. Write it like 'GPU:0', '/gpu:0' or "
            f"'/job:localhost/replica:0/task:0/device:GPU:0', or pass a jax.Device."
        )
    return match["kind"].upper(), int(match["index"])


def _find(spec: tuple[str, int] | Device, given: DeviceLike, num_cpus: int) -> Device:
    if isinstance(spec, Device):
        return spec
    kind, index = spec
    try:
        devices = jax.local_devices(backend=kind.lower())
    except RuntimeError:
        devices = []
    if index < len(devices):
        return devices[index]
    existing = [device_name(d) for d in all_local_devices()]
    hint = ""
    if kind == "CPU":
        hint = (
            f" JAX had already started with {len(devices)} CPU device(s): call "
            f"mx.config.set_logical_device_configuration(cpu={num_cpus}) before anything "
            f"uses JAX's devices."
        )
    elif not devices:
        hint = (
            f" JAX sees no {kind}: install it with support for them (`pip install "
            "'jax[cuda13]'` for NVIDIA), or try things out on logical CPUs: "
            "['CPU:0', 'CPU:1']."
        )
    raise ValueError(
        f"There is no device {_show(given)} here. Existing devices: "
        f"{', '.join(existing)}.{hint}"
    )


def _show(device: DeviceLike) -> str:
    return f"the jax.Device {device}" if isinstance(device, Device) else repr(device)


def show_bytes(count: int) -> str:
    """A number of bytes for people: `1.5 MiB`."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
