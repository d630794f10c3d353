"""Where the main thread is, as another thread sees it."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from traceback import StackSummary

from mirrax._src.base import hooks
from mirrax._src.base.errors import is_library

_looking = threading.RLock()
hooks.around_fork(_looking.acquire, _looking.release)


def main_threads_line() -> str:
    """The innermost line outside mirrax and JAX: `train.py:31`."""
    for file, line, _ in _main_threads_places():
        if not is_library(file):
            return f"{Path(file).name}:{line}"
    return "shutdown"


def main_threads_stack() -> StackSummary:
    """All of it, innermost last."""
    places = reversed(_main_threads_places())
    return StackSummary.from_list([(*place, None) for place in places])


def _main_threads_places() -> list[tuple[str, int, str]]:
    """Files, lines and functions, innermost first."""
    found = []
    with _no_collection():
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            code = frame.f_code
            found.append((code.co_filename, frame.f_lineno or 0, code.co_name))
            frame = frame.f_back
    return found


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector away, which in CPython 3.11 may come while a frame is made.

    JAX has it call Python, so that the main thread may run on meanwhile. Then the frame is one
    that has ended, which crashes sooner or later; or the two wait for each other for ever
    (python/cpython#106883).
    """
    with _looking:  # nor is anybody forked without a collector
        is_on = sys.version_info < (3, 12) and gc.isenabled()
        if is_on:
            gc.disable()
        try:
            yield
        finally:
            if is_on:
                gc.enable()
