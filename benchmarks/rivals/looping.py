"""Whole training loops: what all libraries train, from their own input on.

`peers.py` writes the rows and parameters to a folder and starts each library in a process,
or one for each worker, as `stepping.py` describes: `loop_LIBRARY.py WAY WORKER ADDRESSES
FOLDER REPLICAS`. A step takes the next batch of rows in memory from the library's own input,
updates the parameters (SGD with momentum; Adam for the transformer), and gives the loss of the
global batch. The first process also saves and restores, when it is asked to `save` or `restore`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from stepping import Steps, Ways, Worker, answer

RATE, MOMENTUM = 0.01, 0.9
ADAM_RATE = 0.001
ODD = "odd"  # the model whose last batch is smaller, for all replicas together


@dataclass(frozen=True)
class Loop:
    """What one process trains.

    Attributes:
        way: Which of its library's ways.
        worker: Which of the workers it is.
        replicas: How many there are on all workers.
        parameters: Arrays, as in `models.py`.
        x: All rows.
        y: Their labels.
        batch: Rows of a global batch.
    """

    way: str
    model: str
    worker: Worker
    replicas: int
    parameters: list[np.ndarray]
    x: np.ndarray
    y: np.ndarray
    batch: int

    @property
    def workers(self) -> int:
        return len(self.worker.addresses)

    @property
    def is_transformer(self) -> bool:
        return self.model == "transformer"

    @property
    def is_variables(self) -> bool:
        """Whether the model is many vectors, drawn towards the rows."""
        return self.model == "variables"

    def own_batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """This worker's rows of each global batch, for ever."""
        starts = range(0, len(self.x), self.batch)
        for start in itertools.cycle(starts):
            end = min(start + self.batch, len(self.x))
            size = -(-(end - start) // self.workers)
            first = start + self.worker.number * size
            part = slice(first, min(first + size, end))
            yield self.x[part], self.y[part]


@dataclass(frozen=True)
class Training:
    """A loop that runs.

    Attributes:
        steps: Does some steps.
        save: Saves what the library can save, at a path; None if nobody asks for it.
        restore: Goes on from what was saved.
    """

    steps: Steps
    save: Callable[[Path], object] | None = None
    restore: Callable[[Path], object] | None = None


def run(make: Callable[[Loop], Training]) -> None:
    """Answers for the loops of one library."""
    way, *place, replicas = sys.argv[1:]

    def join(worker: Worker) -> Ways:
        made: dict[str, Training] = {}

        def training_of(model: str) -> Training:
            if model not in made:
                with np.load(worker.folder / f"{model}.npz") as arrays:
                    count = len(arrays.files) - 3
                    parameters = [arrays[f"arr_{i}"] for i in range(count)]
                    rows = arrays["x"], arrays["y"], int(arrays["batch"])
                loop = Loop(way, model, worker, int(replicas), parameters, *rows)
                made[model] = make(loop)
            return made[model]

        def keeping(what: str) -> Callable[[str], Steps]:
            def of_model(model: str) -> Steps:
                act = getattr(training_of(model), what)
                path = worker.folder / f"saved-{Path(sys.argv[0]).stem}"

                def once(_: int) -> float:
                    act(path)
                    return 0.0

                return once

            return of_model

        trained = {way: lambda model: training_of(model).steps}
        return trained | {what: keeping(what) for what in ("save", "restore")}

    answer(join, place)
