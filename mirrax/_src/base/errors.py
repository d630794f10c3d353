"""Error classes, and pieces that messages share."""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from traceback import StackSummary, walk_stack
from types import FrameType, TracebackType
from typing import Any, BinaryIO, TypeVar, cast

import jax

_PACKAGE = str(Path(__file__).parents[2])
_STDLIB = str(Path(threading.__file__).parent)
_STACK_LINE = re.compile(r'File "(.*)", line (\d+) in (.*)')
_warned: set[str] = set()
_Method = TypeVar("_Method", bound=Callable[..., Any])


def warn_user(message: str, kind: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside mirrax."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, kind, stacklevel=level)


def warn_renamed(old: str, new: str) -> None:
    """Warns once in a process that `old` is now called `new`, or needless if that is ""."""
    if old not in _warned:
        _warned.add(old)
        warn_user(
            f"`{old}` is the older name of `{new}`; it works, but write `{new}`."
            if new
            else f"`{old}` has nothing to do in mirrax; leave it out.",
            DeprecationWarning,
        )


def renamed(new: str) -> Callable[[_Method], _Method]:
    """Marks a method as the older form of `new`, or of nothing: it warns once, and works."""

    def mark(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            warn_renamed(method.__name__, new)
            return method(*args, **kwargs)

        return cast(_Method, call)

    return mark


def users_line() -> str:
    """The innermost line outside mirrax and JAX: `train.py:31`."""
    frame = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""


def main_threads_line() -> str:
    """The innermost line outside mirrax and JAX where the main thread is; asked by another.

    "" if it cannot be known: in CPython 3.11 and 3.12 only of the last hundred threads.
    """
    stack = main_threads_stack()
    for at in reversed(stack):
        if not _is_library(at.filename):
            return f"{Path(at.filename).name}:{at.lineno}"
    return "shutdown" if stack else ""


def main_threads_stack() -> StackSummary:
    """Where the main thread is, innermost last; asked by another thread.

    In CPython 3.11 `sys._current_frames` can deadlock, and following `f_back` of frames that
    another thread is running can crash. `faulthandler` looks while no thread can run; but in
    CPython 3.13 it crashes on a thread that is returning to C.
    """
    if sys.version_info >= (3, 13):
        frame = sys._current_frames().get(threading.main_thread().ident)
        frames = walk_stack(frame) if frame is not None else ()
        stack = StackSummary.extract(frames, lookup_lines=False)
        stack.reverse()
        return stack
    with _scratch_file() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read().decode(errors="replace")
    main = rf"hread 0x0*{threading.main_thread().ident:x} .*\n((?:  .*\n)*)"
    found = re.search(main, text)
    lines = _STACK_LINE.findall(found[1]) if found else []
    return StackSummary.from_list(
        [(file, int(line), name, None) for file, line, name in reversed(lines)]
    )


def _scratch_file() -> BinaryIO:
    """In memory where the system can, so that a full disk changes nothing."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("mirrax"), "w+b")
    return cast(BinaryIO, tempfile.TemporaryFile())


def line_of_error(error: BaseException) -> str:
    """The innermost line outside mirrax and JAX that an exception went through; "" if none."""
    found, at = "", error.__traceback__
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if not _is_library(file):
            found = f"{Path(file).name}:{at.tb_lineno}"
        at = at.tb_next
    return found


def _is_library(file: str) -> bool:
    is_pythons_own = file.startswith(_STDLIB) and "site-packages" not in file
    is_ours = file.startswith((_PACKAGE, "<string>", "<frozen"))
    return is_pythons_own or is_ours or "/jax/" in file


def hide_own_frames(error: BaseException) -> None:
    """Leaves the inside of mirrax out of a traceback, as JAX leaves out its own.

    Also what mirrax calls of Python and of JAX. `JAX_TRACEBACK_FILTERING=off` keeps all.
    """
    if jax.config.jax_traceback_filtering == "off":  # pyright: ignore[reportAttributeAccessIssue]
        return
    while type(error.__context__).__module__.startswith("mirrax._src"):  # a detour
        error.__context__ = error.__context__ and error.__context__.__context__
    kept, at, is_inside = [], error.__traceback__, False
    while at is not None:
        is_inside = _is_inside(at.tb_frame, is_inside)
        if not is_inside:
            kept.append(at)
        at = at.tb_next
    shown = None
    for at in reversed(kept):
        shown = TracebackType(shown, at.tb_frame, at.tb_lasti, at.tb_lineno)
    error.__traceback__ = shown


def _is_inside(frame: FrameType, is_caller: bool) -> bool:
    """Whether a frame belongs to mirrax, or to what mirrax, its caller, uses."""
    file = frame.f_code.co_filename
    if (
        file == "<string>"
    ):  # the `__init__` of a dataclass, or the program of `python -c`
        return frame.f_globals.get("__name__", "").startswith("mirrax")
    return file.startswith(_PACKAGE) or (is_caller and _is_library(file))


def sentence(text: str) -> str:
    """`text` with a capital first letter."""
    return text[:1].upper() + text[1:]


class RunEagerly(BaseException):
    """What is being traced has to run as plain Python; passes its `except Exception`."""


class OutOfRangeError(Exception):
    """There is no next element: the data has ended."""

    __module__ = "mirrax.errors"


class DataLossError(Exception):
    """A file is damaged: cut off, or changed after it was written."""

    __module__ = "mirrax.errors"


class UnavailableError(Exception):
    """Another worker is gone, or does not answer, or does something else.

    Attributes:
        workers: The numbers of the workers that this is about.
    """

    __module__ = "mirrax.errors"

    def __init__(self, message: str, workers: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.workers = workers
