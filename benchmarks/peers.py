"""Is the whole training loop ahead of its peers? One interleaved run of all of them.

Input, forward, backward, reduction, optimizer and loss together, with mirrax, hand-written
in JAX, and under TensorFlow, PyTorch's DistributedDataParallel and Keras 3 (`--python` names
an interpreter that has them); then input alone, then faults. Every peer runs in processes of
its own with a time limit: one that fails or hangs is a row that says so. All is done in
`--seconds`; the tables are written to PEERS.md, also after Ctrl-C, and `--resume` goes on. The
short table of a whole run goes into the README as well.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import NoAnswer, Rival, describe_machine, is_installed
from models import Model, mlp, small_variables, transformer
from peer_faults import measure_faults
from peer_libraries import (
    DDP,
    EACH,
    GATHERED,
    KERAS,
    MIRRAX,
    PACKED,
    TF,
    TF_FEW,
    TF_LOOP,
    Peer,
)
from peer_report import FAULTS, Cell, update_readme, write_report
from workers import Workers

HERE = Path(__file__).parent
RIVALS = HERE / "rivals"
RESULTS = HERE.parent / "build"
README = HERE.parent / "README.md"
BATCHES = 20  # of an epoch
OUT_OF_TIME = "out of time"
LIMIT = 75.0  # seconds for a peer's first step, and for each later answer
MODULES = {"tensorflow": "tensorflow", "torch": "torch", "keras": "keras"}
VERSIONS = ("tensorflow", "tensorflow_cpu", "torch", "keras", "grain", "jax")


# Fills the cells of a table, in about so many seconds.
Measure = Callable[[dict[str, Cell], float], None]


@dataclass(frozen=True)
class Row:
    """One loop that all of `peers` run."""

    title: str
    model: str
    peers: tuple[Peer, ...]
    replicas: int = 2
    workers: int = 1
    weight: float = 1.0  # of its share of the time


def rows_of(is_quick: bool) -> list[Row]:
    many, count = (8, 200) if is_quick else (32, 1000)
    one = (MIRRAX, EACH, PACKED, TF, TF_LOOP, DDP, KERAS)
    two = (MIRRAX, PACKED, GATHERED, TF, TF_FEW, TF_LOOP, DDP)
    if is_quick:
        one, two = (MIRRAX, PACKED, TF, DDP, KERAS), (MIRRAX, GATHERED, TF, DDP)
    large, small = "MLP 784-1024-1024-10", "MLP 784-128-128-10"
    some = (
        (MIRRAX, EACH, PACKED, TF) if is_quick else (MIRRAX, EACH, PACKED, TF, TF_LOOP)
    )
    rows = [
        Row(f"2 workers, {large}", "large", two, workers=2),
        Row(f"2 workers, {small}", "small", two, workers=2),
        Row(f"2 replicas, {large}", "large", one),
        Row(f"2 replicas, {small}", "small", one),
        Row(f"{many} replicas, 20 layers of 64", "deep", some, many),
        # Their first steps take most of it; one psum for each is far behind here.
        Row(
            f"{count} small variables, 2 replicas",
            "variables",
            tuple(peer for peer in some if peer is not EACH),
            weight=3.0,
        ),
    ]
    attention = "transformer, 2 layers of 128, batch 32, Adam"
    return (
        rows
        if is_quick
        else [*rows, Row(f"2 replicas, {attention}", "transformer", one)]
    )


def models_of(is_quick: bool) -> dict[str, Model]:
    return {
        "large": mlp(784, 1024, 1024, 10),
        "small": mlp(784, 128, 128, 10),
        "deep": mlp(*[64] * 20, 10),
        "variables": small_variables(200 if is_quick else 1000),
        "transformer": replace(transformer(), batch_size=32),
        "odd": mlp(784, 128, 128, 10),
    }


def input_rows(is_quick: bool) -> int:
    return 10_000 if is_quick else 60_000


def input_title(is_quick: bool) -> str:
    return f"input, {input_rows(is_quick):,} shuffled rows of 784 floats"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--python", default=sys.executable, help="has the peers")
    options.add_argument("--quick", action="store_true")
    options.add_argument("--seconds", type=float, default=0)
    options.add_argument("--resume", action="store_true", help="keep what was measured")
    options.add_argument("--only", default="", help="rows whose title contains this")
    options.add_argument("--output", type=Path, default=HERE, help="a folder")
    given = options.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    load = os.getloadavg()[0]
    run = Run(
        given, time.monotonic() + (given.seconds or (225 if given.quick else 870))
    )
    if given.resume and run.results.exists():
        run.found = json.loads(run.results.read_text())
    try:
        with tempfile.TemporaryDirectory() as folder:
            run.all_of(Path(folder))
    except KeyboardInterrupt:
        print("stopped: writing what there is", flush=True)
    facts = {
        **describe_machine(),
        "peers": versions_of(given.python),
        "quick": given.quick,
        "load": load,
    }
    write_report(run.found, facts, given.output)
    print(f"wrote {given.output / 'PEERS.md'}")
    if run.is_whole and given.output == HERE:
        update_readme(README, HERE / "PEERS.md")
        print(f"wrote its short table to {README}")


def stop(*_: Any) -> None:
    """On Ctrl-C nothing is waited for any more."""
    Rival.kill_all()
    raise KeyboardInterrupt


@dataclass
class Run:
    """What has been measured so far, and until when the rest may take."""

    given: argparse.Namespace
    deadline: float
    found: dict[str, dict[str, Cell]] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def results(self) -> Path:
        name = "peers-quick.json" if self.given.quick else "peers.json"
        return RESULTS / name

    @property
    def is_whole(self) -> bool:
        """Whether all was measured, at full length."""
        titles = [row.title for row in rows_of(False)] + [input_title(False), FAULTS]
        return not self.given.quick and all(map(self.is_done, titles))

    def is_done(self, title: str) -> bool:
        """Whether a table needs no other run: it is there, and time was enough for it."""
        cells = self.found.get(title, {})
        texts = [c.get("said", "") + c.get("problem", "") for c in cells.values()]
        return bool(cells) and not any(OUT_OF_TIME in text for text in texts)

    def all_of(self, folder: Path) -> None:
        write_models(folder, self.given.quick)
        is_quick = self.given.quick
        parts: list[tuple[str, float, Measure]] = [
            (row.title, row.weight, lambda *a, row=row: self.measure(row, folder, *a))
            for row in rows_of(is_quick)
        ]
        parts.append((input_title(is_quick), 1, self.measure_input))

        def start(*how: Any) -> Workers:
            return self.start(*how, folder=folder)

        faults = functools.partial(measure_faults, start, is_quick)
        parts.append((FAULTS, 2 if is_quick else 3, faults))
        parts = [p for p in parts if self.given.only in p[0] and not self.is_done(p[0])]
        for i, (title, weight, measure) in enumerate(parts):
            share = self.left * weight / sum(weight for _, weight, _ in parts[i:])
            if self.left < 5:
                print(f"{title}: out of time", flush=True)
                continue
            print(f"{title} ({share:.0f} s)", flush=True)
            begin = time.monotonic()
            self.found[title] = {}
            measure(self.found[title], share)
            for name, cell in self.found[title].items():
                print(f"  {name}: {summary_of(cell)}", flush=True)
            print(f"  took {time.monotonic() - begin:.0f} s", flush=True)
            self.save()

    def save(self) -> None:
        self.results.parent.mkdir(exist_ok=True)
        self.results.write_text(json.dumps(self.found, indent=1))

    def start(self, peer: Peer, replicas: int, workers: int, folder: Path) -> Workers:
        """The processes of a peer."""
        python = self.given.python if peer.library in MODULES else sys.executable
        if peer.library in MODULES and not is_installed(python, MODULES[peer.library]):
            raise RuntimeError("not installed")
        count = 2 if peer.library == "torch" else workers  # DDP has no other replicas
        script = str(RIVALS / f"loop_{peer.library}.py"), peer.way
        return Workers(count, python, script, folder, (str(replicas),), peer.settings)

    def measure(
        self, row: Row, folder: Path, cells: dict[str, Cell], seconds: float
    ) -> None:
        """Each peer's milliseconds a step; their turns are short and in random order."""
        end = time.monotonic() + seconds
        cells.update({peer.name: {} for peer in row.peers})
        running: dict[Peer, Workers] = {}
        with contextlib.ExitStack() as stack:
            for peer in row.peers:
                with saying_why(cells[peer.name]):
                    workers = self.start(peer, row.replicas, row.workers, folder)
                    stack.callback(workers.close)
                    running[peer] = workers
            ping_all(running, cells, min(LIMIT, seconds / 2))
            for peer, workers in list(running.items()):
                limit = max(5.0, min(LIMIT, end - time.monotonic()))
                with saying_why(cells[peer.name], limit):
                    ms, loss = workers.train(peer.way, row.model, 1, limit)
                    cells[peer.name] |= {"first": ms / 1e3, "loss": loss}
                    continue
                running.pop(peer)
            self._rounds(row, running, cells, end)
        check_losses(cells)

    def _rounds(
        self, row: Row, running: dict[Peer, Workers], cells: dict[str, Cell], end: float
    ) -> None:
        counts: dict[Peer, int] = {}
        alive = list(running)

        def turn(peer: Peer, count: int) -> float | None:
            left = max(5.0, min(LIMIT, end - time.monotonic()))
            with saying_why(cells[peer.name]):
                return running[peer].train(peer.way, row.model, count, left)[0]
            alive.remove(peer)
            return None

        for peer in list(alive):
            ms = turn(peer, 4)
            counts[peer] = whole_epochs(max(2, math.ceil(250 / ms))) if ms else 0
        shuffle = random.Random(0).shuffle
        for round_number in range(30):
            if time.monotonic() > end and round_number >= 2:
                break
            shuffle(alive)
            for peer in list(alive):
                ms = turn(peer, counts[peer])
                if ms is not None:
                    cells[peer.name].setdefault("figures", []).append(ms)

    def measure_input(self, cells: dict[str, Cell], seconds: float) -> None:
        """Rows a second that each pipeline brings to two logical devices."""
        count = input_rows(self.given.quick)
        end = time.monotonic() + seconds
        asked = {
            "our": ("mirrax", "NumPy and device_put"),
            "tensorflow": ("TensorFlow", "TensorFlow, in a tf.function"),
            "torch": ("PyTorch", "PyTorch, batches of indices"),
            "grain": ("Grain", "Grain, batches of indices"),
        }
        cells.update({name: {} for names in asked.values() for name in names})
        pipelines: dict[str, Rival] = {}
        with contextlib.ExitStack() as stack:
            for library, names in asked.items():
                python = sys.executable if library == "our" else self.given.python
                script = str(RIVALS / f"{library}_input.py")
                rival = Rival([script, str(count), "2", "cpu"], python)
                stack.callback(rival.close)
                for name in names:
                    if rival.process.poll() is not None:
                        cells[name]["problem"] = "not tried: its process has ended"
                        continue
                    with saying_why(cells[name]):
                        rival.ask(name, max(5.0, min(LIMIT, end - time.monotonic())))
                        pipelines[name] = rival
            for round_number in range(10):
                if time.monotonic() > end and round_number >= 2:
                    break
                for name, rival in list(pipelines.items()):
                    begin = time.perf_counter()
                    with saying_why(cells[name]):
                        rival.ask(name, max(5.0, min(LIMIT, end - time.monotonic())))
                        rate = count / (time.perf_counter() - begin)
                        cells[name].setdefault("rates", []).append(rate)
                        continue
                    pipelines.pop(name)


def whole_epochs(steps: int) -> int:
    """So many steps, or more: who trains by epochs is asked for whole ones."""
    return steps if steps < BATCHES else BATCHES * math.ceil(steps / BATCHES)


def ping_all(
    running: dict[Peer, Workers], cells: dict[str, Cell], limit: float
) -> None:
    """Waits until all have imported their libraries, side by side."""

    def ping(peer: Peer) -> None:
        with saying_why(cells[peer.name]):
            running[peer].train("ping", "", 0, limit)

    with ThreadPoolExecutor(max(1, len(running))) as threads:
        list(threads.map(ping, list(running)))
    for peer in [peer for peer in running if "problem" in cells[peer.name]]:
        running.pop(peer)


def summary_of(cell: Cell) -> str:
    """A cell in a few words."""
    figures = cell.get("figures") or cell.get("rates")
    known = cell.get("problem") or cell.get("said")
    return known or (f"{np.median(figures):.3g}" if figures else "not measured")


@contextlib.contextmanager
def saying_why(cell: Cell, limit: float = LIMIT) -> Iterator[None]:
    """Notes in `cell` why a peer has failed; one with less than its full time ran out of it."""
    try:
        yield
    except NoAnswer as error:
        is_short = error.is_late and limit < LIMIT
        cell["problem"] = OUT_OF_TIME if is_short else error.reason
    except RuntimeError as error:
        cell["problem"] = str(error)


def check_losses(cells: dict[str, Cell]) -> None:
    """Marks peers whose first loss is not that of most: they train something else."""
    losses = [cell["loss"] for cell in cells.values() if "loss" in cell]
    for cell in cells.values():
        if "loss" in cell and not np.isclose(
            cell["loss"], np.median(losses), rtol=1e-2
        ):
            cell["problem"] = f"trains something else: loss {cell['loss']:.4g}"


def write_models(folder: Path, is_quick: bool) -> None:
    for name, model in models_of(is_quick).items():
        size = model.batch_size * BATCHES
        if name == "deep":
            model_batch = 32 * 16
            size = model_batch * 10
        else:
            model_batch = model.batch_size
        if name == "odd":
            size = model_batch + 17
        x, y = model.make_batch(size=size)
        parameters = model.make_parameters()
        np.savez(folder / f"{name}.npz", *parameters, x=x, y=y, batch=model_batch)


def versions_of(python: str) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.name.replace('-', '_'): d.version for d in m.distributions()}\n"
        "print(json.dumps({n: found[n] for n in sys.argv[1:] if n in found}))"
    )
    done = subprocess.run(
        [python, "-c", code, *VERSIONS], capture_output=True, text=True
    )
    return json.loads(done.stdout or "{}")


if __name__ == "__main__":
    main()
