"""A step in which no replica has any rows: at the end of the data, on all of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import both_engines, compile_if, mirrored, per_replica

import mirrax as mx


@pytest.fixture
def strategy():
    return mirrored(2)


def empty(strategy, shape=(0, 3)):
    return strategy.experimental_distribute_values_from_function(
        lambda context: jnp.zeros(shape)
    )


@both_engines
@pytest.mark.parametrize("reduce", [jnp.sum, lambda x: jnp.max(x, initial=0.0)])
def test_a_reduction_of_nothing(engine, strategy, reduce):
    total = strategy.run(compile_if(engine, reduce), args=(empty(strategy),))
    assert float(strategy.reduce("SUM", total, axis=None)) == 0.0


@both_engines
def test_a_training_step_changes_nothing(engine, strategy):
    with strategy.scope():
        w = mx.Variable(jnp.ones((3, 2)))
        seen = mx.metrics.Mean()

    def step(x):
        def compute_loss():
            return jnp.sum(jax.nn.relu(x @ w))

        loss, gradients = mx.value_and_grad(compute_loss, [w])()
        context = mx.distribute.get_replica_context()
        (gradient,) = context.all_reduce("SUM", gradients)
        w.assign_sub(gradient)
        seen.update_state(jnp.sum(x, axis=1))
        return context.all_reduce("SUM", loss)

    step = compile_if(engine, step)
    for _ in range(2):
        assert (
            float(
                strategy.reduce(
                    "MEAN", strategy.run(step, args=(empty(strategy),)), axis=None
                )
            )
            == 0.0
        )
    np.testing.assert_array_equal(w.numpy(), np.ones((3, 2)))
    assert float(seen.result()) == 0.0


def test_a_function_around_the_run(strategy):
    @mx.function
    def step(x):
        return strategy.reduce("SUM", strategy.run(jnp.sum, args=(x,)), axis=None)

    assert float(step(empty(strategy))) == 0.0


@both_engines
def test_collectives_of_nothing(engine, strategy):
    def replica_fn(x):
        context = mx.distribute.get_replica_context()
        return context.all_reduce("SUM", x), context.all_gather(x, axis=0)

    summed, gathered = strategy.run(
        compile_if(engine, replica_fn), args=(empty(strategy),)
    )
    assert [a.shape for a in strategy.experimental_local_results(summed)] == [
        (0, 3)
    ] * 2
    assert [a.shape for a in strategy.experimental_local_results(gathered)] == [
        (0, 3)
    ] * 2
    assert strategy.reduce("SUM", empty(strategy), axis=None).shape == (0, 3)
    assert strategy.reduce("SUM", empty(strategy), axis=0).shape == (3,)
    assert strategy.gather(empty(strategy), axis=0).shape == (0, 3)


def test_a_constant_of_nothing(strategy):
    """Indexing a number with no index at all is a scatter with an empty array of indices."""
    x = per_replica(strategy, 1.0, 2.0)
    found = strategy.run(mx.function(lambda x: x.at[()].add(1)), args=(x,))
    assert list(map(float, strategy.experimental_local_results(found))) == [2.0, 3.0]
