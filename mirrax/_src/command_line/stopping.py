"""Signals to the launcher: noted when they come, acted on by whoever watches the workers."""

from __future__ import annotations

import signal
import time
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# `timeout` and some shells send a signal to the process and then to its group.
_SAME_SIGNAL_SECONDS = 0.3


class StopSignals:
    """The first signal asks the workers to end, the second one kills them."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._first_at = 0.0
        self._is_urgent = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under `nohup`
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        self.request(number)

    def request(self, number: int) -> None:
        """Stops as if the signal had come."""
        if self.first is None:
            self.first, self._first_at = number, time.monotonic()
        elif time.monotonic() - self._first_at > _SAME_SIGNAL_SECONDS:
            self._is_urgent = True

    @property
    def passed(self) -> signal.Signals | None:
        """The signal that the workers get; they have nothing to do with our pipes."""
        if self.first is None:
            return None
        is_pipe = self.first == signal.SIGPIPE
        return signal.SIGTERM if is_pipe else signal.Signals(self.first)

    def is_urgent(self) -> bool:
        """Whether a second signal has come."""
        return self._is_urgent
