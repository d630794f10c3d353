"""TensorFlow 2.4, `compat.v1`: an optimizer of one's own, fed by an input function.

    python examples/older/compat_v1_own_optimizer.py --replicas 2 --steps 200

Sensors are calibrated: from 12 raw readings a model predicts two true quantities, and each
reading's error is made up (from a seed), so that the right weights are known. The optimizer
does what those of `tf.compat.v1.train` did inside: it leaves the replicas with `merge_call`, sums all
gradients in one `batch_reduce_to`, and updates each copy of a variable, and its slot, where it
lies. Comments name what the program called in TensorFlow.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mirrax as mx

READINGS, QUANTITIES, SAMPLES = 12, 2, 4096
GLOBAL_BATCH_SIZE, STEPS_PER_EPOCH = 64, 20

Pairs = list[tuple[Any, mx.Variable]]


class MomentumOptimizer:  # a subclass of tf.compat.v1.train.Optimizer
    """Gradient descent with momentum; its slots lie with their variables."""

    def __init__(self, learning_rate: float, momentum: float) -> None:
        self.learning_rate, self.momentum = learning_rate, momentum
        self.slots: dict[str, mx.Variable] = {}

    def create_slots(
        self, strategy: mx.compat.v1.distribute.Strategy, variables: list[mx.Variable]
    ) -> None:
        """Makes a velocity for each variable; in the scope."""
        for variable in variables:
            with strategy.extended.colocate_vars_with(variable):
                self.slots[variable.name] = mx.compat.v1.Variable(
                    jnp.zeros(variable.shape), trainable=False
                )

    def apply_gradients(self, grads_and_vars: Pairs) -> None:
        """Sums the gradients of all replicas and takes a step; in a replica."""
        context = mx.compat.v1.distribute.get_replica_context()
        assert context is not None
        context.merge_call(self._distributed_apply, args=(grads_and_vars,))

    def _distributed_apply(
        self, strategy: mx.compat.v1.distribute.Strategy, grads_and_vars: Pairs
    ) -> None:
        """All replicas' gradients at once; outside of replicas."""
        gradients = strategy.extended.batch_reduce_to(
            mx.compat.v1.distribute.ReduceOp.SUM, grads_and_vars
        )
        for gradient, (_, variable) in zip(gradients, grads_and_vars):
            slot = self.slots[variable.name]
            # the function gets one copy of the variable, and what lies beside it
            strategy.extended.update(variable, self._apply_dense, args=(gradient, slot))

    def _apply_dense(
        self, variable: mx.Variable, gradient: jax.Array, velocity: mx.Variable
    ) -> None:
        velocity.assign(self.momentum * velocity + gradient)
        variable.assign_sub(self.learning_rate * velocity)


def load_samples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw readings, true quantities, and the weights that give them."""
    rng = np.random.default_rng(0)
    readings = rng.normal(size=(SAMPLES, READINGS)).astype("float32")
    weights = rng.normal(size=(READINGS, QUANTITIES)).astype("float32")
    noise = 0.05 * rng.normal(size=(SAMPLES, QUANTITIES))
    return readings, (readings @ weights + 3 + noise).astype("float32"), weights


def train(
    strategy: mx.compat.v1.distribute.Strategy, epochs: int
) -> tuple[list[float], float]:
    """The mean loss of each epoch, and how far the weights are from the true ones."""
    readings, quantities, true_weights = load_samples()

    def input_fn(context: mx.compat.v1.distribute.InputContext) -> mx.data.Dataset:
        # tf.compat.v1.data.Dataset; each worker reads every n-th sample
        dataset = mx.data.Dataset.from_tensor_slices((readings, quantities))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        batch_size = context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE)
        return dataset.repeat().batch(batch_size)

    iterator = strategy.make_input_fn_iterator(input_fn)
    optimizer = MomentumOptimizer(learning_rate=0.05, momentum=0.8)
    with strategy.scope():
        # tf.compat.v1.get_variable
        weights = mx.compat.v1.Variable(
            jnp.zeros((READINGS, QUANTITIES)), name="weights"
        )
        offset = mx.compat.v1.Variable(jnp.zeros(QUANTITIES), name="offset")
        optimizer.create_slots(strategy, [weights, offset])

    @mx.function  # built once, as a graph was
    def step_fn(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, y = inputs

        def loss() -> jax.Array:
            return jnp.sum((x @ weights + offset - y) ** 2) / GLOBAL_BATCH_SIZE

        variables = [weights, offset]
        # optimizer.compute_gradients(loss, variables)
        value, gradients = mx.value_and_grad(loss, variables)()
        optimizer.apply_gradients(list(zip(gradients, variables)))
        return value

    iterator.initialize()  # session.run(iterator.initialize())
    losses = []
    for epoch in range(epochs):
        total = 0.0
        for _ in range(STEPS_PER_EPOCH):  # session.run(train_op)
            per_replica = strategy.experimental_run(step_fn, iterator)
            total += float(strategy.reduce("SUM", per_replica))
        losses.append(total / STEPS_PER_EPOCH)
        print(f"step {(epoch + 1) * STEPS_PER_EPOCH}: loss {losses[-1]:.5f}")
    return losses, float(np.abs(weights.numpy() - true_weights).max())


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2, help="logical CPUs")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.replicas)
    # tf.compat.v1.distribute.MirroredStrategy(cross_device_ops=...)
    strategy = mx.compat.v1.distribute.MirroredStrategy(
        cross_device_ops=mx.compat.v1.distribute.ReductionToOneDevice()
    )
    _, distance = train(strategy, max(1, options.steps // STEPS_PER_EPOCH))
    print(f"The weights are true to {distance:.4f}.")
    return distance


if __name__ == "__main__":
    main()
