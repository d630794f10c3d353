"""TensorFlow 2.4, `compat.v1`: an iterator that is initialized for each epoch.

    python examples/older/compat_v1_iterator_loop.py --replicas 2 --epochs 10

A perceptron learns scikit-learn's digits. `make_dataset_iterator` splits each batch over the
replicas, `experimental_run` takes a step with the next one, and the end of an epoch is an
`OutOfRangeError`. There is no session: what was an op to run happens where it was built.
Comments name what the program called in TensorFlow.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import mirrax as mx

GLOBAL_BATCH_SIZE = 100  # 1437 images to train with: the last batch has 37
TRAINING_IMAGES = 1437
LEARNING_RATE = 0.5

Batch = tuple[jax.Array, jax.Array]


class Perceptron:  # tf.compat.v1.layers.dense, twice
    """A hidden layer and one score for each digit."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)

        def kernel(*shape: int) -> mx.Variable:  # tf.compat.v1.get_variable
            value = rng.normal(size=shape) / np.sqrt(shape[0])
            return mx.compat.v1.Variable(
                value.astype("float32"),
                aggregation=mx.compat.v1.VariableAggregation.MEAN,
            )

        self.hidden, self.scores = kernel(64, 48), kernel(48, 10)
        self.bias = mx.compat.v1.Variable(jnp.zeros(48))
        self.variables = [self.hidden, self.bias, self.scores]

    def __call__(self, images: jax.Array) -> jax.Array:
        return jnp.tanh(images @ self.hidden + self.bias) @ self.scores


def make_datasets() -> tuple[mx.data.Dataset, mx.data.Dataset]:
    """Images to train with and to test with, in global batches."""
    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype("float32")
    labels = digits.target[order].astype("int32")
    known, unknown = slice(TRAINING_IMAGES), slice(TRAINING_IMAGES, None)
    # tf.compat.v1.data.Dataset
    training = mx.data.Dataset.from_tensor_slices((images[known], labels[known]))
    testing = mx.data.Dataset.from_tensor_slices((images[unknown], labels[unknown]))
    shuffled = training.shuffle(TRAINING_IMAGES, seed=0)
    return shuffled.batch(GLOBAL_BATCH_SIZE), testing.batch(GLOBAL_BATCH_SIZE)


def train(
    strategy: mx.compat.v1.distribute.Strategy, epochs: int
) -> tuple[list[float], float]:
    """The training loss of each epoch, and the accuracy on images that were never seen."""
    training, testing = make_datasets()
    train_iterator = strategy.make_dataset_iterator(training)
    test_iterator = strategy.make_dataset_iterator(testing)
    with strategy.scope():
        model = Perceptron()

    @mx.function  # built once, as a graph was
    def train_step(inputs: Batch) -> jax.Array:
        images, labels = inputs

        def loss_fn() -> jax.Array:
            # tf.compat.v1.losses.sparse_softmax_cross_entropy(reduction=Reduction.SUM)
            losses = optax.softmax_cross_entropy_with_integer_labels(
                model(images), labels
            )
            return jnp.sum(losses) * (1.0 / GLOBAL_BATCH_SIZE)

        # tf.compat.v1.train.GradientDescentOptimizer(LEARNING_RATE).minimize(loss)
        loss, gradients = mx.value_and_grad(loss_fn, model.variables)()
        context = mx.compat.v1.distribute.get_replica_context()
        assert context is not None
        for variable, gradient in zip(
            model.variables, context.all_reduce("SUM", gradients)
        ):
            variable.assign_sub(LEARNING_RATE * gradient)
        return loss

    @mx.function
    def test_step(inputs: Batch) -> jax.Array:
        images, labels = inputs
        return (jnp.argmax(model(images), axis=-1) == labels).astype(jnp.float32)

    losses = []
    for epoch in range(epochs):
        train_iterator.initialize()  # session.run(train_iterator.initialize())
        total = 0.0
        while True:
            try:
                # train_op, once; then session.run(train_op)
                per_replica = strategy.experimental_run(train_step, train_iterator)
            except mx.errors.OutOfRangeError:  # tf.errors.OutOfRangeError
                break
            total += float(
                strategy.reduce(mx.compat.v1.distribute.ReduceOp.SUM, per_replica)
            )
        losses.append(total * GLOBAL_BATCH_SIZE / TRAINING_IMAGES)
        print(f"epoch {epoch + 1}: loss {losses[-1]:.5f}")

    test_iterator.initialize()
    right, images = 0.0, 0
    for _ in range(len(testing)):
        is_right = strategy.experimental_run(test_step, test_iterator)
        right += float(strategy.reduce("SUM", is_right, axis=0))
        images += sum(map(len, strategy.experimental_local_results(is_right)))
    return losses, right / images


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2, help="logical CPUs")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.replicas)
    # tf.compat.v1.distribute.MirroredStrategy()
    strategy = mx.compat.v1.distribute.MirroredStrategy()
    _, accuracy = train(strategy, options.epochs)
    print(f"{accuracy:.1%} of the test images are right.")
    return accuracy


if __name__ == "__main__":
    main()
