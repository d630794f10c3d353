"""Who gets which rows, in plain Python: one list for each worker, step and replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Rows = list[Any]
Steps = list[list[Rows]]


def chunks(rows: Sequence[Any], size: int) -> list[Rows]:
    """Batches of `size` rows; the last one may be smaller."""
    return [list(rows[i : i + size]) for i in range(0, len(rows), size)]


def dealt(batches: Sequence[Rows], workers: int, local: int) -> list[Steps]:
    """Each batch in equal parts, front replicas first; worker w takes part w, w + n, ..."""
    found: list[Steps] = [[] for _ in range(workers)]
    for batch in batches:
        size = -(-len(batch) // (workers * local))
        parts = [batch[i * size : (i + 1) * size] for i in range(workers * local)]
        for k in range(workers):
            found[k].append(parts[k::workers])
    return found


def by_rows(rows: Sequence[Any], batch: int, worker: int, total: int, local: int):
    """All rows for one worker, in the sizes that a batch has for its replicas in turn."""
    small, rest = divmod(batch, total)
    sizes = [small + (i < rest) for i in range(total)]
    at, left, steps = worker * local, list(rows), []
    while left:
        step = []
        for _ in range(local):
            size = sizes[at % total]
            step.append(left[:size])
            left, at = left[size:], at + 1
        steps.append(step)
    return steps


def in_turn(batches: Sequence[Rows], local: int) -> Steps:
    """One batch after the other, one for each replica."""
    steps = chunks(list(batches), local)
    return [step + [[]] * (local - len(step)) for step in steps]


def together(steps: Sequence[Steps], local: int) -> list[Steps]:
    """Workers whose data ends early go on with nothing until all have ended."""
    longest = max(map(len, steps))
    nothing: list[Rows] = [[]] * local
    return [own + [nothing] * (longest - len(own)) for own in steps]
