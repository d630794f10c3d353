"""Flax NNX on several workers: as in one process with as many replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
from flax import nnx
from helpers.engines import per_replica

import mirrax as mx

from .comparing import Pool

X = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name="replica", rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.first(x)))


def train(strategy, rows, is_compiled):
    """Two steps on parts of so many rows; everything that they change, and a draw."""
    with strategy.scope():
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        metrics: Any = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    def step(model, optimizer, metrics, x):
        def loss(model):
            values = (model(x) ** 2).sum(axis=1)
            return values.sum() / len(X), values

        (_, values), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        metrics.update(loss=values)
        return values

    x = per_replica(strategy, *np.split(X[: sum(rows)], np.cumsum(rows)[:-1]))
    fn = mx.function(step) if is_compiled else step
    values = [strategy.run(fn, (model, optimizer, metrics, x)) for _ in range(2)]
    weights = nnx.to_pure_dict(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))
    return weights, metrics.compute(), int(metrics.loss.count[...]), values


def test_a_model_of_nnx(two_by_two: Pool) -> None:
    even = two_by_two.assert_as_one(train, (1, 1, 1, 1), True, atol=1e-6)
    uneven = two_by_two.assert_as_one(train, (2, 2, 2, 1), True, atol=1e-6)
    assert (even[2], uneven[2]) == (8, 14)


def test_eager_replicas_of_two_workers(two_by_one: Pool) -> None:
    two_by_one.assert_as_one(train, (4, 3), False, atol=1e-6)


def checkpoint(strategy, directory):
    """A model, saved and restored in place; every worker reads what the first wrote."""
    with strategy.scope():
        model, rngs = Net(nnx.Rngs(0)), nnx.Rngs(7)
    saver = mx.train.Checkpoint(model=model, rngs=rngs)
    path = saver.write(f"{directory}/ckpt")
    before = np.array(model.first.kernel[...])
    model.first.kernel[...] = 0 * before
    nnx.reseed(rngs, default=1)
    saver.read(path).assert_consumed()
    draw = strategy.run(mx.function(lambda: rngs.uniform((2,))))
    return np.array_equal(model.first.kernel[...], before), draw


def test_a_checkpoint(two_by_one: Pool, tmp_path) -> None:
    found = two_by_one.assert_as_one(checkpoint, str(tmp_path))
    assert found[0]
