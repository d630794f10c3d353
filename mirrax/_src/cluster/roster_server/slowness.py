"""Which worker makes the others wait, and how much of the time.

A worker is occupied while its last program runs, or while it waits for the others. Devices
wait for each other in programs that communicate, so all are occupied equally long, except for
the one that comes late: its devices have nothing to do until its program has been started.
The difference is what the others could save. A device that is slow by itself is not found so:
it is occupied as long as those that wait for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

LEAST_SHARE = 0.1
WINDOW_SECONDS = 30.0
# The same worker is not named again before.
_QUIET_SECONDS = 600.0
_LEAST_STEPS = 10


class Slowness:
    """Looks at what workers say of themselves, once in a while.

    Args:
        now: The time, as all times here, of a monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._next = now + WINDOW_SECONDS
        self._steps: dict[int, int] = {}
        self._suspect: int | None = None
        self._told: dict[int, float] = {}

    def look(
        self, now: float, statuses: Mapping[int, dict[str, Any]]
    ) -> tuple[int, float] | None:
        """The slowest worker and what it costs, as a share of the step, if it is news.

        It has to be the same one in two windows one after the other.
        """
        if now < self._next:
            return None
        self._next = now + WINDOW_SECONDS
        before, self._steps = self._steps, {k: s["step"] for k, s in statuses.items()}
        suspect, self._suspect = self._suspect, None
        steps = [count - before.get(k, count) for k, count in self._steps.items()]
        if len(steps) < 2 or min(steps) < _LEAST_STEPS:
            return None
        slowest, share = _slowest({k: s["occupied"] for k, s in statuses.items()})
        if share <= LEAST_SHARE:
            return None
        self._suspect = slowest
        last = self._told.get(slowest)
        if suspect != slowest or (last is not None and now - last < _QUIET_SECONDS):
            return None
        self._told[slowest] = now
        return slowest, share


def _slowest(occupied: Mapping[int, float]) -> tuple[int, float]:
    """The worker that is occupied least, and how much less than the middle one of the others."""
    slowest = min(occupied, key=occupied.__getitem__)
    others = [share for k, share in occupied.items() if k != slowest]
    return slowest, statistics.median(others) - occupied[slowest]
