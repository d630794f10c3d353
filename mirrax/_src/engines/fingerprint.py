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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.values import PyTree, is_distributed, is_leaf
from mirrax._src.engines.signature import Static
from mirrax._src.state.variable import Variable

_PLAIN = (int, complex, bool, str, bytes, type(None), types.EllipsisType, slice)
_LIBRARIES = {"jax", "jaxlib", "numpy", "flax", "optax", "mirrax", "einops", "chex"}
# Whose callable objects are functions, too: what `jax.jit` or `mx.function` return.
_TRANSFORMING = {"jax", "jaxlib", "mirrax"}
_MOST_OBJECTS = 2000
# Names of things that a compiled function would do once instead of every time.
_EFFECTS = {
    "print",
    "breakpoint",
    "set_trace",
    "input",
    "open",
    "next",
    "time",
    "environ",
    "getenv",
}
_GROWS = {"append", "extend", "insert", "update", "setdefault", "pop", "add", "clear"}


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
    except (
        _Unknown,
        TypeError,
        ValueError,
    ):  # the latter: a dict that cannot be sorted
        return None
    return Lifted(key, tuple(arrays), lambda new: _with_cells(fn, iter(new)))


def describe_objects(values: Sequence[Any]) -> Any:
    """A key for objects as they are now; None if they may change unseen."""
    describer = _Describer(exactly=True)
    try:
        return tuple(describer.value(value, None, ()) for value in values)
    except (_Unknown, TypeError, ValueError):
        return None


class _Describer:
    """Makes a key of what a function reaches."""

    def __init__(self, exactly: bool) -> None:
        self._exactly = exactly
        self._seen: dict[int, int] = {}

    def function(self, fn: types.FunctionType, arrays: list[Any] | None) -> Any:
        """A key for `fn`; arrays it closes over are put into `arrays`."""
        names = _names(fn.__code__)
        if self._exactly and _has_effects(fn):
            raise _Unknown
        cells = []
        for cell in fn.__closure__ or ():
            try:
                contents = cell.cell_contents
            except ValueError:
                cells.append("empty")
                continue
            cells.append(self.value(contents, arrays, names))
        defaults = self.value((fn.__defaults__, fn.__kwdefaults__), None, names)
        reached = [
            (name, self.value(fn.__globals__[name], None, names))
            for name in (names if self._exactly else ())
            if name in fn.__globals__
        ]
        own = self.value(dict(vars(fn)), None, names) if self._exactly else None
        return (fn.__code__, tuple(cells), defaults, tuple(reached), own)

    def value(self, value: Any, arrays: list[Any] | None, names: Sequence[str]) -> Any:
        """A key for `value`, of which a function uses the attributes `names`.

        Arrays and floats are put into `arrays`; without it they stand for themselves.
        """
        if _is_lifted(value):
            if arrays is not None:
                arrays.append(value)
                return "array"
            is_mutable = isinstance(value, np.ndarray) and value.flags.writeable
            if self._exactly and is_mutable:
                raise _Unknown
            # By its text, which tells 0.0 and -0.0 apart.
            return repr(value) if isinstance(value, float) else Static(value)
        if isinstance(value, _PLAIN):
            return (type(value), repr(value) if isinstance(value, slice) else value)
        if isinstance(value, Variable):
            return ("variable", value.number)
        if isinstance(value, types.ModuleType | type):
            return self._namespace(value, names)
        if _is_fixed(value):
            return Static(value)
        if id(value) in self._seen:
            return ("again", self._seen[id(value)])
        if isinstance(value, types.FunctionType):
            return self._once(value, lambda: self.function(value, None))
        leaves, tree = jax.tree.flatten(value, is_leaf=is_leaf)
        if len(leaves) == 1 and leaves[0] is value:
            return self._object(value)
        return (tree, tuple(self.value(leaf, arrays, names) for leaf in leaves))

    def _namespace(self, value: Any, names: Sequence[str]) -> Any:
        """A module or class: what the function may look up in one of the user's."""
        if not self._exactly or not _is_users(value):
            return Static(value)
        inside = [(name, vars(value)[name]) for name in names if name in vars(value)]
        return self._once(
            value,
            lambda: tuple(
                (name, self.value(item, None, names))
                for name, item in inside
                if not isinstance(item, property | classmethod | staticmethod)
            ),
        )

    def _object(self, value: Any) -> Any:
        """An object of the user's: as it is now, attribute by attribute."""
        if not self._exactly:
            return Static(value)
        is_container = isinstance(value, dict | list | tuple | set | types.MethodType)
        if is_distributed(value) or is_container or not _is_users(type(value)):
            raise _Unknown
        has_slots = any(vars(cls).get("__slots__") for cls in type(value).__mro__)
        if has_slots or not hasattr(value, "__dict__"):
            raise _Unknown

        def describe() -> Any:
            methods = [
                self.value(getattr(item, "fget", item), None, ())
                for cls in type(value).__mro__
                if _is_users(cls)
                for name, item in vars(cls).items()
                if isinstance(item, types.FunctionType | property)
                and name != "__init__"
            ]
            return (self.value(dict(vars(value)), None, ()), tuple(methods))

        return (Static(value), self._once(value, describe))

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


def _has_effects(fn: types.FunctionType) -> bool:
    """Whether `fn` may do more than compute its result, as far as its text tells."""
    names = _names(fn.__code__)
    reached = [fn.__globals__.get(name) for name in names]
    is_random = any(module is np or module is random for module in reached)
    if is_random and "random" in names:
        return True
    return any(name in _EFFECTS for name in names) or _changes_things(fn.__code__)


@functools.lru_cache(maxsize=4096)
def _changes_things(code: types.CodeType) -> bool:
    """Whether `code` assigns to what is not its own, or lets something grow that is not."""
    before = None
    for op in dis.get_instructions(code):
        if op.opname in ("STORE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"):
            return True
        if op.opname == "STORE_DEREF" and op.argval in code.co_freevars:
            return True
        is_local = before is not None and before.opname.startswith("LOAD_FAST")
        if op.argval in _GROWS and not is_local:
            return True
        before = op
    return any(
        _changes_things(c) for c in code.co_consts if isinstance(c, types.CodeType)
    )


def _is_lifted(value: Any) -> bool:
    """Whether `value` becomes an argument of the compiled form."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    return isinstance(value, float) or (is_array and not isinstance(value, Tracer))


def _is_users(value: Any) -> bool:
    """Whether a class or module is neither a library's nor of Python itself."""
    home = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    root = home.split(".")[0]
    return root == "__main__" or not (
        root in _LIBRARIES or root in sys.stdlib_module_names
    )


def _is_fixed(value: Any) -> bool:
    """Whether `value` is a function of a library, which does not change."""
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, types.ModuleType | None)
    if isinstance(value, np.ufunc | np.dtype | Tracer):
        return True
    is_function = isinstance(value, types.FunctionType) or (
        callable(value) and type(value).__module__.split(".")[0] in _TRANSFORMING
    )
    home = getattr(value, "__module__", None) or type(value).__module__
    return is_function and home.split(".")[0] in _LIBRARIES


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
    if _is_lifted(value):
        return next(arrays)
    if isinstance(value, _PLAIN) or _is_fixed(value):
        return value
    leaves, tree = jax.tree.flatten(value, is_leaf=is_leaf)
    if not any(map(_is_lifted, leaves)):
        return value
    return jax.tree.unflatten(tree, [_with_arrays(leaf, arrays) for leaf in leaves])
