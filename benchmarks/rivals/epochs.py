"""An epoch of input: the rows, the work for one of them, and how rivals are asked for it.

`input.py` starts each rival in a process of its own. It waits there until it reads the
name of a pipeline, delivers an epoch of it and prints the number of batches, so that
epochs of all libraries take turns.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import numpy as np

BATCH = 256
FEATURES = 784
CLASSES = 10

Epoch = Callable[[], int]
"""Delivers all rows in a new random order and returns the number of batches."""


def make_rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, FEATURES), dtype=np.float32)
    return x, rng.integers(CLASSES, size=count, dtype=np.int32)


def normalise(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One row's work in Python: what it does depends on the row, so rows cannot share a call."""
    x = x / np.linalg.norm(x)
    if x[0] > x[-1]:
        x = np.ascontiguousarray(x[::-1])
    return x, y


def answer(pipelines: dict[str, Epoch]) -> None:
    """Delivers an epoch of each pipeline that is asked for, until nothing more is."""
    for line in sys.stdin:
        batches = pipelines[line.strip()]()
        print(json.dumps({"batches": batches}), flush=True)
