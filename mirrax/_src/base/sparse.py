"""`IndexedSlices`: a gradient of a few rows, reduced without becoming dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.base.jax_compat import Tracer


class IndexedSlices:
    """Rows `values[i]` that belong at position `indices[i]` of a larger array.

    >>> s = mx.IndexedSlices(jnp.ones((2, 3)), jnp.array([0, 2]), dense_shape=(4, 3))
    >>> s.to_dense()[:, 0]
    Array([1., 0., 1., 0.], dtype=float32)

    Args:
        values: The rows.
        indices: Where they belong; an index may appear several times, its rows add up.
        dense_shape: The shape of the larger array, where it is known.
    """

    __module__ = "mirrax"

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        self.values = values
        self.indices = indices
        self.dense_shape = _as_shape(dense_shape)

    @property
    def dtype(self) -> Any:
        """That of the rows."""
        return self.values.dtype

    @property
    def shape(self) -> Any:
        """The shape of the larger array; None where it is not known."""
        return self.dense_shape

    def to_dense(self) -> jax.Array:
        """The larger array, with zeros where no row belongs."""
        if not isinstance(self.dense_shape, tuple):
            raise ValueError(
                f"`to_dense` needs `dense_shape` as numbers, got {self.dense_shape!r}: pass it to "
                "IndexedSlices(values, indices, dense_shape)."
            )
        values = jnp.asarray(self.values)
        zeros = jnp.zeros(self.dense_shape, values.dtype)
        return zeros.at[jnp.asarray(self.indices)].add(values)

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, "
            f"dense_shape={self.dense_shape})"
        )


def _as_shape(shape: Any) -> Any:
    """A tuple of numbers; a shape that is being traced stays what it is."""
    is_known = isinstance(shape, Sequence | np.ndarray | jax.Array)
    if not is_known or isinstance(shape, Tracer):
        return shape
    return tuple(int(n) for n in np.asarray(shape))


def _flatten(slices: IndexedSlices) -> tuple[tuple[Any, ...], Any]:
    if isinstance(slices.dense_shape, tuple | None):
        return (slices.values, slices.indices), slices.dense_shape
    return (slices.values, slices.indices, slices.dense_shape), None


def _unflatten(shape: Any, children: Sequence[Any]) -> IndexedSlices:
    self = object.__new__(IndexedSlices)
    self.values, self.indices = children[:2]
    self.dense_shape = children[2] if len(children) == 3 else shape
    return self


jax.tree_util.register_pytree_node(IndexedSlices, _flatten, _unflatten)
