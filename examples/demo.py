"""Trains a convolutional network on several replicas of this machine.

    make demo
    python examples/demo.py --replicas 4 --epochs 30
    python examples/demo.py --resume        # goes on where it was stopped

The images are scikit-learn's bundled digits: 1797 real 8 x 8 scans, no download. Batches of
100 leave a partial last one (1437 = 14 x 100 + 37), which every number of replicas handles
exactly: the weights are those of one device, to float tolerance. It saves all the time, so
kill it whenever you like: with `--resume` it ends with the same weights, to the last bit.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits

import mirrax as mx

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

BATCH = 100
HELD_OUT = 360
CLASSES = 10


class Network:
    """Two convolutions, a pooling and two dense layers."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)

        def weight(name: str, *shape: int) -> mx.Variable:
            scale = math.sqrt(2 / math.prod(shape[:-1]))
            value = (rng.normal(size=shape) * scale).astype("float32")
            return mx.Variable(value, name=name)

        def bias(name: str, size: int) -> mx.Variable:
            return mx.Variable(np.zeros(size, "float32"), name=name)

        self.conv1 = weight("conv1", 3, 3, 1, 16), bias("bias1", 16)
        self.conv2 = weight("conv2", 3, 3, 16, 32), bias("bias2", 32)
        self.dense3 = weight("dense3", 512, 64), bias("bias3", 64)
        self.dense4 = weight("dense4", 64, CLASSES), bias("bias4", CLASSES)

    @property
    def variables(self) -> list[mx.Variable]:
        return [*self.conv1, *self.conv2, *self.dense3, *self.dense4]

    def __call__(self, images: jax.Array) -> jax.Array:
        x = images[..., None]
        for kernel, bias in (self.conv1, self.conv2):
            x = lax.conv_general_dilated(
                x,
                kernel.read_value(),
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jax.nn.relu(x + bias)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = x.reshape(len(x), 512)
        x = jax.nn.relu(x @ self.dense3[0] + self.dense3[1])
        return x @ self.dense4[0] + self.dense4[1]


class History:
    """What the picture shows. With these two methods a checkpoint saves it, too."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.accuracies: list[float] = []
        self.rates: list[float] = []

    def get_state(self) -> dict[str, list[float]]:
        return vars(self)

    def set_state(self, state: dict[str, list[float]]) -> None:
        vars(self).update(state)


class Training:
    """A network, what trains it, and the steps that replicas run."""

    def __init__(self, strategy: mx.distribute.Strategy, steps: int, seed: int) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.network = Network(seed)
            schedule = optax.cosine_decay_schedule(3e-3, steps)
            self.optimizer = mx.train.Optimizer(optax.adamw(schedule))
            self.loss = mx.metrics.Mean()
            self.accuracy = mx.metrics.SparseCategoricalAccuracy()

    @mx.function
    def train_step(self, images: jax.Array, labels: jax.Array) -> None:
        def loss() -> tuple[jax.Array, jax.Array]:
            losses = optax.softmax_cross_entropy_with_integer_labels(
                self.network(images), labels
            )
            return mx.nn.compute_average_loss(losses), losses

        variables = self.network.variables
        (_, losses), gradients = mx.value_and_grad(loss, variables, has_aux=True)()
        self.optimizer.apply_gradients(zip(gradients, variables))
        self.loss.update_state(losses)

    @mx.function
    def test_step(self, images: jax.Array, labels: jax.Array) -> None:
        self.accuracy.update_state(labels, self.network(images))

    def test(self, dataset: Any) -> float:
        """The part of the images that it gets right."""
        self.accuracy.reset_state()
        for batch in dataset:
            self.strategy.run(self.test_step, args=batch)
        return float(self.accuracy.result())


def train(options: argparse.Namespace) -> tuple[Training, History, Any]:
    """The trained network, how it went, and a batch to look at."""
    strategy = mx.MirroredStrategy()
    print(f"replicas: {strategy.num_replicas_in_sync}, {strategy!r}")
    digits: Any = load_digits()
    order = np.random.default_rng(options.seed).permutation(len(digits.images))
    images = (digits.images[order] / 16).astype("float32")
    labels = digits.target[order].astype("int32")
    test_set, train_set = (
        mx.data.Dataset.from_tensor_slices((images[part], labels[part]))
        for part in (slice(HELD_OUT), slice(HELD_OUT, None))
    )
    examples = len(images) - HELD_OUT
    per_epoch = math.ceil(examples / BATCH)
    steps = options.epochs * per_epoch

    shuffled = train_set.shuffle(examples, seed=options.seed).batch(BATCH).repeat()
    batches = iter(strategy.experimental_distribute_dataset(shuffled))
    test_batches = strategy.experimental_distribute_dataset(test_set.batch(BATCH))
    training, history = Training(strategy, steps, options.seed), History()
    optimizer = training.optimizer
    checkpoint = mx.train.Checkpoint(training=training, data=batches, history=history)
    manager = mx.train.CheckpointManager(checkpoint, options.directory, max_to_keep=2)
    if options.resume:
        found = manager.restore_or_initialize()
        print(f"going on from {found}" if found else "nothing to resume: starting anew")
    done = int(optimizer.iterations.numpy())

    batch = None
    started = time.perf_counter()
    with mx.train.Progress(steps, initial=done) as progress:
        for step in range(done + 1, steps + 1):
            if step % per_epoch == 1:
                training.loss.reset_state()
            batch = next(batches)
            strategy.run(training.train_step, args=batch)
            progress.update(examples=BATCH, loss=training.loss)
            if step % per_epoch == 0:
                history.losses.append(float(training.loss.result()))
                history.accuracies.append(training.test(test_batches))
                history.rates.append(examples / (time.perf_counter() - started))
                started = time.perf_counter()
            if step % options.save_every == 0 or step == steps:
                manager.save(step)
    manager.sync()
    return training, history, batch


def draw(training: Training, history: History, batch: Any, path: str) -> None:
    """The picture: loss and accuracy, speed, and what each device holds."""
    figure, (loss, rate, places) = plt.subplots(1, 3, figsize=(14, 4))
    epochs = range(1, len(history.losses) + 1)
    loss.semilogy(epochs, history.losses, color="tab:blue")
    loss.set(xlabel="epoch", title="learning")
    loss.set_ylabel("training loss", color="tab:blue")
    right = loss.twinx()
    right.plot(epochs, history.accuracies, color="tab:green")
    right.set_ylim(min([0.9, *history.accuracies]), 1)
    right.set_ylabel("test accuracy", color="tab:green")
    right.yaxis.set_major_formatter("{x:.0%}")
    rate.plot(epochs, history.rates, marker="o", markersize=3)
    rate.set(xlabel="epoch", title="examples per second, with tests", ylim=(0, None))
    rate.annotate(
        "the first epoch compiles",
        (1, history.rates[0]),
        (12, 6),
        textcoords="offset points",
    )

    variables = training.network.variables
    devices = training.strategy.extended.worker_devices
    parts = training.strategy.experimental_local_results(batch[0]) if batch else ()
    weights = sum(math.prod(v.shape) for v in variables)
    places.axis("off")
    places.set_title("on each device")
    for i, device in enumerate(devices):
        rows = f"{len(parts[i])} images" if parts else "no step was left"
        places.text(
            0.5,
            1 - (i + 0.5) / len(devices),
            f"{device.rpartition('device:')[2]}: replica {i}\n"
            f"a copy of all {len(variables)} variables ({weights:,} weights)\n"
            f"last batch: {rows}",
            ha="center",
            va="center",
            fontsize=max(5, 11 - len(devices) // 2),
            bbox={"boxstyle": "round", "facecolor": "aliceblue"},
        )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
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
        "--resume", action="store_true", help="go on from the newest checkpoint"
    )
    parser.add_argument("--directory", default="demo-checkpoints")
    parser.add_argument("--save-every", type=int, default=15, help="steps")
    parser.add_argument("--picture", default="demo.png")
    options = parser.parse_args(arguments)
    if min(options.replicas, options.epochs, options.save_every) < 1:
        parser.error("--replicas, --epochs and --save-every must be at least 1")
    mx.config.set_logical_device_configuration(cpu=options.replicas)
    training, history, batch = train(options)
    draw(training, history, batch, options.picture)
    score = history.accuracies[-1]
    print(
        f"{score:.1%} of {HELD_OUT} images that it had never seen; the picture is "
        f"{options.picture}, the weights are in {options.directory}"
    )
    return score


if __name__ == "__main__":
    main()
