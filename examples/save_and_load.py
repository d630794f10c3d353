"""Saving and loading: to go on with training, and to use the weights elsewhere.

    python examples/save_and_load.py

It trains a small model in three ways that end with the same weights: in one go; stopped in
the middle and resumed by a new process' worth of objects, on another number of replicas; and
from weights alone, which another program could have read.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mirrax as mx

STEPS = 40
X = np.random.default_rng(0).normal(size=(500, 8)).astype("float32")
Y = np.tanh(X @ np.linspace(-1, 1, 8).astype("float32"))


class Training:
    """All that a run consists of. A checkpoint saves each of its attributes."""

    def __init__(self, strategy: mx.MirroredStrategy) -> None:
        self._strategy = strategy  # names that begin with an underscore are not saved
        dataset = mx.data.Dataset.from_tensor_slices((X, Y)).shuffle(500, seed=0)
        batches = strategy.experimental_distribute_dataset(dataset.batch(48).repeat())
        self.batches = iter(batches)
        with strategy.scope():
            self.weights = mx.Variable(jnp.zeros(8), name="weights")
            self.bias = mx.Variable(0.0, name="bias")
            self.optimizer = mx.train.Optimizer("adam", learning_rate=0.05)

    def predict(self, x: Any) -> jax.Array:
        return jnp.tanh(x @ self.weights + self.bias)

    @mx.function
    def _step(self, x: jax.Array, y: jax.Array) -> None:
        def loss() -> jax.Array:
            return mx.nn.compute_average_loss((self.predict(x) - y) ** 2)

        variables = [self.weights, self.bias]
        gradients = mx.grad(loss, variables)()
        self.optimizer.apply_gradients(zip(gradients, variables))

    def run(self, until: int) -> None:
        while self.optimizer.iterations < until:
            self._strategy.run(self._step, args=next(self.batches))


def train_and_save(directory: str, replicas: int, until: int) -> Training:
    """Goes on from the newest checkpoint in `directory`, if there is one."""
    devices = [f"CPU:{i}" for i in range(replicas)]
    training = Training(mx.MirroredStrategy(devices))
    manager = mx.train.CheckpointManager(
        mx.train.Checkpoint(training=training), directory, max_to_keep=2
    )
    found = manager.restore_or_initialize()
    start = int(training.optimizer.iterations)
    print(f"{replicas} replica(s): {'resumed' if found else 'began'} at step {start}")
    training.run(until)
    manager.save(wait=True)  # without `wait` it is written while training goes on
    return training


def export(training: Training, file: str) -> None:
    """The weights alone, for a program that knows nothing of mirrax."""
    np.savez(file, weights=training.weights.numpy(), bias=training.bias.numpy())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", help="where to save; temporary by default")
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=3)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or temporary
        in_one_go = train_and_save(os.path.join(directory, "one"), 2, STEPS)

        interrupted = os.path.join(directory, "two")
        train_and_save(interrupted, 2, STEPS // 2)
        resumed = train_and_save(
            interrupted, 3, STEPS
        )  # other objects, one more device
        np.testing.assert_allclose(
            resumed.weights.numpy(), in_one_go.weights.numpy(), atol=1e-5
        )
        newest = str(mx.train.latest_checkpoint(interrupted))
        names = sorted(n for n in mx.train.load_checkpoint(newest) if "weights" in n)
        print(f"{os.path.basename(newest)} holds {', '.join(names)}")

        file = os.path.join(directory, "weights.npz")
        export(resumed, file)
        loaded = np.load(file)
        error = np.mean((np.tanh(X @ loaded["weights"] + loaded["bias"]) - Y) ** 2)
        print(f"NumPy alone, with the exported weights: mean squared error {error:.5f}")


if __name__ == "__main__":
    main()
