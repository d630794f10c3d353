"""Do two workers train as fast with mirrax as with TensorFlow, PyTorch or bare JAX?

Two processes on this machine, one CPU replica each, talk over the loopback: the MLPs and
the CNN under mirrax's MultiWorkerMirroredStrategy, hand-written on JAX's distributed
runtime (one psum for each tensor, all in one psum, and gathered and added), under
TensorFlow's MultiWorkerMirroredStrategy (RING) and PyTorch's DistributedDataParallel
(Gloo). `--tensorflow PYTHON` and `--torch PYTHON` name interpreters that have those
libraries. Every library's workers stay alive, and their steps take turns. All have the
same parameters and batch, and the losses have to agree.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from common import Ratio, Report, Rival, better, in_turns, is_installed, parser
from models import MODELS, Model
from rivals.stepping import save

HERE = Path(__file__).parent
HAND_WRITTEN = ("psum each", "psum packed", "gather")
MIRRAX = ("mirrax variables", "mirrax state")
# DESIGN.md, "Numbers to reach"; the limit is the fastest hand-written step.
LIMIT = 1.05
SPEED_UPS = {"tensorflow": 2.0, "torch": 1.0}
# TensorFlow is compared by the faster of its default and a worker's share of the cores.
RIVALS = {
    "tensorflow": ("TensorFlow", "TensorFlow, few threads"),
    "torch": ("PyTorch",),
}
HEADER = ("step", "ms", "quartiles", "against the limit", f"/ {MIRRAX[0]}")


def main() -> None:
    options = parser(__doc__)
    names = [name for name in MODELS if name != "transformer"]
    options.add_argument("--models", nargs="+", default=names, choices=names)
    options.add_argument("--tensorflow", metavar="PYTHON", default=sys.executable)
    options.add_argument("--torch", metavar="PYTHON", default=sys.executable)
    given = options.parse_args()
    report = Report("workers", given)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in given.models:
            model = MODELS[name]
            save(folder, name, model.make_parameters(), model.make_batch())
        ways = start(given, folder, stack)
        for name in given.models:
            compare(name, MODELS[name], ways, report)
    report.finish()


# Workers ------------------------------------------------------------------------------


class Workers:
    """The processes of one library, which train together."""

    def __init__(
        self,
        count: int,
        python: str,
        script: Sequence[str],
        folder: Path,
        more: Sequence[str] = (),
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        addresses = ",".join(free_addresses(count))
        self._rivals = [
            Rival([*script, str(i), addresses, str(folder), *more], python, settings)
            for i in range(count)
        ]
        self._threads = ThreadPoolExecutor(count)

    def train(
        self, way: str, model: str, steps: int, timeout: float = 300
    ) -> tuple[float, float]:
        """Milliseconds a step, of the slowest worker, and the loss over all workers."""
        asked = json.dumps([way, model, steps])

        def ask(rival: Rival) -> Any:
            return rival.ask(asked, timeout)

        answers = list(self._threads.map(ask, self._rivals))
        return max(a["ms"] for a in answers), sum(a["loss"] for a in answers)

    def begin(self, way: str, model: str, steps: int) -> None:
        """Asks for steps without waiting for them."""
        for rival in self._rivals:
            rival.send(json.dumps([way, model, steps]))

    @property
    def processes(self) -> list[subprocess.Popen[str]]:
        return [rival.process for rival in self._rivals]

    def kill(self) -> None:
        """Ends the processes at once, also stopped ones."""
        for process in self.processes:
            process.kill()
        self.close()

    def close(self) -> None:
        list(self._threads.map(lambda rival: rival.close(), self._rivals))
        self._threads.shutdown()


def free_addresses(count: int) -> list[str]:
    """Addresses on the loopback that nobody listens at."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def start(
    options: argparse.Namespace, folder: Path, stack: contextlib.ExitStack
) -> dict[str, Workers]:
    """The workers that answer for each way; libraries that are missing have none."""

    def begin(python: str, *script: str) -> Workers:
        workers = Workers(options.replicas, python, script, folder)
        stack.callback(workers.close)
        return workers

    jax_script = str(HERE / "jax_workers.py")
    ways: dict[str, Workers] = {}
    for side, names in {"JAX": HAND_WRITTEN, "mirrax": MIRRAX}.items():
        workers = begin(sys.executable, jax_script, side)
        ways |= {name: workers for name in names}
    for library, names in RIVALS.items():
        python = getattr(options, library)
        if is_installed(python, library):
            script = str(HERE / "rivals" / f"{library}_workers.py")
            ways |= {name: begin(python, script, name) for name in names}
    return ways


# Figures ------------------------------------------------------------------------------


def compare(name: str, model: Model, ways: dict[str, Workers], report: Report) -> None:
    """Measures all ways of training one model."""
    check_same_losses(name, ways)
    figures = measure(name, ways, report.options.quick)
    limit, ours = better(figures, HAND_WRITTEN), figures[MIRRAX[0]]
    rows: list[list[object]] = []
    for way, values in figures.items():
        low, median, high = np.percentile(values, [25, 50, 75])
        shown = "limit" if way == limit else str(Ratio.of(values, figures[limit]))
        against = str(Ratio.of(values, ours)) if values is not ours else ""
        rows.append([way, float(median), f"{low:.3g} to {high:.3g}", shown, against])
    for name in (name for names in RIVALS.values() for name in names):
        if name not in ways:
            rows.append([name, "not installed", *[""] * (len(HEADER) - 2)])
    workers = report.options.replicas
    title = f"{model.name}, batch {model.batch_size}, {workers} workers"
    report.table(title, HEADER, rows)
    for way in MIRRAX:
        ratio = Ratio.of(figures[way], figures[limit]).median
        report.check(f"{model.name}, {way} / {limit}", ratio, LIMIT)
    if model.name.startswith("MLP"):  # XLA's convolutions are no matter of a strategy
        for library, names in RIVALS.items():
            if names[0] in ways:
                rival = better(figures, names)
                ratio = Ratio.of(figures[rival], ours).median
                title = f"{model.name}, {rival} / {MIRRAX[0]}"
                report.check(title, ratio, SPEED_UPS[library], is_minimum=True)


def check_same_losses(model: str, ways: dict[str, Workers], steps: int = 4) -> None:
    """Stops if the ways do not train alike."""
    losses = {
        way: [workers.train(way, model, 1)[1] for _ in range(steps)]
        for way, workers in ways.items()
    }
    first, *others = losses.items()
    for way, values in others:
        np.testing.assert_allclose(
            values, first[1], rtol=1e-3, err_msg=f"{way} against {first[0]}"
        )


def measure(
    model: str, ways: dict[str, Workers], is_quick: bool
) -> dict[str, np.ndarray]:
    """Milliseconds a step of each way, one figure for each round, in turn."""
    rounds, seconds = (3, 0.05) if is_quick else (30, 0.25)
    slowest = max(workers.train(way, model, 3)[0] for way, workers in ways.items())
    count = max(2, math.ceil(seconds * 1e3 / slowest))
    figures = in_turns(ways, rounds, lambda way: ways[way].train(way, model, count)[0])
    return {way: np.array(values) for way, values in figures.items()}


if __name__ == "__main__":
    main()
