"""Two function objects that compute the same: closures that are made anew every step.

What a function closes over is sorted into arrays, which become arguments of its compiled
form, and everything else, which is part of the key that finds it again.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from mirrax._src.base.errors import warn_user
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.values import Fn, PyTree, is_leaf
from mirrax._src.engines.arguments import Static

_Function = TypeVar("_Function")
_WARN_AFTER_FORMS = 10
_PLAIN = (int, complex, bool, str, bytes, type(None), types.EllipsisType, slice)


class FunctionCache(Generic[_Function]):
    """The compiled forms of functions that host code passes on, again and again.

    A function that is defined inside a loop is a new object every time; it is recognised by
    its code and what it closes over.
    """

    def __init__(self, make: Callable[[Fn], _Function]) -> None:
        self._make = make
        self._functions: dict[Any, _Function] = {}
        self._forms: Counter[Any] = Counter()

    def compiled(self, fn: Fn) -> tuple[_Function, tuple[Any, ...]]:
        """The compiled form of `fn`, and the arrays to give it before the arguments."""
        key, arrays = _sort_closure(fn)
        if key not in self._functions:
            self._note_form(fn)
            self._functions[key] = self._make(fn if arrays is None else _lifted(fn))
        return self._functions[key], () if arrays is None else (arrays,)

    def _note_form(self, fn: Fn) -> None:
        """Counts the compiled forms of one piece of code; when there are many, warns."""
        code = getattr(fn, "__code__", None)
        self._forms[code] += 1
        if code is not None and self._forms[code] % _WARN_AFTER_FORMS == 0:
            warn_user(
                f"{code.co_name!r} ({Path(code.co_filename).name}:{code.co_firstlineno}) has "
                f"been compiled {self._forms[code]} times, because what it closes over was "
                "different each time. Each time is slow: pass what changes as an argument, "
                "or keep it in a variable."
            )


def _sort_closure(fn: Fn) -> tuple[Any, tuple[Any, ...] | None]:
    """A key, equal for functions that compute the same from the same arrays; the arrays."""
    arrays: list[Any] = []
    try:
        if isinstance(fn, types.FunctionType):
            return _describe_function(fn, arrays, {}), tuple(arrays)
    except (TypeError, ValueError):  # a dict that cannot be sorted
        pass
    return fn, None


def _describe_function(
    fn: types.FunctionType, arrays: list[Any] | None, seen: dict[int, int]
) -> Any:
    """A key for `fn`; arrays and floats that it closes over are put into `arrays`, if any."""
    cells = [
        _describe(cell.cell_contents, arrays, seen) if _is_full(cell) else "empty"
        for cell in fn.__closure__ or ()
    ]
    defaults = _describe((fn.__defaults__, fn.__kwdefaults__), None, seen)
    return (fn.__code__, tuple(cells), defaults)


def _describe(value: Any, arrays: list[Any] | None, seen: dict[int, int]) -> Any:
    def describe(leaf: Any) -> Any:
        if _is_lifted(leaf):
            if arrays is not None:
                arrays.append(leaf)
                return "array"
            # By its text, which tells 0.0 and -0.0 apart.
            return repr(leaf) if isinstance(leaf, float) else Static(leaf)
        if isinstance(leaf, _PLAIN):
            return (type(leaf), repr(leaf) if isinstance(leaf, slice) else leaf)
        if not isinstance(leaf, types.FunctionType):
            return Static(leaf)
        if id(leaf) in seen:
            return ("again", seen[id(leaf)])
        seen[id(leaf)] = len(seen)
        return _describe_function(leaf, None, seen)

    leaves, tree = jax.tree.flatten(value, is_leaf=is_leaf)
    return (tree, tuple(map(describe, leaves)))


def _lifted(fn: Any) -> Fn:
    """`fn`, which takes the arrays that it closes over as its first argument."""

    def call(closed_over: tuple[Any, ...], *args: Any, **kwargs: Any) -> PyTree:
        arrays = iter(closed_over)
        cells = tuple(_refilled(cell, arrays) for cell in fn.__closure__ or ())
        rebuilt = types.FunctionType(
            fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells
        )
        rebuilt.__kwdefaults__ = fn.__kwdefaults__
        return rebuilt(*args, **kwargs)

    call.__name__ = fn.__name__
    return call


def _refilled(cell: types.CellType, arrays: Iterator[Any]) -> types.CellType:
    if not _is_full(cell):
        return cell
    leaves, tree = jax.tree.flatten(cell.cell_contents, is_leaf=is_leaf)
    if not any(map(_is_lifted, leaves)):  # the very object, which `fn` may change
        return types.CellType(cell.cell_contents)
    new = [next(arrays) if _is_lifted(leaf) else leaf for leaf in leaves]
    return types.CellType(tree.unflatten(new))


def _is_lifted(value: Any) -> bool:
    """Whether `value` becomes an argument of the compiled form."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    return isinstance(value, float) or (is_array and not isinstance(value, Tracer))


def _is_full(cell: types.CellType) -> bool:
    return cell != types.CellType()  # cells compare by contents, and so do empty ones
