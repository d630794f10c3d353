"""What do many small variables cost?

10, 100 and 1000 vectors of 32 numbers: the time of a step against the hand-written
steps (the limit is the faster one), and the time of the first step, in a fresh process,
against one psum for each tensor.
"""

from __future__ import annotations

import json
from statistics import median

import jax
import numpy as np
from common import (
    Devices,
    Ratio,
    Report,
    better,
    find_devices,
    interleaved,
    parser,
    run_python,
    seconds_of,
)
from models import small_variables
from training import MIRRAX, limits

COUNTS = (10, 100, 1000)
STEP_TARGET, FIRST_STEP_TARGET = 1.1, 1.3


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    options.add_argument("--side", help="time one first step, in this process")
    given = options.parse_args()
    devices = find_devices(given.replicas)
    if given.side:
        print(json.dumps(first_step(given.side, given.counts[0], devices)))
        return
    report = Report("many_variables", given)
    for count in given.counts:
        compare(count, devices, report)
    report.finish(devices)


def compare(count: int, devices: Devices, report: Report) -> None:
    """Measures `count` variables."""
    quick = report.options.quick
    hand = limits(devices)
    model = small_variables(count)
    makers = {**hand, **MIRRAX}
    first = {side: time_first_step(side, count, report) for side in makers}
    variants = {side: make(model, devices) for side, make in makers.items()}
    figures = interleaved(variants, *((3, 0.02) if quick else (40, 0.2)))
    limit, plain = better(figures, list(hand)), next(iter(hand))
    rows: list[list[object]] = []
    for side, values in figures.items():
        ratio = Ratio.of(values, figures[limit])
        shown = "limit" if side == limit else str(ratio)
        rows.append([side, float(np.median(values)), shown, first[side]])
        if side in MIRRAX:
            name = f"{model.name}, {side}"
            report.check(f"{name} / limit", ratio.median, STEP_TARGET)
            ratio = first[side] / first[plain]
            report.check(f"{name}, first step / {plain}'s", ratio, FIRST_STEP_TARGET)
    header = ("step", "ms", "against the limit", "first step, s")
    report.table(f"{model.name}, {len(devices)} replicas", header, rows)


def time_first_step(side: str, count: int, report: Report) -> float:
    """Seconds, from a process of its own."""
    options = report.options
    arguments = [__file__, "--side", side, "--counts", str(count)]
    arguments += ["--replicas", str(options.replicas)]
    repeats = 1 if options.quick else 3
    return median(run_python(arguments) for _ in range(repeats))


def first_step(side: str, count: int, devices: Devices) -> float:
    """Seconds; JAX itself is warm, everything about the step is new."""
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.device_put(np.float32(0))))
    make = {**limits(devices), **MIRRAX}[side]
    return seconds_of(make(small_variables(count), devices))


if __name__ == "__main__":
    main()
