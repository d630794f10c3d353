"""Several batches make one update, and travel between replicas once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import all_styles, both_engines, compile_if, parts, per_replica
from helpers.hlo import compiled_text, count
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from property.examples import examples

import mirrax as mx

from .training import (
    STRATEGIES,
    Plain,
    assert_close,
    assert_in_step,
    copies,
    distribute,
    gradients_of,
    initial_values,
    make_variables,
    pairs,
    step_of,
    sum_of,
)

pytestmark = pytest.mark.slow


def momentum():
    return optax.sgd(0.125, momentum=0.5)


def clipped():
    return optax.chain(optax.clip_by_global_norm(1.0), momentum())


def mean_of(batches):
    """The mean over batches of the gradients summed over replicas."""
    totals = [sum_of(batch) for batch in batches]
    return jax.tree.map(lambda *xs: np.mean(xs, axis=0, dtype="float32"), *totals)


def assert_inner(optimizer, variables, plain):
    """What Optax has made of the updates so far; the slots that accumulate are apart."""
    slots = jax.tree.leaves(optimizer.state.inner, is_leaf=lambda x: hasattr(x, "name"))
    for variable in (*variables.values(), *slots):
        assert_in_step(variable)
    for name, variable in variables.items():
        np.testing.assert_allclose(variable.numpy(), plain.params[name], 2e-6, 1e-6)
    for slot, expected in zip(slots, jax.tree.leaves(plain.state)):
        np.testing.assert_allclose(slot.numpy(), expected, 2e-6, 1e-6)


@both_engines
def test_k_calls_make_one_update_with_their_mean(engine, k=3):
    strategy = STRATEGIES[2]
    variables, plain = make_variables(strategy), Plain(momentum())
    optimizer = mx.train.Optimizer(momentum(), gradient_accumulation_steps=k)
    step = step_of(engine, optimizer, variables)
    for update in range(2):
        batches = [gradients_of(2, update * k + i) for i in range(k)]
        for i, gradients in enumerate(batches):
            assert int(optimizer.iterations) == update
            assert int(optimizer.state.micro_step if update or i else 0) == i
            strategy.run(step, (distribute(strategy, gradients),))
            if i < k - 1:
                assert_inner(optimizer, variables, plain)
        plain.step(mean_of(batches))
        assert_inner(optimizer, variables, plain)
    assert int(optimizer.iterations) == 2
    if engine == "compiled":
        assert step.trace_count == 1


@examples(4)
@given(
    n=st.integers(1, 4),
    k=st.integers(2, 4),
    calls=st.integers(1, 6),
    engine=st.sampled_from(["eager", "compiled"]),
)
def test_any_number_of_calls(n, k, calls, engine):
    strategy, values = STRATEGIES[n], {"v": np.ones(2, "float32")}
    variables, plain = make_variables(strategy, values), Plain(momentum(), values)
    optimizer = mx.train.Optimizer(momentum(), gradient_accumulation_steps=k)
    step = step_of(engine, optimizer, variables)
    batches = [gradients_of(n, i, {"v": (2,)}) for i in range(calls)]
    for batch in batches:
        strategy.run(step, (distribute(strategy, batch),))
    for i in range(calls // k):
        plain.step(mean_of(batches[i * k : (i + 1) * k]))
    np.testing.assert_allclose(variables["v"].numpy(), plain.params["v"], 2e-6, 1e-6)
    assert int(optimizer.iterations) == calls // k
    left = [sum_of(batch)["v"] for batch in batches[calls - calls % k :]]
    kept = optimizer.state.accumulated["v"].numpy()
    np.testing.assert_allclose(kept, np.sum(left, axis=0), atol=1e-6)


@both_engines
def test_clipping_sees_the_mean_of_the_whole_batch(engine):
    strategy = STRATEGIES[2]
    variables, plain = make_variables(strategy), Plain(clipped())
    optimizer = mx.train.Optimizer(clipped(), gradient_accumulation_steps=2)
    step = step_of(engine, optimizer, variables)
    batches = [gradients_of(2, i) for i in range(2)]
    for gradients in batches:
        strategy.run(step, (distribute(strategy, gradients),))
    plain.step(mean_of(batches))
    assert_inner(optimizer, variables, plain)


@both_engines
def test_until_the_update_every_replica_keeps_its_own_sum(engine):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy, {"v": np.zeros((), "float32")})
    optimizer = mx.train.Optimizer(optax.sgd(1.0), gradient_accumulation_steps=3)
    step = step_of(engine, optimizer, variables)
    for _ in range(2):
        strategy.run(step, ({"v": per_replica(strategy, 1.0, 5.0)},))
    own = optimizer.state.accumulated["v"]
    assert parts(strategy, own) == [2.0, 10.0]
    assert own.synchronization is mx.VariableSynchronization.ON_READ
    assert float(variables["v"]) == 0.0
    strategy.run(step, ({"v": per_replica(strategy, 4.0, 2.0)},))
    assert parts(strategy, own) == [0.0, 0.0]
    assert float(variables["v"]) == -6.0


@both_engines
def test_uneven_batches_are_accumulated_too(engine):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy, {"v": np.array([1.0, 2.0], "float32")})
    v = variables["v"]
    optimizer = mx.train.Optimizer(optax.sgd(1.0), gradient_accumulation_steps=2)

    def replica_fn(x):
        gradient = mx.grad(lambda: jnp.sum(v * x), v)()
        optimizer.apply_gradients([(gradient, v)])

    step = compile_if(engine, replica_fn)
    for sizes in ([2, 2], [2, 1]):
        x = per_replica(strategy, *(jnp.ones((size, 2)) for size in sizes))
        strategy.run(step, (x,))
    assert parts(strategy, v) == [[-2.5, -1.5]] * 2
    assert int(optimizer.iterations) == 1


@all_styles
def test_outside_of_replicas(engine):
    strategy = STRATEGIES[2]
    variables, plain = make_variables(strategy), Plain(momentum())
    optimizer = mx.train.Optimizer(momentum(), gradient_accumulation_steps=2)

    def apply(gradients):
        optimizer.apply_gradients(pairs(gradients, variables))

    apply = apply if engine == "eager" else mx.function(apply)
    batches = [gradients_of(2, i) for i in range(4)]
    for batch in batches:
        if engine == "caller":
            with strategy.scope():
                apply(distribute(strategy, batch))
        else:
            apply(distribute(strategy, batch))
    plain.step(mean_of(batches[:2]))
    plain.step(mean_of(batches[2:]))
    assert_inner(optimizer, variables, plain)


@both_engines
def test_plain_gradients_outside_of_replicas(engine):
    variables = make_variables(STRATEGIES[2], {"v": np.zeros((), "float32")})
    optimizer = mx.train.Optimizer(optax.sgd(1.0), gradient_accumulation_steps=2)
    step = step_of(engine, optimizer, variables)
    step({"v": 1.0})
    step({"v": 5.0})
    assert parts(STRATEGIES[2], variables["v"]) == [-3.0, -3.0]
    assert int(optimizer.iterations) == 1


@both_engines
def test_of_a_variable_that_is_left_out_nothing_changes(engine):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy)
    optimizer = mx.train.Optimizer(momentum(), gradient_accumulation_steps=2)
    step = step_of(engine, optimizer, variables)
    some = step_of(engine, optimizer, {"w": variables["w"]})
    first = gradients_of(2, 0)
    strategy.run(step, (distribute(strategy, first),))
    b, own = variables["b"], optimizer.state.accumulated["b"]
    before = copies(b), copies(own)
    strategy.run(some, ({"w": distribute(strategy, gradients_of(2, 1))["w"]},))
    assert (copies(b), copies(own)) == before
    np.testing.assert_allclose(own.numpy(), sum_of(first)["b"], rtol=1e-6)
    assert int(optimizer.iterations) == 1


def test_eager_and_compiled_calls_take_turns():
    strategy = STRATEGIES[2]
    variables, plain = make_variables(strategy), Plain(momentum())
    optimizer = mx.train.Optimizer(momentum(), gradient_accumulation_steps=2)
    compiled = step_of("compiled", optimizer, variables)
    eager = step_of("eager", optimizer, variables)
    batches = [gradients_of(2, i) for i in range(4)]
    for step, batch in zip([compiled, eager, eager, compiled], batches):
        strategy.run(step, (distribute(strategy, batch),))
    plain.step(mean_of(batches[:2]))
    plain.step(mean_of(batches[2:]))
    assert_inner(optimizer, variables, plain)


# What is compiled ------------------------------------------------------------------------


def text_of(strategy, replica_fn, *args):
    function = mx.function(replica_fn)
    strategy.run(function, args)
    return compiled_text(function, strategy, *args)


def entry(text):
    """The part of a program that always runs."""
    return text.split("\nENTRY ", 1)[1].split("\n}", 1)[0]


def make(n, **kwargs):
    strategy = STRATEGIES[n]
    variables = make_variables(strategy)
    return strategy, variables, mx.train.Optimizer(clipped(), **kwargs)


def test_the_gradients_of_a_step_travel_once(n=2):
    strategy, variables, optimizer = make(n)
    step = step_of("eager", optimizer, variables)
    text = text_of(strategy, step, distribute(strategy, gradients_of(n, 0)))
    assert count(text, "all-reduce") == count(entry(text), "all-reduce") == 1


def test_accumulated_gradients_travel_only_for_an_update(n=4):
    strategy, variables, optimizer = make(n, gradient_accumulation_steps=4)
    step = step_of("eager", optimizer, variables)
    text = text_of(strategy, step, distribute(strategy, gradients_of(n, 0)))
    assert count(text, "all-reduce") == 1
    assert count(entry(text), "all-reduce") == 0, "it waits in a branch"


def test_gradients_that_are_summed_already_do_not_travel():
    strategy, variables, optimizer = make(2)

    def step(gradients):
        optimizer.apply_gradients(pairs(gradients, variables), aggregate=False)

    gradients = jax.tree.map(jnp.asarray, sum_of(gradients_of(2, 0)))
    assert count(text_of(strategy, step, gradients), "all-reduce") == 0


def loss_of(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def loop(variables, batches):
    """The mean gradient of micro-batches, by a loop in Python."""
    total = jax.tree.map(jnp.zeros_like, variables)
    for x in batches:
        gradients = mx.grad(lambda x=x: loss_of(variables, x), variables)()
        total = jax.tree.map(jnp.add, total, gradients)
    return jax.tree.map(lambda x: x / len(batches), total)


def scan(variables, batches):
    """The mean gradient of micro-batches, by `lax.scan`."""
    params = jax.tree.map(jnp.asarray, variables)

    def add(total, x):
        gradients = jax.grad(loss_of)(params, x)
        return jax.tree.map(jnp.add, total, gradients), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, _ = lax.scan(add, zeros, batches)
    return jax.tree.map(lambda x: x / len(batches), total)


@pytest.mark.parametrize("accumulate", [loop, scan], ids=["loop", "scan"])
def test_micro_batches_inside_a_step_travel_once(accumulate):
    strategy, variables, optimizer = make(2)
    plain = Plain(clipped())
    data = np.random.default_rng(0).normal(size=(2, 3, 4, 2)).astype("float32")

    def step(batches):
        gradients = accumulate(variables, batches)
        optimizer.apply_gradients(pairs(gradients, variables))

    text = text_of(strategy, step, per_replica(strategy, *data))
    assert count(text, "all-reduce") == count(entry(text), "all-reduce") == 1
    each = [jax.vmap(jax.grad(loss_of), (None, 0))(initial_values(), d) for d in data]
    plain.step(sum_of([jax.tree.map(lambda x: np.mean(x, 0), g) for g in each]))
    assert_close(optimizer, variables, plain, rtol=1e-4)
