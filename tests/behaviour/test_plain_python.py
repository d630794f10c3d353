"""An undecorated replica function is plain Python, called once for each replica."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import pytest
from helpers.engines import all_sum, mirrored, parts, per_replica, replica_id

import mirrax as mx
from mirrax._src.base.jax_compat import Tracer


@pytest.fixture
def strategy():
    return mirrored(2)


def test_print_prints_for_every_replica_in_order(strategy, capsys):
    x = per_replica(strategy, [1.0], [2.0])
    strategy.run(
        lambda x: print("replica", int(replica_id()), "has", float(x[0])), (x,)
    )
    assert capsys.readouterr().out == "replica 0 has 1.0\nreplica 1 has 2.0\n"


def test_python_branches_on_values_and_on_the_replica_id(strategy):
    def replica_fn(x):
        if float(x) > 0:
            return x * 10
        if replica_id() == 1:
            return x - 1
        return x

    x = per_replica(strategy, 2.0, -3.0)
    assert parts(strategy, strategy.run(replica_fn, (x,))) == [20.0, -4.0]


def test_loops_that_end_differently_on_each_replica(strategy):
    def replica_fn(x):
        steps = 0
        while x < 100:
            x = x * 2
            steps += 1
        return x, jnp.int32(steps)

    x = per_replica(strategy, 10.0, 30.0)
    value, steps = strategy.run(replica_fn, (x,))
    assert parts(strategy, value) == [160.0, 120.0]
    assert parts(strategy, steps) == [4, 2]


def test_side_effects_happen_every_time_and_hold_real_values(strategy):
    history = []

    def replica_fn(x):
        history.append((int(replica_id()), x))
        total = all_sum(x)
        history.append(float(total))
        return total

    x = per_replica(strategy, 1.0, 2.0)
    for _ in range(2):
        strategy.run(replica_fn, (x,))
    assert len(history) == 8
    assert [(i, float(v)) for i, v in (history[0], history[1])] == [(0, 1.0), (1, 2.0)]
    assert history[2:4] == [3.0, 3.0]
    assert all(
        not isinstance(v, Tracer)
        for entry in history
        for v in (entry if isinstance(entry, tuple) else (entry,))
    )


def test_replicas_take_turns_and_switch_only_where_they_meet():
    strategy = mirrored(3)
    order = []

    def replica_fn():
        i = int(replica_id())
        order.append(("start", i))
        all_sum(1.0)
        order.append(("middle", i))
        all_sum(1.0)
        order.append(("end", i))

    strategy.run(replica_fn)
    assert order == [(name, i) for name in ("start", "middle", "end") for i in range(3)]


def test_new_arrays_are_made_on_the_replicas_own_device(strategy):
    out = strategy.run(lambda: jnp.zeros(2) + jnp.arange(2))
    found = [x.devices() for x in strategy.experimental_local_results(out)]
    assert found == [{device} for device in jax.devices()[:2]]


def test_any_python_object_can_be_returned(strategy):
    out = strategy.run(lambda: f"replica {int(replica_id())}")
    assert strategy.experimental_local_results(out) == ("replica 0", "replica 1")
    same = object()
    assert strategy.run(lambda: same) is same


def test_any_python_object_can_be_an_argument(strategy):
    class Settings:
        rate = 0.5

    settings = Settings()
    out = strategy.run(
        lambda s, f, text: f(s.rate) + len(text) + replica_id(),
        (settings, lambda r: 2 * r, "abc"),
    )
    assert parts(strategy, out) == [4.0, 5.0]


def test_a_value_and_grad_may_branch_on_values(strategy):
    with strategy.scope():
        w = mx.Variable(3.0)

    def replica_fn(x):
        def loss():
            if float(x) > 1.5:
                return w * x
            return -(w * x)

        return mx.grad(loss, w)()

    x = per_replica(strategy, 1.0, 2.0)
    assert parts(strategy, strategy.run(replica_fn, (x,))) == [-1.0, 2.0]


def test_a_value_and_grad_may_branch_on_what_depends_on_variables(strategy):
    with strategy.scope():
        w = mx.Variable(3.0)

    def replica_fn(x):
        def loss():
            y = w * x
            return y if y > 4 else y * y

        return mx.value_and_grad(loss, w)()

    x = per_replica(strategy, 1.0, 2.0)
    value, gradient = strategy.run(replica_fn, (x,))
    assert parts(strategy, value) == [9.0, 6.0]
    assert parts(strategy, gradient) == [6.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        lambda w, n: sum((w * k for k in range(n)), start=0.0),
        lambda w, n: w * [0.0, 1.0, 3.0, 3.0][n],
        lambda w, n: w * jnp.ones(n).sum(),
        lambda w, n: w * float(n),
        lambda w, n: w * jnp.arange(4)[jnp.arange(4) == n].sum(),
    ],
    ids=["range", "list", "shape", "float", "mask"],
)
def test_a_value_and_grad_may_use_an_array_as_a_python_number(loss, strategy):
    with strategy.scope():
        w = mx.Variable(2.0)
    gradient = strategy.run(lambda n: mx.grad(lambda: loss(w, n), w)(), (jnp.int32(3),))
    assert parts(strategy, gradient) == [3.0, 3.0]


def test_scopes_are_a_matter_of_the_thread_that_enters_them(strategy):
    seen = []
    with strategy.scope():
        thread = threading.Thread(
            target=lambda: seen.append(mx.distribute.has_strategy())
        )
        thread.start()
        thread.join()
        assert mx.distribute.has_strategy()
    assert seen == [False]


def test_two_threads_may_run_two_strategies_at_once():
    results = {}

    def work(n):
        strategy = mirrored(n)
        with strategy.scope():
            v = mx.Variable(0.0, aggregation=mx.VariableAggregation.SUM)
        for _ in range(5):
            strategy.run(lambda: v.assign_add(jnp.float32(1.0)))
        results[n] = float(v)

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {2: 10.0, 3: 15.0}


def test_everything_runs_as_plain_python_when_asked(strategy):
    calls = []

    @mx.function
    def step(x):
        calls.append(float(x))
        return 2 * x

    x = per_replica(strategy, 1.0, 2.0)
    mx.config.run_functions_eagerly(True)
    try:
        assert mx.config.functions_run_eagerly()
        for _ in range(2):
            assert parts(strategy, strategy.run(step, (x,))) == [2.0, 4.0]
        assert step(3.0) == 6.0
    finally:
        mx.config.run_functions_eagerly(False)
    assert calls == [1.0, 2.0, 1.0, 2.0, 3.0]
    assert step.trace_count == 0
