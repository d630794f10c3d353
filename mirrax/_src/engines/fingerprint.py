"""Two function objects that compute the same: closures that are made anew every step.

`fingerprint` sorts what a function can reach by name into arrays, which become arguments
of its compiled form, and everything else, which is part of the key that finds it again.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.values import PyTree, is_distributed, is_leaf
from mirrax._src.engines.signature import Static
from mirrax._src.state.variable import Variable

_PLAIN = (int, float, complex, bool, str, bytes, type(None), types.EllipsisType, slice)
_FIXED = (types.ModuleType, type, types.BuiltinFunctionType, np.ufunc, np.dtype)
_LIBRARIES = {"jax", "jaxlib", "numpy", "flax", "optax", "mirrax", "builtins", "math"}
_MOST_OBJECTS = 2000
# Names of things that a compiled function would do once instead of every time.
_EFFECTS = {"print", "breakpoint", "set_trace", "input", "open", "next", "time"}


class _Unknown(Exception):
    """Something whose contents can change without notice."""


@dataclass(frozen=True)
class Lifted:
    """A function without the arrays it closes over.

    Attributes:
        key: Equal for functions that compute the same from the same arrays.
        arrays: What the function closes over, in order.
        rebuild: The function, with other arrays in their places.
    """

    key: Any
    arrays: tuple[Any, ...]
    rebuild: Callable[[tuple[Any, ...]], Callable[..., PyTree]]


def lift(fn: Callable[..., PyTree], *, exactly: bool = True) -> Lifted | None:
    """`fn` without its arrays; None if it reaches what may change unseen.

    With `exactly` the key also holds the globals and attributes that `fn` can reach, and
    a function with effects beyond its result is refused: calling its compiled form must
    do what calling `fn` does. Without, the key says what a compiled function may take for
    granted: the code and what it closes over.
    """
    if not isinstance(fn, types.FunctionType):
        return None
    arrays: list[Any] = []
    try:
        key = _Describer(exactly).function(fn, arrays)
    except _Unknown:
        return None
    return Lifted(key, tuple(arrays), lambda new: _with_cells(fn, iter(new)))


class _Describer:
    """Makes a key of what a function reaches."""

    def __init__(self, exactly: bool) -> None:
        self._exactly = exactly
        self._seen: dict[int, int] = {}

    def function(self, fn: types.FunctionType, arrays: list[Any] | None) -> Any:
        """A key for `fn`; arrays it closes over are put into `arrays`."""
        if self._exactly and _has_effects(fn.__code__, _stateful_modules(fn)):
            raise _Unknown
        cells = []
        for cell in fn.__closure__ or ():
            try:
                cells.append(self.value(cell.cell_contents, arrays))
            except ValueError:
                cells.append("empty")
        defaults = self.value((fn.__defaults__, fn.__kwdefaults__), None)
        used = _names(fn.__code__) if self._exactly else ()
        reached = [
            (name, self.value(fn.__globals__[name], None))
            for name in used
            if name in fn.__globals__
        ]
        return (fn.__code__, tuple(cells), defaults, tuple(reached))

    def value(self, value: Any, arrays: list[Any] | None) -> Any:
        """A key for `value`; arrays are put into `arrays`, or stand for themselves."""
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            if arrays is not None and not isinstance(value, Tracer):
                arrays.append(value)
                return "array"
            if (
                self._exactly
                and isinstance(value, np.ndarray)
                and value.flags.writeable
            ):
                raise _Unknown
            return Static(value)
        if isinstance(value, _PLAIN):
            return (type(value), repr(value) if isinstance(value, slice) else value)
        if isinstance(value, (*_FIXED, Variable)) or _is_library_callable(value):
            return Static(value)
        if id(value) in self._seen:
            return ("again", self._seen[id(value)])
        if isinstance(value, types.FunctionType):
            return self._once(value, lambda: self.function(value, None))
        leaves, tree = jax.tree.flatten(value, is_leaf=is_leaf)
        if len(leaves) == 1 and leaves[0] is value:
            return self._object(value)
        return (tree, tuple(self.value(leaf, arrays) for leaf in leaves))

    def _object(self, value: Any) -> Any:
        """An object of the user's: as it is now, attribute by attribute."""
        if not self._exactly:
            return Static(value)
        is_users = type(value).__module__.split(".")[0] not in sys.stdlib_module_names
        is_users = is_users or type(value).__module__ == "__main__"
        if is_distributed(value) or not is_users or not hasattr(value, "__dict__"):
            raise _Unknown
        for name, method in vars(type(value)).items():
            if isinstance(method, types.FunctionType) and name != "__init__":
                if _has_effects(method.__code__, _stateful_modules(method)):
                    raise _Unknown
        attributes = dict(vars(value))
        return (Static(value), self._once(value, lambda: self.value(attributes, None)))

    def _once(self, value: Any, describe: Callable[[], Any]) -> Any:
        if len(self._seen) > _MOST_OBJECTS:
            raise _Unknown
        self._seen[id(value)] = len(self._seen)
        return describe()


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The global and attribute names in `code` and in the functions it defines."""
    inner = [
        n for c in code.co_consts if isinstance(c, types.CodeType) for n in _names(c)
    ]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


@functools.lru_cache(maxsize=4096)
def _has_effects(code: types.CodeType, has_stateful_random: bool) -> bool:
    """Whether `code` may do more than compute its result, as far as its text tells."""
    if has_stateful_random and "random" in _names(code):
        return True
    if any(name in _EFFECTS for name in _names(code)):
        return True
    return any(
        op.opname in ("STORE_GLOBAL", "STORE_ATTR", "DELETE_ATTR")
        or (op.opname == "STORE_DEREF" and op.argval in code.co_freevars)
        for op in dis.get_instructions(code)
    )


def _stateful_modules(fn: types.FunctionType) -> bool:
    """Whether `fn` can reach random numbers that change a hidden state."""
    reached = [fn.__globals__.get(name) for name in _names(fn.__code__)]
    return any(module is np or module is random for module in reached)


def _is_library_callable(value: Any) -> bool:
    home = getattr(value, "__module__", None) or type(value).__module__
    return callable(value) and home.split(".")[0] in _LIBRARIES


def _with_cells(fn: types.FunctionType, arrays: Any) -> Callable[..., PyTree]:
    cells = []
    for cell in fn.__closure__ or ():
        try:
            contents = cell.cell_contents
        except ValueError:
            cells.append(cell)
            continue
        cells.append(types.CellType(_with_arrays(contents, arrays)))
    rebuilt = types.FunctionType(
        fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, tuple(cells)
    )
    rebuilt.__kwdefaults__ = fn.__kwdefaults__
    return rebuilt


def _with_arrays(value: Any, arrays: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return value if isinstance(value, Tracer) else next(arrays)
    if isinstance(value, (*_PLAIN, *_FIXED, Variable, types.FunctionType)):
        return value
    if _is_library_callable(value):
        return value
    leaves, tree = jax.tree.flatten(value, is_leaf=is_leaf)
    if not any(
        isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves
    ):
        return value
    return jax.tree.unflatten(tree, [_with_arrays(leaf, arrays) for leaf in leaves])
