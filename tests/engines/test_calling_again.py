"""The same program again: what it may rely on, and what has to be looked at each time."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import mirrored, parts
from jax import lax

import mirrax as mx
from mirrax._src.base.values import is_distributed


@pytest.fixture
def strategy():
    return mirrored(2)


def add_one(state):
    return jax.tree.map(lambda x: x + 1, state)


# Donation ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_a_state_that_comes_to_hold_one_array_twice_is_an_error(n):
    strategy = mirrored(n)
    step = mx.function(add_one, donate_argnums=0)
    state = strategy.replicate({"a": jnp.ones(3), "b": jnp.zeros(3)})
    for _ in range(2):
        state = strategy.run(step, (state,))
    state["b"] = state["a"]
    with pytest.raises(ValueError, match="donated twice"):
        strategy.run(step, (state,))
    state["b"] = strategy.replicate(jnp.zeros(3))
    state = strategy.run(step, (state,))
    assert float(state["a"][0]) == 4.0


@pytest.mark.parametrize("n", [1, 2])
def test_an_array_that_is_donated_and_also_given_is_an_error(n):
    strategy = mirrored(n)
    step = mx.function(lambda a, b: (a + 1, b * 2), donate_argnums=0)
    x = strategy.replicate(jnp.ones(3))
    with pytest.raises(ValueError, match="donated twice"):
        strategy.run(step, (x, x))
    a, b = strategy.run(step, (strategy.replicate(jnp.ones(3)), x))
    assert float(a[0]) == 2.0 and float(b[0]) == 2.0


# After a failure -------------------------------------------------------------------------


def test_a_call_that_failed_does_not_let_other_shapes_in():
    f = mx.function(lambda a, b: (a - a.mean(), b - b.mean()), donate_argnums=(0, 1))
    x = jnp.arange(2.0)
    with pytest.raises(ValueError, match="donated twice"):
        f(x, x)
    a, b = f(jnp.arange(4.0), jnp.arange(4.0))
    assert a.tolist() == b.tolist() == [-1.5, -0.5, 0.5, 1.5]


def test_a_step_that_met_a_nan_takes_other_shapes_afterwards():
    v = mx.Variable(1.0)

    @mx.function
    def f(x):
        v.assign_add(jnp.log(x).mean())
        return x.mean()

    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            f(-jnp.ones(2))
        assert float(f(jnp.arange(1.0, 5.0))) == 2.5


@pytest.mark.parametrize("n", [1, 2])
def test_looking_for_nans_may_begin_after_the_first_steps(n):
    strategy = mirrored(n)
    with strategy.scope():
        v = mx.Variable(1.0)
    step = mx.function(lambda x: v.assign_add(jnp.log(x)).read_value())
    for _ in range(2):
        strategy.run(step, (1.0,))
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            strategy.run(step, (-1.0,))
        strategy.run(step, (1.0,))
    strategy.run(step, (1.0,))
    assert float(v) == 1.0


# Kinds of arguments --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mirrored", "per replica"])
def test_random_keys_are_arguments_again_and_again(kind, strategy):
    f = mx.function(lambda key: jax.random.uniform(key))
    key = jax.random.key(0)
    value = strategy.replicate(key)
    if kind == "per replica":
        value = strategy.experimental_distribute_values_from_function(lambda _: key)
    expected = float(jax.random.uniform(key))
    for _ in range(3):
        assert parts(strategy, strategy.run(f, (value,))) == [expected] * 2


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_boolean_steers_python_also_after_an_array_of_booleans(n):
    def f(x, flag):
        return x + (1 if isinstance(flag, bool) and flag else 10)

    f = mx.function(f)
    strategy = mirrored(n or 1)
    run = f if n == 0 else lambda *args: strategy.run(f, args)
    for _ in range(2):
        assert float(run(1.0, jnp.array(True))) == 11.0
        assert float(run(1.0, True)) == 2.0
        assert float(run(1.0, False)) == 11.0


def test_a_method_of_a_class_that_holds_arrays():
    class Model:
        table = np.arange(3.0)

        @mx.function
        def look_up(self, i):
            return jnp.asarray(self.table)[i]

    assert float(Model().look_up(2)) == 2.0


def test_settings_of_jax_belong_to_a_program():
    f = mx.function(lambda x: x + jnp.ones(3).sum())
    assert f(jnp.float32(1.0)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert f(jnp.float64(1.0)).dtype == jnp.float64
    assert f(jnp.float32(1.0)).dtype == jnp.float32


def test_a_function_knows_whether_it_is_called_in_a_replica():
    strategy = mx.OneDeviceStrategy("CPU:0")
    f = mx.function(
        lambda x: x + (100 if mx.distribute.in_cross_replica_context() else 0)
    )
    for _ in range(2):
        with strategy.scope():
            assert float(f(1.0)) == 101.0
        assert float(strategy.run(lambda x: f(x), (1.0,))) == 1.0


# Variables -----------------------------------------------------------------------------


def test_a_variable_of_a_strategy_on_the_same_devices_is_traced_once():
    one, other = mirrored(2), mx.MirroredStrategy(["CPU:0", "CPU:1"])
    with one.scope():
        v = mx.Variable(1.0)
    f = mx.function(lambda x: x + v)
    for k in range(3):
        v.assign(float(k))
        assert parts(other, other.run(f, (1.0,))) == [1.0 + k] * 2
    assert f.trace_count == 1


def test_a_variable_does_not_share_memory_with_a_numpy_array(strategy):
    for _ in range(20):  # whether JAX takes memory over depends on where it lies
        initial = np.ones(4096, np.float32)
        with strategy.scope():
            v = mx.Variable(initial)
        w = mx.Variable(initial)
        initial[:] = 7
        assert [float(p[0]) for p in strategy.experimental_local_results(v)] == [1, 1]
        assert float(w[0]) == 1.0


def test_what_was_read_of_a_split_variable_is_not_kept(strategy):
    with strategy.scope():
        v = mx.Variable(
            jnp.zeros(50_000),
            synchronization=mx.VariableSynchronization.ON_READ,
            aggregation=mx.VariableAggregation.SUM,
        )
    step = mx.function(lambda: v.assign_add(jnp.ones(50_000)).read_value()[0])
    strategy.run(step)
    float(v.read_value()[0])
    strategy.run(step)
    gc.collect()
    live = [a for a in jax.live_arrays() if a.size >= 50_000 and not a.is_deleted()]
    assert sum(a.nbytes for a in live) <= 2 * v.values[0].read_value().nbytes


# Eager gradients and JAX's own traces ------------------------------------------------------


def test_gradients_inside_gradients_share_a_body_that_reads_a_variable():
    w = mx.Variable(2.0)
    layer = jax.checkpoint(lambda x: x * w.read_value() ** 2)

    def outer():
        return mx.grad(lambda: layer(1.0), w)() * layer(1.0)

    for _ in range(2):
        value, gradient = mx.value_and_grad(outer, w)()
        assert (float(value), float(gradient)) == (16.0, 24.0)


def test_a_scan_sees_what_a_gradient_before_it_has_assigned():
    v, w = mx.Variable(1.0), mx.Variable(1.0)

    def body(carry, _):
        return carry + v.read_value(), None

    def total():
        return lax.scan(body, 0.0, None, length=2)[0]

    def outer():
        def inner():
            before = total()
            v.assign(4.0)
            return before * w

        first = mx.value_and_grad(inner, w)()[0]
        return first + total() * w

    assert float(mx.value_and_grad(outer, w)()[0]) == 2.0 + 8.0


def test_what_jax_traced_in_a_gradient_is_not_reused_outside():
    u, w = mx.Variable(1.0), mx.Variable(1.0)
    add = jax.jit(lambda c: c + u.read_value())
    assert float(mx.value_and_grad(lambda: add(0.0) * w, w)()[0]) == 1.0
    u.assign(5.0)
    with pytest.raises(RuntimeError, match="JAX traces on its own"):
        add(0.0)
    assert float(mx.value_and_grad(lambda: add(0.0) * w, w)()[0]) == 5.0


# A state that comes back -----------------------------------------------------------------

CHANGES = {
    "array": lambda state: {**state, "b": jnp.ones(2)},
    "NumPy": lambda state: {**state, "b": np.ones(2, np.float32)},
    "number": lambda state: {**state, "b": 7.0},
    "dict": lambda state: {**state, "b": {"c": jnp.ones(2)}},
    "nothing": lambda state: {**state, "b": None},
    "copies": lambda state: {**state, "b": mx.distribute.Mirrored([jnp.ones(2)] * 2)},
    "computed": lambda state: {**state, "b": state["a"] * 2},
    "fewer": lambda state: {"b": state["b"]},
    "more": lambda state: {**state, "new": state["b"] + 1},
    "list": lambda state: [state["a"], state["b"]],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_may_be_changed_between_steps(change, strategy):
    def numbers(tree):
        whole = jax.tree.map(np.asarray, tree, is_leaf=is_distributed)
        return jax.tree.map(np.ndarray.tolist, whole)

    step = mx.function(add_one, donate_argnums=0)
    state = strategy.replicate({"a": jnp.ones(2), "b": jnp.zeros(2)})
    for _ in range(2):
        state = strategy.run(step, (state,))
    state = change(state)
    expected = numbers(add_one(jax.tree.map(np.asarray, numbers(state))))
    assert numbers(strategy.run(step, (state,))) == expected


def test_a_state_that_another_program_has_taken_is_an_error(strategy):
    state = strategy.replicate({"a": jnp.ones(2), "key": jax.random.key(0)})
    add = mx.function(lambda s: s | {"a": s["a"] + 1}, donate_argnums=0)
    double = mx.function(lambda s: s | {"a": s["a"] * 2}, donate_argnums=0)
    for step in (add, double) * 2:
        state = strategy.run(step, (state,))
    new = strategy.run(add, (state,))
    with pytest.raises(RuntimeError, match="was donated"):
        strategy.run(double, (state,))
    assert parts(strategy, strategy.run(double, (new,))["a"]) == [[22.0, 22.0]] * 2
