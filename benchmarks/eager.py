"""What does a step cost as plain Python, beside the same step compiled?

The same training step of the small and the large MLP, once as it is and once in
`mx.function`. Eager code dispatches every operation by itself on every replica, so that
its cost is a matter of the number of operations, not of their size.
"""

from __future__ import annotations

import jax
import numpy as np
from common import Devices, Ratio, Report, Step, find_devices, interleaved, parser
from models import MODELS, Model
from training import distribute, variables_step

import mirrax as mx


def main() -> None:
    options = parser(__doc__).parse_args()
    devices = find_devices(options.replicas)
    report = Report("eager", options)
    rows: list[list[object]] = []
    for name in ("small", "large"):
        model = MODELS[name]
        steps = {kind: make(model, devices, kind) for kind in ("compiled", "eager")}
        for _ in range(3):
            jax.block_until_ready([step() for step in steps.values()])
        rounds = 3 if options.quick else 20
        figures = interleaved(steps, rounds, 0.05)
        ratio = Ratio.of(figures["eager"], figures["compiled"])
        medians = [float(np.median(values)) for values in figures.values()]
        rows.append([model.name, *medians, str(ratio)])
    header = ["model", "compiled, ms", "eager, ms", "eager / compiled"]
    report.table(f"{len(devices)} replicas", header, rows)
    report.finish(devices)


def make(model: Model, devices: Devices, kind: str) -> Step:
    """A step of `model`, as plain Python or compiled."""
    strategy = mx.distribute.MirroredStrategy(devices)
    compiled = variables_step(strategy, model)
    step = compiled if kind == "compiled" else compiled.fn
    batch = distribute(strategy, model.make_batch())
    return lambda: strategy.run(step, args=batch)


if __name__ == "__main__":
    main()
