"""A whole training loop with Keras 3 on JAX; see `looping.py`.

`fit` under `DataParallel`, of the rows in memory, ten steps an execution. The way `default` has JAX's own thread pool,
the other one of a safe size.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

from typing import Any

import jax
from looping import ADAM_RATE, MOMENTUM, ODD, RATE, Loop, Training, run


def make(loop: Loop) -> Training:
    if loop.way != "default":
        os.environ["PJRT_NPROC"] = str(max(4, 2 * loop.replicas))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", loop.replicas)
    import keras

    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=keras.distribution.list_devices())
    )
    model = transformer(loop) if loop.is_transformer else mlp(loop)
    model.set_weights(loop.parameters)
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = (
        keras.optimizers.Adam(ADAM_RATE)
        if loop.is_transformer
        else keras.optimizers.SGD(RATE, MOMENTUM)
    )
    model.compile(optimizer, crossentropy, steps_per_execution=10)
    most = len(loop.x) // loop.batch

    def steps(count: int) -> float:
        whole, rest = divmod(count, most)
        parts = [(len(loop.x), whole), (rest * loop.batch, 1)]
        if loop.model == ODD:
            parts = [(len(loop.x), 1)]
        loss = 0.0
        for rows, epochs in parts:
            if rows and epochs:
                x, y, size = loop.x[:rows], loop.y[:rows], loop.batch
                done = model.fit(x, y, size, epochs, shuffle=False, verbose=0)
                loss = float(done.history["loss"][-1])
        return loss

    return Training(steps)


def mlp(loop: Loop) -> Any:
    import keras

    shapes = [p.shape for p in loop.parameters[::2]]
    layers: list = [keras.Input(loop.x.shape[1:])]
    layers += [keras.layers.Dense(n, "relu") for _, n in shapes[:-1]]
    return keras.Sequential([*layers, keras.layers.Dense(shapes[-1][1])])


def transformer(loop: Loop) -> Any:
    """The transformer of `models.py`, as one layer of Keras' operations."""
    import keras
    from keras import ops

    def normalize(x: Any, gain: Any, bias: Any) -> Any:
        x = x - ops.mean(x, -1, keepdims=True)
        variance = ops.mean(ops.square(x), -1, keepdims=True)
        return x * ops.rsqrt(variance + 1e-6) * (1 + gain) + bias

    class Transformer(keras.layers.Layer):
        HEADS = 4

        def build(self, shape: Any) -> None:
            self.arrays = [self.add_weight(shape=p.shape) for p in loop.parameters]

        def call(self, tokens: Any) -> Any:
            embedding, positions, *layers, head = self.arrays
            length, width = positions.shape
            x = ops.take(embedding, tokens, axis=0) + positions
            for i in range(0, len(layers), 10):
                g1, b1, w_qkv, w_out, g2, b2, w1, c1, w2, c2 = layers[i : i + 10]
                qkv = ops.matmul(normalize(x, g1, b1), w_qkv)
                size = (-1, length, 3, self.HEADS, width // self.HEADS)
                q, k, v = ops.unstack(ops.reshape(qkv, size), axis=2)
                mixed = ops.dot_product_attention(q, k, v, is_causal=True)
                mixed = ops.reshape(mixed, (-1, length, width))
                x = x + ops.matmul(mixed, w_out)
                hidden = ops.matmul(normalize(x, g2, b2), w1) + c1
                x = x + ops.matmul(ops.gelu(hidden, approximate=True), w2) + c2
            return ops.matmul(x, head)

    return keras.Sequential(
        [keras.Input(loop.x.shape[1:], dtype="int32"), Transformer()]
    )


if __name__ == "__main__":
    run(make)
