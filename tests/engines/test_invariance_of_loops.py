"""What is the same on all replicas stays in one piece through branches and loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mirrax as mx
from mirrax._src.engines.jaxprs import invariant_outputs


def is_one(fn, *inputs: bool) -> list[bool]:
    """For each result whether it is found to be the same, from which inputs are."""
    args = [jnp.float32(i) for i in range(len(inputs))]
    return invariant_outputs(jax.make_jaxpr(fn)(*args).jaxpr, list(inputs))


def scanned(carried, own):
    return lax.scan(lambda c, x: (c * 2, x + c), carried, jnp.stack([own, own]))


def test_a_scan_keeps_its_carry_and_not_its_outputs() -> None:
    assert is_one(scanned, True, False) == [True, False]
    assert is_one(scanned, True, True) == [True, True]
    assert is_one(scanned, False, True) == [False, False]


def test_a_carry_that_becomes_different_later_is_different() -> None:
    def mixed(a, b, own):
        def body(carry, _):
            a, b, c = carry
            return (b, c, c), None

        return lax.scan(body, (a, b, own), None, length=3)[0]

    assert is_one(mixed, True, True, False) == [False, False, False]


def test_a_loop_that_replicas_leave_at_different_times() -> None:
    def loop(limit, value):
        return lax.while_loop(
            lambda c: c[0] < limit, lambda c: (c[0] + 1, c[1] * 2), (0.0, value)
        )[1]

    assert is_one(loop, True, True) == [True]
    assert is_one(loop, False, True) == [False]
    assert is_one(loop, True, False) == [False]


def test_a_branch() -> None:
    def branch(which, own, same):
        return lax.cond(which > 0, lambda: (same, own), lambda: (same * 2, own + same))

    assert is_one(branch, True, False, True) == [True, False]
    assert is_one(branch, False, True, True) == [False, False]


def test_many_steps_in_one_call_keep_the_state_in_one_piece(two_cpus) -> None:
    def one_step(state, x):
        total = mx.distribute.get_replica_context().all_reduce("SUM", jnp.sum(x))
        return state + total, state

    step = mx.function(lambda state, xs: lax.scan(one_step, state, xs)[0])
    state = two_cpus.replicate(jnp.float32(0))
    xs = mx.distribute.PerReplica([jnp.ones((3, 2)), 2 * jnp.ones((3, 2))])
    for _ in range(2):
        state = two_cpus.run(step, args=(state, xs))
        assert isinstance(state, mx.distribute.Mirrored)
    assert float(state) == 2 * 3 * (2 + 4)
    assert step.trace_count == 1


@pytest.mark.parametrize("size", [3, 100_000])
def test_an_array_that_a_step_closes_over_counts_for_each_replica(
    two_cpus, size
) -> None:
    ones = jnp.ones(size)

    def fn():
        return mx.distribute.get_replica_context().all_reduce("SUM", ones)[0]

    for each in (fn, mx.function(fn)):
        assert float(two_cpus.run(each).values[1]) == 2


def test_an_uneven_step_may_close_over_a_key(two_cpus) -> None:
    key = jax.random.key(0)

    def fn(x):
        total = mx.distribute.get_replica_context().all_reduce("SUM", jnp.sum(x))
        return total + jax.random.normal(key)

    x = mx.distribute.PerReplica([jnp.ones(3), jnp.ones(1)])
    eager, compiled = two_cpus.run(fn, (x,)), two_cpus.run(mx.function(fn), (x,))
    assert float(eager.values[0]) == float(compiled.values[1])
