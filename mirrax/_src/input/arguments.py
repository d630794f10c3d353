"""Checks of what users pass to datasets, each with the argument's name in its message."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

from mirrax._src.input.node import Node
from mirrax._src.input.options import AUTOTUNE


def checked_calls(calls: int | None) -> int | None:
    """A number of parallel calls, or None."""
    calls = None if calls is None else integer(calls, "num_parallel_calls")
    if calls is not None and calls != AUTOTUNE and calls < 1:
        raise ValueError(
            f"`num_parallel_calls` must be positive or AUTOTUNE, got {calls}."
        )
    return calls


def integer(value: Any, name: str) -> int:
    """`value` if it is an integer; else a TypeError that names the argument."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an integer, got {value!r}.") from None


def positive(value: Any, name: str) -> int:
    """`value` if it is a positive integer."""
    number = integer(value, name)
    if number < 1:
        raise ValueError(f"`{name}` must be positive, got {number}.")
    return number


def check_arguments(fn: Callable[..., Any], root: Node, what: str) -> None:
    """Raises if `fn` cannot be called with an element, where that is known beforehand."""
    spec = root.outline()
    if spec is None:
        return
    count = len(spec) if type(spec) is tuple else 1
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # a function without a signature
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise TypeError(
            f"`{what}` calls its function with {count} argument(s), the part(s) of an element "
            f"{spec}, but {getattr(fn, '__qualname__', fn)}{signature} does not take them: "
            f"{error}."
        ) from None
