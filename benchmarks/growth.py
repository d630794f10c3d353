"""Does anything grow faster than what it grows with?

Step time, host time, first step and memory against the number of replicas (logical CPUs),
variables, leaves of a batch and rows of a dataset; for the first two also those of the same step
hand-written in JAX, small tensors packed: what grows there too is XLA's. Each point runs in a process of its own,
with a time limit, and all of them in `--seconds`. The slope is the exponent of the power law
that fits the larger half of the points: 1 is linear. Times are processor time of the whole
process, which other programs disturb little; GROWTH.md and growth.svg have what was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

HERE = Path(__file__).parent
_REPLICAS = (1, 2, 4, 8, 16, 32, 64)
_VARIABLES = (10, 100, 500, 1000, 2000, 5000)
POINTS = {
    "replicas": _REPLICAS,
    "replicas, by hand": _REPLICAS,
    "variables": _VARIABLES,
    "variables, by hand": _VARIABLES,
    "leaves": (1, 10, 100, 1000),
    "rows": (1_000, 10_000, 100_000, 400_000),
}
FIGURES = {"step": "ms", "host": "ms", "first step": "s", "memory": "MB"}
MOST_SECONDS = 600.0
STEPS = 10


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=2400)
    options.add_argument("--only", choices=POINTS, nargs="+", default=list(POINTS))
    options.add_argument("--output", type=Path, default=HERE, help="a folder")
    options.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.point:
        what, size = given.point
        print(json.dumps(measure(what, int(size))))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end = time.monotonic() + given.seconds
    found: dict[str, dict[int, Any]] = {what: {} for what in given.only}
    try:
        # The largest last, so that a short run has all the others.
        for i in range(max(map(len, POINTS.values()))):
            for what in given.only:
                for size in POINTS[what][i : i + 1]:
                    found[what][size] = measure_apart(what, size, end)
                    print(f"{what} {size}: {found[what][size]}", flush=True)
    except KeyboardInterrupt:
        print("stopped: writing what there is", flush=True)
    write(found, given.output)


def measure_apart(what: str, size: int, end: float) -> Any:
    """A point, measured in a process of its own; in words if it cannot be."""
    limit = min(MOST_SECONDS, end - time.monotonic())
    if limit < 2:
        return "out of time"
    command = [sys.executable, __file__, "--point", what, str(size)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"not done in {limit:.0f} s"
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1][:150]}"
    return json.loads(done.stdout.splitlines()[-1])


# One point ----------------------------------------------------------------------------


def measure(what: str, size: int) -> dict[str, float]:
    import jax

    jax.config.update("jax_platforms", "cpu")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = MAKERS[what](size)
    begin = time.process_time()
    jax.block_until_ready(step())
    first = time.process_time() - begin
    jax.block_until_ready(step())
    begin, own = time.process_time(), time.thread_time()
    for _ in range(STEPS):
        last = step()
    host = time.thread_time() - own
    jax.block_until_ready(last)
    whole = time.process_time() - begin
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "step": whole / STEPS * 1e3,
        "host": host / STEPS * 1e3,
        "first step": first,
        "memory": (after - before) / 1024,
    }


def strategy_of(replicas: int) -> Any:
    import mirrax as mx

    mx.config.set_logical_device_configuration(cpu=replicas)
    return mx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def replicas_step(count: int, make: str = "with_variables") -> Callable[[], Any]:
    """An MLP, 64 rows for each replica."""
    import training
    from common import cpu_devices
    from models import mlp

    model = dataclasses.replace(mlp(64, 128, 128, 10), batch_size=64 * count)
    return getattr(training, make)(model, cpu_devices(count))


def variables_step(count: int, make: str = "with_variables") -> Callable[[], Any]:
    """Small variables, one operation each, on 2 replicas."""
    import training
    from common import cpu_devices
    from models import small_variables

    return getattr(training, make)(small_variables(count), cpu_devices(2))


def leaves_step(count: int) -> Callable[[], Any]:
    """A batch of many arrays, on 2 replicas."""
    import mirrax as mx

    strategy = strategy_of(2)
    rows = {f"leaf {i}": np.ones((64, 4), "f") for i in range(count)}
    dataset = mx.data.Dataset.from_tensor_slices(rows).batch(8).repeat()
    batches = iter(strategy.experimental_distribute_dataset(dataset))

    @mx.function
    def step(batch: dict[str, Any]) -> Any:
        return sum(leaf.sum() for leaf in batch.values())

    return lambda: strategy.run(step, args=(next(batches),))


def rows_step(count: int) -> Callable[[], Any]:
    """An epoch of shuffled rows, on 2 replicas."""
    import mirrax as mx

    strategy = strategy_of(2)
    dataset = mx.data.Dataset.from_tensor_slices(np.ones((count, 8), "f"))
    dataset = dataset.shuffle(count).batch(250)
    distributed = strategy.experimental_distribute_dataset(dataset)

    def epoch() -> Any:
        for batch in distributed:
            last = batch
        return last

    return epoch


MAKERS: dict[str, Callable[[int], Callable[[], Any]]] = {
    "replicas": replicas_step,
    "replicas, by hand": lambda n: replicas_step(n, "handwritten_packed"),
    "variables": variables_step,
    "variables, by hand": lambda n: variables_step(n, "handwritten_packed"),
    "leaves": leaves_step,
    "rows": rows_step,
}


# Slopes, tables, plots ------------------------------------------------------------------


def slope_of(points: dict[int, float]) -> float | None:
    """The exponent of the power law through the larger half of the points."""
    sizes = sorted(size for size, value in points.items() if value > 0)
    sizes = sizes[len(sizes) // 2 - (len(sizes) % 2 == 0) :]
    if len(sizes) < 2:
        return None
    x, y = np.log(sizes), np.log([points[size] for size in sizes])
    return float(np.polyfit(x, y, 1)[0])


def write(found: dict[str, dict[int, Any]], folder: Path) -> None:
    from common import describe_machine

    where = describe_machine()
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items())
    lines = [
        "# Growth",
        "",
        "Written by `python benchmarks/growth.py`, which says what is measured.",
        f"{where['date']}, {where['machine']}, {versions}.",
        "",
    ]
    plots = []
    for what, points in found.items():
        header = [f"{name}, {unit}" for name, unit in FIGURES.items()]
        lines += [
            f"## {what}",
            "",
            f"| {what} | {' | '.join(header)} |",
            "|---" * 5 + "|",
        ]
        for size, point in points.items():
            known = isinstance(point, dict)
            cells = (
                [f"{point[name]:.3g}" for name in FIGURES]
                if known
                else [point, "", "", ""]
            )
            lines.append(f"| {size:,} | {' | '.join(cells)} |")
        curves = {
            name: {s: p[name] for s, p in points.items() if isinstance(p, dict)}
            for name in FIGURES
        }
        slopes = {name: slope_of(curve) for name, curve in curves.items()}
        shown = ["" if s is None else f"**{s:.2f}**" for s in slopes.values()]
        lines += [f"| slope | {' | '.join(shown)} |", ""]
        plots.append((what, curves, slopes))
        for name, slope in slopes.items():
            if slope is not None:
                print(f"{what}: {name} grows with the power {slope:.2f}")
    folder.mkdir(exist_ok=True)
    (folder / "GROWTH.md").write_text("\n".join(lines))
    (folder / "growth.svg").write_text(draw(plots))


def draw(plots: list[tuple[str, dict[str, dict[int, float]], dict[str, Any]]]) -> str:
    """Log-log plots side by side; each curve begins at 1."""
    colours = ("#1f6feb", "#f0883e", "#da3633", "#3fb950")
    parts, width = [], 280
    for k, (what, curves, slopes) in enumerate(plots):
        left = 40 + k * width
        parts.append(
            f'<text x="{left}" y="20" font-weight="bold">{escape(what)}</text>'
        )
        sizes = [s for curve in curves.values() for s in curve]
        if not sizes:
            continue
        low, span = math.log10(min(sizes)), 0.01 + math.log10(max(sizes) / min(sizes))
        for (name, curve), colour in zip(curves.items(), colours):
            base = next((v for v in curve.values() if v > 0), None)
            if base is None:
                continue
            places = [
                (
                    left + (math.log10(s) - low) / span * (width - 80),
                    230 - math.log10(max(v / base, 0.1)) * 45,
                )
                for s, v in sorted(curve.items())
                if v > 0
            ]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
            slope = "" if slopes[name] is None else f" {slopes[name]:.2f}"
            y = 290 + 15 * list(curves).index(name)
            parts.append(
                f'<text x="{left}" y="{y}" fill="{colour}">{name}:{slope}</text>'
            )
        parts.append(
            f'<text x="{left}" y="270">{min(sizes):,} to {max(sizes):,}</text>'
        )
    total = 60 + width * len(plots)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="350" '
        f'font-family="sans-serif" font-size="12"><rect width="{total}" height="350" '
        f'fill="white"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    main()
