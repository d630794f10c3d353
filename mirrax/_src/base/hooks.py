"""Every hook of the process that mirrax uses, except signal handlers.

A program, its other libraries and mirrax share these places: what was there before is
always called as well, and a forked child does not act for its parent.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from mirrax._src.base import jax_compat

around_cpu_start = jax_compat.wrap_cpu_start


def on_uncaught(hook: Callable[[BaseException, Callable[[], None]], None]) -> None:
    """Has `hook(error, show)` called with the exception that ends this process.

    `show()` calls the hook that was there before, which prints the traceback. A forked
    child calls only that.
    """
    previous, process = sys.excepthook, os.getpid()

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() == process:
            hook(error, lambda: previous(kind, error, trace))
        else:
            previous(kind, error, trace)

    sys.excepthook = excepthook


def on_exit(fn: Callable[[], None]) -> None:
    """Has `fn` called at the end of this process, but not of a forked child."""
    process = os.getpid()

    def call() -> None:
        if os.getpid() == process:
            fn()

    atexit.register(call)


def before_threads_end(fn: Callable[[], None]) -> None:
    """Has `fn` called when the main thread ends, in forked children too.

    New threads can still start, unlike in `on_exit`. Raises a RuntimeError afterwards.
    """
    import concurrent.futures.thread  # noqa: F401 - its own hook has to run after this one

    threading._register_atexit(fn)  # type: ignore[attr-defined]


def after_fork_in_child(fn: Callable[[], None]) -> None:
    """Has `fn` called at the start of each forked child."""
    os.register_at_fork(after_in_child=fn)
