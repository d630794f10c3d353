"""The part of `api` that needs no array library: it is the same for both."""

from collections.abc import Callable
from typing import Any

import numpy as np


def attempt(fn: Callable[[], Any]) -> Any:
    """What `fn()` gives, or the exception that it raises."""
    try:
        return fn()
    except Exception as error:
        return error


def fails(fn: Callable[[], Any]) -> bool:
    """Whether `fn()` raises, where the array library chooses the class."""
    return isinstance(attempt(fn), Exception)


def copies(variable: Any) -> list[np.ndarray]:
    """A variable's value on each replica, as it is now."""
    components = getattr(variable, "values", (variable,))
    return [np.array(to_numpy(component)) for component in components]


def to_numpy(value: Any) -> np.ndarray:
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def class_name(value: Any) -> str:
    return type(value).__name__
