"""Two function objects that compute the same: closures that are made anew every step.

`lift` sorts what a function closes over into arrays, which become arguments of its compiled
form, and everything else, which is part of the key that finds it again.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Lifted:
    """A function without the arrays it closes over.

    Attributes:
        key: Equal for functions that compute the same from the same arrays.
        arrays: What the function closes over, in order.
        call: The function, with those arrays as its first argument.
    """

    key: Any
    arrays: tuple[Any, ...]
    call: Fn


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
        lifted = lift(fn)
        key = fn if lifted is None else lifted.key
        if key not in self._functions:
            self._note_form(fn)
            self._functions[key] = self._make(fn if lifted is None else lifted.call)
        return self._functions[key], () if lifted is None else (lifted.arrays,)

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


def lift(fn: Fn) -> Lifted | None:
    """`fn` without its arrays; None if it is no function of Python's."""
    if not isinstance(fn, types.FunctionType):
        return None
    arrays: list[Any] = []
    try:
        key = _Describer().function(fn, arrays)
    except (TypeError, ValueError):  # a dict that cannot be sorted
        return None

    def call(closed_over: tuple[Any, ...], *args: Any, **kwargs: Any) -> PyTree:
        return _with_cells(fn, iter(closed_over))(*args, **kwargs)

    call.__name__ = fn.__name__
    return Lifted(key, tuple(arrays), call)


class _Describer:
    """Makes a key of what a compiled function may take for granted."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def function(self, fn: types.FunctionType, arrays: list[Any] | None) -> Any:
        """A key for `fn`; arrays it closes over are put into `arrays`."""
        cells = [
            self._value(cell.cell_contents, arrays) if _is_full(cell) else "empty"
            for cell in fn.__closure__ or ()
        ]
        defaults = self._value((fn.__defaults__, fn.__kwdefaults__), None)
        return (fn.__code__, tuple(cells), defaults)

    def _value(self, value: Any, arrays: list[Any] | None) -> Any:
        """A key for `value`; arrays and floats are put into `arrays`, if there is one."""
        if _is_lifted(value):
            if arrays is not None:
                arrays.append(value)
                return "array"
            # By its text, which tells 0.0 and -0.0 apart.
            return repr(value) if isinstance(value, float) else Static(value)
        if isinstance(value, _PLAIN):
            return (type(value), repr(value) if isinstance(value, slice) else value)
        if id(value) in self._seen:
            return ("again", self._seen[id(value)])
        if isinstance(value, types.FunctionType):
            self._seen[id(value)] = len(self._seen)
            return self.function(value, None)
        leaves, tree = jax.tree.flatten(value, is_leaf=is_leaf)
        if len(leaves) == 1 and leaves[0] is value:
            return Static(value)
        return (tree, tuple(self._value(leaf, arrays) for leaf in leaves))


def _is_lifted(value: Any) -> bool:
    """Whether `value` becomes an argument of the compiled form."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    return isinstance(value, float) or (is_array and not isinstance(value, Tracer))


def _is_full(cell: types.CellType) -> bool:
    return cell != types.CellType()  # cells compare by contents, and so do empty ones


def _with_cells(fn: types.FunctionType, arrays: Iterator[Any]) -> Fn:
    cells = [
        types.CellType(_with_arrays(cell.cell_contents, arrays))
        if _is_full(cell)
        else cell
        for cell in fn.__closure__ or ()
    ]
    rebuilt = types.FunctionType(
        fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, tuple(cells)
    )
    rebuilt.__kwdefaults__ = fn.__kwdefaults__
    return rebuilt


def _with_arrays(value: Any, arrays: Iterator[Any]) -> Any:
    if _is_lifted(value):
        return next(arrays)
    if isinstance(value, (*_PLAIN, types.FunctionType)):
        return value
    leaves, tree = jax.tree.flatten(value, is_leaf=is_leaf)
    if not any(map(_is_lifted, leaves)):
        return value
    return jax.tree.unflatten(tree, [_with_arrays(leaf, arrays) for leaf in leaves])
