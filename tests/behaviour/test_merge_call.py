"""`merge_call`: all replicas pause, one function runs for all of them."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from helpers.engines import (
    all_styles,
    both_engines,
    mirrored,
    parts,
    per_replica,
    replica_id,
    run,
)

import mirrax as mx


@pytest.fixture
def strategy():
    return mirrored(2)


def merged(merge_fn, *args, **kwargs):
    return mx.get_replica_context().merge_call(merge_fn, args, kwargs)


@all_styles
def test_the_merge_fn_reduces_and_each_replica_goes_on(engine, strategy):
    def merge(strategy, x):
        return strategy.reduce("SUM", x, axis=None)

    x = per_replica(strategy, 1.0, 2.0)
    out = run(strategy, lambda x: 10 * x + merged(merge, x), x, engine=engine)
    assert parts(strategy, out) == [13.0, 23.0]


@all_styles
def test_each_replica_gets_its_own_part_back(engine, strategy):
    x = per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    out = run(strategy, lambda x: merged(lambda s, x: x, x) + 1, x, engine=engine)
    assert parts(strategy, out) == [[2.0, 3.0], [4.0, 5.0]]


@all_styles
@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_merge_fn_may_look_at_single_parts(engine, n):
    strategy = mirrored(n)
    x = per_replica(strategy, *(10.0**i for i in range(n)))

    def merge(strategy, x):
        return sum(strategy.experimental_local_results(x))

    out = run(strategy, lambda x: merged(merge, x) + replica_id(), x, engine=engine)
    total = sum(10.0**i for i in range(n))
    assert parts(strategy, out) == [total + i for i in range(n)]


@all_styles
def test_the_merge_fn_may_reorder_parts(engine, strategy):
    x = per_replica(strategy, 1.0, 2.0)

    def merge(strategy, x):
        return mx.distribute.PerReplica(strategy.experimental_local_results(x)[::-1])

    out = run(strategy, lambda x: merged(merge, x) * 1, x, engine=engine)
    assert parts(strategy, out) == [2.0, 1.0]


@both_engines
def test_the_merge_fn_runs_once_in_cross_replica_context(engine, strategy):
    seen = []

    def merge(given, x, *, factor):
        seen.append(
            (
                given is strategy,
                mx.distribute.in_cross_replica_context(),
                mx.get_replica_context() is None,
                mx.get_strategy() is strategy,
                factor,
            )
        )
        return given.reduce("SUM", x, axis=None)

    x = per_replica(strategy, 1.0, 2.0)
    run(strategy, lambda x: merged(merge, x, factor=3), x, engine=engine)
    assert seen == [(True, True, True, True, 3)]


@both_engines
def test_nested_arguments_and_results(engine, strategy):
    def merge(strategy, tree, name):
        assert name == "grads"
        total = strategy.reduce("SUM", tree, axis=None)
        return {"total": total, "own": tree["a"], "name": name}

    def replica_fn(x):
        out = merged(merge, {"a": x, "b": [2 * x]}, "grads")
        assert out["name"] == "grads"
        return out["total"]["a"] + out["own"], out["total"]["b"][0] * replica_id()

    x = per_replica(strategy, 1.0, 2.0)
    first, second = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, first) == [4.0, 5.0]
    assert parts(strategy, second) == [0.0, 6.0]


@all_styles
def test_the_merge_fn_may_assign_variables(engine, strategy):
    with strategy.scope():
        v = mx.Variable(1.0)

    def merge(strategy, x):
        v.assign_add(strategy.reduce("SUM", x, axis=None))

    def replica_fn(x):
        merged(merge, x)
        return v.read_value() * (replica_id() + 1)

    x = per_replica(strategy, 1.0, 2.0)
    out = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, out) == [4.0, 8.0]
    assert parts(strategy, v) == [4.0, 4.0]


@both_engines
def test_the_merge_fn_may_update_copies(engine, strategy):
    with strategy.scope():
        v = mx.Variable(1.0)

    def merge(strategy, x):
        total = strategy.extended.reduce_to("SUM", x, v)
        strategy.extended.update(v, lambda copy, t: copy.assign_sub(t), args=(total,))

    x = per_replica(strategy, 1.0, 2.0)
    run(strategy, lambda x: merged(merge, x), x, engine=engine)
    assert parts(strategy, v) == [-2.0, -2.0]


@both_engines
def test_several_merge_calls_in_a_row(engine, strategy):
    def merge(strategy, x):
        return strategy.reduce("MEAN", x, axis=None)

    def replica_fn(x):
        for _ in range(3):
            x = merged(merge, x) + replica_id()
        return x

    # 1, 3 -> 2, 3 -> 2.5, 3.5 -> 3, 4
    x = per_replica(strategy, 1.0, 3.0)
    assert parts(strategy, run(strategy, replica_fn, x, engine=engine)) == [3.0, 4.0]


@both_engines
def test_equal_arguments_arrive_once(engine, strategy):
    shared = {"table": jnp.array([5.0, 7.0])}

    def merge(strategy, table, x):
        return table["table"][1] * strategy.reduce("SUM", x, axis=None)

    x = per_replica(strategy, 1.0, 2.0)
    out = run(strategy, lambda x: merged(merge, shared, x) * 1, x, engine=engine)
    assert parts(strategy, out) == [21.0, 21.0]


def test_without_a_strategy_a_merge_call_just_calls():
    context = mx.get_replica_context()
    assert context.merge_call(lambda strategy, x: x + 1, (2,)) == 3
