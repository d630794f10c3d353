"""A Flax NNX model, with BatchNorm and dropout, trained on several replicas.

    python examples/nnx_training.py --replicas 4 --epochs 5

What differs from a program for one device: everything is made in the strategy's scope, the
loss is divided by the examples of all replicas, and the steps go through `strategy.run`.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import optax
from flax import nnx
from sklearn.datasets import load_digits

import mirrax as mx

BATCH = 100  # 1437 images to train with: the last batch has 37


class Classifier(nnx.Module):
    """A small convolutional network."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        # With this name the statistics are those of the whole batch, not of a replica's part.
        self.norm = nnx.BatchNorm(16, momentum=0.9, axis_name="replica", rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.dense = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv1(x)))
        x = nnx.relu(self.conv2(x))
        return self.dense(self.dropout(x.reshape(len(x), -1)))


def load_datasets() -> tuple[mx.data.Dataset, mx.data.Dataset]:
    """Images to train with and to test with, in batches."""
    data: Any = load_digits()
    images = (data.images[..., None] / 16).astype("float32")
    labels = data.target.astype("int32")
    training = mx.data.Dataset.from_tensor_slices((images[:1437], labels[:1437]))
    testing = mx.data.Dataset.from_tensor_slices((images[1437:], labels[1437:]))
    return training.shuffle(1437, seed=0).batch(BATCH), testing.batch(BATCH)


@mx.function
def train_step(
    model: Classifier,
    optimizer: nnx.Optimizer,
    metrics: nnx.MultiMetric,
    images: jax.Array,
    labels: jax.Array,
) -> None:
    """What each replica does with its part of a batch."""

    def loss_fn(model: Classifier) -> tuple[jax.Array, Any]:
        logits = model(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        # Divided by the examples of all replicas, however many there are.
        return mx.nn.compute_average_loss(losses), (losses, logits)

    gradient = nnx.value_and_grad(loss_fn, has_aux=True)
    (_, (losses, logits)), gradients = gradient(model)
    optimizer.update(model, gradients)  # sums them over the replicas
    metrics.update(values=losses, logits=logits, labels=labels)


@mx.function
def test_step(
    model: Classifier, right: nnx.List, images: jax.Array, labels: jax.Array
) -> None:
    """Counts, for each digit, how many images there are and how many are right."""
    is_right = model(images).argmax(axis=-1) == labels
    for digit, average in enumerate(right):
        average.update(values=is_right, mask=labels == digit)


def train(strategy: mx.MirroredStrategy, epochs: int) -> list[nnx.metrics.Average]:
    """The part of the test images that is right, by digit."""
    training, testing = map(strategy.experimental_distribute_dataset, load_datasets())
    with strategy.scope():
        model = Classifier(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
        metrics = nnx.MultiMetric(
            loss=nnx.metrics.Average(), accuracy=nnx.metrics.Accuracy()
        )
        right = nnx.List([nnx.metrics.Average() for _ in range(10)])

    for epoch in range(1, epochs + 1):
        model.train()
        for batch in training:
            strategy.run(train_step, args=(model, optimizer, metrics, *batch))
        found = metrics.compute()
        print(f"epoch {epoch}: loss {found['loss']:.4f}, {found['accuracy']:.1%} right")
        metrics.reset()

    model.eval()  # which compiled functions notice
    for batch in testing:
        strategy.run(test_step, args=(model, right, *batch))
    return list(right)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2, help="logical CPUs")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.replicas)
    strategy = mx.MirroredStrategy()  # all accelerators, or the CPUs
    by_digit = train(strategy, options.epochs)
    print("digit  images  right")
    for digit, average in enumerate(by_digit):
        share = float(average.compute())
        bar = "#" * round(30 * share)
        print(f"{digit:5}  {int(average.count[...]):6}  {share:6.1%} {bar}")
    total = sum(float(average.total[...]) for average in by_digit)
    accuracy = total / sum(int(average.count[...]) for average in by_digit)
    print(f"{accuracy:.1%} of the test images are right.")
    return accuracy


if __name__ == "__main__":
    main()
