"""What all benchmarks share: devices, interleaved timing, tables, JSON.

Ways of doing the same work are timed in turn, in short rounds in a random order, and
compared within a round. What else the machine does then meets all of them alike, and
the median over the rounds leaves its peaks out.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jaxlib
import numpy as np

import mirrax as mx  # before JAX starts, so that its CPU thread pool gets a safe size

Step = Callable[[], Any]
Devices = Sequence[Any]  # of `jax.Device`, which is no type for type checkers


# Options and devices ------------------------------------------------------------------


def parser(question: str | None, replicas: int = 2) -> argparse.ArgumentParser:
    """The options that every script has."""
    options = argparse.ArgumentParser(description=question)
    options.add_argument("--quick", action="store_true", help="few, short rounds")
    options.add_argument("--replicas", type=int, default=replicas, metavar="N")
    options.add_argument("--json", type=Path, metavar="FILE", help="write results here")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return options


def find_devices(count: int, at_least: int = 1) -> Devices:
    """Up to `count` accelerators; `count` logical CPUs where they are too few."""
    mx.config.set_logical_device_configuration(cpu=count)
    accelerators = [d for d in jax.local_devices() if d.platform != "cpu"]
    if len(accelerators) >= at_least:
        return accelerators[:count]
    return jax.local_devices(backend="cpu")[:count]


def cpu_devices(count: int) -> Devices:
    """`count` logical CPUs, in a process that uses nothing else."""
    jax.config.update("jax_platforms", "cpu")
    mx.config.set_logical_device_configuration(cpu=count)
    return jax.local_devices()


# Timing -------------------------------------------------------------------------------


def seconds_of(step: Step) -> float:
    """How long one step takes until its result is there."""
    start = time.perf_counter()
    jax.block_until_ready(step())
    return time.perf_counter() - start


def interleaved(
    variants: dict[str, Step], rounds: int, round_seconds: float
) -> dict[str, np.ndarray]:
    """Milliseconds a step of each variant, one figure for each round.

    Each round runs the same number of steps of every variant and waits for the last one
    only, as a training loop does.
    """
    for step in variants.values():
        seconds_of(step)
    slowest = max(min(seconds_of(step) for _ in range(3)) for step in variants.values())
    count = max(1, math.ceil(round_seconds / slowest))

    def measure(name: str) -> float:
        step, last = variants[name], None
        start = time.perf_counter()
        for _ in range(count):
            last = step()
        jax.block_until_ready(last)
        return (time.perf_counter() - start) / count * 1e3

    found = in_turns(variants, rounds, measure)
    return {name: np.array(values) for name, values in found.items()}


def in_turns(
    names: Iterable[Any], rounds: int, measure: Callable[[Any], Any], at_least: int = 1
) -> dict[Any, list[Any]]:
    """What `measure` gives for each name in each round; the order in a round is random.

    Who is stopped (Ctrl-C, SIGTERM) after `at_least` whole rounds gets what there is.
    """
    if _stopped:
        raise KeyboardInterrupt
    order, shuffle = list(names), random.Random(0).shuffle
    figures: dict[Any, list[Any]] = {name: [] for name in order}
    try:
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                figures[name].append(measure(name))
    except KeyboardInterrupt:
        whole = min(map(len, figures.values()))
        if whole < at_least:
            raise
        _stopped.append(True)
        print(f"stopped after {whole} of {rounds} rounds", flush=True)
        figures = {name: values[:whole] for name, values in figures.items()}
    return figures


@contextlib.contextmanager
def until_stopped() -> Iterator[None]:
    """Ends early on Ctrl-C or SIGTERM, so that what follows can show what there is."""
    try:
        yield
    except KeyboardInterrupt:
        _stopped.append(True)
        print("stopped: this is what there is", flush=True)


_stopped: list[bool] = []


def better(figures: dict[str, np.ndarray], names: Sequence[str]) -> str:
    """The one of `names` with the smallest median: the limit."""
    return min(names, key=lambda name: float(np.median(figures[name])))


@dataclass(frozen=True)
class Ratio:
    """The median over rounds of the ratio of two variants, and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, above: np.ndarray, below: np.ndarray) -> Ratio:
        low, median, high = np.percentile(above / below, [25, 50, 75])
        return cls(float(median), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


# Child processes ----------------------------------------------------------------------


def run_python(
    arguments: Sequence[str], python: str = sys.executable, timeout: float = 1800
) -> Any:
    """The JSON that a script prints as its last line, run in a process of its own."""
    command = [python, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=_environment()
    )
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-20:])
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{last}")
    return json.loads(done.stdout.splitlines()[-1])


def is_installed(python: str, *modules: str) -> bool:
    """Whether an interpreter finds all of these modules."""
    code = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    return subprocess.run([python, "-c", code, *modules]).returncode == 0


class NoAnswer(RuntimeError):
    """A rival has failed or hangs.

    Attributes:
        is_late: Whether its time was up, so that it was killed.
        reason: Why, in a line without names of this machine's files.
    """

    def __init__(self, where: str, timeout: float | None, errors: str) -> None:
        self.is_late = timeout is not None
        lines = [line.strip() for line in errors.splitlines()]
        telling = [s for s in lines if "Error" in s or "rendezvous" in s]
        if timeout is not None:
            self.reason = f"no answer in {timeout:.0f} s"
        else:
            self.reason = f"fails: {(telling or ['without a message'])[-1][:150]}"
        super().__init__(f"{where}: {self.reason}\n{errors}")


class Rival:
    """A script in a process of its own that does a piece of work whenever it is asked.

    It reads the name of the work as a line and prints JSON as one when it is done.
    """

    running: ClassVar[weakref.WeakSet[Rival]] = weakref.WeakSet()

    def __init__(
        self,
        arguments: Sequence[str],
        python: str = sys.executable,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`settings` are variables of its environment."""
        self._name = " ".join(arguments)
        self._errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [python, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**_environment(), **settings},
        )
        Rival.running.add(self)

    @classmethod
    def kill_all(cls) -> None:
        """Ends all of them at once, so that nobody waits for an answer any more."""
        for rival in list(cls.running):
            rival.process.kill()

    def ask(self, work: str, timeout: float = 300) -> Any:
        """The answer; a process that gives none in time is ended."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.process.kill()

        deadline = threading.Timer(timeout, give_up)
        deadline.start()
        assert self.process.stdout
        try:
            self.send(work)
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        finally:
            deadline.cancel()
        with contextlib.suppress(ValueError):
            if not late.is_set():  # else it was killed, even if it has just answered
                return json.loads(line)
        self._errors.seek(0)
        last = "".join(self._errors.readlines()[-20:])
        where = f"{self._name} at {work!r}"
        raise NoAnswer(where, timeout if late.is_set() else None, last)

    def send(self, work: str) -> None:
        """Asks without waiting for the answer."""
        assert self.process.stdin
        self.process.stdin.write(f"{work}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError):  # it may have ended
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()
        self._errors.close()


def _environment() -> dict[str, str]:
    # This process may hold most of a GPU's memory already.
    return {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


# Results ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """A figure and the target that it has to reach."""

    name: str
    value: float
    target: float
    unit: str = "x"
    is_minimum: bool = False

    @property
    def is_met(self) -> bool:
        return (
            self.value >= self.target if self.is_minimum else self.value <= self.target
        )

    @classmethod
    def read(cls, content: dict[str, Any]) -> Check:
        """A check as JSON has it."""
        return cls(**{name: content[name] for name in cls.__dataclass_fields__})

    def row(self) -> list[str]:
        sign = ">=" if self.is_minimum else "<="
        return [
            self.name,
            f"{self.value:.4g} {self.unit}",
            f"{sign} {self.target:g} {self.unit}",
            "ok" if self.is_met else "MISSED",
        ]


@dataclass
class Report:
    """What a script has measured: printed as it comes, written as JSON at the end."""

    script: str
    options: argparse.Namespace
    tables: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    is_finished: bool = False

    def __post_init__(self) -> None:
        atexit.register(self._finish_early)

    def _finish_early(self) -> None:
        """Prints and writes what there is when the script was stopped or has failed."""
        if not self.is_finished and self.tables:
            self.finish()

    def table(
        self, title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        self.tables.append({"title": title, "header": header, "rows": rows})
        print(f"\n{title}")
        print_table(header, rows)

    def check(self, name: str, value: float, target: float, **more: Any) -> None:
        self.checks.append(Check(name, value, target, **more))

    def finish(self, devices: Devices = ()) -> None:
        self.is_finished = True
        if self.checks:
            print()
            print_table(CHECK_HEADER, [check.row() for check in self.checks])
        if self.options.json:
            content = {
                "script": self.script,
                "quick": self.options.quick,
                **describe_machine(devices),
                "tables": self.tables,
                "checks": [{**asdict(c), "is_met": c.is_met} for c in self.checks],
            }
            self.options.json.write_text(json.dumps(content, indent=2) + "\n")


CHECK_HEADER = ("check", "measured", "target", "verdict")


def describe_machine(devices: Devices = ()) -> dict[str, Any]:
    """The date, the machine and the versions that figures belong to."""
    modules = (mx, jax, jaxlib, np)  # mirrax need not be installed
    return {
        "date": date.today().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in devices],
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in modules},
        },
    }


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[Any]], names: int = 1
) -> None:
    """Columns under each other: the first `names` to the left, figures to the right."""
    lines = [list(header), *([_show(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = [
            cell.ljust(width) if i < names else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ]
        print("  ".join(cells).rstrip(), flush=True)


def _show(cell: Any) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)
