"""Is a compiled training step with mirrax as fast as the same step hand-written in JAX?

Two MLPs, a CNN and a transformer; the limit is the faster of one psum for each tensor
and small tensors packed. `--tensorflow PYTHON` and `--torch PYTHON` name interpreters
that have those libraries, for the same MLPs under MirroredStrategy and
DistributedDataParallel. Accelerators get larger batches: with these small ones a step
takes them less time than it takes JAX to start it (`--batch-factor 1` shows that).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from common import (
    Devices,
    Ratio,
    Report,
    Step,
    better,
    find_devices,
    interleaved,
    parser,
    run_python,
)
from models import MODELS, Model
from training import MIRRAX, MakeStep, limits

RIVALS = Path(__file__).parent / "rivals"
# DESIGN.md, "Numbers to reach".
TARGETS = {"cpu": 1.03, "gpu": 1.01}
ACCELERATOR_BATCH_FACTOR = 256
HEADER = ("step", "ms", "against the limit")
SPEED_UPS = {"tensorflow": 2.5, "torch": 1.0}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    options.add_argument("--batch-factor", type=int, default=0, metavar="N")
    options.add_argument("--tensorflow", metavar="PYTHON")
    options.add_argument("--torch", metavar="PYTHON")
    given = options.parse_args()
    devices = find_devices(given.replicas)
    report = Report("steps", given)
    factor = 1 if devices[0].platform == "cpu" else ACCELERATOR_BATCH_FACTOR
    factor = given.batch_factor or factor
    for name in given.models:
        model = MODELS[name]
        model = replace(model, batch_size=model.batch_size * factor)
        compare(model, devices, report)
    report.finish(devices)


def compare(model: Model, devices: Devices, report: Report) -> None:
    """Measures all ways of training `model`."""
    rows, figures = measure(model, devices, report, limits(devices), MIRRAX)
    ours = min(float(np.median(figures[name])) for name in MIRRAX)
    rows += compare_with_rivals(model, len(devices), ours, report, report.options)
    title = f"{model.name}, batch {model.batch_size}, {len(devices)} replicas"
    report.table(title, HEADER, rows)


def measure(
    model: Model,
    devices: Devices,
    report: Report,
    limits: Mapping[str, MakeStep],
    ours: Mapping[str, MakeStep],
) -> tuple[list[list[object]], dict[str, np.ndarray]]:
    """Times steps beside the hand-written `limits`: rows for a table, and all figures."""
    variants = {n: make(model, devices) for n, make in {**limits, **ours}.items()}
    check_same_losses(variants)
    rounds, seconds = (3, 0.02) if report.options.quick else (40, 0.2)
    figures = interleaved(variants, rounds, seconds)
    limit = better(figures, list(limits))
    rows: list[list[object]] = []
    for name, values in figures.items():
        ratio = Ratio.of(values, figures[limit])
        shown = "limit" if name == limit else str(ratio)
        rows.append([name, float(np.median(values)), shown])
        if name in ours:
            target = TARGETS.get(devices[0].platform, 1.01)
            report.check(f"{model.name}, {name} / limit", ratio.median, target)
    return rows, figures


def check_same_losses(variants: dict[str, Step], steps: int = 4) -> None:
    """Stops if the variants do not train alike."""
    losses = {
        name: [_total(step()) for _ in range(steps)] for name, step in variants.items()
    }
    first, *others = losses.items()
    for name, values in others:
        np.testing.assert_allclose(
            values, first[1], rtol=1e-3, err_msg=f"{name} against {first[0]}"
        )


def _total(losses: object) -> float:
    """The global loss, from the replicas' shares of it."""
    return float(sum(np.asarray(part).sum() for part in jax.tree.leaves(losses)))


def compare_with_rivals(
    model: Model,
    replicas: int,
    ours: float,
    report: Report,
    options: argparse.Namespace,
) -> list[list[object]]:
    """Rows for the libraries whose interpreters were given; MLPs only."""
    if not model.name.startswith("MLP"):
        return []
    rows: list[list[object]] = []
    for rival in ("tensorflow", "torch"):
        python = getattr(options, rival)
        if not python:
            continue
        script = str(RIVALS / f"{rival}_mlp.py")
        sizes = model.name.removeprefix("MLP ")
        rounds = "3" if options.quick else "20"
        arguments = [script, sizes, str(model.batch_size), str(replicas), rounds]
        theirs = run_python(arguments, python)["ms"]
        rows.append([rival, theirs, f"{theirs / ours:.2f}x mirrax's time"])
        report.check(
            f"{model.name}, {rival}'s time / mirrax's",
            theirs / ours,
            SPEED_UPS[rival],
            is_minimum=True,
        )
    return rows


if __name__ == "__main__":
    main()
