"""Several threads at once: no assignment is lost, no step, and no array.

As in TensorFlow each `assign_add` is atomic, in eager and in compiled code. What a program
reads first and assigns later is not: another thread may come between.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import all_sum, mirrored, parts, per_replica
from helpers.scripts import run_script
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx

TIMES = 200
Aggregation = mx.VariableAggregation
ON_READ = mx.VariableSynchronization.ON_READ


@pytest.fixture
def strategy():
    return mirrored(2)


@pytest.fixture(autouse=True)
def threads_switch_often() -> Iterator[None]:
    """Python changes threads a thousand times as often, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def together(*works: Callable[[], Any], seconds: float = SECONDS_TO_HANG) -> None:
    """Runs every function in a thread of its own, all from one moment on.

    Raises what the first of them raises; a thread that is not done in time is an error.
    """
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], Any]) -> None:
        try:
            start.wait(seconds)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=(work,), daemon=True) for work in works
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


def repeat(fn: Callable[[], Any], times: int = TIMES) -> Callable[[], None]:
    def work() -> None:
        for _ in range(times):
            fn()

    return work


def make_variable(strategy: Any, aggregation: Any, **kwargs: Any) -> Any:
    with strategy.scope():
        return mx.Variable(0.0, aggregation=aggregation, **kwargs)


# Assigning in eager code ---------------------------------------------------------------


def test_two_threads_add_to_an_ordinary_variable():
    v = mx.Variable(0.0)
    together(*[repeat(lambda: v.assign_add(1.0))] * 2)
    assert float(v) == 2 * TIMES


def test_two_threads_add_to_and_subtract_from_an_ordinary_variable():
    v = mx.Variable(0.0)
    together(repeat(lambda: v.assign_add(3.0)), repeat(lambda: v.assign_sub(1.0)))
    assert float(v) == 2 * TIMES


@pytest.mark.parametrize("aggregation", Aggregation)
def test_two_threads_add_to_a_mirrored_variable(aggregation, strategy):
    """Outside replicas an aggregation has no say: all copies get the value."""
    v = make_variable(strategy, aggregation)
    together(*[repeat(lambda: v.assign_add(1.0))] * 2)
    assert parts(strategy, v) == [2.0 * TIMES] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "aggregation, each",
    [
        (Aggregation.NONE, 1.0),
        (Aggregation.SUM, 2.0),
        (Aggregation.MEAN, 1.0),
        (Aggregation.ONLY_FIRST_REPLICA, 1.0),
    ],
)
def test_replicas_of_two_threads_add_to_a_mirrored_variable(
    aggregation, each, strategy
):
    v = make_variable(strategy, aggregation)
    step = repeat(lambda: strategy.run(lambda: v.assign_add(jnp.float32(1.0))))
    together(step, step)
    assert parts(strategy, v) == [2 * TIMES * each] * 2


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", Aggregation)
def test_replicas_of_two_threads_add_to_an_on_read_variable(aggregation, strategy):
    v = make_variable(strategy, aggregation, synchronization=ON_READ)
    step = repeat(lambda: strategy.run(lambda: v.assign_add(jnp.float32(1.0))))
    together(step, step)
    assert parts(strategy, v) == [2.0 * TIMES] * 2


def test_two_threads_add_to_an_on_read_variable_outside_replicas(strategy):
    v = make_variable(strategy, Aggregation.MEAN, synchronization=ON_READ)
    together(*[repeat(lambda: v.assign_add(1.0))] * 2)
    assert parts(strategy, v) == [2.0 * TIMES] * 2


def test_two_threads_add_to_single_copies(strategy):
    v = make_variable(strategy, Aggregation.NONE)
    first, second = v.values
    together(
        repeat(lambda: first.assign_add(1.0)), repeat(lambda: second.assign_add(2.0))
    )
    assert parts(strategy, v) == [1.0 * TIMES, 2.0 * TIMES]


def test_threads_of_two_strategies_add_to_variables_of_their_own():
    both = [mirrored(2), mirrored(3)]
    variables = [make_variable(s, Aggregation.SUM) for s in both]

    def steps(strategy, v):
        return repeat(
            lambda: strategy.run(lambda: v.assign_add(jnp.float32(1.0))), TIMES // 4
        )

    together(*[steps(s, v) for s, v in zip(both, variables)])
    assert [float(v) for v in variables] == [2 * TIMES / 4, 3 * TIMES / 4]


# Running in eager code -----------------------------------------------------------------


def test_eager_steps_of_three_threads_keep_their_own_numbers(strategy):
    def worker(k):
        x = per_replica(strategy, 1.0 * k, 2.0 * k)

        def work():
            for _ in range(30):
                out = strategy.run(lambda x: (x, all_sum(x)), (x,))
                assert parts(strategy, out[0]) == [1.0 * k, 2.0 * k]
                assert parts(strategy, out[1]) == [3.0 * k, 3.0 * k]

        return work

    together(*[worker(k) for k in (1, 2, 3)])


def test_eager_steps_of_three_threads_are_all_counted(strategy):
    count = make_variable(strategy, Aggregation.SUM)
    seen = make_variable(strategy, Aggregation.SUM, synchronization=ON_READ)

    def replica_fn():
        count.assign_add(jnp.float32(1.0))
        seen.assign_add(jnp.float32(1.0))

    together(*[repeat(lambda: strategy.run(replica_fn), 50)] * 3)
    assert float(count) == 3 * 50 * 2
    assert float(seen) == 3 * 50 * 2


def test_eager_gradients_of_two_threads_are_their_own(strategy):
    with strategy.scope():
        w = mx.Variable(3.0)

    def worker(k):
        def work():
            for _ in range(20):
                out = strategy.run(lambda: mx.grad(lambda: w * w * k, w)())
                assert parts(strategy, out) == [6.0 * k] * 2

        return work

    together(worker(1.0), worker(10.0))


def test_a_replica_that_fails_in_one_thread_leaves_the_other_alone(strategy):
    v = make_variable(strategy, Aggregation.SUM)

    def failing():
        for _ in range(30):
            with pytest.raises(KeyError, match="on purpose"):
                strategy.run(lambda: {}["on purpose"])

    step = repeat(lambda: strategy.run(lambda: v.assign_add(jnp.float32(1.0))), 30)
    together(step, failing)
    assert float(v) == 60.0


def test_scopes_of_threads_do_not_meet(strategy):
    other = mirrored(3)

    def inside(strategy):
        def work():
            for _ in range(TIMES):
                with strategy.scope():
                    assert mx.get_strategy() is strategy
                assert not mx.distribute.has_strategy()

        return work

    together(inside(strategy), inside(other))


# Compiled code -------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation, each", [("NONE", 1), ("SUM", 2), ("MEAN", 1)])
def test_compiled_steps_and_eager_assignments_are_all_counted(
    aggregation, each, strategy
):
    v = make_variable(strategy, Aggregation[aggregation])

    @mx.function
    def step():
        v.assign_add(jnp.float32(1.0))

    strategy.run(step)
    together(repeat(lambda: strategy.run(step)), repeat(lambda: v.assign_add(1.0)))
    assert parts(strategy, v) == [each * (TIMES + 1.0) + TIMES] * 2


def test_compiled_and_eager_additions_to_an_ordinary_variable_are_all_counted():
    v = mx.Variable(0.0)
    step = mx.function(lambda: v.assign_add(1.0) * 1)
    step()
    together(repeat(step), repeat(lambda: v.assign_add(1.0)))
    assert float(v) == 2 * TIMES + 1


def test_compiled_steps_around_run_and_eager_steps_are_all_counted(strategy):
    v = make_variable(strategy, Aggregation.SUM)

    def replica_fn():
        v.assign_add(jnp.float32(1.0))

    around = mx.function(lambda: strategy.run(replica_fn))
    around()
    together(repeat(around, 50), repeat(lambda: strategy.run(replica_fn), 50))
    assert float(v) == 2 * 101


def test_compiled_steps_of_three_threads_are_all_counted(strategy):
    v = make_variable(strategy, Aggregation.SUM)
    w = make_variable(strategy, Aggregation.MEAN, synchronization=ON_READ)

    @mx.function
    def step():
        v.assign_add(jnp.float32(1.0))
        w.assign_add(jnp.float32(1.0))

    strategy.run(step)
    together(*[repeat(lambda: strategy.run(step), 50)] * 3)
    assert float(v) == 2 * 151
    assert float(w) == 151


def test_a_function_that_threads_call_first_at_once_is_right_in_all_of_them(strategy):
    v = make_variable(strategy, Aggregation.SUM)

    @mx.function
    def step(x):
        v.assign_add(x)
        return x * 2

    def work():
        out = strategy.run(step, (jnp.float32(1.0),))
        assert parts(strategy, out) == [2.0, 2.0]

    together(*[work] * 4)
    assert float(v) == 4 * 2


READS = {
    "float": lambda v: float(v),
    "read_value": lambda v: float(v.read_value()),
    "numpy": lambda v: float(v.numpy()),
    "arithmetic": lambda v: float(v + 0.0),
    "asarray": lambda v: float(np.asarray(v)),
    "jnp": lambda v: float(jnp.sum(v)),
    "copies": lambda v: max(float(copy) for copy in v.values),
    "repr": lambda v: float(repr(v).split("numpy=")[1].split(">")[0]),
}


@pytest.mark.parametrize("read", READS)
def test_what_is_read_while_compiled_steps_run_is_never_deleted(read, strategy):
    """A compiled step reuses (donates) the memory of the variables that it assigns."""
    v = make_variable(strategy, Aggregation.SUM)

    @mx.function
    def step():
        v.assign_add(jnp.float32(1.0))

    strategy.run(step)
    seen: list[float] = []
    together(
        repeat(lambda: strategy.run(step)), repeat(lambda: seen.append(READS[read](v)))
    )
    assert seen == sorted(seen)
    assert all(value % 2 == 0 for value in seen), "a step was seen half done"
    assert float(v) == 2.0 * (TIMES + 1)


def test_an_array_kept_by_one_thread_outlives_the_steps_of_another(strategy):
    with strategy.scope():
        v = mx.Variable(jnp.zeros(1000))
    step = mx.function(lambda: v.assign_add(jnp.ones(1000)) * 1)
    strategy.run(step)
    kept: list[Any] = []
    together(
        repeat(lambda: strategy.run(step)), repeat(lambda: kept.append(v.read_value()))
    )
    rows = [np.asarray(array) for array in kept]
    assert all((row == row[0]).all() for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


def test_an_eager_replica_reads_while_compiled_steps_run(strategy):
    with strategy.scope():
        v = mx.Variable(0.0)
    step = mx.function(lambda: v.assign_add(1.0) * 1)
    strategy.run(step)
    seen: list[list[float]] = []
    together(
        repeat(lambda: strategy.run(step)),
        repeat(lambda: seen.append(parts(strategy, strategy.run(lambda: v * 1.0))), 50),
    )
    assert [row[0] for row in seen] == sorted(row[0] for row in seen)
    assert float(v) == TIMES + 1


@pytest.mark.slow
def test_an_on_read_variable_is_read_while_compiled_steps_run():
    """In a process of its own: a program that is given a donated array crashes it."""
    done = run_script(
        """
        import sys, threading
        import jax.numpy as jnp
        import mirrax as mx

        sys.setswitchinterval(5e-6)
        strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            v = mx.Variable(
                0.0,
                synchronization=mx.VariableSynchronization.ON_READ,
                aggregation=mx.VariableAggregation.SUM,
            )

        @mx.function
        def step():
            v.assign_add(jnp.float32(1.0))

        def train():
            for _ in range(200):
                strategy.run(step)

        strategy.run(step)
        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        seen = [float(v) for _ in range(50)]
        thread.join(200)
        assert not thread.is_alive()
        print(seen == sorted(seen), float(v))
        """
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True", "402.0"]


def test_one_thread_assigns_what_another_trains(strategy):
    """`assign` in the middle of training is seen by later steps and never undone by halves."""
    with strategy.scope():
        v, w = mx.Variable(0.0), mx.Variable(0.0)

    @mx.function
    def step():
        v.assign_add(1.0)
        w.assign_add(1.0)

    strategy.run(step)
    together(repeat(lambda: strategy.run(step)), repeat(lambda: v.assign(0.0), 50))
    assert float(w) == TIMES + 1
    assert 0.0 <= float(v) <= TIMES + 1
    assert parts(strategy, v)[0] == parts(strategy, v)[1]
