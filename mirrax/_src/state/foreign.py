"""Variables of other libraries: in a scope, what holds their array holds an `mx.Variable`.

Each library has one module in `integrations`, which knows its classes. It routes the attribute
in which a class keeps its array, and adopts the objects that are made in a scope.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mirrax._src.base import hooks
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.state.variable import Variable

# By the module of the library that has to be there: our own.
LIBRARIES = {
    "equinox": "mirrax._src.integrations.equinox_norm",
    "flax.linen": "mirrax._src.integrations.linen",
    "flax.nnx": "mirrax._src.integrations.nnx",
    "keras": "mirrax._src.integrations.keras",
}


# By the class whose attribute is routed.
_routes: dict[type, Route] = {}


def route_of(obj: Any) -> Route | None:
    """How an object of another library keeps its array; None for any other object."""
    return next((_routes[k] for k in type(obj).__mro__ if k in _routes), None)


def variable_of(obj: Any) -> Any:
    """The `mx.Variable` that an object of another library holds; any other object as it is.

    Raises:
        TypeError: If it is such an object, but was made outside all scopes.
    """
    route = route_of(obj)
    if route is None:
        return obj
    held = route.held(obj)
    if not isinstance(held, Variable):
        shown = " ".join(repr(obj).split())[:80]
        raise TypeError(
            f"{shown} was made outside the scope of a strategy, so that mirrax does not "
            "know it. Make it, or the model that it belongs to, inside `with "
            "strategy.scope():`."
        )
    return held


def value_of(obj: Any) -> Any:
    """The value of an object of another library; any other object as it is."""
    route = route_of(obj)
    return obj if route is None else route.__get__(obj)


def attach() -> None:
    """Makes the libraries that are imported, now or later, work in scopes."""
    for library, ours in LIBRARIES.items():
        if ours not in sys.modules:
            hooks.after_import(library, lambda ours=ours: importlib.import_module(ours))


class Route:
    """The attribute `name` of a foreign class, whose objects may have an `mx.Variable` in it.

    Reading such an attribute reads the variable, setting it assigns the variable; subclasses
    say where that is not so.
    """

    def __init__(self, owner: type, name: str) -> None:
        self._slot = vars(owner).get(name)  # of a class with `__slots__`
        self._name = name
        setattr(owner, name, self)
        _routes[owner] = self

    def held(self, obj: Any) -> Any:
        """What is in the attribute: an `mx.Variable`, or the library's own value."""
        if self._slot is not None:
            return self._slot.__get__(obj)
        try:
            return vars(obj)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def hold(self, obj: Any, value: Any) -> None:
        """Puts an `mx.Variable`, or the library's own value, in the attribute."""
        if self._slot is not None:
            self._slot.__set__(obj, value)
        else:
            vars(obj)[self._name] = value

    def read(self, obj: Any, variable: Variable) -> Any:
        """The value of an object that holds a variable."""
        return variable.read_value()

    def write(self, obj: Any, variable: Variable, value: Any) -> None:
        """Sets the value of an object that holds a variable."""
        variable.assign(value)

    def like(self, obj: Any, value: Any) -> Any:
        """The gradient `value` of an object, as the library has gradients."""
        return value

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        if obj is None:
            return self
        held = self.held(obj)
        return self.read(obj, held) if isinstance(held, Variable) else held

    def __set__(self, obj: Any, value: Any) -> None:
        try:
            held = self.held(obj)
        except AttributeError:
            held = None
        if isinstance(held, Variable):
            self.write(obj, held, value)
        else:
            self.hold(obj, value)


# Modules ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleKind:
    """What mirrax asks of a library's class of modules, which hold its variables.

    Attributes:
        kind: The class.
        check: Raises unless a compiled function can take a module as an argument.
        replicate: A copy of a module with its variables in a strategy.
        saved_parts: What a checkpoint saves of a module, by name.
        replace_parts: Takes the parts that were restored and are not variables.
    """

    kind: type
    check: Callable[[Any], None]
    replicate: Callable[[StrategyLike, Any], Any]
    saved_parts: Callable[[Any], dict[str, Any]]
    replace_parts: Callable[[Any, dict[str, Any]], None]


module_kinds: list[ModuleKind] = []


def module_kind(value: Any) -> ModuleKind | None:
    """The kind of a module of another library; None for anything else."""
    return next((k for k in module_kinds if isinstance(value, k.kind)), None)


def is_module(value: Any) -> bool:
    """Whether `value` is a module of another library."""
    return module_kind(value) is not None


class Settings:
    """Which plain attributes of modules are not as they were at first (`model.eval()`).

    A program is built for them. `token` stands for all that have changed: it is the same
    object whenever the same ones have the same values.
    """

    def __init__(self) -> None:
        self._owners: dict[int, Any] = {}
        self._first: dict[tuple[int, str], Any] = {}
        self._changed: dict[tuple[int, str], Any] = {}
        self._tokens: dict[frozenset[Any], frozenset[Any]] = {}
        self.token: frozenset[Any] = frozenset()

    def note(self, owner: Any, name: str, old: Any, new: Any) -> None:
        """Notes that an attribute of `owner` is set, which was `old` before."""
        key, now = (id(owner), f"{type(owner).__name__}.{name}"), _Value(new)
        first = self._first.get(key)
        if first is None:
            if now == _Value(old):
                return
            self._owners[key[0]] = weakref.ref(owner, lambda _: self._forget(key[0]))
            first = self._first[key] = _Value(old)
        if now == first:
            self._changed.pop(key, None)
        else:
            self._changed[key] = now
        self._renew()

    def explain(self, old: frozenset[Any], new: frozenset[Any]) -> str:
        """What is different between two tokens, in words."""
        keys = {key for key, _ in old ^ new}
        names = sorted({name for number, name in keys if number in self._owners})
        if names:
            return f"{', '.join(names[:3])} has changed"
        gone = sorted({name for _, name in keys})
        return f"a model whose {gone[0]} had changed is gone" if gone else ""

    def _forget(self, number: int) -> None:
        self._owners.pop(number, None)
        for every in (self._first, self._changed):
            for key in [k for k in every.copy() if k[0] == number]:
                del every[key]
        self._renew()

    def _renew(self) -> None:
        # Of a copy: memory may be collected meanwhile, and an owner with it.
        token = frozenset(self._changed.copy().items())
        self.token = self._tokens.setdefault(token, token)


class _Value:
    """The value of an attribute; equal values of one type are the same, others if identical."""

    def __init__(self, value: Any) -> None:
        self._value = value
        try:
            self._hash = hash((type(value), value))
        except TypeError:
            self._hash = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value):
            return False
        mine, theirs = self._value, other._value
        if self._hash is None or type(mine) is not type(theirs):
            return mine is theirs
        return mine is theirs or bool(mine == theirs)

    def __hash__(self) -> int:
        return id(self._value) if self._hash is None else self._hash


settings = Settings()
