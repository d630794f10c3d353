"""Trains a digit classifier on several replicas of this machine.

    make demo
    python examples/demo.py --replicas 4 --epochs 20

The images are scikit-learn's bundled digits: 1797 real 8 x 8 scans, no download. Batches
of 100 leave a partial last one (1437 = 14 x 100 + 37), which every replica count handles
exactly: the weights are those of one device, to float tolerance.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits

import mirrax as mx

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

BATCH = 100
HELD_OUT = 360
SIZES = (64, 128, 64, 10)


class Classifier:
    """A small multi-layer perceptron, trained by momentum."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.weights: list[mx.Variable] = []
        for fan_in, fan_out in zip(SIZES, SIZES[1:]):
            w = rng.normal(size=(fan_in, fan_out)) * np.sqrt(2 / fan_in)
            self.weights += [
                mx.Variable(w.astype("float32")),
                mx.Variable(jnp.zeros(fan_out)),
            ]
        self.momenta = [mx.Variable(jnp.zeros(w.shape)) for w in self.weights]

    def logits(self, x: jax.Array) -> jax.Array:
        for i in range(0, len(self.weights), 2):
            x = x @ self.weights[i] + self.weights[i + 1]
            if i < len(self.weights) - 2:
                x = jax.nn.relu(x)
        return x

    @mx.function
    def train_step(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """What each replica does with its part of a batch; its part of the loss."""

        def loss() -> jax.Array:
            chosen = jnp.take_along_axis(
                jax.nn.log_softmax(self.logits(x)), y[:, None], 1
            )
            return -jnp.sum(chosen)

        value, gradients = mx.value_and_grad(loss, self.weights)()
        # The mean over the examples that exist: parts of the last batch may differ.
        gradients, count = mx.get_replica_context().all_reduce(
            "sum", (gradients, float(len(x)))
        )
        gradients = [gradient / count for gradient in gradients]
        for weight, momentum, gradient in zip(self.weights, self.momenta, gradients):
            momentum.assign(0.9 * momentum + gradient)
            weight.assign_sub(0.05 * momentum)
        return value

    @mx.function
    def count_correct(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(jnp.argmax(self.logits(x), axis=1) == y)


def accuracy(
    strategy: mx.distribute.Strategy, model: Classifier, x: np.ndarray, y: np.ndarray
) -> float:
    correct = 0
    dataset = mx.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    for batch in strategy.experimental_distribute_dataset(dataset):
        counts = strategy.run(model.count_correct, args=batch)
        correct += int(strategy.reduce("SUM", counts, axis=None))
    return correct / len(x)


def train(
    replicas: int, epochs: int, seed: int, console: Console
) -> tuple[float, list[float], float]:
    """The accuracy on images never seen, the losses, and the examples per second."""
    accelerators = [
        d for d in mx.config.list_logical_devices() if d.device_type != "CPU"
    ]
    devices = accelerators or [f"CPU:{i}" for i in range(replicas)]
    strategy = mx.distribute.MirroredStrategy(devices)
    console.print(f"[bold]{strategy.num_replicas_in_sync} replicas[/]: {strategy!r}")

    data: Any = load_digits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data.data))
    images = (data.data[order] / 16).astype("float32")
    labels = data.target[order].astype("int32")
    (x_test, x), (y_test, y) = ((a[:HELD_OUT], a[HELD_OUT:]) for a in (images, labels))
    dataset = mx.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=seed)
    training = strategy.experimental_distribute_dataset(dataset.batch(BATCH))
    with strategy.scope():
        model = Classifier(seed)

    losses, started = [], time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("training", total=epochs, note="")
        for _ in range(epochs):
            total = 0.0
            for batch in training:
                value = strategy.run(model.train_step, args=batch)
                total += float(strategy.reduce("SUM", value, axis=None))
            losses.append(total / len(x))
            progress.update(task, advance=1, note=f"loss {losses[-1]:.4f}")
    rate = epochs * len(x) / (time.perf_counter() - started)
    return accuracy(strategy, model, x_test, y_test), losses, rate


def draw(losses: list[float], score: float, path: str) -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.semilogy(range(1, len(losses) + 1), losses, marker="o", markersize=3)
    axes.set(
        xlabel="epoch",
        ylabel="training loss",
        title=f"Digits: {score:.1%} of test images right",
    )
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=2,
        help="logical CPU replicas, where there is no GPU",
    )
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--picture", default="demo.png", help="where to save the loss curve"
    )
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=max(options.replicas, 1))
    console = Console()
    score, losses, rate = train(options.replicas, options.epochs, options.seed, console)
    draw(losses, score, options.picture)
    console.print(
        f"[bold green]{score:.1%}[/] of {HELD_OUT} images it had never seen, "
        f"{rate:,.0f} examples/s, loss curve in [bold]{options.picture}[/]"
    )
    return score


if __name__ == "__main__":
    main()
