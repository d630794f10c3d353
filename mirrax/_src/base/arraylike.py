"""Objects that work wherever an array does, and one that says why it does not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np


class ArrayLike:
    """Behaves as the array that `__jax_array__` returns."""

    # So that NumPy arrays on the left leave the operator to us.
    __array_priority__ = 100
    __slots__ = ()

    def __jax_array__(self) -> jax.Array:
        raise AssertionError("a subclass says which array it stands for")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # A copy, because the buffer behind it may be reused by the next compiled step.
        return np.array(self.__jax_array__(), dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            try:
                return getattr(self.__jax_array__(), name)
            except AttributeError:
                pass
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
        )

    def __format__(self, spec: str) -> str:
        return format(self.__jax_array__(), spec) if spec else str(self)

    __hash__ = object.__hash__

    if TYPE_CHECKING:  # installed below, one line each instead of a method each

        def _operator(self, *args: Any) -> Any: ...

        __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __pow__ = _operator
        __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = _operator
        __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __getitem__ = _operator
        __float__: Callable[..., float]
        __int__: Callable[..., int]
        __bool__: Callable[..., bool]
        __index__: Callable[..., int]
        __len__: Callable[..., int]
        __iter__: Callable[..., Iterator[jax.Array]]


class NotOneArray:
    """Says what to do with a value that has a part for each replica."""

    __slots__ = ()
    values: tuple[Any, ...]

    def _why(self) -> str:
        return (
            f"A PerReplica value has a part for each replica, {len(self.values)} here, "
            "and is used as one number or array. Combine the parts, `strategy.reduce('SUM', "
            "value, axis=None)` or `strategy.gather(value, axis=0)`, or look at each: "
            "`strategy.experimental_local_results(value)`."
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(self._why())

    # Not `__len__` and `__iter__`, which would make it a collection to others.
    __float__ = __int__ = __complex__ = __array__ = __getitem__ = _refuse
    __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __pow__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = __rpow__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __round__ = _refuse

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else str(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"'PerReplica' object has no attribute {name!r}")
        raise AttributeError(self._why())


def _array(value: Any) -> Any:
    return value.__jax_array__() if isinstance(value, ArrayLike) else value


def _install(name: str, apply: Callable[..., Any], reflected: bool = False) -> None:
    def method(self: ArrayLike, *args: Any) -> Any:
        mine, others = self.__jax_array__(), map(_array, args)
        return apply(*others, mine) if reflected else apply(mine, *others)

    method.__name__ = name
    setattr(ArrayLike, name, method)


_BINARY = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift".split()
for _name in _BINARY:
    _apply = getattr(operator, _name, None) or getattr(operator, _name + "_")
    _install(f"__{_name}__", _apply)
    _install(f"__r{_name}__", _apply, reflected=True)
for _name in "eq ne lt le gt ge neg pos abs invert getitem index".split():
    _install(f"__{_name}__", getattr(operator, _name))
for _apply in (bool, int, float, complex, divmod, round, len, iter):
    _install(f"__{_apply.__name__}__", _apply)
