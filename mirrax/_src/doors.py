"""Doors that load what is behind them when it is first used (PEP 562).

    if TYPE_CHECKING:
        from mirrax import train as train
        from mirrax._src.state.variable import Variable as Variable
    else:
        __all__, __dir__, __getattr__ = open_lazily(
            __name__, modules=("train",), names={"state.variable": ("Variable",)}
        )

Type checkers read the first part, Python the second; a test compares the two.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def open_lazily(
    door: str, modules: Sequence[str] = (), names: Mapping[str, Sequence[str]] = {}
) -> tuple[list[str], Callable[[], list[str]], Callable[[str], Any]]:
    """A door's `__all__`, `__dir__` and `__getattr__`.

    Call it last, since `__all__` has the public names that the door holds by then as well.

    Args:
        door: The door's module.
        modules: The modules in it.
        names: What it re-exports from each module of `mirrax._src`.
    """
    module = sys.modules[door]
    homes = {name: home for home, found in names.items() for name in found}
    own = [name for name in vars(module) if not name.startswith("_")]
    public = sorted({*own, *modules, *homes})

    def list_names() -> list[str]:
        return sorted({*vars(module), *public})

    def load(name: str) -> Any:
        if name in modules:
            value = importlib.import_module(f"{door}.{name}")
        elif name in homes:
            value = _load(homes[name], name)
        else:
            text = f"module {door!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=module)
        setattr(module, name, value)  # the next time Python finds it by itself
        return value

    return public, list_names, load


def loading(home: str, name: str) -> Callable[[], Any]:
    """A function that returns `name` of a module of `mirrax._src`, and loads it for that."""
    return lambda: _load(home, name)


def _load(home: str, name: str) -> Any:
    return getattr(importlib.import_module(f"mirrax._src.{home}"), name)
