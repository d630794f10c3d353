"""TensorFlow 1.11, `contrib.distribute`: batch statistics that towers share.

    python examples/older/contrib_moving_averages.py --towers 2 --steps 240

A linear model learns from inputs whose columns have very different means and sizes (made up,
from a seed), as the tests of that time did with one dense layer and batch normalization. Each
tower keeps moving averages of its own batches. Between towers their mean is read (`read_var`)
and copied to all devices (`broadcast`), so that every tower normalizes with the same numbers.
Gradients are combined with `reduce` and applied with `update`. Comments name what the program
called in TensorFlow.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mirrax as mx

COLUMNS, ROWS, GLOBAL_BATCH_SIZE, STEPS_PER_EPOCH = 6, 1536, 48, 24
MOMENTUM, LEARNING_RATE = 0.9, 0.05


def load_rows() -> tuple[np.ndarray, np.ndarray]:
    """Inputs with columns of all sizes, and what to predict for them."""
    rng = np.random.default_rng(0)
    clean = rng.normal(size=(ROWS, COLUMNS))
    targets = clean @ rng.normal(size=COLUMNS) + 0.05 * rng.normal(size=ROWS)
    sizes = 10.0 ** rng.uniform(-1, 2, COLUMNS)
    inputs = clean * sizes + sizes * rng.normal(size=COLUMNS)
    return inputs.astype("float32"), targets.astype("float32")


class Normalization:  # tf.contrib.layers.batch_norm(zero_debias_moving_mean=True)
    """Moving averages of the inputs and their squares, on each tower its own."""

    def __init__(self) -> None:
        self.mean, self.square, self.weight = (
            mx.Variable(
                jnp.zeros(shape),
                trainable=False,
                # tf.VariableSynchronization.ON_READ, tf.VariableAggregation.MEAN
                synchronization=mx.VariableSynchronization.ON_READ,
                aggregation=mx.VariableAggregation.MEAN,
            )
            for shape in (COLUMNS, COLUMNS, ())
        )

    @mx.function  # built once, as a graph was
    def update(self, x: jax.Array) -> None:
        """Takes note of a tower's batch; in a tower."""
        batch = jnp.mean(x, axis=0), jnp.mean(x**2, axis=0), 1.0
        for variable, now in zip((self.mean, self.square, self.weight), batch):
            variable.assign(MOMENTUM * variable + (1 - MOMENTUM) * now)

    def statistics(
        self, distribution: mx.contrib.distribute.DistributionStrategy
    ) -> tuple[Any, Any]:
        """Means and deviations of all towers' batches, on all towers; between towers."""
        weight = distribution.read_var(self.weight)
        mean = distribution.read_var(self.mean) / weight
        square = distribution.read_var(self.square) / weight
        deviation = jnp.sqrt(square - mean**2)
        return distribution.broadcast(mean), distribution.broadcast(deviation)


def train(
    distribution: mx.contrib.distribute.DistributionStrategy, epochs: int
) -> tuple[list[float], float]:
    """The mean loss of each epoch, and the error in the end, as a part of the variation."""
    inputs, targets = load_rows()

    def dataset_fn() -> mx.data.Dataset:
        """Batches for one tower: towers take them in turn."""
        dataset = mx.data.Dataset.from_tensor_slices((inputs, targets))  # tf.data
        return dataset.repeat().batch(GLOBAL_BATCH_SIZE // distribution.num_towers)

    with distribution.scope():
        normalization = Normalization()
        weights = mx.Variable(jnp.zeros(COLUMNS), name="weights")  # tf.get_variable
        iterator = distribution.distribute_dataset(dataset_fn).make_one_shot_iterator()

        # which tower lies where
        devices = distribution.call_for_each_tower(
            lambda tower: tower, distribution.worker_device_index
        )
        for tower in distribution.unwrap(devices):
            print(f"tower {tower}: {distribution.worker_devices[int(tower)]}")

        @mx.function
        def tower_fn(x: Any, y: Any, mean: Any, deviation: Any) -> Any:
            normalized = (x - mean) / deviation

            def loss() -> jax.Array:
                return jnp.mean((normalized @ weights - y) ** 2)

            return mx.value_and_grad(loss, weights)()

        def step() -> float:
            x, y = iterator.get_next()
            distribution.group(
                distribution.call_for_each_tower(normalization.update, x)
            )
            mean, deviation = normalization.statistics(distribution)
            losses, gradients = distribution.call_for_each_tower(
                tower_fn, x, y, mean, deviation
            )
            # tf.VariableAggregation.MEAN; towers have equally many rows
            gradient = distribution.reduce(
                mx.VariableAggregation.MEAN, gradients, destinations=weights
            )
            distribution.update(
                weights, lambda w, g: w.assign_sub(LEARNING_RATE * g), gradient
            )
            loss = distribution.reduce(
                mx.VariableAggregation.MEAN, losses, destinations="/device:CPU:0"
            )
            (value,) = distribution.unwrap(loss)
            return float(value)

        losses = []
        for epoch in range(epochs):
            losses.append(float(np.mean([step() for _ in range(STEPS_PER_EPOCH)])))
            print(f"step {(epoch + 1) * STEPS_PER_EPOCH}: loss {losses[-1]:.5f}")

        mean, deviation = normalization.statistics(distribution)
        mean, deviation = (
            np.asarray(distribution.unwrap(each)[0]) for each in (mean, deviation)
        )
    errors = (inputs - mean) / deviation @ weights.numpy() - targets
    return losses, float(np.var(errors) / np.var(targets))


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--towers", type=int, default=2, help="logical CPUs")
    parser.add_argument("--steps", type=int, default=240)
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.towers)
    # tf.contrib.distribute.MirroredStrategy(num_gpus=2)
    distribution = mx.contrib.distribute.MirroredStrategy(
        devices=[f"/device:CPU:{i}" for i in range(options.towers)]
    )
    _, error = train(distribution, max(1, options.steps // STEPS_PER_EPOCH))
    print(f"{error:.2%} of the variation is not explained.")
    return error


if __name__ == "__main__":
    main()
