"""A training loop of your own, with variables, the way a TensorFlow user writes it.

    python examples/custom_loop.py --replicas 4 --epochs 10
    python examples/custom_loop.py --directory /tmp/digits --epochs 20

The second line saves a checkpoint after every epoch. Stop it and start it again: it goes on
with the next epoch, and ends with the same weights to the last bit.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import mirrax as mx

BATCH = 100  # 1437 images to train with: the last batch has 37
SIZES = (64, 128, 10)


class Classifier:
    """A multi-layer perceptron."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.weights = [
            mx.Variable(rng.normal(size=s).astype("float32") * np.sqrt(2 / s[0]))
            for s in zip(SIZES, SIZES[1:])
        ]
        self.biases = [mx.Variable(jnp.zeros(size)) for size in SIZES[1:]]
        self.variables = [*self.weights, *self.biases]

    def __call__(self, x: jax.Array) -> jax.Array:
        for weight, bias in zip(self.weights[:-1], self.biases[:-1]):
            x = jax.nn.relu(x @ weight + bias)
        return x @ self.weights[-1] + self.biases[-1]


def load_datasets() -> tuple[mx.data.Dataset, mx.data.Dataset]:
    """Images to train with and to test with, in batches."""
    data: Any = load_digits()
    images, labels = (data.data / 16).astype("float32"), data.target.astype("int32")
    training = mx.data.Dataset.from_tensor_slices((images[:1437], labels[:1437]))
    testing = mx.data.Dataset.from_tensor_slices((images[1437:], labels[1437:]))
    return training.shuffle(1437, seed=0).batch(BATCH), testing.batch(BATCH)


def train(strategy: mx.MirroredStrategy, epochs: int, directory: str) -> float:
    """The accuracy on images that were never seen."""
    training, testing = load_datasets()
    batches = iter(strategy.experimental_distribute_dataset(training.repeat()))
    test_batches = strategy.experimental_distribute_dataset(testing)

    with strategy.scope():
        model = Classifier(np.random.default_rng(0))
        optimizer = mx.train.Optimizer(optax.adam(2e-3))
        train_loss = mx.metrics.Mean(name="train_loss")
        test_accuracy = mx.metrics.SparseCategoricalAccuracy(name="test_accuracy")
        epoch = mx.Variable(0)

    @mx.function
    def train_step(images: jax.Array, labels: jax.Array) -> None:
        def loss_fn() -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(
                model(images), labels
            )
            train_loss.update_state(losses)
            # Divided by the examples of all replicas, however many there are.
            return mx.nn.compute_average_loss(losses)

        gradients = mx.grad(loss_fn, model.variables)()
        optimizer.apply_gradients(zip(gradients, model.variables))

    @mx.function
    def test_step(images: jax.Array, labels: jax.Array) -> None:
        test_accuracy.update_state(labels, model(images))

    # With `batches` the order of the images is saved, too.
    checkpoint = mx.train.Checkpoint(
        model=model, optimizer=optimizer, batches=batches, epoch=epoch
    )
    manager = mx.train.CheckpointManager(checkpoint, directory, max_to_keep=3)
    restored = manager.restore_or_initialize()
    print(f"Restored {restored}." if restored else "Starting from scratch.")

    while epoch < epochs:
        for _ in range(len(training)):
            strategy.run(train_step, args=next(batches))
        epoch.assign_add(1)
        manager.save()
        print(f"epoch {int(epoch)}: loss {train_loss.result():.4f}")
        train_loss.reset_state()

    manager.sync()
    for batch in test_batches:
        strategy.run(test_step, args=batch)
    return float(test_accuracy.result())


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2, help="logical CPUs")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--directory", help="where checkpoints are kept")
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.replicas)
    strategy = mx.MirroredStrategy()  # all accelerators, or the CPUs
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or temporary
        accuracy = train(strategy, options.epochs, directory)
    print(f"{accuracy:.1%} of the test images are right.")
    return accuracy


if __name__ == "__main__":
    main()
