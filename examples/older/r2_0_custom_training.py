"""TensorFlow 2.0: the custom training loop of the tutorials, with `experimental_run_v2`.

    python examples/older/r2_0_custom_training.py --replicas 2 --epochs 6

A convolutional network learns scikit-learn's digits. Training and testing have metrics of their
own, every second epoch is saved, and at the end the newest checkpoint is restored into a model
that knows nothing of strategies. Comments name what the program called in TensorFlow.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits

import mirrax as mx

GLOBAL_BATCH_SIZE = 96
TRAINING_IMAGES = 1440  # leaves 357 images to test with: the last batch has 69


class Model:  # tf.keras.Sequential([Conv2D, Flatten, Dense, Dense])
    """A convolution and two dense layers."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)

        def layer(*shape: int) -> tuple[mx.Variable, mx.Variable]:
            kernel = rng.normal(size=shape) * math.sqrt(2 / math.prod(shape[:-1]))
            bias = np.zeros(shape[-1], "float32")
            return mx.Variable(kernel.astype("float32")), mx.Variable(bias)

        self.convolution = layer(3, 3, 1, 16)
        self.hidden = layer(3 * 3 * 16, 64)
        self.logits = layer(64, 10)

    @property
    def trainable_variables(self) -> list[mx.Variable]:
        return [*self.convolution, *self.hidden, *self.logits]

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, bias = self.convolution
        layout = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(
            x, kernel.read_value(), (2, 2), "VALID", dimension_numbers=layout
        )
        x = jax.nn.relu(x + bias).reshape(len(x), 3 * 3 * 16)
        x = jax.nn.relu(x @ self.hidden[0] + self.hidden[1])
        return x @ self.logits[0] + self.logits[1]


def make_datasets() -> tuple[mx.data.Dataset, mx.data.Dataset]:
    """Images to train with and to test with, in global batches."""
    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[..., None] / 16).astype("float32")
    labels = digits.target.astype("int32")
    known, unknown = order[:TRAINING_IMAGES], order[TRAINING_IMAGES:]
    # tf.data.Dataset, call for call
    train = mx.data.Dataset.from_tensor_slices((images[known], labels[known]))
    test = mx.data.Dataset.from_tensor_slices((images[unknown], labels[unknown]))
    shuffled = train.shuffle(TRAINING_IMAGES, seed=0)
    return shuffled.batch(GLOBAL_BATCH_SIZE), test.batch(GLOBAL_BATCH_SIZE)


def train(
    strategy: mx.distribute.Strategy, epochs: int, directory: str
) -> tuple[list[float], float]:
    """The training loss of each epoch, and the accuracy on images that were never seen."""
    train_dataset, test_dataset = make_datasets()
    train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
    test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)

    with strategy.scope():
        model = Model()
        optimizer = mx.train.Optimizer(optax.adam(3e-3))  # tf.keras.optimizers.Adam
        # tf.keras.metrics
        test_loss = mx.metrics.Mean(name="test_loss")
        train_accuracy = mx.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_accuracy = mx.metrics.SparseCategoricalAccuracy(name="test_accuracy")
    checkpoint = mx.train.Checkpoint(optimizer=optimizer, model=model)  # tf.train

    def loss_object(labels: jax.Array, predictions: jax.Array) -> jax.Array:
        # tf.keras.losses.SparseCategoricalCrossentropy(reduction=Reduction.NONE)
        return optax.softmax_cross_entropy_with_integer_labels(predictions, labels)

    def train_step(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        images, labels = inputs

        def compute_loss() -> tuple[jax.Array, jax.Array]:  # with tf.GradientTape()
            predictions = model(images)
            losses = loss_object(labels, predictions)
            # tf.nn.compute_average_loss
            loss = mx.nn.compute_average_loss(
                losses, global_batch_size=GLOBAL_BATCH_SIZE
            )
            return loss, predictions

        (loss, predictions), gradients = mx.value_and_grad(  # tape.gradient
            compute_loss, model.trainable_variables, has_aux=True
        )()
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs: tuple[jax.Array, jax.Array]) -> None:
        images, labels = inputs
        predictions = model(images)
        test_loss.update_state(loss_object(labels, predictions))
        test_accuracy.update_state(labels, predictions)

    @mx.function  # @tf.function
    def distributed_train_step(dataset_inputs: Any) -> jax.Array:
        per_replica_losses = strategy.experimental_run_v2(
            train_step, args=(dataset_inputs,)
        )
        return strategy.reduce(
            mx.distribute.ReduceOp.SUM, per_replica_losses, axis=None
        )

    @mx.function  # @tf.function
    def distributed_test_step(dataset_inputs: Any) -> None:
        strategy.experimental_run_v2(test_step, args=(dataset_inputs,))

    epoch_losses = []
    for epoch in range(epochs):
        total_loss, num_batches = 0.0, 0
        for x in train_dist_dataset:
            total_loss += distributed_train_step(x)
            num_batches += 1
        epoch_losses.append(float(total_loss / num_batches))

        for x in test_dist_dataset:
            distributed_test_step(x)
        if epoch % 2 == 1:
            checkpoint.save(os.path.join(directory, "ckpt"))
        print(
            f"Epoch {epoch + 1}, Loss: {epoch_losses[-1]:.5f}, "
            f"Accuracy: {train_accuracy.result():.1%}, "
            f"Test Loss: {test_loss.result():.5f}, "
            f"Test Accuracy: {test_accuracy.result():.1%}"
        )
        for metric in (test_loss, train_accuracy, test_accuracy):
            metric.reset_state()  # reset_states

    checkpoint.save(os.path.join(directory, "ckpt"))
    checkpoint.sync()  # `save` returns while a thread still writes
    return epoch_losses, evaluate_without_strategy(directory, test_dataset)


def evaluate_without_strategy(directory: str, test_dataset: mx.data.Dataset) -> float:
    """The accuracy of the newest checkpoint, in a model on one device."""
    eval_accuracy = mx.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
    new_model = Model()
    checkpoint = mx.train.Checkpoint(model=new_model)
    newest = mx.train.latest_checkpoint(directory)
    checkpoint.restore(newest).expect_partial()  # the optimizer is not asked for

    @mx.function  # @tf.function
    def eval_step(images: jax.Array, labels: jax.Array) -> None:
        eval_accuracy.update_state(labels, new_model(images))

    for images, labels in test_dataset:
        eval_step(images, labels)
    return float(eval_accuracy.result())


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2, help="logical CPUs")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.replicas)
    strategy = mx.distribute.MirroredStrategy()  # tf.distribute.MirroredStrategy()
    print(f"Number of devices: {strategy.num_replicas_in_sync}")
    with tempfile.TemporaryDirectory() as directory:
        _, accuracy = train(strategy, options.epochs, directory)
    print(f"Accuracy after restoring the saved model without strategy: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
