"""Data and model of `main.py`, under the names that they have in TensorFlow's tutorial.

The images are scikit-learn's bundled digits, 1797 real 8 x 8 scans: no download.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax import lax
from sklearn.datasets import load_digits

import mirrax as mx


def mnist_dataset() -> mx.data.Dataset:
    """Images and labels without end, each time in another order."""
    digits: Any = load_digits()
    x_train = (digits.images / 16).astype("float32")
    y_train = digits.target.astype("int32")
    # With a seed each run meets the same orders, and can be compared with another one.
    return (
        mx.data.Dataset.from_tensor_slices((x_train, y_train))
        .shuffle(len(x_train), seed=0)
        .repeat()
    )


def dataset_fn(
    global_batch_size: int, input_context: mx.distribute.InputContext
) -> mx.data.Dataset:
    """One worker's part of the images, in batches for one replica."""
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    dataset = mnist_dataset()
    dataset = dataset.shard(
        input_context.num_input_pipelines, input_context.input_pipeline_id
    )
    return dataset.batch(batch_size)


class CNN:
    """A convolution and two dense layers."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)

        def layer(name: str, *shape: int) -> tuple[mx.Variable, mx.Variable]:
            scale = math.sqrt(2 / math.prod(shape[:-1]))
            kernel = (rng.normal(size=shape) * scale).astype("float32")
            bias = np.zeros(shape[-1], "float32")
            return mx.Variable(kernel, name=name), mx.Variable(bias, name=f"{name}_b")

        self.conv = layer("conv", 3, 3, 1, 32)
        self.dense = layer("dense", 6 * 6 * 32, 128)
        self.logits = layer("logits", 128, 10)

    @property
    def trainable_variables(self) -> list[mx.Variable]:
        return [*self.conv, *self.dense, *self.logits]

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, bias = self.conv
        x = lax.conv_general_dilated(
            x[..., None],
            kernel.read_value(),
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = jax.nn.relu(x + bias).reshape(len(x), 6 * 6 * 32)
        x = jax.nn.relu(x @ self.dense[0] + self.dense[1])
        return x @ self.logits[0] + self.logits[1]


def build_cnn_model() -> CNN:
    """A new model; made in a scope, its variables are on all replicas."""
    return CNN()
