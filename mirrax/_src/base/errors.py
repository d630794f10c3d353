"""Error classes, and pieces that messages share."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

import jax

_PACKAGE = str(Path(__file__).parents[2])
_STDLIB = str(Path(threading.__file__).parent)
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
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""


def line_of_error(error: BaseException) -> str:
    """The innermost line outside mirrax and JAX that an exception went through; "" if none."""
    found, at = "", error.__traceback__
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if not is_library(file):
            found = f"{Path(file).name}:{at.tb_lineno}"
        at = at.tb_next
    return found


def is_library(file: str) -> bool:
    """Whether a file belongs to Python, JAX or mirrax, and not to the user's program."""
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
    return file.startswith(_PACKAGE) or (is_caller and is_library(file))


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
