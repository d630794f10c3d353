"""Compares what the other workers say of themselves with what this one does.

A worker that waits in a program for another one cannot know it: the devices wait. What can be
known is how many programs each has started, which ones, and whether the last one is done.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mirrax._src.cluster import launches

_SURE_SECONDS = 10.0
# News of the others come every second.
_ASLEEP_SECONDS = 2.5
_LINE_SECONDS = 30.0

# A worker, and what it does or fails to do.
Complaint = tuple[int, str]


class Watch:
    """What is known of the others so far.

    Args:
        worker: This worker's number.
        names: All workers, for messages.
    """

    def __init__(self, worker: int, names: Sequence[str]) -> None:
        self._worker, self._names = worker, names
        self._behind: dict[int, tuple[int, float]] = {}
        self._told = 0.0
        self._looked = time.monotonic()

    def look(
        self,
        statuses: Mapping[int, dict[str, Any]],
        ended: Collection[int],
        step: int,
        step_timeout: float,
    ) -> tuple[list[Complaint], str]:
        """What is wrong with others, by their last words, and a line to show if one is late."""
        self._forgive_sleep()
        found: list[Complaint] = []
        line = ""
        for k, status in statuses.items():
            if k == self._worker or "launches" not in status:
                continue  # this one, or one that has not said anything yet
            if other := self._difference(status):
                found.append((k, other))
            since = self._seconds_behind(k, status["launches"])
            if k in ended and since > _SURE_SECONDS:
                found.append(self.needs(k, step))
            elif since > step_timeout:
                text = (
                    f"has not arrived for {since:.0f} s, while {self._own_place(step)}. Raise "
                    "`step_timeout` if it has that much to do alone."
                )
                found.append((k, text))
            elif (
                since > _LINE_SECONDS and time.monotonic() - self._told > _LINE_SECONDS
            ):
                self._told = time.monotonic()
                line = (
                    f"has waited {since:.0f} s for {self._names[k]}, which is at "
                    f"{status['doing']}, step {status['step']}."
                )
        return found, line

    def _forgive_sleep(self) -> None:
        """Nobody was behind while this process was stopped, or no news came of the others."""
        now = time.monotonic()
        slept, self._looked = now - self._looked, now
        if slept > _ASLEEP_SECONDS:
            self._behind = {k: (n, at + slept) for k, (n, at) in self._behind.items()}

    def needs(self, worker: int, step: int) -> Complaint:
        """What is wrong with a worker whose program is done, while this one needs it."""
        return worker, (
            f"has ended its program, while {self._own_place(step)}. All workers have to take "
            "the same steps: run, reduce, read metrics, save."
        )

    def _difference(self, status: dict[str, Any]) -> str:
        """What another worker runs in place of what this one does; "" if it is the same."""
        mine, me = launches.last, self._names[self._worker]
        mark = status["mark"]
        if other := mark and mine.difference(mark, me):
            return other
        is_stuck = status["is_busy"] and mine.is_busy()
        if (
            is_stuck
            and status["launches"] == mine.count
            and status["label"] != mine.label
            and time.monotonic() - mine.time > _SURE_SECONDS
        ):
            return (
                f"is running a different program: {status['label']} there, {mine.label} on {me}. All "
                "workers have to take the same steps."
            )
        return ""

    def _seconds_behind(self, worker: int, count: int) -> float:
        """How long this worker has waited for another one to start as many programs."""
        now, mine = time.monotonic(), launches.last
        if count >= mine.count or not mine.is_busy():  # nobody waits for anybody here
            self._behind.pop(worker, None)
            return 0.0
        known, since = self._behind.get(worker, (-1, now))
        if known != count:
            since = now
        self._behind[worker] = (count, since)
        return now - since

    def _own_place(self, step: int) -> str:
        label = launches.last.label
        return f"{self._names[self._worker]} waits for it in {label} (step {step})"
