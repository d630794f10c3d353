"""The same model, trained from every source, ends at the same weights."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from helpers.engines import mirrored

import mirrax as mx
from interop.sources import ONE_PASS, columns, every_source

EXAMPLES, BATCH, STEPS = 157, 8, 20  # the last batch has 5 examples


class Model:
    """A small network on two replicas; its step is compiled once for all tests."""

    def __init__(self):
        self.strategy = mirrored(2)
        with self.strategy.scope():
            self.variables = [mx.Variable(start) for start in self.starts()]

        def replica_fn(batch):
            x = batch["x"].astype("float32") / 100
            y = jnp.sin(batch["y"].astype("float32"))

            def loss():
                w, b, v = self.variables
                return jnp.sum((jnp.tanh(x @ w + b) @ v - y) ** 2) / BATCH

            gradients = mx.grad(loss, self.variables)()
            total = mx.get_replica_context().all_reduce("SUM", gradients)
            for variable, gradient in zip(self.variables, total):
                variable.assign_sub(0.1 * gradient)

        self.step = mx.function(replica_fn)

    @staticmethod
    def starts():
        random = np.random.default_rng(0)
        shapes = [(3, 5), (5,), (5,)]
        return [random.normal(size=s).astype("float32") for s in shapes]

    def train(self, dataset):
        """The weights after one pass."""
        for variable, start in zip(self.variables, self.starts()):
            variable.assign(start)
        steps = 0
        for batch in self.strategy.experimental_distribute_dataset(dataset):
            self.strategy.run(self.step, (batch,))
            steps += 1
        assert steps == STEPS
        return [np.asarray(variable) for variable in self.variables]


model = functools.cache(Model)


@functools.cache
def expected():
    dataset = mx.data.Dataset.from_tensor_slices(columns(EXAMPLES)).batch(BATCH)
    return model().train(dataset)


@every_source(ONE_PASS)
def test_twenty_steps_end_at_the_weights_of_from_tensor_slices(source):
    found = model().train(source.make(columns(EXAMPLES), BATCH))
    for a, b, start in zip(found, expected(), Model.starts()):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all() and (a != start).all()
