"""Two function objects that compute the same: closures that are made anew every step.

`fingerprint` sorts what a function can reach by name into arrays, which become arguments
of its compiled form, and everything else, which is part of the key that finds it again.
"""

from __future__ import annotations

import dis
import functools
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


def lift(fn: Callable[..., PyTree]) -> Lifted | None:
    """`fn` without its arrays; None if it reaches objects that may change unseen."""
    if not isinstance(fn, types.FunctionType) or _assigns_outer_names(fn.__code__):
        return None
    try:
        key, arrays = _describe_cells(fn, {})
        key = (key, _describe_globals(fn, {}))
    except _Unknown:
        return None
    return Lifted(key, tuple(arrays), lambda new: _with_cells(fn, iter(new)))


@functools.lru_cache(maxsize=4096)
def _assigns_outer_names(code: types.CodeType) -> bool:
    return any(
        op.opname == "STORE_GLOBAL"
        or (op.opname == "STORE_DEREF" and op.argval in code.co_freevars)
        for op in dis.get_instructions(code)
    )


def _describe_cells(
    fn: types.FunctionType, seen: dict[int, int]
) -> tuple[Any, list[Any]]:
    arrays: list[Any] = []
    parts = []
    for cell in fn.__closure__ or ():
        try:
            parts.append(_describe(cell.cell_contents, arrays, seen))
        except ValueError:
            parts.append("empty")
    defaults = _describe((fn.__defaults__, fn.__kwdefaults__), None, seen)
    return (fn.__code__, tuple(parts), defaults), arrays


def _describe_globals(fn: types.FunctionType, seen: dict[int, int]) -> Any:
    parts = []
    names = list(fn.__code__.co_names)
    for const in fn.__code__.co_consts:
        if isinstance(const, types.CodeType):
            names += const.co_names
    for name in names:
        if name in fn.__globals__:
            parts.append((name, _describe(fn.__globals__[name], None, seen)))
    return tuple(parts)


def _describe(value: Any, arrays: list[Any] | None, seen: dict[int, int]) -> Any:
    """A key for `value`; arrays are put into `arrays`, or taken as they are without it."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        if arrays is None or isinstance(value, Tracer):
            return Static(value)
        arrays.append(value)
        return "array"
    if isinstance(value, _PLAIN):
        return (type(value), value if not isinstance(value, slice) else repr(value))
    if isinstance(value, _FIXED) or isinstance(value, Variable):
        return Static(value)
    if isinstance(value, types.FunctionType):
        if value.__module__ and value.__module__.split(".")[0] in _LIBRARIES:
            return Static(value)
        if id(value) in seen:
            return ("again", seen[id(value)])
        seen[id(value)] = len(seen)
        key, inner = _describe_cells(value, seen)
        return (key, tuple(map(Static, inner)), _describe_globals(value, seen))
    if is_distributed(value) or len(seen) > _MOST_OBJECTS:
        raise _Unknown
    if _is_library_callable(value):
        return Static(value)
    if id(value) in seen:
        return ("again", seen[id(value)])
    leaves, tree = jax.tree.flatten(value, is_leaf=is_leaf)
    if len(leaves) == 1 and leaves[0] is value:
        # An object of the user's: as it is now, attribute by attribute.
        if type(value).__module__.split(".")[0] in sys.stdlib_module_names - {
            "__main__"
        }:
            raise _Unknown
        seen[id(value)] = len(seen)
        attributes = getattr(value, "__dict__", None)
        if attributes is None:
            raise _Unknown
        return (Static(value), _describe(dict(attributes), None, seen))
    return (tree, tuple(_describe(leaf, arrays, seen) for leaf in leaves))


def _is_library_callable(value: Any) -> bool:
    return callable(value) and type(value).__module__.split(".")[0] in _LIBRARIES


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
