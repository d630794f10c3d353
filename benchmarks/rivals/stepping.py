"""Steps of many workers: the models as arrays, and how each worker is asked for steps.

`workers.py` starts the workers of each library in processes of their own. Each waits
until it reads a line of JSON with the way, the model and the number of steps, does them
together with the other workers and prints how long that took and the last loss, so that
all libraries take turns. All start with the same parameters and the same batch, which
`workers.py` has written to a folder: libraries here need not have JAX.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RATE = 0.01

Steps = Callable[[int], float]
"""Does that many steps and returns this worker's share of the last one's loss."""

Ways = dict[str, Callable[[str], Steps]]
"""From a model's name to steps of it, in each way that a library has."""


@dataclass(frozen=True)
class Worker:
    """Which worker this is: `WORKER ADDRESSES FOLDER` on the command line.

    Attributes:
        number: Its place among the workers.
        addresses: Where each worker listens.
        folder: Where the models are.
    """

    number: int
    addresses: Sequence[str]
    folder: Path

    @classmethod
    def read(cls, arguments: Sequence[str]) -> Worker:
        number, addresses, folder = arguments
        return cls(int(number), addresses.split(","), Path(folder))

    @property
    def threads(self) -> int:
        """This worker's share of the cores."""
        return max(1, (os.cpu_count() or 1) // len(self.addresses))

    @property
    def tf_config(self) -> str:
        """Who the workers are, for `TF_CONFIG`."""
        task = {"type": "worker", "index": self.number}
        return json.dumps({"cluster": {"worker": self.addresses}, "task": task})

    def load(self, model: str) -> Problem:
        """What this worker trains."""
        with np.load(self.folder / f"{model}.npz") as arrays:
            x, y = arrays["x"], arrays["y"]
            parameters = [arrays[f"arr_{i}"] for i in range(len(arrays) - 2)]
        size = len(x) // len(self.addresses)
        part = slice(self.number * size, (self.number + 1) * size)
        return Problem(parameters, x[part], y[part], len(x))


@dataclass(frozen=True)
class Problem:
    """A model's parameters and one worker's part of the batch.

    Attributes:
        parameters: As in `models.py`, whose first kernel tells the MLPs and the CNN apart.
        x: Inputs of this worker.
        y: Labels of this worker.
        total: Examples of all workers.
    """

    parameters: list[np.ndarray]
    x: np.ndarray
    y: np.ndarray
    total: int

    @property
    def is_cnn(self) -> bool:
        return self.parameters[0].ndim == 4


def save(
    folder: Path,
    model: str,
    parameters: Sequence[np.ndarray],
    batch: Sequence[np.ndarray],
) -> None:
    """Writes what `Worker.load` reads."""
    x, y = batch
    np.savez(folder / f"{model}.npz", *parameters, x=x, y=y)


def answer(join: Callable[[Worker], Ways], arguments: Sequence[str]) -> None:
    """Joins the other workers and does the steps that are asked for, until no more are."""
    # What libraries write to the standard output (Gloo does, whenever workers connect)
    # is no answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    ways = join(Worker.read(arguments))
    made: dict[tuple[str, str], Steps] = {}
    for line in sys.stdin:
        way, model, count = json.loads(line)
        if way == "ping":  # all is imported
            print(json.dumps({"ms": 0.0, "loss": 0.0}), file=answers, flush=True)
            continue
        if (way, model) not in made:
            made[way, model] = ways[way](model)
        start = time.perf_counter()
        loss = made[way, model](count)
        seconds = time.perf_counter() - start
        found = {"ms": seconds / count * 1e3, "loss": loss}
        print(json.dumps(found), file=answers, flush=True)
    answers.close()
    # Workers end one after another here, which some runtimes take for a failure.
    os._exit(0)
