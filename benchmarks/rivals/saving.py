"""A checkpoint: the variables, what is timed, and how rivals are asked for it.

`checkpoints.py` starts each library in a process of its own. It waits there until it
reads a line of JSON with the way, the layout of variables and the folder to use, saves
and restores once and prints how long that took, so that all libraries take turns.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LAYOUTS: dict[str, list[tuple[int, ...]]] = {
    "25 of 4 MB": [(1024, 1024)] * 25,
    "200, 100 MB in all": [(1024, 3072)] * 8 + [(64, 256)] * 40 + [(256,)] * 152,
    "1000 of 128 bytes": [(32,)] * 1000,
}
# For accelerators: the weights of a model of 100 million, and Adam's slots.
LARGE = "72 of 16 MB"
LAYOUTS[LARGE] = [(2048, 2048)] * 72


@dataclass(frozen=True)
class Way:
    """One way of keeping variables on the disk.

    Attributes:
        step: Adds one to every variable, as a training step would, and waits for it.
        save: Begins a checkpoint in a folder and returns what `restore` takes.
        wait: Waits until the checkpoint is written.
        restore: Puts the values back into the variables, and waits for them.
        read: The variables' values.
    """

    step: Callable[[], Any]
    save: Callable[[str], Any]
    wait: Callable[[], Any]
    restore: Callable[[Any], Any]
    read: Callable[[], list[np.ndarray]]


MakeWay = Callable[[Sequence[np.ndarray]], Way]


def make_values(layout: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in LAYOUTS[layout]]


def time_checkpoint(way: Way, place: str, is_checked: bool) -> dict[str, float]:
    """Milliseconds for each part of saving and restoring once, in a new folder.

    A step follows each of them at once, so that what they leave to it is seen too.
    """
    clock = time.perf_counter
    with tempfile.TemporaryDirectory(dir=place) as folder:
        start = clock()
        way.step()
        alone = clock()
        before = [value.copy() for value in way.read()] if is_checked else []
        begun = clock()
        saved = way.save(folder)
        returned = clock()
        way.step()
        stepped = clock()
        way.wait()
        _flush(folder)
        written = clock()
        way.restore(saved)
        restored = clock()
        found = [value.copy() for value in way.read()] if is_checked else []
        resumed = clock()
        way.step()
        again = clock()
    np.testing.assert_equal(found, before)
    seconds = {
        "step": alone - start,
        "save": returned - begun,
        "next step": stepped - returned,
        "on disk": written - begun,
        "restore": restored - written,
        "step after": again - resumed,
    }
    return {name: value * 1e3 for name, value in seconds.items()}


def _flush(folder: str) -> None:
    """Waits for the disk, as not all libraries do."""
    for place, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(place, name), "rb") as file:
                os.fsync(file.fileno())


def answer(makers: dict[str, MakeWay]) -> None:
    """Times a checkpoint whenever one is asked for, until nothing more is."""
    ways: dict[tuple[str, str], Way] = {}
    for line in sys.stdin:
        name, layout, place = json.loads(line)
        is_first = (name, layout) not in ways
        if is_first:
            ways[name, layout] = makers[name](make_values(layout))
            ways[name, layout].step()
        figures = time_checkpoint(ways[name, layout], place, is_checked=is_first)
        print(json.dumps(figures), flush=True)
