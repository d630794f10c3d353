"""TensorFlow 1.11, `contrib.distribute`: Adam written by hand, for towers.

    python examples/older/contrib_own_adam.py --towers 2 --steps 150

A perceptron learns scikit-learn's digits. Each tower computes gradients of its own batch; a
`merge_call` brings them together, `batch_reduce` sums them, and `update` changes each copy of a
variable together with its two slots. The powers of Adam's betas belong to no variable: they lie
on the `non_slot_devices` and are changed by `update_non_slot`. There is no session: what was an
op to run happens where it was built. Comments name what the program called in TensorFlow.
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

GLOBAL_BATCH_SIZE, STEPS_PER_EPOCH = 96, 15
TRAINING_IMAGES = 1437

Pairs = list[tuple[Any, mx.Variable]]


class AdamOptimizer:  # a subclass of tf.train.Optimizer
    """Adam; its slots lie with their variables."""

    def __init__(
        self,
        distribution: mx.contrib.distribute.DistributionStrategy,
        variables: list[mx.Variable],
        learning_rate: float,
        beta1: float = 0.9,
        beta2: float = 0.999,
    ) -> None:
        self.learning_rate, self.beta1, self.beta2 = learning_rate, beta1, beta2
        self.variables = variables
        # _create_slots
        self.slots: dict[str, tuple[mx.Variable, mx.Variable]] = {}
        for variable in variables:
            with distribution.colocate_vars_with(variable):
                zeros = jnp.zeros(variable.shape)
                self.slots[variable.name] = mx.Variable(zeros), mx.Variable(zeros)
        # _create_non_slot_variable
        self.beta1_power = mx.Variable(beta1, name="beta1_power")
        self.beta2_power = mx.Variable(beta2, name="beta2_power")

    def apply_gradients(self, grads_and_vars: Pairs) -> None:
        """Sums the gradients of all towers and takes a step; in a tower."""
        # tf.get_tower_context
        context = mx.contrib.distribute.get_tower_context()
        assert context is not None
        context.merge_call(self._distributed_apply, grads_and_vars)

    def _distributed_apply(
        self,
        distribution: mx.contrib.distribute.DistributionStrategy,
        grads_and_vars: Pairs,
    ) -> None:
        """All towers' gradients at once; between towers."""
        gradients = distribution.batch_reduce(
            mx.VariableAggregation.SUM, grads_and_vars
        )
        for gradient, (_, variable) in zip(gradients, grads_and_vars):
            distribution.update(
                variable,
                self._apply_dense,
                gradient,
                *self.slots[variable.name],
                self.beta1_power,
                self.beta2_power,
            )
        devices = distribution.non_slot_devices(self.variables)
        distribution.update_non_slot(devices, self._finish)

    def _apply_dense(
        self,
        variable: mx.Variable,
        gradient: jax.Array,
        mean: mx.Variable,
        square: mx.Variable,
        beta1_power: jax.Array,
        beta2_power: jax.Array,
    ) -> None:
        mean.assign(self.beta1 * mean + (1 - self.beta1) * gradient)
        square.assign(self.beta2 * square + (1 - self.beta2) * gradient**2)
        rate = self.learning_rate * jnp.sqrt(1 - beta2_power) / (1 - beta1_power)
        variable.assign_sub(rate * mean / (jnp.sqrt(square.read_value()) + 1e-8))

    def _finish(self) -> None:
        self.beta1_power.assign(self.beta1_power * self.beta1)
        self.beta2_power.assign(self.beta2_power * self.beta2)


class Perceptron:  # tf.layers.dense, twice
    """A hidden layer and one score for each digit."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)

        def kernel(name: str, *shape: int) -> mx.Variable:  # tf.get_variable
            value = rng.normal(size=shape) / np.sqrt(shape[0])
            return mx.Variable(value.astype("float32"), name=name)

        self.hidden, self.scores = kernel("hidden", 64, 48), kernel("scores", 48, 10)
        self.bias = mx.Variable(jnp.zeros(48), name="bias")
        self.variables = [self.hidden, self.bias, self.scores]

    def __call__(self, images: jax.Array) -> jax.Array:
        return jax.nn.relu(images @ self.hidden + self.bias) @ self.scores


def train(
    distribution: mx.contrib.distribute.DistributionStrategy, epochs: int
) -> tuple[list[float], float]:
    """The mean loss of each epoch, and the accuracy on images that were never seen."""
    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype("float32")
    labels = digits.target[order].astype("int32")

    def dataset_fn() -> mx.data.Dataset:
        """Batches for one tower: towers take them in turn."""
        known = (images[:TRAINING_IMAGES], labels[:TRAINING_IMAGES])
        dataset = mx.data.Dataset.from_tensor_slices(known)  # tf.data.Dataset
        shuffled = dataset.shuffle(TRAINING_IMAGES, seed=0).repeat()
        return shuffled.batch(GLOBAL_BATCH_SIZE // distribution.num_towers)

    with distribution.scope():
        model = Perceptron()
        optimizer = AdamOptimizer(distribution, model.variables, learning_rate=3e-3)
        iterator = distribution.distribute_dataset(dataset_fn).make_one_shot_iterator()

        @mx.function  # built once, as a graph was
        def tower_fn(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
            images, labels = inputs

            def loss() -> jax.Array:  # tf.losses.sparse_softmax_cross_entropy
                losses = optax.softmax_cross_entropy_with_integer_labels(
                    model(images), labels
                )
                return jnp.sum(losses) / GLOBAL_BATCH_SIZE

            # optimizer.compute_gradients(loss)
            value, gradients = mx.value_and_grad(loss, model.variables)()
            optimizer.apply_gradients(list(zip(gradients, model.variables)))
            return value

        losses = []
        for epoch in range(epochs):
            total = 0.0
            for _ in range(STEPS_PER_EPOCH):  # session.run(train_op)
                towers = distribution.call_for_each_tower(tower_fn, iterator.get_next())
                total += sum(map(float, distribution.unwrap(towers)))
            losses.append(total / STEPS_PER_EPOCH)
            print(f"step {(epoch + 1) * STEPS_PER_EPOCH}: loss {losses[-1]:.5f}")

    scores = np.asarray(model(jnp.asarray(images[TRAINING_IMAGES:])))
    return losses, float(np.mean(scores.argmax(1) == labels[TRAINING_IMAGES:]))


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--towers", type=int, default=2, help="logical CPUs")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.towers)
    # tf.contrib.distribute.MirroredStrategy(num_gpus=2)
    distribution = mx.contrib.distribute.MirroredStrategy(
        devices=[f"/device:CPU:{i}" for i in range(options.towers)],
        cross_tower_ops=mx.contrib.distribute.AllReduceCrossTowerOps(num_packs=2),
    )
    _, accuracy = train(distribution, max(1, options.steps // STEPS_PER_EPOCH))
    print(f"{accuracy:.1%} of the test images are right.")
    return accuracy


if __name__ == "__main__":
    main()
