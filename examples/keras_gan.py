"""A GAN of Keras' parts in a training loop of one's own, on several replicas.

    python examples/keras_gan.py --replicas 2 --steps 1500

The generator learns to draw numbers as they come from a mixture of two bells. A step is an
`mx.function` that every replica runs on its part of the batch: gradients by
`mx.value_and_grad`, two Keras optimizers, which sum them over the replicas, Keras' metrics, and a
`SeedGenerator` that gives every replica noise of its own.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import numpy as np

import mirrax as mx

BATCH = 256
NOISE = 4
BINS = np.linspace(-3, 3, 25)


def real_numbers(rng: np.random.Generator, count: int) -> np.ndarray:
    """What the generator has to imitate."""
    centre = rng.choice([-1.5, 1.0], (count, 1), p=[0.4, 0.6])
    return (centre + 0.3 * rng.normal(size=(count, 1))).astype("float32")


class Gan:
    """The two networks and what trains them; made in the scope."""

    def __init__(self) -> None:
        layers = keras.layers
        self.generator = keras.Sequential(
            [
                layers.Input((NOISE,)),
                layers.Dense(32, use_bias=False),
                layers.BatchNormalization(synchronized=True),
                layers.Activation("relu"),
                layers.Dense(32, activation="relu"),
                layers.Dense(1),
            ]
        )
        self.discriminator = keras.Sequential(
            [
                layers.Input((1,)),
                layers.Dense(32, activation="leaky_relu"),
                layers.Dense(32, activation="leaky_relu"),
                layers.Dense(1),
            ]
        )
        self.optimizers = [
            keras.optimizers.Adam(0.001, beta_1=0.5),
            keras.optimizers.Adam(0.002, beta_1=0.5),
        ]
        self.seeds = keras.random.SeedGenerator(0)
        self.losses = [keras.metrics.Mean("generator"), keras.metrics.Mean("critic")]

    def draw(self, count: int, training: bool = False) -> jax.Array:
        noise = keras.random.normal((count, NOISE), seed=self.seeds)
        return self.generator(noise, training=training)

    def train(self, real: jax.Array) -> None:
        """A step of a replica on its part of the real numbers."""

        def error(scores: jax.Array, is_real: float) -> jax.Array:
            wanted = scores if is_real else -scores
            return jnp.sum(jax.nn.softplus(-wanted)) / BATCH

        def critic_loss() -> jax.Array:
            fake = jax.lax.stop_gradient(self.draw(len(real), training=True))
            return error(self.discriminator(real), 1) + error(
                self.discriminator(fake), 0
            )

        def generator_loss() -> jax.Array:
            return error(self.discriminator(self.draw(len(real), training=True)), 1)

        turns = [
            (critic_loss, self.discriminator, self.optimizers[1], self.losses[1]),
            (generator_loss, self.generator, self.optimizers[0], self.losses[0]),
        ]
        for loss, network, optimizer, metric in turns:
            variables = network.trainable_variables
            value, gradients = mx.value_and_grad(loss, variables)()
            optimizer.apply(gradients, variables)
            metric.update_state(value * mx.get_replica_context().num_replicas_in_sync)


def show(real: np.ndarray, fake: np.ndarray) -> float:
    """Prints both histograms; how much of them overlaps."""
    counts = [np.histogram(each, BINS)[0] / len(each) for each in (real, fake)]
    print("         real                       generated")
    for left, *both in zip(BINS, *counts):
        bars = ["#" * round(200 * share) for share in both]
        print(f"{left:6.2f}   {bars[0]:<26} {bars[1]}")
    return float(np.minimum(*counts).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()

    mx.config.set_logical_device_configuration(cpu=options.replicas)
    strategy = mx.MirroredStrategy([f"CPU:{i}" for i in range(options.replicas)])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        gan = Gan()
    rng = np.random.default_rng(0)
    numbers = real_numbers(rng, 20 * BATCH)
    dataset = mx.data.Dataset.from_tensor_slices(numbers).shuffle(20 * BATCH, seed=0)
    dataset = dataset.batch(BATCH, drop_remainder=True).repeat()
    step = mx.function(gan.train)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    for number in range(1, options.steps + 1):
        strategy.run(step, (next(batches),))
        if number % max(1, options.steps // 5) == 0:
            losses = "   ".join(f"{m.name} {float(m.result()):.3f}" for m in gan.losses)
            print(f"step {number:5}   {losses}")
            for metric in gan.losses:
                metric.reset_state()
    batches.close()
    overlap = show(numbers, np.asarray(gan.draw(len(numbers))))
    print(f"{overlap:.1%} of the two histograms is the same.")


if __name__ == "__main__":
    main()
