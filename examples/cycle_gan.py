"""A CycleGAN with four networks and four optimizers, on several replicas.

    python examples/cycle_gan.py --replicas 4 --steps 400

Points of a ring are to become points of a square and back, without any pairs: one generator
each way, and a critic on each side that tells made points from real ones. A step computes
four losses, of which each has its own variables and its own optimizer, and is one compiled
program for all replicas. What keeps the two generators together is that there and back has
to end where it began.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrax as mx

BATCH = 256
CYCLE = 1.0  # how much it counts that there and back ends where it began


def ring(rng: np.random.Generator, count: int) -> np.ndarray:
    angle = rng.uniform(0, 2 * np.pi, count)
    points = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return (points + 0.05 * rng.normal(size=(count, 2))).astype("float32")


def square(rng: np.random.Generator, count: int) -> np.ndarray:
    return (3 + rng.uniform(-1, 1, (count, 2))).astype("float32")


class Network:
    """Two layers, with a shortcut where there are as many outputs as inputs."""

    def __init__(self, rng: np.random.Generator, outputs: int, name: str) -> None:
        sizes = (2, 64, outputs)
        self.weights = [
            mx.Variable(
                rng.normal(size=s).astype("float32") / np.sqrt(s[0]),
                name=f"{name}/w{i}",
            )
            for i, s in enumerate(zip(sizes, sizes[1:]))
        ]
        self.biases = [
            mx.Variable(jnp.zeros(n), name=f"{name}/b{i}")
            for i, n in enumerate(sizes[1:])
        ]
        self.variables = [*self.weights, *self.biases]
        self.optimizer = mx.train.Optimizer(optax.adam(3e-3, b1=0.5), name=name)
        self.is_generator = outputs == 2

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jax.nn.leaky_relu(x @ self.weights[0] + self.biases[0])
        out = hidden @ self.weights[1] + self.biases[1]
        return x + out if self.is_generator else out[:, 0]

    def learn(self, loss_fn: Any) -> tuple[Any, jax.Array]:
        """The gradients of this network's own variables, and the loss."""
        loss, gradients = mx.value_and_grad(loss_fn, self.variables)()
        return list(zip(gradients, self.variables)), loss


class CycleGan:
    """The four networks and the step that trains them; made in the scope."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.to_square = Network(rng, 2, "to_square")
        self.to_ring = Network(rng, 2, "to_ring")
        self.square_critic = Network(rng, 1, "square_critic")
        self.ring_critic = Network(rng, 1, "ring_critic")
        self.networks = [
            self.to_square,
            self.to_ring,
            self.square_critic,
            self.ring_critic,
        ]

    def generator_loss(self, there: Any, back: Any, critic: Any, x: Any, y: Any) -> Any:
        deceived = (critic(there(x)) - 1) ** 2
        cycles = jnp.abs(back(there(x)) - x) + jnp.abs(there(back(y)) - y)
        return mx.nn.compute_average_loss(deceived + CYCLE * jnp.mean(cycles, axis=1))

    def critic_loss(self, critic: Any, real: Any, made: Any) -> Any:
        return mx.nn.compute_average_loss((critic(real) - 1) ** 2 + critic(made) ** 2)

    @mx.function
    def train_step(self, rings: jax.Array, squares: jax.Array) -> list[jax.Array]:
        made_squares, made_rings = self.to_square(rings), self.to_ring(squares)
        losses = [
            lambda: self.generator_loss(
                self.to_square, self.to_ring, self.square_critic, rings, squares
            ),
            lambda: self.generator_loss(
                self.to_ring, self.to_square, self.ring_critic, squares, rings
            ),
            lambda: self.critic_loss(self.square_critic, squares, made_squares),
            lambda: self.critic_loss(self.ring_critic, rings, made_rings),
        ]
        # All gradients first, so that all are of the same weights; then all updates.
        learned = [net.learn(loss) for net, loss in zip(self.networks, losses)]
        for network, (pairs, _) in zip(self.networks, learned):
            network.optimizer.apply_gradients(pairs)
        return [loss for _, loss in learned]


def train(strategy: mx.MirroredStrategy, steps: int, seed: int) -> tuple[float, float]:
    """How far made squares lie from the middle of real ones, and cycles from their start."""
    rng = np.random.default_rng(seed)
    points = (ring(rng, 4096), square(rng, 4096))
    dataset = mx.data.Dataset.from_tensor_slices(points).shuffle(4096, seed=seed)
    batches = iter(
        strategy.experimental_distribute_dataset(dataset.repeat().batch(BATCH))
    )
    with strategy.scope():
        gan = CycleGan(seed)
    for step in range(1, steps + 1):
        losses = strategy.run(gan.train_step, args=next(batches))
        if step % 100 == 0 or step == steps:
            means = [float(strategy.reduce("SUM", x, axis=None)) for x in losses]
            print(f"step {step}: losses {', '.join(f'{x:.3f}' for x in means)}")
    rings = jnp.asarray(ring(rng, 1000))
    made = gan.to_square(rings)
    cycle = jnp.mean(jnp.abs(gan.to_ring(made) - rings))
    return float(jnp.max(jnp.abs(jnp.mean(made, axis=0) - 3))), float(cycle)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2, help="logical CPUs")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.replicas)
    middle, cycle = train(mx.MirroredStrategy(), options.steps, options.seed)
    print(f"made squares are {middle:.2f} off the middle; there and back: {cycle:.2f}")


if __name__ == "__main__":
    main()
