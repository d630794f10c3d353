"""What this process has started on the devices of several workers, for those who watch it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from mirrax._src.cluster.roster_server.describing import describe_difference

# A program's number, a checksum of what all up to it were, and what it was itself.
Mark = list[Any]
_BETWEEN_MARKS = 16
_MOST_MARKS = 256


class Launches:
    """The programs over all workers' devices: how many, and the last one.

    Attributes:
        count: How many have been started.
        label: What the last one is.
        time: When it was started.
        mark: What all were that have been started, to compare with another worker's.
    """

    def __init__(self) -> None:
        self.count = 0
        self.label = ""
        self.time = 0.0
        self._result: Any = None
        # Replaced as a whole, when a program has really been started: others' threads read it.
        self.mark: Mark = [0, 0, ""]
        self.marks: dict[int, Mark] = {}
        self.last_mark: Mark | None = None

    def begin(self, label: str) -> None:
        """Notes that a program is being started."""
        self.count += 1
        self.label = label
        self.time = time.monotonic()
        self._result = True

    def undo(self) -> None:
        """Notes that it was not started after all."""
        self.count -= 1
        self.label = self.mark[2]
        self._result = None

    def end(self, result: Any) -> None:
        """Notes one array of what it will give; a small one, since it is kept."""
        self._result = result
        checksum = zlib.crc32(self.label.encode(), self.mark[1])
        self.mark = [self.count, checksum, self.label]
        if self.count % _BETWEEN_MARKS == 0 or self.count < _BETWEEN_MARKS:
            self.marks[self.count] = self.last_mark = self.mark
            if len(self.marks) > _MOST_MARKS:
                del self.marks[next(iter(self.marks))]

    def difference(self, theirs: Mark, me: str) -> str | None:
        """What another worker ran instead of what this one, `me`, did, if that is known."""
        own = self.marks.get(theirs[0])
        if own is None or own[1] == theirs[1]:
            return None
        return describe_difference(own[0], theirs[2], own[2], me)

    def watch(
        self, label: str, program: Callable[[Any], list[Any]], arrays: Any
    ) -> list[Any]:
        """`program(arrays)`, noted."""
        self.begin(label)
        try:
            results = program(arrays)
        except BaseException:
            self.undo()
            raise
        at = smallest(results)
        self.end(None if at is None else results[at])
        return results

    def has_failed(self) -> bool:
        """Whether the last one has ended with an error, as far as can be told."""
        array = self._result
        if array is None or array is True or array.is_deleted():
            return False
        try:
            array.block_until_ready()
        except Exception:
            return True
        return False

    def is_busy(self) -> bool:
        """Whether the last one is still running, as far as can be told."""
        array = self._result
        if array is None or array is True:
            return bool(array)
        try:
            return not array.is_ready()
        except RuntimeError:  # donated to the next one, on another thread
            return False


def smallest(arrays: Sequence[Any]) -> int | None:
    """The position of the array that needs the least memory, and can be asked if it is ready."""
    sizes = {i: a.size for i, a in enumerate(arrays) if hasattr(a, "is_ready")}
    return min(sizes, key=sizes.__getitem__) if sizes else None


last = Launches()
