"""Assignments to a part of a variable: rows that `IndexedSlices` name, or a slice."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirrax._src.base.arraylike import ArrayLike
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.reduce_op import VariableAggregation, VariableSynchronization
from mirrax._src.base.sparse import IndexedSlices

if TYPE_CHECKING:
    from mirrax._src.state.variable import Variable


class Scatter:
    """Changes rows of a variable, by `how(array, indices, values)`."""

    def __init__(self, name: str, how: Callable[[Any, Any, Any], jax.Array]) -> None:
        self.name, self._how = name, how

    def __call__(self, old: jax.Array, slices: IndexedSlices) -> jax.Array:
        return self._how(old, slices.indices, slices.values)

    def check(self, variable: Variable) -> None:
        """Raises where what replicas scatter cannot be brought together."""
        if variable.synchronization is VariableSynchronization.ON_READ:
            raise NotImplementedError(
                f"Variable {variable.name!r} has `synchronization=ON_READ`, which does not "
                f"support `{self.name}`. Assign a whole value, or a slice, in `strategy.run`."
            )
        adds_up = (VariableAggregation.SUM, VariableAggregation.MEAN)
        if self in ORDERED and variable.aggregation in adds_up:
            raise NotImplementedError(
                f"`{self.name}` of a mirrored variable needs the aggregation NONE or "
                f"ONLY_FIRST_REPLICA; {variable.name!r} has {variable.aggregation.name}, and "
                "rows of several replicas would be added up first."
            )

    def convert(self, variable: Variable, slices: Any) -> IndexedSlices:
        """`slices` as arrays that fit the variable."""
        if not isinstance(slices, IndexedSlices):
            raise TypeError(
                f"`{self.name}` takes `mx.IndexedSlices(values, indices)` as `sparse_delta`, "
                f"got {type(slices).__name__}."
            )
        indices = jnp.asarray(slices.indices)
        if not variable.shape or not jnp.issubdtype(indices.dtype, jnp.integer):
            raise ValueError(
                f"`{self.name}` needs integer indices and a variable with rows; the indices "
                f"are {indices.dtype}, and {variable.name!r} has shape {variable.shape}."
            )
        rows = variable.shape[0]
        if not isinstance(indices, Tracer):
            known = np.asarray(indices)
            for place in np.argwhere((known < 0) | (known >= rows))[:1]:
                where = f"[{', '.join(map(str, place))}]" if known.ndim else ""
                raise ValueError(
                    f"`{self.name}` of variable {variable.name!r}: indices{where} = "
                    f"{known[tuple(place)]} is not in [0, {rows})."
                )
        values = variable.with_dtype(slices.values)
        expected = (*indices.shape, *variable.shape[1:])
        if values.shape not in ((), expected):
            raise ValueError(
                f"`{self.name}` of variable {variable.name!r}, shape {variable.shape}, with "
                f"indices of shape {indices.shape} takes values of shape {expected} or one "
                f"number, got shape {values.shape}."
            )
        # In a compiled function nobody can be told; JAX would count negative ones from the end.
        indices = jnp.where(indices < 0, jnp.int32(rows), indices)
        return IndexedSlices(jnp.broadcast_to(values, expected), indices)


def _divide(array: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
    return lax.div(array, jnp.ones_like(array).at[at].multiply(values))


ADD = Scatter("scatter_add", lambda array, at, values: array.at[at].add(values))
SUB = Scatter("scatter_sub", lambda array, at, values: array.at[at].add(-values))
MUL = Scatter("scatter_mul", lambda array, at, values: array.at[at].multiply(values))
DIV = Scatter("scatter_div", _divide)
MIN = Scatter("scatter_min", lambda array, at, values: array.at[at].min(values))
MAX = Scatter("scatter_max", lambda array, at, values: array.at[at].max(values))
UPDATE = Scatter("scatter_update", lambda array, at, values: array.at[at].set(values))
ORDERED = (MIN, MAX, UPDATE)


class SliceUpdate:
    """Changes `variable[key]`, the rest stays."""

    def __init__(self, key: Any, shape: tuple[int, ...], how: Any) -> None:
        self._key, self._shape, self._how = key, shape, how
        self.replaces = how is None

    def __call__(self, old: jax.Array, value: jax.Array) -> jax.Array:
        if self._how is not None:
            value = self._how(old[self._key], value)
        return old.at[self._key].set(value)

    def convert(self, variable: Variable, value: Any) -> jax.Array:
        """`value` with the shape of the slice."""
        array = variable.with_dtype(value)
        try:
            return jnp.broadcast_to(array, self._shape)
        except ValueError:
            raise ValueError(
                f"A value of shape {array.shape} is assigned to a slice of variable "
                f"{variable.name!r} that has shape {self._shape}: cannot broadcast it."
            ) from None


# What does not replace all of a variable.
PartUpdate = Scatter | SliceUpdate


class VariableSlice(ArrayLike):
    """`variable[key]`: the array that was there, which can also be assigned.

    >>> v = mx.Variable([1.0, 2.0, 3.0])
    >>> print(v[1:] + 1)
    [3. 4.]
    >>> v[0].assign(9.0).numpy()
    array([9., 2., 3.], dtype=float32)
    """

    __module__ = "mirrax"
    __slots__ = ("_array", "_key", "_variable")

    def __init__(self, variable: Any, key: Any) -> None:
        if not any(isinstance(k, Tracer) for k in _numbers_in(key)):
            # Raises for a number that is out of range, where JAX takes the last one.
            np.broadcast_to(0, variable.shape)[key]
        self._variable, self._key = variable, key
        self._array = variable.__jax_array__()[key]

    def __jax_array__(self) -> jax.Array:
        return self._array

    def assign(self, val: Any, name: str | None = None) -> Variable:
        """Replaces the slice by `val`, which may be broadcast. Returns the whole variable."""
        return self._update(val, None)

    def assign_add(self, delta: Any, name: str | None = None) -> Variable:
        """Adds `delta` to the slice. Returns the whole variable."""
        return self._update(delta, operator.add)

    def assign_sub(self, delta: Any, name: str | None = None) -> Variable:
        """Subtracts `delta` from the slice. Returns the whole variable."""
        return self._update(delta, operator.sub)

    def _update(self, value: Any, how: Any) -> Variable:
        update = SliceUpdate(self._key, self._array.shape, how)
        self._variable._assign(value, update)
        return self._variable

    def __repr__(self) -> str:
        return repr(self._array)

    def __str__(self) -> str:
        return str(self._array)


jax.tree_util.register_pytree_node(
    VariableSlice, lambda s: ((s._array,), None), lambda _, children: children[0]
)


def _numbers_in(key: Any) -> list[Any]:
    keys = key if isinstance(key, tuple) else (key,)
    bounds = [(k.start, k.stop, k.step) if isinstance(k, slice) else (k,) for k in keys]
    return [number for each in bounds for number in each]


def is_slice(key: Any) -> bool:
    """Whether `key` is what TensorFlow slices by: numbers, slices, `...`, None."""

    def is_place(k: Any) -> bool:
        if isinstance(k, np.ndarray | jax.Array):
            return k.ndim == 0 and k.dtype != bool
        places = int | np.integer | type(...) | None
        return isinstance(k, places) and not isinstance(k, bool)

    return all(map(is_place, _numbers_in(key)))


class InParts(ArrayLike):
    """What variables do with parts of themselves."""

    _assign: Callable[..., None]
    shape: tuple[int, ...]

    def scatter_add(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Any = None
    ) -> Any:
        """Adds `sparse_delta.values[i]` to row `sparse_delta.indices[i]`. Returns the variable.

        >>> v = mx.Variable([1.0, 2.0, 3.0])
        >>> v.scatter_add(mx.IndexedSlices(jnp.array([10.0, 20.0]), jnp.array([0, 2]))).numpy()
        array([11.,  2., 23.], dtype=float32)

        Each of several values for one row counts. In replicas they come together by the
        variable's aggregation. In a compiled function indices that are out of range do nothing.

        Args:
            sparse_delta: The values, and which rows they belong to.
            use_locking: Assignments are always atomic.
            name: Named an operation of a graph; nothing is called so here.
        """
        return self._scatter(ADD, sparse_delta)

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Any = None
    ) -> Any:
        """Subtracts from rows; see `scatter_add`."""
        return self._scatter(SUB, sparse_delta)

    def scatter_mul(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Any = None
    ) -> Any:
        """Multiplies rows; see `scatter_add`."""
        return self._scatter(MUL, sparse_delta)

    def scatter_div(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Any = None
    ) -> Any:
        """Divides rows; see `scatter_add`."""
        return self._scatter(DIV, sparse_delta)

    def scatter_min(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Any = None
    ) -> Any:
        """Takes the smaller of a row and the value; see `scatter_add`."""
        return self._scatter(MIN, sparse_delta)

    def scatter_max(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Any = None
    ) -> Any:
        """Takes the larger of a row and the value; see `scatter_add`."""
        return self._scatter(MAX, sparse_delta)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Any = None
    ) -> Any:
        """Replaces rows; see `scatter_add`."""
        return self._scatter(UPDATE, sparse_delta)

    def _scatter(self, update: Scatter, slices: IndexedSlices) -> Any:
        self._assign(slices, update)
        return self

    def __getitem__(self, key: Any) -> Any:
        """The part there; one that numbers and slices name can be assigned.

        >>> v = mx.Variable([1.0, 2.0, 3.0])
        >>> v[1:].assign_add([10.0, 20.0]).numpy()
        array([ 1., 12., 23.], dtype=float32)

        In a replica the slice of its own copy is assigned, whatever the aggregation.
        """
        if is_slice(key):
            return VariableSlice(self, key)
        return super().__getitem__(key)
