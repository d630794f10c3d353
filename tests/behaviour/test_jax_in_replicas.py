"""Plain JAX inside replica functions: collectives, loops, checkpoints, transformations."""

from __future__ import annotations

import contextvars

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import (
    all_styles,
    all_sum,
    both_engines,
    mirrored,
    parts,
    per_replica,
    replica_id,
    run,
)
from jax import lax

import mirrax as mx

compiled_styles = pytest.mark.parametrize("engine", ["compiled", "caller"])


@compiled_styles
@pytest.mark.parametrize("n", [1, 2, 4])
def test_psum_over_the_axis_name(engine, n):
    strategy = mirrored(n)
    x = per_replica(strategy, *(10.0**i for i in range(n)))
    total = run(strategy, lambda x: lax.psum(x, strategy.axis_name), x, engine=engine)
    assert parts(strategy, total) == [sum(10.0**i for i in range(n))] * n


@compiled_styles
def test_other_collectives_of_jax_over_the_axis_name(engine):
    strategy = mirrored(4)
    x = per_replica(strategy, 1.0, 2.0, 3.0, 6.0)

    def replica_fn(x):
        name = strategy.axis_name
        return {
            "mean": lax.pmean(x, name),
            "max": lax.pmax(x, name),
            "index": lax.axis_index(name),
            "left": lax.ppermute(x, name, [(i, (i - 1) % 4) for i in range(4)]),
            "all": lax.all_gather(x, name),
        }

    out = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, out["mean"]) == [3.0] * 4
    assert parts(strategy, out["max"]) == [6.0] * 4
    assert parts(strategy, out["index"]) == [0, 1, 2, 3]
    assert parts(strategy, out["left"]) == [2.0, 3.0, 6.0, 1.0]
    assert parts(strategy, out["all"]) == [[1.0, 2.0, 3.0, 6.0]] * 4


@both_engines
def test_what_all_replicas_share_comes_back_as_one_array(engine):
    strategy = mirrored(2)
    x = per_replica(strategy, 1.0, 2.0)
    out = run(strategy, lambda x: {"sum": all_sum(x), "own": x + 1}, x, engine=engine)
    assert isinstance(out["sum"], mx.distribute.Mirrored)
    assert isinstance(out["own"], mx.distribute.PerReplica)
    assert float(out["sum"]) == 3.0
    np.testing.assert_array_equal(jnp.arange(2) * out["sum"], [0.0, 3.0])


@compiled_styles
def test_what_is_computed_from_shared_values_is_shared(engine):
    strategy = mirrored(2)

    def replica_fn(x):
        total = all_sum(x)
        scanned, _ = lax.scan(lambda c, _: (c + total, None), jnp.zeros(()), length=3)
        mixed, _ = lax.scan(lambda c, _: (c + x, None), total, length=3)
        return scanned, mixed, jnp.where(replica_id() == 0, total, 0.0)

    x = per_replica(strategy, 1.0, 2.0)
    scanned, mixed, first = run(strategy, replica_fn, x, engine=engine)
    assert isinstance(scanned, mx.distribute.Mirrored)
    assert float(scanned) == 9.0
    assert parts(strategy, mixed) == [6.0, 9.0]
    assert parts(strategy, first) == [3.0, 0.0]


@all_styles
def test_a_scan_may_start_from_zeros(engine):
    strategy = mirrored(2)
    x = per_replica(strategy, [1.0, 2.0, 3.0], [10.0, 20.0, 30.0])

    def replica_fn(x):
        return lax.scan(lambda c, a: (c + a, c), jnp.zeros(()), x)

    total, before = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, total) == [6.0, 60.0]
    assert parts(strategy, before) == [[0.0, 1.0, 3.0], [0.0, 10.0, 30.0]]


@all_styles
def test_while_cond_and_fori_loops(engine):
    strategy = mirrored(2)
    x = per_replica(strategy, 3, 5)

    def replica_fn(x):
        doubled = lax.while_loop(lambda a: a < 20, lambda a: 2 * a, x)
        counted = lax.fori_loop(0, 4, lambda i, a: a + i, jnp.zeros((), jnp.int32))
        chosen = lax.cond(x > 4, lambda a: a, lambda a: -a, x)
        return doubled, counted, chosen

    doubled, counted, chosen = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, doubled) == [24, 20]
    assert parts(strategy, counted) == [6, 6]
    assert parts(strategy, chosen) == [-3, 5]


@compiled_styles
def test_replicas_may_communicate_inside_a_scan(engine):
    strategy = mirrored(2)
    x = per_replica(strategy, [1.0, 2.0], [10.0, 20.0])

    def replica_fn(x):
        return lax.scan(lambda c, a: (c + all_sum(a), None), jnp.zeros(()), x)[0]

    total = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, total) == [33.0, 33.0]


@pytest.mark.slow
@all_styles
def test_grad_vmap_jit_and_checkpoint_in_a_replica(engine):
    strategy = mirrored(2)
    x = per_replica(strategy, 2.0, 3.0)

    def replica_fn(x):
        cube = jax.checkpoint(lambda a: a * jax.jit(jnp.square)(a))
        return (
            jax.grad(cube)(x),
            jax.grad(jax.grad(cube))(x),
            jax.vmap(cube)(jnp.stack([x, 2 * x])),
        )

    first, second, mapped = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, first) == [12.0, 27.0]
    assert parts(strategy, second) == [12.0, 18.0]
    assert parts(strategy, mapped) == [[8.0, 64.0], [27.0, 216.0]]


@both_engines
def test_the_gradient_of_an_all_reduce_is_the_all_reduce_of_the_gradients(engine):
    strategy = mirrored(2)
    x = per_replica(strategy, 1.0, 2.0)

    def replica_fn(x):
        return jax.grad(lambda a: (replica_id() + 1) * all_sum(a) ** 2)(x)

    # d/dx_i of all replicas' losses: (1 + 2) * 2 * 3.
    gradient = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, gradient) == [18.0, 18.0]


@pytest.mark.slow
@both_engines
def test_random_keys_can_be_folded_with_the_replica_id(engine):
    strategy = mirrored(2)

    def replica_fn(key):
        return jax.random.uniform(jax.random.fold_in(key, replica_id()), (2,))

    out = run(strategy, replica_fn, jax.random.key(7), engine=engine)
    expected = [
        jax.random.uniform(jax.random.fold_in(jax.random.key(7), i), (2,)).tolist()
        for i in range(2)
    ]
    assert parts(strategy, out) == expected


@all_styles
def test_random_keys_can_be_per_replica_values(engine):
    strategy = mirrored(2)
    keys = strategy.experimental_distribute_values_from_function(
        lambda ctx: jax.random.key(ctx.replica_id_in_sync_group)
    )
    out = run(strategy, lambda key: jax.random.split(key), keys, engine=engine)
    for i, part in enumerate(strategy.experimental_local_results(out)):
        expected = jax.random.key_data(jax.random.split(jax.random.key(i)))
        np.testing.assert_array_equal(jax.random.key_data(part), expected)


@pytest.mark.slow
@both_engines
def test_a_random_key_can_be_a_variable(engine):
    strategy = mirrored(2)
    with strategy.scope():
        key = mx.Variable(jax.random.key(0), name="key")

    def replica_fn():
        new, used = jax.random.split(key.read_value())
        key.assign(new)
        return jax.random.uniform(used)

    new, used = jax.random.split(jax.random.key(0))
    out = run(strategy, replica_fn, engine=engine)
    assert parts(strategy, out) == [float(jax.random.uniform(used))] * 2
    np.testing.assert_array_equal(
        jax.random.key_data(key.read_value()), jax.random.key_data(new)
    )
    assert "key" in repr(key)


@both_engines
def test_collectives_of_nothing_and_of_none(engine):
    strategy = mirrored(2)

    def replica_fn():
        context = mx.get_replica_context()
        return (
            context.all_reduce("SUM", {}),
            context.all_gather([], axis=0),
            context.all_reduce("SUM", {"a": None, "b": 1.5}),
        )

    nothing, nobody, some = run(strategy, replica_fn, engine=engine)
    assert (nothing, nobody, some["a"]) == ({}, [], None)
    assert parts(strategy, some["b"]) == [3.0, 3.0]


@both_engines
def test_a_closed_over_mirrored_value_is_the_replicas_own_copy(engine):
    strategy = mirrored(2)
    table = strategy.replicate(jnp.array([1.0, 2.0]))
    out = run(
        strategy, lambda: (table * (replica_id() + 1), jnp.sum(table)), engine=engine
    )
    assert parts(strategy, out[0]) == [[1.0, 2.0], [2.0, 4.0]]
    assert parts(strategy, out[1]) == [3.0, 3.0]


# `run` inside JAX's own transformations -------------------------------------------------


def test_run_inside_jit():
    strategy = mirrored(2)

    @jax.jit
    def total(x):
        out = strategy.run(lambda x: x * (replica_id() + 1), (x,))
        return strategy.reduce("SUM", out, axis=None)

    np.testing.assert_array_equal(total(jnp.array([1.0, 10.0])), [3.0, 30.0])


@pytest.mark.slow
def test_a_gradient_through_run_and_reduce():
    strategy = mirrored(2)

    def loss(w):
        out = strategy.run(lambda w: w * w * (replica_id() + 1), (w,))
        return strategy.reduce("SUM", out, axis=None)

    value, gradient = jax.value_and_grad(loss)(5.0)
    assert (float(value), float(gradient)) == (75.0, 30.0)


def test_run_inside_a_scan_of_a_function_keeps_functional_state():
    strategy = mirrored(2)
    x = per_replica(strategy, 1.0, 2.0)

    @mx.function
    def train(x):
        def body(w, _):
            out = strategy.run(lambda w, x: w + all_sum(x), (w, x))
            return jnp.asarray(out), None

        return lax.scan(body, jnp.zeros(()), length=4)[0]

    assert float(train(x)) == 12.0


# Settings of the thread that calls `run` ------------------------------------------------


@both_engines
@pytest.mark.parametrize("n", [1, 2])
def test_jax_settings_of_the_caller_hold_in_replicas(engine, n):
    strategy = mirrored(n)
    with jax.enable_x64(True):
        out = run(strategy, lambda: jnp.ones(()) + replica_id(), engine=engine)
        dtypes = {str(p.dtype) for p in strategy.experimental_local_results(out)}
    assert dtypes == {"float64"}


@pytest.mark.parametrize("n", [1, 2])
def test_context_variables_of_the_caller_hold_in_eager_replicas(n):
    strategy = mirrored(n)
    depth = contextvars.ContextVar("depth", default=0)
    depth.set(5)
    assert strategy.run(lambda: depth.get()) == 5


def test_a_wide_variable_is_no_matter_to_functions_without_it():
    strategy = mirrored(2)
    with jax.enable_x64(True), strategy.scope():
        wide = mx.Variable(np.ones(2, "float64"))
    with strategy.scope():
        v = mx.Variable(1.0)
    strategy.run(mx.function(lambda: v.assign_add(1.0)))  # warnings are errors here
    assert wide.dtype == "float64" and v.numpy() == 2.0
