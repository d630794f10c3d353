"""Does the first step get slower with more replicas?

Trace, compile and first run of the small MLP's step on 1 to 32 logical CPUs, each in a
fresh process, beside the same step hand-written in JAX (one psum for each tensor). The
global batch stays the same.
"""

from __future__ import annotations

import json
from statistics import median

import jax
import numpy as np
from common import (
    Devices,
    Report,
    cpu_devices,
    parser,
    run_python,
    seconds_of,
    until_stopped,
)
from models import MODELS
from training import MakeStep, handwritten, with_variables

SIDES: dict[str, MakeStep] = {"mirrax": with_variables, "hand-written": handwritten}
REPLICAS = (1, 2, 8, 32)
TARGET = 1.3


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--side", choices=SIDES, help="measure one, in this process")
    given = options.parse_args()
    if given.side:
        seconds = first_step(SIDES[given.side], cpu_devices(given.replicas))
        print(json.dumps(seconds))
        return
    report = Report("first_step", given)
    rows: list[list[object]] = []
    times: dict[tuple[str, int], float] = {}
    repeats = 1 if given.quick else 3
    with until_stopped():
        for count in REPLICAS:
            for side in SIDES:
                arguments = [__file__, "--side", side, "--replicas", str(count)]
                found = [run_python(arguments) for _ in range(repeats)]
                times[side, count] = median(found)
            rows.append([count, *(times[side, count] for side in SIDES)])
    report.table("Seconds to the end of the first step", ("replicas", *SIDES), rows)
    if len(rows) == len(REPLICAS):
        ratio = times["mirrax", REPLICAS[-1]] / times["mirrax", 2]
        report.check(f"first step, {REPLICAS[-1]} replicas / 2", ratio, TARGET)
    report.finish()


def first_step(make: MakeStep, devices: Devices) -> float:
    """Seconds; JAX itself is warm, everything about the step is new."""
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.device_put(np.float32(0))))
    return seconds_of(make(MODELS["small"], devices))


if __name__ == "__main__":
    main()
