"""Variables of other libraries: in a scope, what holds their array holds an `mx.Variable`.

Each library has one module in `integrations`, which knows its classes. It routes the attribute
in which a class keeps its array, and adopts the objects that are made in a scope.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from mirrax._src.base import hooks
from mirrax._src.state.variable import Variable

# By the module of the library that has to be there: our own.
LIBRARIES = {
    "flax.nnx": "mirrax._src.integrations.nnx",
    "keras": "mirrax._src.integrations.keras",
}


# By the class whose attribute is routed.
_routes: dict[type, Route] = {}


def variable_of(obj: Any) -> Any:
    """The `mx.Variable` that an object of another library holds; any other object as it is.

    Raises:
        TypeError: If it is such an object, but was made outside all scopes.
    """
    route = next((_routes[k] for k in type(obj).__mro__ if k in _routes), None)
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
