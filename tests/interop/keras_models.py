"""Keras models and their training, the same on one device and on many."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from interop import libraries

keras = libraries.keras()
ROWS = 40


def data(rows: int = ROWS, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 6)), rng.normal(size=(ROWS, 3))
    return x[:rows].astype(dtype), y[:rows].astype(dtype)


def squared(y: Any, prediction: Any) -> jax.Array:
    """The squared error; Keras' own is computed in float32 also where all else is not."""
    return jnp.mean((y - prediction) ** 2, axis=-1)


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Has JAX and Keras compute in float64."""
    with jax.enable_x64(True):
        _set_precision("float64")
        try:
            yield
        finally:
            _set_precision("float32")


def _set_precision(name: str) -> None:
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)


def exact_model() -> Any:
    """In float64, without anything that Keras computes in float32."""
    keras.utils.set_random_seed(0)
    layer, kind = keras.layers.Dense, "float64"
    model = keras.Sequential(
        [
            keras.layers.Input((6,), dtype=kind),
            layer(7, activation=jnp.tanh, dtype=kind),
            layer(3, dtype=kind),
        ]
    )
    metric = keras.metrics.MeanMetricWrapper(squared, name="squared", dtype=kind)
    model.compile(keras.optimizers.SGD(0.1), squared, metrics=[metric])
    return model


def usual_model() -> Any:
    """BatchNorm, Dropout and Adam; the layer before BatchNorm has no bias, for Adam would
    divide a gradient of nearly nothing by nearly nothing."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def train(model: Any, x: Any, y: Any = None, **options: Any) -> list[Any]:
    """History, weights, optimizer, evaluation and predictions after two epochs."""
    keras.utils.set_random_seed(1)
    given = {"epochs": 2, "verbose": 0, **options}
    if isinstance(x, np.ndarray):
        given.setdefault("batch_size", 16)
    history = model.fit(x, y, **given).history
    checked = data(dtype=model.dtype)
    asked = {"batch_size": 16, "verbose": 0}
    return [
        history,
        model.get_weights(),
        [np.asarray(v) for v in model.optimizer.variables],
        model.evaluate(*checked, **asked),
        model.predict(checked[0], **asked),
    ]


def farthest(found: Any, expected: Any) -> float:
    """The largest difference anywhere in two structures."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)
