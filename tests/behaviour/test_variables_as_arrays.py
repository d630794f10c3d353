"""A variable works wherever an array does, inside and outside replicas."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import all_styles, both_engines, mirrored, parts, per_replica, run

import mirrax as mx


def make(value, n=2, **kwargs):
    strategy = mirrored(n)
    with strategy.scope():
        return strategy, mx.Variable(value, **kwargs)


# What a replica computes from its x, [1, 2] or [10, 20], and the variable v = [1, 2].
COMPUTATIONS = {
    "matmul": (lambda x, v: jnp.matmul(x, v), [5.0, 50.0]),
    "@": (lambda x, v: x @ v, [5.0, 50.0]),
    "v @": (lambda x, v: v @ x, [5.0, 50.0]),
    "dot": (lambda x, v: jnp.dot(v, x), [5.0, 50.0]),
    "square": (lambda x, v: jnp.sum(jnp.square(v)) * x[0], [5.0, 50.0]),
    "exp": (lambda x, v: jnp.exp(v - v)[0] * x[0], [1.0, 10.0]),
    "maximum": (lambda x, v: jnp.maximum(v, x)[0], [1.0, 10.0]),
    "v +": (lambda x, v: (v + x)[1], [4.0, 22.0]),
    "- v": (lambda x, v: (x - v)[1], [0.0, 18.0]),
    "v /": (lambda x, v: (v / x)[0], [1.0, 0.1]),
    "v **": (lambda x, v: (v**2)[1] * x[0], [4.0, 40.0]),
    "-v": (lambda x, v: (-v)[1] * x[0], [-2.0, -20.0]),
    "v[1]": (lambda x, v: v[1] * x[1], [4.0, 40.0]),
    "v.sum()": (lambda x, v: v.sum() * x[0], [3.0, 30.0]),
    "stack": (lambda x, v: jnp.stack([v, x]).sum(), [6.0, 33.0]),
    "where": (lambda x, v: jnp.where(v > 1, x, 0.0).sum(), [2.0, 20.0]),
    "iteration": (lambda x, v: sum(a for a in v) * x[0], [3.0, 30.0]),
    "jit": (lambda x, v: jax.jit(jnp.dot)(v, x), [5.0, 50.0]),
    "vmap": (lambda x, v: jax.vmap(jnp.multiply)(v, x).sum(), [5.0, 50.0]),
}


@pytest.mark.slow
@all_styles
def test_jnp_functions_and_operators_take_a_variable(engine):
    strategy, v = make([1.0, 2.0])
    x = per_replica(strategy, [1.0, 2.0], [10.0, 20.0])

    def replica_fn(x):
        return {name: compute(x, v) for name, (compute, _) in COMPUTATIONS.items()}

    out = run(strategy, replica_fn, x, engine=engine)
    for name, (_, expected) in COMPUTATIONS.items():
        np.testing.assert_allclose(
            parts(strategy, out[name]), expected, rtol=1e-6, err_msg=name
        )


def test_outside_replicas_a_variable_is_one_array():
    _, v = make([1.0, 2.0])
    np.testing.assert_allclose(jnp.exp(v), np.exp([1.0, 2.0]), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(v), [1.0, 2.0])
    np.testing.assert_array_equal(v.numpy(), [1.0, 2.0])
    assert (v.shape, v.ndim, v.dtype, len(v)) == ((2,), 1, jnp.float32, 2)
    assert float(v[1]) == 2.0
    assert v.T.shape == (2,)
    assert v.sum() == 3.0
    assert [float(x) for x in v] == [1.0, 2.0]


@pytest.mark.parametrize(
    "op", [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow]
)
def test_operators_work_from_both_sides_with_numbers_arrays_and_variables(op):
    strategy, v = make(6.0)
    with strategy.scope():
        w = mx.Variable(3.0)
    for other in (3.0, jnp.float32(3.0), np.float32(3.0), w):
        assert float(op(v, other)) == op(6.0, 3.0)
        assert float(op(other, v)) == op(3.0, 6.0)


def test_comparisons_and_conversions_of_a_scalar_variable():
    _, v = make(3)
    assert v > 2 and v >= 3 and v < 4 and not v != 3
    assert (int(v), float(v), bool(v), complex(v)) == (3, 3.0, True, 3 + 0j)
    assert list(range(v)) == [0, 1, 2]
    assert f"{v:.1f}" == "3.0"
    assert ["a", "b", "c", "d"][v] == "d"


def test_a_variable_can_be_a_key_and_is_found_by_identity():
    _, v = make(1.0)
    _, w = make(1.0)
    names = {v: "v", w: "w"}
    assert names[v] == "v" and names[w] == "w"
    assert len({v, w, v}) == 2


@all_styles
def test_tree_map_over_a_dict_of_variables_gives_arrays(engine):
    strategy = mirrored(2)
    with strategy.scope():
        variables = {"a": mx.Variable(1.0), "b": [mx.Variable([2.0, 3.0])]}
    x = per_replica(strategy, 1.0, 10.0)

    def replica_fn(x):
        return jax.tree.map(lambda leaf: leaf * x, variables)

    out = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, out["a"]) == [1.0, 10.0]
    assert parts(strategy, out["b"][0]) == [[2.0, 3.0], [20.0, 30.0]]
    doubled = jax.tree.map(lambda leaf: 2 * leaf, variables)
    assert float(doubled["a"]) == 2.0
    assert not isinstance(doubled["a"], mx.Variable)


def test_tree_map_makes_variables_of_a_tree_of_arrays():
    strategy = mirrored(2)
    with strategy.scope():
        variables = jax.tree.map(mx.Variable, {"w": jnp.ones(2), "b": 0.5})
    assert isinstance(variables["w"], mx.distribute.MirroredVariable)
    assert float(variables["b"]) == 0.5


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adam(0.1)])
def test_optax_can_start_from_variables(optimizer):
    strategy = mirrored(2)
    with strategy.scope():
        variables = {"w": mx.Variable([1.0, 2.0])}
    state = optimizer.init(variables)
    slots = [x for x in jax.tree.leaves(state) if jnp.shape(x) == (2,)]
    assert slots
    assert all(x.tolist() == [0.0, 0.0] for x in slots)
    updates, _ = optimizer.update({"w": jnp.array([1.0, 1.0])}, state, variables)
    assert updates["w"].shape == (2,)


@both_engines
def test_a_variable_passed_as_an_argument_arrives_as_the_variable(engine):
    strategy, v = make(1.0, aggregation=mx.VariableAggregation.SUM)

    def replica_fn(v, x):
        v.assign_add(x)
        return v * 1.0

    x = per_replica(strategy, 2.0, 3.0)
    out = run(strategy, replica_fn, v, x, engine=engine)
    assert parts(strategy, out) == [6.0, 6.0]
    assert float(v) == 6.0


@both_engines
def test_a_variable_that_replicas_return_comes_back_as_the_variable(engine):
    strategy, v = make(1.0)
    assert run(strategy, lambda: v, engine=engine) is v
    assert run(strategy, lambda: {"v": v}, engine=engine)["v"] is v


@all_styles
def test_what_is_read_in_a_replica_follows_what_it_has_assigned(engine):
    strategy, v = make([0.0, 0.0])

    def replica_fn(x):
        v.assign_add(x)
        first = v.read_value()
        v.assign_sub(x / 2)
        return first, v.read_value()

    x = per_replica(strategy, [2.0, 4.0], [2.0, 4.0])
    first, second = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, first) == [[2.0, 4.0]] * 2
    assert parts(strategy, second) == [[1.0, 2.0]] * 2
    assert parts(strategy, v) == [[1.0, 2.0]] * 2


@both_engines
def test_an_ordinary_variable_can_be_read_in_replicas(engine):
    v = mx.Variable(5.0)
    strategy = mirrored(2)
    x = per_replica(strategy, 1.0, 2.0)
    assert parts(strategy, run(strategy, lambda x: v * x, x, engine=engine)) == [5, 10]
    v.assign(7.0)
    assert parts(strategy, run(strategy, lambda x: v * x, x, engine=engine)) == [7, 14]


@both_engines
def test_replicas_that_assign_different_numbers_to_a_mean_variable(engine):
    strategy, v = make(0.0, aggregation=mx.VariableAggregation.MEAN)
    x = per_replica(strategy, 1.0, 3.0)

    def replica_fn(x):
        v.assign(float(x) if engine == "eager" else x)

    run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, v) == [2.0, 2.0]


@all_styles
def test_variables_can_swap_and_share_values_step_after_step(engine):
    strategy = mirrored(2)
    with strategy.scope():
        a, b, c = mx.Variable(1.0), mx.Variable(2.0), mx.Variable(0.0)

    def swap():
        x, y = a.read_value(), b.read_value()
        a.assign(y)
        b.assign(x)
        c.assign(x)

    for expected in [(2.0, 1.0, 1.0), (1.0, 2.0, 2.0), (2.0, 1.0, 1.0)]:
        run(strategy, swap, engine=engine)
        assert (float(a), float(b), float(c)) == expected


def test_variables_swap_in_one_compiled_function_called_many_times():
    strategy = mirrored(2)
    with strategy.scope():
        a, b, c = mx.Variable([1.0]), mx.Variable([2.0]), mx.Variable([0.0])

    @mx.function
    def swap():
        x, y = a.read_value(), b.read_value()
        a.assign(y)
        b.assign(x)
        c.assign(x)

    for k in range(6):
        strategy.run(swap)
        expected = ([2.0], [1.0], [1.0]) if k % 2 == 0 else ([1.0], [2.0], [2.0])
        if k in (1, 4, 5):
            assert (a.numpy(), b.numpy(), c.numpy()) == expected
    assert swap.trace_count == 1


def test_two_variables_may_be_assigned_the_same_value_every_step():
    strategy = mirrored(2)
    with strategy.scope():
        a, b = mx.Variable(jnp.zeros(3)), mx.Variable(jnp.zeros(3))

    @mx.function
    def step(x):
        new = a + x
        a.assign(new)
        b.assign(new)

    for _ in range(4):
        strategy.run(step, (1.0,))
    assert a.numpy().tolist() == b.numpy().tolist() == [4.0] * 3
