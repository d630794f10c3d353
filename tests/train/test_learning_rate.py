"""`Optimizer.learning_rate`: read and set before, between and in steps, and kept in checkpoints."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import both_engines, compile_if, mirrored

import mirrax as mx

MADE = {
    "by name": lambda rate: mx.train.Optimizer("sgd", learning_rate=rate),
    "injected": lambda rate: mx.train.Optimizer(
        optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    ),
    "in a chain": lambda rate: mx.train.Optimizer(
        optax.chain(
            optax.clip(10.0), optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
        )
    ),
}
all_kinds = pytest.mark.parametrize("kind", MADE)


def stepping(strategy, optimizer, engine, before=lambda: None):
    """A variable of value 10, and a step that takes the rate from it, once a replica."""
    with strategy.scope():
        w = mx.Variable(10.0)

    def step():
        before()
        optimizer.apply_gradients([(jnp.float32(1.0), w)])

    compiled = compile_if(engine, step)
    return w, lambda: strategy.run(compiled)


@all_kinds
@both_engines
@pytest.mark.parametrize("replicas", [1, 2])
def test_it_is_set_before_and_between_steps(kind, engine, replicas):
    optimizer = MADE[kind](0.5)
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert float(optimizer.learning_rate) == 0.25
    w, step = stepping(mirrored(replicas), optimizer, engine)
    step()
    assert float(w) == 10 - 0.25 * replicas
    optimizer.learning_rate = 1.0
    assert float(optimizer.learning_rate) == 1.0
    step()
    assert float(w) == 10 - 1.25 * replicas


def test_setting_it_does_not_trace_again():
    optimizer = MADE["by name"](0.5)
    strategy = mirrored(2)
    with strategy.scope():
        w = mx.Variable(1.0)
    step = mx.function(
        lambda: optimizer.apply_gradients([(jnp.float32(1.0), w)]) is None
    )
    for rate in (0.5, 0.25, 0.125):
        optimizer.learning_rate = rate
        strategy.run(step)
    assert step.trace_count == 1


@both_engines
def test_it_is_set_in_the_step(engine):
    optimizer = MADE["by name"](1.0)

    def halve():
        optimizer.learning_rate = optimizer.learning_rate / 2

    w, step = stepping(mirrored(2), optimizer, engine, before=halve)
    optimizer.build([w])
    step()
    step()
    assert float(optimizer.learning_rate) == 0.25
    assert float(w) == 10 - 2 * 0.5 - 2 * 0.25


def test_a_schedule_is_read_and_not_set():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    optimizer = mx.train.Optimizer("sgd", learning_rate=schedule)
    assert float(optimizer.learning_rate) == 1.0
    w, step = stepping(mirrored(2), optimizer, "compiled")
    step()
    step()
    assert float(optimizer.learning_rate) == 0.75
    assert float(w) == 10 - 2 * 1.0 - 2 * 0.75
    with pytest.raises(ValueError, match="follows a schedule.*set to 0.1"):
        optimizer.learning_rate = 0.1


def test_a_schedule_may_read_a_variable():
    """What `optax.sgd(variable)` cannot do."""
    strategy = mirrored(2)
    with strategy.scope():
        rate = mx.Variable(0.5)
    optimizer = mx.train.Optimizer(optax.sgd(lambda count: rate.read_value()))
    w, step = stepping(strategy, optimizer, "compiled")
    step()
    rate.assign(0.25)
    step()
    assert float(w) == 10 - 2 * 0.5 - 2 * 0.25


def test_a_checkpoint_keeps_it(tmp_path):
    def make():
        optimizer = MADE["by name"](0.5)
        w, step = stepping(mirrored(2), optimizer, "compiled")
        return optimizer, w, step, mx.train.Checkpoint(w=w, optimizer=optimizer)

    optimizer, w, step, checkpoint = make()
    step()
    optimizer.learning_rate = 0.125
    path = checkpoint.save(str(tmp_path / "ckpt"))
    checkpoint.sync()
    other, w2, step2, checkpoint2 = make()
    checkpoint2.restore(path)
    step2()
    assert float(other.learning_rate) == 0.125
    np.testing.assert_allclose(float(w2), float(w) - 0.25)


def test_mistakes():
    fixed = mx.train.Optimizer(optax.adam(1e-3), name="adam")
    with pytest.raises(
        AttributeError, match="'adam' is a constant.*inject_hyperparams"
    ):
        _ = fixed.learning_rate
    with pytest.raises(AttributeError, match="'adam' is a constant.*by name"):
        fixed.learning_rate = 1.0
    with pytest.raises(
        TypeError, match="set to a function.*when the optimizer is made"
    ):
        MADE["by name"](1.0).learning_rate = lambda step: 0.1
    with pytest.raises(ValueError, match="no optimizer 'adan_'"):
        mx.train.Optimizer("adan_", learning_rate=1.0)
    with pytest.raises(TypeError, match="no argument 'beta'; it has learning_rate, b1"):
        mx.train.Optimizer("adam", learning_rate=1.0, beta=0.9)
    with pytest.raises(TypeError, match="needs a `learning_rate`"):
        mx.train.Optimizer("adam")
    with pytest.raises(TypeError, match="'learning_rate' only with the name"):
        mx.train.Optimizer(optax.adam(1e-3), learning_rate=1.0)
    two = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    with pytest.raises(AttributeError, match="2 learning rates"):
        _ = mx.train.Optimizer(optax.chain(two, two)).learning_rate


# A variable as the rate -------------------------------------------------------------------


@both_engines
@pytest.mark.parametrize(
    "make",
    [
        lambda rate: mx.train.Optimizer("sgd", learning_rate=rate),
        lambda rate: mx.train.Optimizer(
            optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
        ),
        lambda rate: mx.train.Optimizer(optax.sgd(lambda count: rate)),
    ],
    ids=["by name", "injected", "schedule"],
)
def test_a_variable_is_read_in_each_step(engine, make):
    strategy = mirrored(2)
    with strategy.scope():
        rate = mx.Variable(0.5)
    w, step = stepping(strategy, make(rate), engine)
    step()
    rate.assign(2.0)
    step()
    assert w.numpy() == 10 - 2 * 0.5 - 2 * 2.0


def test_setting_the_rate_assigns_the_variable():
    strategy = mirrored(2)
    with strategy.scope():
        rate = mx.Variable(0.5)
    optimizer = mx.train.Optimizer("adam", learning_rate=rate)
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert rate.numpy() == 0.25


@pytest.mark.parametrize(
    "make",
    [optax.sgd, optax.adam, lambda v: optax.chain(optax.clip(1.0), optax.adamw(v))],
)
def test_a_variable_that_optax_would_read_only_once(make):
    for scope in (mx.get_strategy().scope(), mirrored(2).scope()):
        with scope:
            rate = mx.Variable(0.5, name="rate")
        with pytest.raises(ValueError, match="'rate'.*read it now and never again"):
            make(rate)
    assert float(-1 * rate) == -0.5  # nobody else is disturbed
