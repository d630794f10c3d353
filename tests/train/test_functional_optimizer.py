"""`init` and `update`: an optimizer as one of Optax's transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from helpers.engines import both_engines, compile_if, parts, per_replica

import mirrax as mx

from .training import (
    STRATEGIES,
    Plain,
    distribute,
    gradients_of,
    initial_values,
    make_variables,
    step_of,
    sum_of,
)

pytestmark = pytest.mark.slow


def clipped():
    return optax.chain(optax.clip_by_global_norm(1.0), momentum())


def momentum():
    return optax.sgd(0.125, momentum=0.5)


def assert_equal_trees(strategy, mine, theirs):
    """Every replica has the numbers of `theirs`."""
    leaves = jax.tree.leaves(
        mine, is_leaf=lambda x: isinstance(x, mx.distribute.DistributedValues)
    )
    assert len(leaves) == len(jax.tree.leaves(theirs))
    for value, expected in zip(leaves, jax.tree.leaves(theirs)):
        for part in strategy.experimental_local_results(value):
            np.testing.assert_allclose(part, expected, 2e-6, 1e-6)


def step_with(optimizer):
    def step(state, gradients):
        params, slots = state
        updates, slots = optimizer.update(gradients, slots, params)
        return optax.apply_updates(params, updates), slots

    return step


@pytest.mark.parametrize(
    "engine, k",
    [
        ("compiled", 1),
        ("donating", 2),
        ("eager", 1),
        ("eager", 2),
        ("compiled", 2),
        ("donating", 1),
    ],
)
def test_the_same_as_with_variables(engine, k):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy)
    by_variables = mx.train.Optimizer(clipped(), gradient_accumulation_steps=k)
    optimizer = mx.train.Optimizer(clipped(), gradient_accumulation_steps=k)
    params = jax.tree.map(jnp.asarray, initial_values())
    state = strategy.replicate((params, optimizer.init(params)))
    step = step_with(optimizer)
    if engine == "donating":
        step = mx.function(step, donate_argnums=0)
    else:
        step = compile_if(engine, step)
    apply = step_of("compiled", by_variables, variables)
    for i in range(2 * k):
        gradients = distribute(strategy, gradients_of(2, i))
        state = strategy.run(step, (state, gradients))
        strategy.run(apply, (gradients,))
    values = {name: variable.numpy() for name, variable in variables.items()}
    assert_equal_trees(strategy, state[0], values)
    inner = state[1] if k == 1 else state[1].inner
    slots = by_variables.state if k == 1 else by_variables.state.inner
    numbers = jax.tree.map(
        lambda v: v.numpy(), slots, is_leaf=lambda v: isinstance(v, mx.Variable)
    )
    assert_equal_trees(strategy, inner, numbers)
    assert (values["w"] != initial_values()["w"]).all()
    if engine != "eager":
        # What accumulates begins as one value for all and becomes each replica's own.
        assert step.trace_count == k


@both_engines
def test_gradients_that_are_summed_already(engine):
    strategy = STRATEGIES[2]
    optimizer, plain = mx.train.Optimizer(momentum()), Plain(momentum())
    params = jax.tree.map(jnp.asarray, initial_values())

    def step(params, slots, gradients):
        updates, _ = optimizer.update(gradients, slots, params, aggregate=False)
        return optax.apply_updates(params, updates)

    gradients = sum_of(gradients_of(2, 0))
    args = strategy.replicate((params, optimizer.init(params), gradients))
    plain.step(gradients)
    result = strategy.run(compile_if(engine, step), args)
    assert_equal_trees(strategy, result, plain.params)
    outside = step(params, optimizer.init(params), gradients)
    assert_equal_trees(strategy, outside, plain.params)


def test_extra_arguments_are_passed_on():
    optimizer = mx.train.Optimizer(
        optax.contrib.reduce_on_plateau(patience=1, factor=0.5)
    )
    params = jnp.ones(2)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for expected in (1.0, 0.5, 0.25):
        updates, state = update(params, state, params, value=1.0)
        np.testing.assert_array_equal(updates, [expected] * 2)


@both_engines
def test_an_accumulating_state_waits_with_updates_of_zero(engine):
    strategy = STRATEGIES[2]
    optimizer = mx.train.Optimizer(optax.sgd(1.0), gradient_accumulation_steps=2)

    def step(gradient, state):
        return optimizer.update(gradient, state)

    step = compile_if(engine, step)
    state = strategy.replicate(optimizer.init(jnp.zeros(())))
    gradient = per_replica(strategy, 1.0, 5.0)
    seen = []
    for _ in range(4):
        update, state = strategy.run(step, (gradient, state))
        seen.append((parts(strategy, update), parts(strategy, state.accumulated)))
    assert seen == [([0.0, 0.0], [1.0, 5.0]), ([-6.0, -6.0], [0.0, 0.0])] * 2


@both_engines
@pytest.mark.parametrize("k", [1, 2])
def test_in_the_train_state_of_flax(engine, k):
    strategy = STRATEGIES[2]
    optimizer = mx.train.Optimizer(momentum(), gradient_accumulation_steps=k)
    state = TrainState.create(
        apply_fn=None, params=jax.tree.map(jnp.asarray, initial_values()), tx=optimizer
    )
    state = strategy.replicate(state)

    def step(state, gradients):
        return state.apply_gradients(grads=gradients)

    step = compile_if(engine, step)
    plain, batches = Plain(momentum()), [gradients_of(2, i) for i in range(2)]
    for gradients in batches:
        state = strategy.run(step, (state, distribute(strategy, gradients)))
    totals = [sum_of(gradients) for gradients in batches]
    if k == 2:
        totals = [jax.tree.map(lambda a, b: (a + b) / 2, *totals)]
    for total in totals:
        plain.step(total)
    assert_equal_trees(strategy, state.params, plain.params)
    assert parts(strategy, state.step) == [2, 2]


def test_inside_a_chain_of_optax():
    strategy = STRATEGIES[2]
    chain = optax.chain(mx.train.Optimizer(optax.identity()), optax.sgd(1.0))  # pyright: ignore

    @mx.function
    def step(gradient):
        return chain.update(gradient, chain.init(gradient))[0]

    update = strategy.run(step, (per_replica(strategy, 1.0, 5.0),))
    assert parts(strategy, update) == [-6.0, -6.0]


def test_update_outside_of_replicas_says_what_to_do():
    strategy = STRATEGIES[2]
    optimizer = mx.train.Optimizer(optax.sgd(1.0))
    state = optimizer.init(jnp.ones(2))
    with strategy.scope(), pytest.raises(RuntimeError, match="inside `strategy.run`"):
        optimizer.update(jnp.ones(2), state)


def test_without_a_strategy():
    optimizer, plain = mx.train.Optimizer(momentum()), Plain(momentum())
    params = jax.tree.map(jnp.asarray, initial_values())
    gradients = sum_of(gradients_of(1, 0))
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    plain.step(gradients)
    assert_equal_trees(
        STRATEGIES[1], optax.apply_updates(params, updates), plain.params
    )
