"""Functions that live long and that JAX remembers by identity: their results never go stale.

`jax.jit`, `jax.checkpoint` and the loops of `lax` keep what they traced. A variable or a
replica id that such a function reads must not be kept with it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers.engines import compile_if, mirrored, parts, per_replica, replica_id
from jax import lax

import mirrax as mx


def kept(kind, read):
    """x * read(), through a function that is made once."""
    times = lambda x: x * read()  # noqa: E731
    if kind == "jit":
        return jax.jit(times)
    if kind == "checkpoint":
        return jax.checkpoint(times)
    if kind == "vmap":
        mapped = jax.vmap(times)
        return lambda x: mapped(jnp.stack([x, x]))[0]
    if kind == "cond":
        stay = lambda x: x  # noqa: E731
        return lambda x: lax.cond(x > 0, times, stay, x)
    body = lambda carry, _: (times(carry), None)  # noqa: E731
    return lambda x: lax.scan(body, x, length=1)[0]


kinds = pytest.mark.parametrize("kind", ["jit", "checkpoint", "vmap", "cond", "scan"])


@pytest.fixture
def strategy():
    return mirrored(2)


@pytest.fixture
def w(strategy):
    with strategy.scope():
        return mx.Variable(2.0, name="w")


@kinds
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_a_variable_is_read_anew_or_refused(kind, engine, strategy, w):
    fn = kept(kind, w.read_value)
    for value in (2.0, 3.0):
        w.assign(value)
        step = compile_if(engine, lambda x: fn(x))
        try:
            out = strategy.run(step, (jnp.float32(10.0),))
        except RuntimeError as error:
            # An eager replica cannot see what JAX will keep, so it may say no.
            assert engine == "eager"
            assert "'w' is read inside a function that JAX traces" in str(error)
            assert "mx.function" in str(error)
        else:
            assert parts(strategy, out) == [10.0 * value] * 2


@kinds
def test_one_compiled_function_reads_a_variable_anew(kind, strategy, w):
    fn = kept(kind, w.read_value)
    step = mx.function(lambda x: fn(x))
    for value in (2.0, 3.0):
        w.assign(value)
        out = strategy.run(step, (jnp.float32(10.0),))
        assert parts(strategy, out) == [10.0 * value] * 2
    assert step.trace_count == 1


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_gradients_read_a_variable_anew(kind, engine, strategy, w):
    fn = kept(kind, lambda: w * w)
    for value, factor in [(2.0, 1.0), (3.0, 5.0)]:
        w.assign(value)
        step = compile_if(engine, lambda x: mx.grad(lambda: factor * fn(x), w)())  # noqa: B023
        out = strategy.run(step, (jnp.float32(10.0),))
        assert parts(strategy, out) == [20.0 * value * factor] * 2


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_the_replica_id_is_each_replicas_own_or_refused(kind, engine, strategy):
    fn = kept(kind, lambda: replica_id() + 1)
    x = per_replica(strategy, 10.0, 100.0)
    for _ in range(2):
        step = compile_if(engine, lambda x: fn(x))
        try:
            out = strategy.run(step, (x,))
        except RuntimeError as error:
            assert engine == "eager"
            assert "mx.function" in str(error)
        else:
            assert parts(strategy, out) == [10.0, 200.0]


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_a_jitted_replica_function(engine, strategy):
    fn = compile_if(engine, jax.jit(lambda x: x * 2))
    x = per_replica(strategy, [1.0], [2.0])
    assert parts(strategy, strategy.run(fn, (x,))) == [[2.0], [4.0]]


@pytest.mark.parametrize("style", ["eager", "compiled"])
def test_without_jit_everything_still_works(style, strategy):
    with jax.disable_jit():
        out = strategy.run(
            compile_if(style, lambda x: mx.get_replica_context().all_reduce("SUM", x)),
            (per_replica(strategy, 2.0, 3.0),),
        )
        assert parts(strategy, out) == [5.0, 5.0]
