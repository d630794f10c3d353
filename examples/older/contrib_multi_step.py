"""TensorFlow 1.11, `contrib.distribute`: many steps in one run, and metrics of towers.

    python examples/older/contrib_multi_step.py --towers 2 --steps 300

A network tells points of two spirals apart (made up, from a seed). `run_steps_on_dataset` takes
20 steps in one compiled loop and hands out what the last one set. Each tower counts on its own,
in variables that are synchronized when they are read (`read_var`). Comments name what the
program called in TensorFlow.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrax as mx

POINTS, GLOBAL_BATCH_SIZE, STEPS_PER_RUN = 1024, 128, 20


def load_points() -> tuple[np.ndarray, np.ndarray]:
    """Points of two spirals, and to which of them each belongs."""
    rng = np.random.default_rng(0)
    spiral = rng.integers(0, 2, POINTS)
    turn = rng.uniform(0.5, 3, POINTS)
    angle = np.pi * (turn + spiral)
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1)
    noise = 0.03 * rng.normal(size=points.shape)
    return (points + noise).astype("float32"), spiral.astype("float32")


class Network:  # tf.layers.dense, three times
    """Two hidden layers that say to which spiral a point belongs, as a logit."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        sizes = (2, 32, 32, 1)
        self.layers = [
            (
                mx.Variable(rng.normal(size=s).astype("float32") / np.sqrt(s[0])),
                mx.Variable(jnp.zeros(s[1])),
            )
            for s in zip(sizes, sizes[1:])
        ]
        self.variables = [variable for layer in self.layers for variable in layer]

    def __call__(self, x: jax.Array) -> jax.Array:
        for kernel, bias in self.layers[:-1]:
            x = jnp.tanh(x @ kernel + bias)
        kernel, bias = self.layers[-1]
        return (x @ kernel + bias)[:, 0]


class TowerAccuracy:  # tf.metrics.accuracy
    """Two sums that each tower keeps for itself."""

    def __init__(self) -> None:
        self.right, self.seen = (
            mx.Variable(
                0.0,
                trainable=False,
                # tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
                synchronization=mx.VariableSynchronization.ON_READ,
                aggregation=mx.VariableAggregation.SUM,
            )
            for _ in range(2)
        )

    def update(self, is_right: jax.Array) -> None:
        """Counts a tower's batch; in a tower."""
        self.right.assign_add(jnp.sum(is_right.astype(jnp.float32)))
        self.seen.assign_add(float(len(is_right)))

    def read(self, distribution: mx.contrib.distribute.DistributionStrategy) -> float:
        """What all towers have counted, and begins anew; between towers."""
        right, seen = map(distribution.read_var, (self.right, self.seen))
        for variable in (self.right, self.seen):
            variable.assign(0.0)  # tf.local_variables_initializer
        return float(right) / float(seen)


def train(
    distribution: mx.contrib.distribute.DistributionStrategy, epochs: int
) -> tuple[list[float], float]:
    """The loss after each run of steps, and the accuracy in the last one."""
    points, spirals = load_points()

    def dataset_fn() -> mx.data.Dataset:
        """Batches for one tower: towers take them in turn."""
        dataset = mx.data.Dataset.from_tensor_slices((points, spirals))  # tf.data
        shuffled = dataset.shuffle(POINTS, seed=0).repeat()
        return shuffled.batch(GLOBAL_BATCH_SIZE // distribution.num_towers)

    with distribution.scope():
        network, accuracy = Network(), TowerAccuracy()
        optimizer = mx.train.Optimizer(optax.adam(0.01))  # tf.train.AdamOptimizer
        iterator = distribution.distribute_dataset(
            dataset_fn
        ).make_initializable_iterator()
        iterator.initialize()  # session.run(iterator.initializer)

        def tower_fn(x: jax.Array, y: jax.Array) -> jax.Array:
            def loss_fn() -> tuple[jax.Array, jax.Array]:
                logits = network(x)
                losses = optax.sigmoid_binary_cross_entropy(logits, y)
                return jnp.sum(losses) / GLOBAL_BATCH_SIZE, logits

            (loss, logits), gradients = mx.value_and_grad(
                loss_fn, network.variables, has_aux=True
            )()
            optimizer.apply_gradients(zip(gradients, network.variables))
            accuracy.update((logits > 0) == (y > 0.5))
            return loss

        def step_fn(
            context: mx.contrib.distribute.MultiStepContext, x: Any, y: Any
        ) -> None:
            losses = distribution.call_for_each_tower(tower_fn, x, y)
            context.set_last_step_output(
                "loss", losses, aggregation=mx.VariableAggregation.SUM
            )
            context.set_non_tensor_output("points", "spirals")

        distribution.initialize()  # session.run(distribution.initialize())
        context = distribution.run_steps_on_dataset(
            step_fn,
            iterator,
            iterations=STEPS_PER_RUN,
            initial_loop_values={"loss": jnp.float32(1e7)},
        )
        losses, rate = [], 0.0
        for run in range(epochs):
            if run:
                context.run_op()  # session.run(context.run_op)
            losses.append(float(context.last_step_outputs["loss"]))
            rate = accuracy.read(distribution)
            print(
                f"step {(run + 1) * STEPS_PER_RUN}: loss {losses[-1]:.5f}, "
                f"accuracy {rate:.1%}"
            )
        distribution.finalize()  # session.run(distribution.finalize())
    return losses, rate


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--towers", type=int, default=2, help="logical CPUs")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.towers)
    # tf.contrib.distribute.MirroredStrategy(num_gpus=2, prefetch_on_device=True)
    distribution = mx.contrib.distribute.MirroredStrategy(
        devices=[f"/device:CPU:{i}" for i in range(options.towers)],
        prefetch_on_device=True,
    )
    _, accuracy = train(distribution, max(1, options.steps // STEPS_PER_RUN))
    print(f"{accuracy:.1%} of the points are told right.")
    return accuracy


if __name__ == "__main__":
    main()
