"""Whole training loops: what all libraries train, from their own input on.

`peers.py` writes the rows and parameters to a folder and starts each library in a process,
or one for each worker, as `stepping.py` describes: `loop_LIBRARY.py WAY WORKER ADDRESSES
FOLDER REPLICAS`. A step takes the next batch of rows in memory from the library's own input,
updates the parameters by SGD with momentum, and gives the loss of the global batch.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from stepping import Steps, Worker, answer

RATE, MOMENTUM = 0.01, 0.9
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


def run(make: Callable[[Loop], Steps]) -> None:
    """Answers for the loops of one library."""
    way, *place, replicas = sys.argv[1:]

    def join(worker: Worker) -> dict[str, Callable[[str], Steps]]:
        def steps_of(model: str) -> Steps:
            with np.load(worker.folder / f"{model}.npz") as arrays:
                parameters = [arrays[f"arr_{i}"] for i in range(len(arrays.files) - 3)]
                rows = arrays["x"], arrays["y"], int(arrays["batch"])
            return make(Loop(way, model, worker, int(replicas), parameters, *rows))

        return {way: steps_of}

    answer(join, place)
