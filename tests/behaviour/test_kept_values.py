"""What the user holds stays readable: compiled steps never take it away."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import all_sum, mirrored, parts, per_replica

import mirrax as mx

counts = pytest.mark.parametrize("n", [1, 2])


def make(n, value=(1.0, 2.0), **kwargs):
    strategy = mirrored(n)
    with strategy.scope():
        return strategy, mx.Variable(jnp.array(value), **kwargs)


def steps(strategy, v, count=3):
    """Compiled steps that add 1 to `v`, with the variable's buffer reused."""
    add = mx.function(lambda: v.assign_add(jnp.ones(2), read_value=False))
    for _ in range(count):
        strategy.run(add)


@counts
def test_a_value_read_before_a_step(n):
    strategy, v = make(n)
    steps(strategy, v)
    held = [v.read_value(), jnp.asarray(v), v * 1, v.value(), v[:]]
    copies = strategy.experimental_local_results(v)
    components = [copy.read_value() for copy in v.values]
    steps(strategy, v)
    for array in [*held, *copies, *components]:
        assert array.tolist() == [4.0, 5.0]
    assert v.numpy().tolist() == [7.0, 8.0]


@counts
def test_a_numpy_view_of_a_value_read_before_a_step(n):
    strategy, v = make(n)
    steps(strategy, v)
    views = [np.asarray(v.read_value()), np.asarray(v), v.numpy()]
    steps(strategy, v)
    assert [view.tolist() for view in views] == [[4.0, 5.0]] * 3


@counts
def test_a_tree_of_values_taken_before_a_step(n):
    strategy, v = make(n)
    steps(strategy, v)
    (leaf,) = jax.tree.leaves({"v": v})
    mapped = jax.tree.map(lambda x: x, {"v": v})["v"]
    steps(strategy, v)
    assert leaf.tolist() == mapped.tolist() == [4.0, 5.0]


@counts
def test_the_initial_value(n):
    strategy = mirrored(n)
    initial = jnp.array([1.0, 2.0])
    with strategy.scope():
        v = mx.Variable(initial)
        w = mx.Variable(lambda: initial)
    for variable in (v, w):
        steps(strategy, variable)
        assert variable.numpy().tolist() == [4.0, 5.0]
    assert initial.tolist() == [1.0, 2.0]


def test_the_initial_value_of_an_ordinary_variable():
    initial = jnp.array([1.0, 2.0])
    v = mx.Variable(initial)
    add = mx.function(lambda: v.assign_add(jnp.ones(2)).read_value())
    held = [add() for _ in range(3)]
    assert initial.tolist() == [1.0, 2.0]
    assert [x.tolist() for x in held] == [[2.0, 3.0], [3.0, 4.0], [4.0, 5.0]]


@counts
def test_a_variable_made_from_another_variable(n):
    strategy, v = make(n)
    with strategy.scope():
        w = mx.Variable(v)
    steps(strategy, v)
    assert w.numpy().tolist() == [1.0, 2.0]
    steps(strategy, w, 1)
    assert v.numpy().tolist() == [4.0, 5.0]


@counts
def test_an_array_assigned_to_a_variable(n):
    strategy, v = make(n)
    new = jnp.array([10.0, 20.0])
    steps(strategy, v)
    v.assign(new)
    steps(strategy, v)
    assert new.tolist() == [10.0, 20.0]
    assert v.numpy().tolist() == [13.0, 23.0]


@counts
def test_an_argument_that_a_compiled_step_assigns(n):
    strategy, v = make(n)
    new = jax.device_put(jnp.array([10.0, 20.0]), jax.devices()[0])
    keep = mx.function(lambda x: v.assign(x, read_value=False))
    steps(strategy, v)
    strategy.run(keep, (new,))
    steps(strategy, v)
    mirror = strategy.replicate(jnp.array([30.0, 40.0]))
    strategy.run(keep, (mirror,))
    steps(strategy, v)
    assert new.tolist() == [10.0, 20.0]
    assert parts(strategy, mirror)[0] == [30.0, 40.0]
    assert v.numpy().tolist() == [33.0, 43.0]


def test_a_per_replica_argument_that_a_compiled_step_assigns():
    strategy, v = make(2)
    x = per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    held = strategy.experimental_local_results(x)
    keep = mx.function(lambda x: v.assign(x, read_value=False))
    steps(strategy, v)
    strategy.run(keep, (x,))
    steps(strategy, v)
    assert [a.tolist() for a in held] == [[1.0, 2.0], [3.0, 4.0]]
    assert parts(strategy, x) == [[1.0, 2.0], [3.0, 4.0]]
    assert parts(strategy, v) == [[4.0, 5.0], [6.0, 7.0]]


@counts
def test_what_compiled_steps_return(n):
    strategy, v = make(n)

    @mx.function
    def step(x):
        before = v.read_value()
        v.assign_add(x)
        return before, v.read_value(), all_sum(x)

    x = jnp.ones(2)
    returned = [strategy.run(step, (x,)) for _ in range(4)]
    for k, (before, after, total) in enumerate(returned):
        assert parts(strategy, before) == [[1.0 + k, 2.0 + k]] * n
        assert parts(strategy, after) == [[2.0 + k, 3.0 + k]] * n
        assert parts(strategy, total) == [[n, n]] * n
    assert x.tolist() == [1.0, 1.0]


@counts
def test_what_a_function_around_run_returns(n):
    strategy, v = make(n)

    @mx.function
    def step(x):
        before = v.read_value()
        strategy.run(lambda x: v.assign_add(x, read_value=False), (x,))
        return before, v.read_value()

    x = jnp.ones(2)
    returned = [step(x) for _ in range(4)]
    for k, (before, after) in enumerate(returned):
        assert before.tolist() == [1.0 + k, 2.0 + k]
        assert after.tolist() == [2.0 + k, 3.0 + k]
    assert x.tolist() == [1.0, 1.0]


@counts
def test_a_constant_that_a_compiled_step_assigns(n):
    strategy, v = make(n)
    zero = jnp.zeros(2)
    reset = mx.function(lambda: v.assign(zero, read_value=False))
    for _ in range(3):
        strategy.run(reset)
        steps(strategy, v, 2)
        assert v.numpy().tolist() == [2.0, 2.0]
    assert zero.tolist() == [0.0, 0.0]


def test_the_copies_of_a_metric_read_before_a_step():
    strategy, v = make(
        2,
        synchronization=mx.VariableSynchronization.ON_READ,
        aggregation=mx.VariableAggregation.SUM,
    )
    steps(strategy, v)
    copies, total = strategy.experimental_local_results(v), v.read_value()
    steps(strategy, v)
    assert [copy.tolist() for copy in copies] == [[4.0, 5.0]] * 2
    assert total.tolist() == [8.0, 10.0]
    assert v.numpy().tolist() == [14.0, 16.0]


def test_values_held_between_eager_and_compiled_steps():
    strategy, v = make(2)
    held = []
    for k in range(6):
        out = strategy.run(lambda: v.read_value())
        held.append(strategy.experimental_local_results(out))
        add = mx.function(lambda: v.assign_add(jnp.ones(2), read_value=False))
        strategy.run(add if k % 2 else add.fn)
    for k, copies in enumerate(held):
        assert [copy.tolist() for copy in copies] == [[1.0 + k, 2.0 + k]] * 2


@counts
def test_replicated_state_is_a_copy_of_the_users(n):
    strategy = mirrored(n)
    mine = {"w": jnp.array([1.0, 2.0])}
    state = strategy.replicate(mine)
    step = mx.function(lambda s: {"w": s["w"] + 1}, donate_argnums=0)
    for _ in range(2):
        state = strategy.run(step, (state,))
    assert mine["w"].tolist() == [1.0, 2.0]
    assert parts(strategy, state["w"]) == [[3.0, 4.0]] * n


def test_replicated_state_without_a_strategy_is_a_copy_too():
    strategy = mx.get_strategy()
    mine = {"w": jnp.array([1.0, 2.0])}
    state = strategy.replicate(mine)
    step = mx.function(lambda s: {"w": s["w"] + 1}, donate_argnums=0)
    for _ in range(2):
        state = strategy.run(step, (state,))
    assert mine["w"].tolist() == [1.0, 2.0]
    assert state["w"].tolist() == [3.0, 4.0]
