"""`mx.train.Progress`: one line that says how training goes."""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mirrax._src.base.values import Mirrored, PerReplica
from mirrax._src.strategies.default import get_strategy

_DRAW_SECONDS = 0.2
_LONG_STEP = 3.0  # seconds


class Progress:
    """Shows step, values such as the loss, examples per second and the time left.

        with mx.train.Progress(total=steps) as progress:
            for batch in dataset:
                loss = strategy.run(train_step, args=(batch,))
                progress.update(examples=64, loss=strategy.reduce("SUM", loss, axis=None))

    On a terminal it is a bar, which says "compiling" until the first step is done, and how long
    a later step has taken if it does not end. Elsewhere it is a line of text every `interval`
    seconds and one at the end. Values stay on their devices until they are shown, so that
    training does not wait for them. Only the chief of several workers shows anything.

    Args:
        total: The number of steps, if it is known.
        initial: The steps that are done already, when training goes on.
        description: The text at the beginning of the line.
        interval: The seconds between two lines where there is no terminal.
        file: Where lines go; the default is standard output.
    """

    __module__ = "mirrax.train"

    def __init__(
        self,
        total: int | None = None,
        *,
        initial: int = 0,
        description: str = "training",
        interval: float = 10.0,
        file: Any = None,
    ) -> None:
        self._total = None if total is None else operator.index(total)
        self._initial = self._step = initial
        self._description = description
        self._interval = interval
        self._file = file or sys.stdout
        self._is_shown = get_strategy().extended.should_save_summary
        self._values: dict[str, Any] = {}
        self._due: dict[str, Any] = {}
        self._examples = 0
        self._started: float | None = None
        self._drawn = self._updated = 0.0
        self._bar: Any = None
        self._task: Any = None

    @property
    def step(self) -> int:
        """The number of steps so far."""
        return self._step

    @property
    def examples_per_second(self) -> float:
        """The rate since the first step, whose compilation does not count."""
        seconds = time.perf_counter() - (self._started or 0.0)
        return self._examples / seconds if self._started and seconds else 0.0

    def __enter__(self) -> Progress:
        if self._is_shown and _is_terminal(self._file):
            self._bar = _make_bar(self._file, self._waiting)
        if self._bar is not None:
            self._task = self._bar.add_task(
                self._description,
                total=self._total,
                completed=self._step,
                note="compiling the first step",
            )
            self._bar.start()
        self._drawn = time.perf_counter()
        return self

    def update(self, steps: int = 1, examples: int = 0, **values: Any) -> None:
        """Counts steps, and takes values to show.

        Args:
            steps: How many steps were done since the last call.
            examples: How many examples these had.
            **values: Numbers, arrays, metrics, or functions that return one of them.
        """
        for name, value in values.items():
            if isinstance(value, PerReplica):
                raise ValueError(
                    f"{name!r} has a value for each replica; combine them first: "
                    f'`strategy.reduce("SUM", {name}, axis=None)`.'
                )
        self._step += steps
        self._values.update(values)
        now = time.perf_counter()
        self._updated = now
        if self._started is None:
            self._started = now
        else:
            self._examples += examples
        wait = self._interval if self._bar is None else _DRAW_SECONDS
        is_last = self._step == self._total  # which is shown at the end
        if self._is_shown and now - self._drawn >= wait and not is_last:
            self._drawn = now
            # On a terminal those of the last drawing, which are computed by now.
            self._draw((self._bar is not None and self._due) or self._values)
            self._due = dict(self._values)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if self._is_shown and (error is None or self._bar is None):
                self._draw(self._values)
        finally:
            if self._bar is not None:
                self._bar.stop()

    def _draw(self, values: dict[str, Any]) -> None:
        parts = [f"{name} {_show(value)}" for name, value in values.items()]
        if self._examples:
            parts.append(f"{self.examples_per_second:,.0f} examples/s")
        if self._bar is not None:
            self._bar.update(self._task, completed=self._step, note=", ".join(parts))
            return
        of_all = "" if self._total is None else f"/{self._total}"
        left = self._seconds_left()
        if left:
            parts.append(f"{_clock(left)} left")
        line = ", ".join([f"step {self._step}{of_all}", *parts])
        print(f"{self._description}: {line}", file=self._file, flush=True)

    def _waiting(self) -> str:
        """What a bar that stands still says: a batch of a new shape compiles, for example."""
        seconds = time.perf_counter() - self._updated
        if self._started is None or seconds < _LONG_STEP:
            return ""
        return f"step {self._step + 1} has taken {seconds:.0f} s, compiling?"

    def _seconds_left(self) -> float | None:
        done = self._step - self._initial - 1
        if self._total is None or self._started is None or done < 1:
            return None
        each = (time.perf_counter() - self._started) / done
        return each * (self._total - self._step)


def _is_terminal(file: Any) -> bool:
    return hasattr(file, "isatty") and file.isatty()


def _make_bar(file: Any, waiting: Callable[[], str]) -> Any:
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text
    except ImportError:
        return None

    class Note(TextColumn):
        def render(
            self, task: Any
        ) -> Text:  # ten times a second, by a thread of its own
            return Text(waiting()) if waiting() else super().render(task)

    return Progress(
        SpinnerColumn(),  # turns while a step compiles and the bar stands still
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        Note("{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
        console=Console(file=file),
    )


def _show(value: Any) -> str:
    if hasattr(value, "result"):
        value = value.result()
    elif callable(value):
        return _show(value())
    if isinstance(value, Mirrored):
        value = value.array if value.array is not None else value.values[0]
    if isinstance(value, jax.Array) and value.is_deleted():
        return "?"  # a later step has reused its memory
    number = np.asarray(value)
    if number.ndim == 0 and np.issubdtype(number.dtype, np.number):
        return f"{number:.4g}" if number.dtype.kind == "f" else str(number)
    return str(value)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
