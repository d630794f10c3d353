"""How functions and results travel between processes: by cloudpickle.

Functions of `__main__`, of test modules and closures travel by value, so that a worker does
not import the test module, which would run what stands at its top. All others travel by name.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

_TEST_FILES = ("test_*.py", "*_test.py", "conftest.py")


def pack_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bytes:
    """A call as bytes; workers `unpack` it.

    Raises:
        TypeError: If something in it cannot leave this process.
    """
    with _by_value([fn, *args, *kwargs.values()]):
        try:
            return pack((fn, args, kwargs))
        except Exception as error:
            raise TypeError(
                f"{_name_of(fn)} and its arguments cannot be sent to other processes: "
                f"{error} Make inside of the function what cannot travel, such as "
                "strategies, variables and locks."
            ) from error


def pack(value: Any) -> bytes:
    """A value as bytes."""
    return _cloudpickle().dumps(value)


def unpack(data: bytes) -> Any:
    """What `pack` has packed."""
    return _cloudpickle().loads(data)


def _cloudpickle() -> ModuleType:
    try:
        import cloudpickle
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "mirrax.testing needs cloudpickle, which is not installed. Type: "
            "pip install 'mirrax[testing]'"
        ) from None
    return cloudpickle


@contextlib.contextmanager
def _by_value(values: list[Any]) -> Iterator[None]:
    """Has what belongs to the test modules of `values` travel by value."""
    cloudpickle = _cloudpickle()
    known = cloudpickle.list_registry_pickle_by_value()
    modules = {module.__name__: module for module in map(_module_of, values) if module}
    added = [
        module
        for name, module in modules.items()
        if name not in known and _is_test(module)
    ]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def _module_of(value: Any) -> ModuleType | None:
    while isinstance(value, functools.partial):
        value = value.func
    name = getattr(value, "__module__", None)
    return sys.modules.get(name) if isinstance(name, str) else None


def _is_test(module: ModuleType) -> bool:
    name = Path(getattr(module, "__file__", None) or "").name
    return any(fnmatch(name, pattern) for pattern in _TEST_FILES)


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
