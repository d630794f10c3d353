"""What do `assert_in_sync` and `check_numerics` cost beside a training step?

Adam on the models of steps.py: a step alone, followed by a check of its loss, of all
variables, and followed by a comparison of all copies. Checks wait for the step, as they do in a
loop. `--quick` for a first look.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from common import Devices, Ratio, Report, find_devices, interleaved, parser
from models import MODELS, Model
from training import distribute, optimizer_step

import mirrax as mx


def variants(model: Model, devices: Devices) -> tuple[dict[str, Any], int, int]:
    """Steps with and without checks; how many bytes each replica holds, and arrays."""
    strategy = mx.MirroredStrategy(devices)
    step, variables, optimizer = optimizer_step(strategy, model, optax.adam(1e-3))
    x, y = distribute(strategy, model.make_batch())

    def run() -> Any:
        return jax.block_until_ready(strategy.run(step, args=(x, y)))

    def followed_by(check: Any) -> Any:
        return lambda: check(run())

    run()
    everything = [*variables, *optimizer.variables]
    size = sum(v.size * v.dtype.itemsize for v in everything)
    ways = {
        "step": run,
        "and its loss checked": followed_by(strategy.check_numerics),
        "and all checked": followed_by(lambda _: strategy.check_numerics(everything)),
        "and all compared": followed_by(lambda _: strategy.assert_in_sync(everything)),
    }
    return ways, size, len(everything)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    given = options.parse_args()
    devices = find_devices(given.replicas)
    report = Report("checks", given)
    for name in given.models:
        ways, size, count = variants(MODELS[name], devices)
        figures = interleaved(ways, *((3, 0.02) if given.quick else (40, 0.2)))
        rows = [
            [way, float(np.median(f)), str(Ratio.of(f, figures["step"]))]
            for way, f in figures.items()
        ]
        held = f"{size / 2**20:.1f} MiB in {count} arrays on each of {len(devices)}"
        moved = f"{4 * count:,} bytes of each to the host"
        report.table(f"{name}: {held}; {moved}", ("way", "ms", "of a step"), rows)
    report.finish(devices)


if __name__ == "__main__":
    main()
