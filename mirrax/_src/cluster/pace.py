"""How fast this worker takes steps, and how much of the time its devices have work."""

from __future__ import annotations

from collections import deque

from mirrax._src.base.stacks import main_threads_line

_WINDOW_SECONDS = 30.0


class Pace:
    """Looks at the worker a few times a second; what it says is about the last half minute."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int, bool]] = deque()

    def look(self, now: float, steps: int, is_occupied: bool) -> None:
        """Notes how many steps it has taken, and whether it computes or waits for others."""
        self._looks.append((now, steps, is_occupied))
        while now - self._looks[0][0] > _WINDOW_SECONDS:
            self._looks.popleft()

    def steps_per_second(self) -> float:
        """Over the last half minute."""
        if len(self._looks) < 2:
            return 0.0
        (start, before, _), (end, after, _) = self._looks[0], self._looks[-1]
        return round((after - before) / (end - start), 3)

    def occupied(self) -> float:
        """The share of the looks at which it computed, or waited for others."""
        found = [is_occupied for _, _, is_occupied in self._looks]
        return round(sum(found) / len(found), 3) if found else 0.0


def describe_silence(seconds: float, used: float, heartbeat: float) -> str:
    """What has kept this worker from reporting for so long, by the processor time it used."""
    why = "the process was suspended, or the machine was overloaded or out of memory"
    if used > seconds / 2:
        why = f"one call kept Python busy, at {main_threads_line()}"
    return (
        f"could not report for {seconds:.0f} s, in which it used {used:.0f} s of processor "
        f"time: {why}. After {heartbeat:g} s it is considered lost (`heartbeat`)."
    )
