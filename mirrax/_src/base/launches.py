"""What this process has started on the devices of several workers, for those who watch it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


class Launches:
    """The programs over all workers' devices: how many, and the last one.

    Attributes:
        count: How many have been started.
        label: What the last one is.
        time: When it was started.
    """

    def __init__(self) -> None:
        self.count = 0
        self.label = ""
        self.time = 0.0
        self._result: Any = None

    def begin(self, label: str) -> None:
        """Notes that a program is being started."""
        self.count += 1
        self.label = label
        self.time = time.monotonic()
        self._result = True

    def end(self, result: Any) -> None:
        """Notes one array of what it will give; a small one, since it is kept."""
        self._result = result

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
        return not array.is_deleted() and not array.is_ready()


def smallest(arrays: Sequence[Any]) -> int | None:
    """The position of the array that needs the least memory."""
    sizes = [array.size for array in arrays]
    return sizes.index(min(sizes)) if sizes else None


last = Launches()
