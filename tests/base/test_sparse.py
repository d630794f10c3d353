"""`IndexedSlices` tells what it is a part of."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import mirrax as mx


def test_its_shape_is_that_of_the_larger_array() -> None:
    slices = mx.IndexedSlices(jnp.ones((2, 3)), np.array([0, 2]), np.array([4, 3]))
    assert slices.shape == slices.dense_shape == (4, 3)
    assert slices.dtype == jnp.float32
    assert slices.to_dense().sum() == 6


def test_a_shape_that_is_not_known() -> None:
    assert mx.IndexedSlices(jnp.ones((2, 3), "int32"), np.array([0, 2])).shape is None
