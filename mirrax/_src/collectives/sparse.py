"""`IndexedSlices`: a gradient of a few rows, reduced without becoming dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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

    def __init__(
        self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None
    ) -> None:
        self.values = values
        self.indices = indices
        self.dense_shape = _as_shape(dense_shape)

    def to_dense(self) -> jax.Array:
        """The larger array, with zeros where no row belongs."""
        if self.dense_shape is None:
            raise ValueError(
                "`to_dense` needs `dense_shape`: pass it to IndexedSlices(values, indices, "
                "dense_shape)."
            )
        values = jnp.asarray(self.values)
        return (
            jnp.zeros(self.dense_shape, values.dtype)
            .at[jnp.asarray(self.indices)]
            .add(values)
        )

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, "
            f"dense_shape={self.dense_shape})"
        )


def _as_shape(shape: Sequence[int] | None) -> tuple[int, ...] | None:
    if shape is None:
        return None
    # A shape given as an array must be a number even while something is traced.
    with jax.ensure_compile_time_eval():
        return tuple(int(n) for n in np.asarray(shape))


jax.tree_util.register_pytree_node(
    IndexedSlices,
    lambda s: ((s.values, s.indices), s.dense_shape),
    lambda shape, children: IndexedSlices(*children, dense_shape=shape),
)
