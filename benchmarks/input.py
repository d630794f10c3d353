"""Does mirrax bring rows from memory to the devices as fast as bare NumPy and JAX do?

Epochs of 60,000 shuffled rows in batches of 256, the partial one too, each waited for on
the devices while the next is under way. Beside mirrax: NumPy and `device_put`, Grain,
PyTorch's DataLoader and TensorFlow's distributed dataset; then beside a step, with and without
a function of every row; then with one that cannot be vectorised; then where mirrax's time goes. Libraries run in processes of their
own, of this interpreter or of `--grain`, `--torch` (both with JAX) and `--tensorflow
PYTHON`, and their epochs take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import (
    Devices,
    Ratio,
    Report,
    Rival,
    better,
    find_devices,
    interleaved,
    is_installed,
    parser,
)
from rivals.delivery import deliver, slice_each, wait_for_each
from rivals.epochs import BATCH, Epoch, make_rows, normalise

import mirrax as mx

RIVALS = Path(__file__).parent / "rivals"
MODULES = {
    "tensorflow": ("tensorflow",),
    "grain": ("grain", "jax"),
    "torch": ("torch", "jax"),
}
ROWS, QUICK_ROWS = 60_000, 10_000
# DESIGN.md, "Numbers to reach".
AGAINST_NUMPY = 0.95
AGAINST_TENSORFLOW = 10.0
AGAINST_OTHER_MAPS = 1.0

# What the libraries' scripts answer to.
NAMES = {"TensorFlow": "tensorflow", "Grain": "grain", "PyTorch": "torch"}
IN_MEMORY = (
    "TensorFlow",
    "TensorFlow, in a tf.function",
    "Grain",
    "Grain, 16 threads",
    "Grain, batches of indices",
    "PyTorch",
    "PyTorch, 2 processes",
    "PyTorch, batches of indices",
)
MAPS = {  # like with like; mirrax's first
    "one thread": ("mirrax map", "Grain map", "PyTorch map"),
    "threads": (
        "mirrax map, 2 threads",
        "Grain map, 2 threads",
        "Grain map, 16 threads",
    ),
    "processes": (
        "mirrax map, 2 processes",
        "Grain map, 2 processes",
        "PyTorch map, 2 processes",
    ),
}
HEADER = ("pipeline", "rows/s", "ms an epoch", "mirrax's speed / its")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=0, help=f"default: {ROWS}")
    for library in MODULES:
        options.add_argument(f"--{library}", metavar="PYTHON", default=sys.executable)
    given = options.parse_args()
    given.rows = given.rows or (QUICK_ROWS if given.quick else ROWS)
    devices = find_devices(given.replicas)
    ours = Pipelines(make_rows(given.rows), devices)
    report = Report("input", given)
    ours.check_all_rows_arrive()
    compare_with_numpy(ours, report)
    compare_beside_a_step(ours, report)
    show_where_time_goes(ours, report)
    with contextlib.ExitStack() as stack:
        rivals = start_rivals(given, devices, stack)
        compare_in_memory(ours, rivals, report)
        compare_maps(ours, rivals, report)
    report.finish(devices)


# Pipelines ----------------------------------------------------------------------------


class Pipelines:
    """Epochs with mirrax, and with NumPy and bare JAX."""

    def __init__(self, arrays: tuple[np.ndarray, np.ndarray], devices: Devices) -> None:
        self.x, self.y = arrays
        self.batches = math.ceil(len(self.x) / BATCH)
        self.sharding = slice_each(devices)
        self.strategy = mx.distribute.MirroredStrategy(devices)
        self.shuffled = mx.data.Dataset.from_tensor_slices(arrays).shuffle(len(self.x))
        self._rng = np.random.default_rng(0)

    def mirrax(self, **options: Any) -> Epoch:
        """mirrax without a map."""
        return self._epoch_of(self.shuffled.batch(BATCH), **options)

    def mapped(self, **how: Any) -> Epoch:
        """mirrax with a Python function of each row."""
        return self._epoch_of(self.shuffled.map(normalise, **how).batch(BATCH))

    def _epoch_of(self, dataset: mx.data.Dataset, **options: Any) -> Epoch:
        distributed = self.strategy.experimental_distribute_dataset(
            dataset, mx.distribute.InputOptions(**options)
        )
        return lambda: _wait_for(distributed)

    def look_up(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Batches as one writes them in NumPy."""
        order = self._rng.permutation(len(self.x))
        for start in range(0, len(order), BATCH):
            index = order[start : start + BATCH]
            yield self.x[index], self.y[index]

    def numpy(self) -> int:
        """Each batch looked up and put on the devices when it is asked for."""
        return deliver(self.look_up(), self.sharding)

    def beside(self, step: Callable[..., Any]) -> dict[str, Epoch]:
        """Epochs in which each whole batch is trained on, with mirrax and NumPy."""

        def trained(batches: Callable[[], Iterable[Sequence[Any]]]) -> Epoch:
            return lambda: wait_for_each(step(*batch) for batch in batches())

        def of_mirrax(dataset: mx.data.Dataset) -> Epoch:
            whole = dataset.batch(BATCH, drop_remainder=True)
            found = self.strategy.experimental_distribute_dataset(whole)
            return trained(lambda: ([*map(_in_one_piece, b)] for b in found))

        def of_numpy(fn: Callable[..., Any]) -> Epoch:
            return trained(
                lambda: (
                    jax.device_put(fn(*batch), self.sharding)
                    for batch in self.look_up()
                    if len(batch[0]) == BATCH
                )
            )

        return {
            "mirrax": of_mirrax(self.shuffled),
            "NumPy, device_put": of_numpy(lambda *batch: batch),
            "mirrax, function of each row": of_mirrax(self.shuffled.map(scale)),
            "NumPy, function of each batch": of_numpy(scale),
        }

    def numpy_ahead(self) -> int:
        """The same in a thread, two batches ahead."""
        batches = (jax.device_put(batch, self.sharding) for batch in self.look_up())
        return wait_for_each(_read_ahead(batches, 2))

    def look_up_only(self) -> int:
        return wait_for_each(self.look_up())

    def numpy_again(self) -> int:
        """One batch, put on the devices again and again: nothing is looked up."""
        batch = next(self.look_up())
        return deliver(itertools.repeat(batch, self.batches), self.sharding)

    def mirrax_again(self, **options: Any) -> Epoch:
        """The same with mirrax, which copies it every time: it gives memory away."""
        batch = next(self.look_up())
        dataset = mx.data.Dataset.from_tensors(batch).repeat(self.batches)
        return self._epoch_of(dataset, **options)

    def check_all_rows_arrive(self) -> None:
        dataset = self.shuffled.batch(BATCH)
        parts = [
            np.asarray(part)
            for _, labels in self.strategy.experimental_distribute_dataset(dataset)
            for part in self.strategy.experimental_local_results(labels)
        ]
        arrived = np.concatenate(parts)
        np.testing.assert_array_equal(np.sort(arrived), np.sort(self.y))
        assert not np.array_equal(arrived, self.y), "The rows were not shuffled."


def _wait_for(batches: Iterable[Sequence[Any]]) -> int:
    """`wait_for_each`, without taking per-replica values apart."""
    return wait_for_each([_in_one_piece(part) for part in batch] for batch in batches)


def _in_one_piece(value: Any) -> Any:
    array = getattr(value, "array", None)
    return value if array is None else array


def scale(x: Any, y: Any) -> tuple[Any, Any]:
    """What is done to each row, or to many at once."""
    return (x - 0.5) * 2.0, y


def _read_ahead(batches: Iterable[Any], size: int) -> Iterator[Any]:
    waiting: queue.Queue[Any] = queue.Queue(size)

    def read() -> None:
        for batch in batches:
            waiting.put(batch)
        waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    return iter(waiting.get, None)


def start_rivals(
    options: argparse.Namespace, devices: Devices, stack: contextlib.ExitStack
) -> dict[str, Rival]:
    """The libraries that are installed, each in a process that waits to be asked."""
    sizes = [str(options.rows), str(len(devices)), devices[0].platform]
    rivals: dict[str, Rival] = {}
    for library, modules in MODULES.items():
        python = getattr(options, library)
        if is_installed(python, *modules):
            rival = Rival([str(RIVALS / f"{library}_input.py"), *sizes], python)
            stack.callback(rival.close)
            rivals[library] = rival
    return rivals


# Tables -------------------------------------------------------------------------------


def compare_with_numpy(ours: Pipelines, report: Report) -> None:
    variants = {
        "mirrax": ours.mirrax(),
        "NumPy, device_put": ours.numpy,
        "NumPy, device_put, in a thread": ours.numpy_ahead,
    }
    rounds, seconds = (3, 0.1) if report.options.quick else (20, 0.5)
    figures = measure(ours, variants, rounds, seconds)
    report.table(
        f"Shuffled rows to {describe(ours)}, beside NumPy",
        HEADER,
        rows_of(figures, ours, "mirrax"),
    )
    for name in list(variants)[1:]:
        check_speed(report, figures, "mirrax", name, AGAINST_NUMPY)


def compare_beside_a_step(ours: Pipelines, report: Report) -> None:
    weights = np.ones((ours.x.shape[1], 256), np.float32)

    @jax.jit
    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        return (x @ weights).sum() + y.sum()

    epochs = ours.beside(step)
    rounds, seconds = (3, 0.1) if report.options.quick else (20, 0.5)
    figures = interleaved(dict(epochs), rounds, seconds)
    names = list(epochs)
    rows = rows_of(figures, ours, names[0])
    report.table(f"The same beside a step, {describe(ours)}", HEADER, rows)
    for mine, other in (names[:2], names[2:]):
        check_speed(report, figures, mine, other, AGAINST_NUMPY)


def compare_in_memory(
    ours: Pipelines, rivals: dict[str, Rival], report: Report
) -> None:
    variants = {"mirrax": ours.mirrax(), **ask_for(IN_MEMORY, rivals)}
    figures = measure(ours, variants, 3 if report.options.quick else 7)
    rows = rows_of(figures, ours, "mirrax") + rows_of_missing(IN_MEMORY, rivals)
    report.table(f"Shuffled rows to {describe(ours)}, beside libraries", HEADER, rows)
    for name in variants:
        if name.startswith("TensorFlow"):
            check_speed(report, figures, "mirrax", name, AGAINST_TENSORFLOW)


def compare_maps(ours: Pipelines, rivals: dict[str, Rival], report: Report) -> None:
    processes = {"num_parallel_calls": 2, "workers": "processes"}
    mine = {
        "one thread": {"mirrax map": ours.mapped()},
        "threads": {"mirrax map, 2 threads": ours.mapped(num_parallel_calls=2)},
        "processes": {
            "mirrax map, 2 processes": ours.mapped(**processes),
        },
    }
    for kind, names in MAPS.items():
        others = ask_for(names[1:], rivals)
        variants = {**mine[kind], **others}
        figures = measure(ours, variants, 3 if report.options.quick else 7)
        rows = rows_of(figures, ours, names[0]) + rows_of_missing(names[1:], rivals)
        report.table(f"A Python function of each row, {kind}", HEADER, rows)
        if others:
            best = better(figures, list(others))
            check_speed(report, figures, names[0], best, AGAINST_OTHER_MAPS)


def show_where_time_goes(ours: Pipelines, report: Report) -> None:
    """The steps of mirrax's way and of NumPy's, one more at a time."""
    now = {"experimental_per_replica_buffer_size": 0}  # no thread
    on_host = {"experimental_fetch_to_device": False}
    steps = {
        "look up": (ours.mirrax(**now, **on_host), ours.look_up_only),
        "deliver one batch again": (ours.mirrax_again(**now), ours.numpy_again),
        "look up, deliver": (ours.mirrax(**now), ours.numpy),
        "whole: both in a thread": (ours.mirrax(), ours.numpy_ahead),
    }
    variants = {
        (name, i): e for name, pair in steps.items() for i, e in enumerate(pair)
    }
    rounds, seconds = (3, 0.1) if report.options.quick else (20, 0.3)
    figures = measure(ours, variants, rounds, seconds)
    rows = [
        [
            name,
            *(float(np.median(figures[name, i])) / ours.batches * 1e3 for i in (0, 1)),
        ]
        for name in steps
    ]
    report.table(
        "Where the time goes, µs a batch", ("step", "mirrax", "NumPy, device_put"), rows
    )


# Figures ------------------------------------------------------------------------------


def measure(
    ours: Pipelines, variants: dict[Any, Epoch], rounds: int, round_seconds: float = 0.0
) -> dict[Any, np.ndarray]:
    """Milliseconds an epoch of each variant; all have to deliver every batch."""

    def checked(name: Any, epoch: Epoch) -> Callable[[], None]:
        def step() -> None:
            found = epoch()
            if found != ours.batches:
                raise RuntimeError(f"{name} gave {found} of {ours.batches} batches.")

        return step

    steps = {name: checked(name, epoch) for name, epoch in variants.items()}
    return interleaved(steps, rounds, round_seconds)


def ask_for(names: Iterable[str], rivals: dict[str, Rival]) -> dict[str, Epoch]:
    """Epochs of those pipelines whose libraries are there."""

    def epoch_of(rival: Rival, name: str) -> Epoch:
        return lambda: rival.ask(name)["batches"]

    found = {name: rivals.get(_library(name)) for name in names}
    return {name: epoch_of(rival, name) for name, rival in found.items() if rival}


def _library(name: str) -> str:
    return NAMES[name.split(",")[0].split()[0]]


def rows_of(
    figures: dict[str, np.ndarray], ours: Pipelines, reference: str
) -> list[list[object]]:
    rows: list[list[object]] = []
    for name, values in figures.items():
        median = float(np.median(values))
        speed = f"{len(ours.x) / median * 1e3:,.0f}"
        ratio = "" if name == reference else str(Ratio.of(values, figures[reference]))
        rows.append([name, speed, median, ratio])
    return rows


def rows_of_missing(
    names: Iterable[str], rivals: dict[str, Rival]
) -> list[list[object]]:
    return [[n, "not installed", "", ""] for n in names if _library(n) not in rivals]


def check_speed(
    report: Report,
    figures: dict[str, np.ndarray],
    reference: str,
    other: str,
    target: float,
) -> None:
    ratio = Ratio.of(figures[other], figures[reference])
    name = f"speed of {reference} / of {other}"
    report.check(name, ratio.median, target, is_minimum=True)


def describe(ours: Pipelines) -> str:
    return f"{ours.strategy.num_replicas_in_sync} replicas, batch {BATCH}"


if __name__ == "__main__":
    main()
