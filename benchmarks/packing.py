"""Which gradients should travel together, and how many at once?

The measurement behind the constants in `mirrax/_src/collectives/packing.py`. A pack's
limits (bytes, arrays) are tried on 1000 gradients of mixed sizes, for the time of a
step and of its compilation; the size under which an array is packed at all is tried on
the models, where products make the gradients.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from common import Devices, Report, find_devices, interleaved, parser, seconds_of
from jax import lax
from models import MODELS, Arrays, Model
from training import AXIS, Reduce, handwritten

from mirrax._src.collectives.packing import PackLimits, reduce_packed

KIB, MIB = 2**10, 2**20
WHOLE = 2**40
# Bytes of an array: 32 to 64 Ki - 1, so that all are packed. 9.5 MiB for 1000 arrays.
SIZES = [8, 32, 128, 512, 2048, 8192, 16383]
# Tried with 64 arrays at most, and with any number of bytes.
PACK_BYTES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
PACK_ARRAYS = (8, 16, 32, 64, 256, WHOLE)
SMALL_BYTES = (0, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, WHOLE)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--arrays", type=int, default=0, help="default: 1000")
    given = options.parse_args()
    devices = find_devices(given.replicas, at_least=2)
    report = Report("packing", given)
    compare_pack_limits(given.arrays or (100 if given.quick else 1000), devices, report)
    for name in ("small", "large", "transformer"):
        compare_small_bytes(MODELS[name], devices, report)
    report.finish(devices)


def compare_pack_limits(count: int, devices: Devices, report: Report) -> None:
    """How much goes into one pack."""
    model = mixed_gradients(count)
    limits = [PackLimits(WHOLE, pack_bytes, 64) for pack_bytes in PACK_BYTES]
    limits += [PackLimits(WHOLE, WHOLE, pack_arrays) for pack_arrays in PACK_ARRAYS]
    choices = {
        "one by one": PackLimits(small_bytes=0),
        f"mirrax: {_show(PackLimits())}": PackLimits(),
        **{_show(limit): limit for limit in limits},
    }
    title = f"{count} gradients of 32 bytes to 64 KiB, {len(devices)} replicas"
    _measure(title, model, choices, devices, report)


def compare_small_bytes(model: Model, devices: Devices, report: Report) -> None:
    """Which arrays are packed."""
    choices = {
        f"under {_size(small)}": PackLimits(small_bytes=small) for small in SMALL_BYTES
    }
    _measure(f"{model.name}, {len(devices)} replicas", model, choices, devices, report)


def _measure(
    title: str,
    model: Model,
    choices: dict[str, PackLimits],
    devices: Devices,
    report: Report,
) -> None:
    seconds_of(handwritten(model, devices))  # JAX itself is warm from here on
    variants = {
        name: handwritten(model, devices, _reduce_with(limits))
        for name, limits in choices.items()
    }
    first = {name: seconds_of(step) for name, step in variants.items()}
    quick = report.options.quick
    figures = interleaved(variants, *((3, 0.02) if quick else (20, 0.1)))
    rows = [
        [name, float(np.median(values)), first[name]]
        for name, values in figures.items()
    ]
    report.table(title, ("packs", "step, ms", "first step, s"), rows)


def _reduce_with(limits: PackLimits) -> Reduce:
    sum_all = functools.partial(lax.psum, axis_name=AXIS)
    return lambda gradients: reduce_packed(gradients, limits, sum_all)


def mixed_gradients(count: int) -> Model:
    """Vectors of mixed sizes, drawn towards the first input."""
    shapes = [(SIZES[i % len(SIZES)],) for i in range(count)]

    def losses(params: Arrays, x: jax.Array, y: jax.Array) -> jax.Array:
        return sum((jnp.sum((x[0, 0] - p) ** 2) for p in params), start=0.0 * y)

    return Model(f"{count} gradients", shapes, losses, (1,), batch_size=16)


def _show(limits: PackLimits) -> str:
    arrays = "any" if limits.pack_arrays == WHOLE else limits.pack_arrays
    return f"{_size(limits.pack_bytes)}, {arrays} arrays"


def _size(count: int) -> str:
    if count == WHOLE:
        return "any size"
    return f"{count // MIB} MiB" if count >= MIB else f"{count // KIB} KiB"


if __name__ == "__main__":
    main()
