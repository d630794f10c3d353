"""Calls after a while, also while the interpreter shuts down.

From Python 3.12 on no thread can be started then, and that is when a worker may have to end
itself. So the threads are there before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

# One that ends the process may be kept by a full pipe, and another one sees to that.
_THREADS = 3


class Later:
    """Threads that wait for something to do."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[float, Callable[[], Any]]] = SimpleQueue()
        for _ in range(_THREADS):
            threading.Thread(
                target=self._work, name="mirrax-later", daemon=True
            ).start()

    def call(self, seconds: float, fn: Callable[[], Any]) -> None:
        """Calls `fn` when `seconds` have passed."""
        self._calls.put((seconds, fn))

    def _work(self) -> None:
        while True:
            seconds, fn = self._calls.get()
            time.sleep(seconds)
            fn()
