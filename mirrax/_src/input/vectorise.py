"""One call of a user's function for many rows: `Lanes` is an array that stands for one row.

A function that is written for one element is called with `Lanes`, which look like that
element and hold all rows. NumPy's element-wise functions, casts, reshapes, indexing and
reductions then work on all rows at once and give bit by bit what they give row by row.
Whatever else the function does (look at a value, call another library, use one row to
index) raises `CannotVectorise`, and the function is called row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mirrax._src.input.blocks import CannotVectorise
from mirrax._src.input.structure import (
    PyTree,
    leaves_of,
    map_leaves,
    to_array,
    tuple_for_list,
)


def vectorise(fn: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
    """`fn` of an element as a function of stacked elements.

    The result raises `CannotVectorise` if `fn` cannot be called with many rows at once.
    """

    def fn_of_rows(stacked: PyTree) -> PyTree:
        count = len(leaves_of(stacked)[0])
        try:
            result = tuple_for_list(fn(map_leaves(Lanes.of, stacked)))
            return map_leaves(lambda leaf: _collect(leaf, count), result)
        except Exception as error:  # the row-by-row call raises it again, if it is one
            raise CannotVectorise from error

    return fn_of_rows


def _collect(leaf: Any, count: int) -> np.ndarray:
    if isinstance(leaf, Lanes):
        return leaf.array
    if isinstance(leaf, list) and any(isinstance(part, Lanes) for part in leaf):
        first = leaf[0]
        for part in leaf:
            is_like = isinstance(part, Lanes) and part.dtype == first.dtype
            if not is_like or part.shape != first.shape:
                raise CannotVectorise
        return np.stack([part.array for part in leaf], axis=1)
    return _repeat(to_array(leaf), count)


def _repeat(value: Any, count: int) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind in "USO":
        raise CannotVectorise
    return np.repeat(array[None], count, axis=0)


class Lanes(NDArrayOperatorsMixin):
    """Many rows that look like one of them: `array` has one axis more than `shape` says."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @classmethod
    def of(cls, array: np.ndarray) -> Lanes:
        # Complex numbers: NumPy computes with scalars in another way than with arrays.
        if array.dtype.hasobject or array.dtype.kind == "c":
            raise CannotVectorise
        return cls(np.ascontiguousarray(array))

    # What one row looks like ---------------------------------------------------------

    @property
    def __class__(self) -> Any:  # for `isinstance(x, np.ndarray)` in users' functions
        return np.ndarray if self.shape else self.dtype.type

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[1:]

    @property
    def ndim(self) -> int:
        return self.array.ndim - 1

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def __len__(self) -> int:
        if not self.shape:
            raise CannotVectorise
        return self.shape[0]

    def _needs_a_row(self, *args: Any, **kwargs: Any) -> Any:
        raise CannotVectorise

    __bool__ = __int__ = __float__ = __complex__ = __index__ = _needs_a_row
    __array__ = __iter__ = __hash__ = _needs_a_row  # type: ignore[assignment]
    __repr__ = __str__ = __format__ = _needs_a_row  # type: ignore[assignment]
    __setitem__ = __iadd__ = __isub__ = __imul__ = __itruediv__ = _needs_a_row
    __ifloordiv__ = __imod__ = __ipow__ = __iand__ = __ior__ = __ixor__ = _needs_a_row
    __imatmul__ = __ilshift__ = __irshift__ = _needs_a_row

    # What can be done with all rows at once --------------------------------------------

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any
    ) -> Any:
        known = kwargs.keys() <= {"dtype", "casting"}
        refused = ufunc.signature is not None or ufunc in (np.power, np.float_power)
        if method != "__call__" or refused or not known:
            raise CannotVectorise
        if ufunc not in _EXACT and not all(map(_is_contiguous, inputs)):
            raise CannotVectorise  # NumPy's loops for strides may give other last bits
        rank = max(_rank(value) for value in inputs)
        result = ufunc(*(_aligned(value, rank) for value in inputs), **kwargs)
        return tuple(map(Lanes, result)) if ufunc.nout > 1 else Lanes(result)

    def __pow__(self, exponent: Any) -> Lanes:
        # NumPy has a way of its own for `x ** 2`, and another one for scalars.
        is_plain = isinstance(exponent, int | float) and self.shape
        if not is_plain or not _is_contiguous(self):
            raise CannotVectorise
        return Lanes(self.array**exponent)

    def __rpow__(self, base: Any) -> Lanes:
        raise CannotVectorise

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        known = _FUNCTIONS.get(func)
        if known is None:
            raise CannotVectorise
        return known(*args, **kwargs)

    def __getitem__(self, key: Any) -> Lanes:
        keys = key if isinstance(key, tuple) else (key,)
        for part in keys:
            is_whole = isinstance(part, int | slice | type(None) | type(Ellipsis))
            if not is_whole or isinstance(part, bool):
                raise CannotVectorise
        return Lanes(self.array[(slice(None), *keys)])

    def astype(self, dtype: Any) -> Lanes:
        return Lanes(self.array.astype(dtype))

    def copy(self) -> Lanes:
        return Lanes(self.array.copy())

    def reshape(self, *shape: Any) -> Lanes:
        if len(shape) == 1 and isinstance(shape[0], tuple | list):
            shape = tuple(shape[0])
        rest = [length for length in shape if length != -1]
        if len(rest) < len(shape):
            known = int(np.prod(rest))
            if len(shape) - len(rest) > 1 or not known or self.size % known:
                raise CannotVectorise
            shape = tuple(self.size // known if n == -1 else n for n in shape)
        if int(np.prod(shape)) != self.size:
            raise CannotVectorise
        return Lanes(self.array.reshape(len(self.array), *shape))

    def ravel(self) -> Lanes:
        return self.reshape(self.size)

    flatten = ravel

    def clip(self, a_min: Any = None, a_max: Any = None) -> Any:
        return np.clip(self, a_min, a_max)

    def sum(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
        return _reduce(np.add.reduce, self, axis, keepdims, dtype=dtype)

    def max(self, axis: Any = None, keepdims: bool = False) -> Any:
        return _reduce(np.maximum.reduce, self, axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Any:
        return _reduce(np.minimum.reduce, self, axis, keepdims)

    def mean(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
        return _reduce(np.mean, self, axis, keepdims, dtype=dtype)


# Functions with one right answer, whatever loop NumPy takes.
_EXACT = {
    getattr(np, name)
    for name in """add subtract multiply true_divide floor_divide remainder fmod negative positive
    absolute fabs sqrt square sign equal not_equal less less_equal greater greater_equal
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor invert
    left_shift right_shift floor ceil rint trunc minimum maximum fmin fmax isnan isinf isfinite
    signbit copysign""".split()
}


def _is_contiguous(value: Any) -> bool:
    array = value.array if isinstance(value, Lanes) else value
    return not isinstance(array, np.ndarray) or array.flags.c_contiguous


def _rank(value: Any) -> int:
    return value.ndim if isinstance(value, Lanes) else np.ndim(value)


def _aligned(value: Any, rank: int) -> Any:
    """The operand with its rows in front of `rank` axes, so that only rows meet rows."""
    if not isinstance(value, Lanes):
        return value
    array = value.array
    missing = (1,) * (rank - value.ndim)
    return array.reshape(len(array), *missing, *value.shape) if missing else array


def _reduce(
    reduce: Any, lanes: Lanes, axis: Any, keepdims: bool, **kwargs: Any
) -> Lanes:
    array = lanes.array
    if not _is_contiguous(array):
        raise CannotVectorise  # sums follow the order of memory
    if axis is None and not keepdims:
        # As NumPy sums a whole array: in the order of its memory.
        return Lanes(reduce(array.reshape(len(array), -1), axis=1, **kwargs))
    if not isinstance(axis, int) or not -lanes.ndim <= axis < lanes.ndim:
        raise CannotVectorise
    return Lanes(reduce(array, axis=axis % lanes.ndim + 1, keepdims=keepdims, **kwargs))


def _where(condition: Any, *branches: Any) -> Lanes:
    if len(branches) != 2:
        raise CannotVectorise
    values = (condition, *branches)
    rank = max(_rank(value) for value in values)
    return Lanes(np.where(*(_aligned(value, rank) for value in values)))


def _clip(a: Any, a_min: Any = None, a_max: Any = None) -> Lanes:
    values = (a, a_min, a_max)
    if not isinstance(a, Lanes) or any(_rank(v) > a.ndim for v in values):
        raise CannotVectorise
    return Lanes(np.clip(*(_aligned(value, a.ndim) for value in values)))


def _expand_dims(a: Lanes, axis: int) -> Lanes:
    if not isinstance(axis, int) or not -a.ndim <= axis + 1 <= a.ndim + 1:
        raise CannotVectorise
    return Lanes(np.expand_dims(a.array, axis + 1 if axis >= 0 else axis))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.where: _where,
    np.clip: _clip,
    np.expand_dims: _expand_dims,
    np.reshape: lambda a, shape: a.reshape(shape),
    np.ravel: lambda a: a.ravel(),
    np.copy: lambda a: a.copy(),
    np.sum: lambda a, axis=None, dtype=None, keepdims=False: a.sum(
        axis, dtype, keepdims
    ),
    np.mean: lambda a, axis=None, dtype=None, keepdims=False: a.mean(
        axis, dtype, keepdims
    ),
    np.max: lambda a, axis=None, keepdims=False: a.max(axis, keepdims),
    np.min: lambda a, axis=None, keepdims=False: a.min(axis, keepdims),
    np.zeros_like: lambda a, dtype=None: Lanes(np.zeros_like(a.array, dtype)),
    np.ones_like: lambda a, dtype=None: Lanes(np.ones_like(a.array, dtype)),
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: a.ndim,
}
