"""A whole training loop with Keras 3 on JAX; see `looping.py`.

`fit` under `DataParallel`, of the rows in memory. The way `default` has JAX's own thread pool,
the other one of a safe size.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
from looping import MOMENTUM, ODD, RATE, Loop, run
from stepping import Steps


def make(loop: Loop) -> Steps:
    if loop.way != "default":
        os.environ["PJRT_NPROC"] = str(max(4, 2 * loop.replicas))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", loop.replicas)
    import keras

    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=keras.distribution.list_devices())
    )
    layers: list = [keras.Input(loop.x.shape[1:])]
    shapes = [p.shape for p in loop.parameters[::2]]
    layers += [keras.layers.Dense(n, "relu") for _, n in shapes[:-1]]
    model = keras.Sequential([*layers, keras.layers.Dense(shapes[-1][1])])
    model.set_weights(loop.parameters)
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE, MOMENTUM), crossentropy)
    most = len(loop.x) // loop.batch

    def steps(count: int) -> float:
        if loop.model == ODD:
            rows, epochs = len(loop.x), 1
        else:
            rows, epochs = min(count, most) * loop.batch, max(1, count // most)
        done = model.fit(
            loop.x[:rows],
            loop.y[:rows],
            batch_size=loop.batch,
            epochs=epochs,
            shuffle=False,
            verbose=0,
        )
        return float(done.history["loss"][-1])

    return steps


if __name__ == "__main__":
    run(make)
