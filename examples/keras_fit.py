"""A Keras model, trained by `fit` on several replicas, or on several workers.

    python examples/keras_fit.py --replicas 4
    mirrax run --workers 2 examples/keras_fit.py

Two spirals have to be told apart. What differs from a program for one device are three lines:
the import, the strategy, and its scope around the model. Losses and weights are those of one
device, also for the last batch of an epoch, which is smaller and does not divide.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import mirrax as mx

SIZE = 27  # of the picture


def spirals(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Points on two spirals, and which one each is on."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, count)
    turn = rng.uniform(0.3, 1, count) * 3 * np.pi
    angle = turn + label * np.pi
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1)
    points = points / (3 * np.pi) + rng.normal(0, 0.01, points.shape)
    return points.astype("float32"), label.astype("int32")


def make_strategy(replicas: int) -> mx.Strategy:
    """All replicas of all workers that `mirrax run` has started; else `replicas` of this one."""
    if "TF_CONFIG" in os.environ:
        return mx.distribute.MultiWorkerMirroredStrategy()
    mx.config.set_logical_device_configuration(cpu=replicas)
    return mx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def draw(model: Any) -> str:
    """What the model says of each point of the plane."""
    axis = np.linspace(-1, 1, SIZE, dtype="float32")
    plane = np.stack(np.meshgrid(axis, -axis), axis=-1).reshape(-1, 2)
    found = model.predict(plane, batch_size=200, verbose=0)
    rows = (found[:, 0] > 0).reshape(SIZE, SIZE)
    return "\n".join(" ".join(".#"[int(x)] for x in row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args()

    strategy = make_strategy(options.replicas)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((2,)),
                keras.layers.Dense(64, use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.Activation("tanh"),
                keras.layers.Dense(32, activation="tanh"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
        )
    x, y = spirals(1001)
    history = model.fit(x, y, batch_size=100, epochs=options.epochs, verbose=0).history
    picture = draw(model)
    resolver = strategy.cluster_resolver
    if resolver is not None and resolver.task_id not in (None, 0):
        return  # the first worker prints
    print(f"{strategy.num_replicas_in_sync} replicas")
    for epoch in range(0, options.epochs, max(1, options.epochs // 5)):
        loss, accuracy = history["loss"][epoch], history["binary_accuracy"][epoch]
        print(f"epoch {epoch + 1:3}   loss {loss:.4f}   accuracy {accuracy:6.1%}")
    print(picture)
    print(f"{history['binary_accuracy'][-1]:.1%} of the points are on the right side.")


if __name__ == "__main__":
    main()
