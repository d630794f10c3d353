"""What users are not shown: names that the parts of mirrax use of each other, and its frames."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeVar

from mirrax._src.base.errors import hide_own_frames

_Class = TypeVar("_Class", bound=type)
_Fn = TypeVar("_Fn", bound=Callable[..., Any])
_CALLED = ("__init__", "__next__")


def hides(*names: str) -> Callable[[_Class], _Class]:
    """Keeps `names` of a class, and of its subclasses, out of `dir` and completion.

    A leading underscore would say "only this file", and other files need these.
    """

    def decorate(cls: _Class) -> _Class:
        shown: Any = cls.__dir__

        def __dir__(self: object) -> Iterable[str]:
            return [name for name in shown(self) if name not in names]

        setattr(cls, "__dir__", __dir__)  # noqa: B010
        return cls

    return decorate


def brief(fn: _Fn) -> _Fn:
    """`fn`, whose errors come with the user's lines and without the inside of mirrax."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

    return call  # pyright: ignore[reportReturnType]


def all_brief(cls: _Class) -> _Class:
    """Makes the public methods of a class `brief`, except those that are so already."""
    for name, found in list(vars(cls).items()):
        if name.startswith("_") and name not in _CALLED:
            continue
        if isinstance(found, classmethod | staticmethod):
            setattr(cls, name, type(found)(brief(found.__func__)))
        elif isinstance(found, FunctionType) and not _is_brief(found):
            setattr(cls, name, brief(found))
    return cls


def _is_brief(fn: FunctionType) -> bool:
    return hide_own_frames.__name__ in fn.__code__.co_names
