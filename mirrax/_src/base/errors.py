"""Pieces that messages share."""

from __future__ import annotations

import warnings

_warned: set[str] = set()


def warn_renamed(old: str, new: str) -> None:
    """Warns once in a process that `old` is now called `new`."""
    if old not in _warned:
        _warned.add(old)
        warnings.warn(
            f"`{old}` is the older name of `{new}`; it works, but write `{new}`.",
            DeprecationWarning,
            stacklevel=3,
        )
