"""Error classes, and pieces that messages share."""

from __future__ import annotations

import sys
import types
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[2])
_warned: set[str] = set()


def warn_user(message: str, kind: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside mirrax."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, kind, stacklevel=level)


def warn_renamed(old: str, new: str) -> None:
    """Warns once in a process that `old` is now called `new`."""
    if old not in _warned:
        _warned.add(old)
        warn_user(
            f"`{old}` is the older name of `{new}`; it works, but write `{new}`.",
            DeprecationWarning,
        )


def users_line() -> str:
    """The innermost line outside mirrax and JAX: `train.py:31`."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        name = frame.f_code.co_filename
        is_library = name.startswith(_PACKAGE) or "/jax/" in name or "<string>" in name
        if not is_library:
            break
        frame = frame.f_back
    assert frame is not None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def sentence(text: str) -> str:
    """`text` with a capital first letter."""
    return text[:1].upper() + text[1:]


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
