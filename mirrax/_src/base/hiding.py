"""`hides`: names that the parts of mirrax use of each other, which users are not shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


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
