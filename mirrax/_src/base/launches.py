"""What this process has started on the devices of several workers, for those who watch it."""

from __future__ import annotations

import time
import weakref
from typing import Any

import jax


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

    def end(self, results: Any) -> None:
        """Notes what it will give."""
        leaves = jax.tree.leaves(results)
        self._result = weakref.ref(leaves[-1]) if leaves else None

    def is_busy(self) -> bool:
        """Whether the last one is still running, as far as can be told."""
        if self._result is None or self._result is True:
            return bool(self._result)
        array = self._result()
        return array is not None and not array.is_deleted() and not array.is_ready()


last = Launches()
