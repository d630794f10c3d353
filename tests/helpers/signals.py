"""Signals of processes that tests start."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def received_signals() -> Iterator[None]:
    """What is started inside receives signals, also where this process ignores them.

    A shell's `&` makes a process ignore SIGINT, and `nohup` SIGHUP; its children inherit that.
    A handler, however, becomes the default action when another program is executed.
    """
    numbers = (signal.SIGINT, signal.SIGHUP)
    ignored = [n for n in numbers if signal.getsignal(n) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
