"""An undecorated replica function is plain Python, called once for each replica."""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import datetime
import functools
import io
import itertools
import logging
import operator
import os
import queue
import random
import secrets
import sys
import threading
import time
import types
import uuid
from datetime import datetime as moment
from time import perf_counter as tick_tock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.compilations import compilations_after_warm_up
from helpers.engines import all_sum, mirrored, parts, per_replica, replica_id
from helpers.scripts import run_script

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


# What a loss does happens in every step ------------------------------------------------
#
# Each case is something that a loss may do and a way to count how often it was done. Only
# `mx.function` compiles, so that the Python of a loss runs for each replica in each step.

STEPS, REPLICAS = 3, 2
EACH_TIME = STEPS * REPLICAS

events = logging.getLogger("events of a loss")
now = datetime.datetime.now
total_calls = 0


class Log:
    """An object of the user's that a loss changes."""

    calls = 0
    __slots__ = ("own",)

    def __init__(self):
        self.own = 0

    def note(self):
        self.own += 1

    @classmethod
    def note_in_class(cls):
        cls.calls += 1


def note_in_module():
    global total_calls
    total_calls += 1


def record(values, make):
    """An effect that keeps what `make()` gives in `values`, which count if all differ."""
    return lambda: values.append(make()), lambda: len(set(values))


def clock_case(clock):
    seen = []
    return lambda: seen.append(clock()), lambda: len(seen)


def logging_case():
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append(record)

    events.handlers[:] = [Keep()]
    events.setLevel(logging.INFO)
    return lambda: events.info("a loss"), lambda: len(records)


def stdout_case():
    text = io.StringIO()

    def effect():
        with contextlib.redirect_stdout(text):
            sys.stdout.write("loss\n")

    return effect, lambda: text.getvalue().count("loss")


def written_case(path):
    def effect():
        with path.open("a") as file:
            file.write("x")

    return effect, lambda: len(path.read_text())


def global_case():
    before = total_calls
    return note_in_module, lambda: total_calls - before


def nonlocal_case():
    calls = 0

    def effect():
        nonlocal calls
        calls += 1

    return effect, lambda: calls


def object_case():
    log = Log()
    return log.note, lambda: log.own


def class_case():
    before = Log.calls
    return Log.note_in_class, lambda: Log.calls - before


def default_argument_case():
    kept = []

    def effect(seen=kept):
        seen.append(1)

    return effect, lambda: len(kept)


def counter_case():
    numbers = itertools.count()
    return lambda: next(numbers), lambda: next(numbers)


def generator_case():
    seen = []

    def numbers():
        while True:
            seen.append(1)
            yield

    generator = numbers()
    return lambda: next(generator), lambda: len(seen)


def container_case(container, add, size=len):
    return lambda: add(container), lambda: size(container)


def context_variable_case():
    calls = []
    variable = contextvars.ContextVar("calls", default=calls)
    return lambda: variable.get().append(1), lambda: len(calls)


def hidden_method_case():
    seen = []
    add = operator.methodcaller("append", 1)
    return functools.partial(add, seen), lambda: len(seen)


def environment_case():
    def effect():
        os.environ["MIRRAX_TEST_CALLS"] = str(
            int(os.environ.get("MIRRAX_TEST_CALLS", "0")) + 1
        )

    return effect, lambda: int(os.environ.pop("MIRRAX_TEST_CALLS"))


def random_state_case():
    state = random.getstate()
    random.seed(0)
    expected = [random.random() for _ in range(EACH_TIME + 1)][-1]
    random.seed(0)

    def count():
        is_next = random.random() == expected
        random.setstate(state)
        return EACH_TIME if is_next else -1

    return random.random, count


EFFECTS = {
    "datetime.now": lambda: clock_case(datetime.datetime.now),
    "datetime.now from a module": lambda: clock_case(lambda: datetime.datetime.now()),
    "an aliased perf_counter": lambda: clock_case(tick_tock),
    "time.time_ns": lambda: clock_case(lambda: time.time_ns()),
    "uuid4": lambda: record([], uuid.uuid4),
    "uuid4 from a module": lambda: record([], lambda: uuid.uuid4()),
    "os.urandom": lambda: record([], lambda: os.urandom(16)),
    "secrets": lambda: record([], lambda: secrets.token_hex(16)),
    "random.random": random_state_case,
    "logging.info": logging_case,
    "sys.stdout.write": stdout_case,
    "an environment variable": environment_case,
    "a global counter": global_case,
    "a counter of the function around it": nonlocal_case,
    "an attribute in a slot": object_case,
    "an attribute of a class": class_case,
    "a mutable default argument": default_argument_case,
    "itertools.count": counter_case,
    "a generator": generator_case,
    "a list": lambda: container_case([], lambda c: c.append(1)),
    "a list by +=": lambda: container_case([], lambda c: c.__iadd__([1])),
    "a dict": lambda: container_case({}, lambda c: c.setdefault(len(c), 1)),
    "a set": lambda: container_case(set(), lambda c: c.add(len(c))),
    "a deque": lambda: container_case(collections.deque(), lambda c: c.append(1)),
    "a Counter": lambda: container_case(
        collections.Counter(), lambda c: c.update("a"), lambda c: c["a"]
    ),
    "an array.array": lambda: container_case(array.array("d"), lambda c: c.append(1.0)),
    "a bytearray": lambda: container_case(bytearray(), lambda c: c.append(1)),
    "a queue": lambda: container_case(
        queue.SimpleQueue(), lambda c: c.put(1), lambda c: c.qsize()
    ),
    "a NumPy array in place": lambda: container_case(
        np.zeros(1), lambda c: np.add(c, 1, out=c), lambda c: int(c[0])
    ),
    "a context variable": context_variable_case,
    "a method that is called by its name": hidden_method_case,
}


@pytest.fixture
def w(strategy):
    with strategy.scope():
        return mx.Variable(3.0, name="w")


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_loss_does_in_every_step_of_every_replica(effect, strategy, w):
    happen, count = EFFECTS[effect]()

    def step(x):
        def loss():
            happen()
            return w * x

        return mx.value_and_grad(loss, w)()

    x = per_replica(strategy, 1.0, 2.0)
    for _ in range(STEPS):
        value, gradient = strategy.run(step, (x,))
        assert parts(strategy, value) == [3.0, 6.0]
        assert parts(strategy, gradient) == [1.0, 2.0]
    assert count() == EACH_TIME


# The same in the loss itself, where the number that the gradient shows is the one that
# was read in this step on this replica.

START = time.perf_counter()
calls_of_a_loss = 0


def loss_with_now(w):
    return w * datetime.datetime.now().microsecond


def loss_with_an_imported_class(w):
    return w * moment.now().microsecond


def loss_with_an_imported_now(w):
    return w * now().microsecond


def loss_with_an_aliased_clock(w):
    return w * ((tick_tock() - START) * 1e3)


def loss_with_monotonic(w):
    return w * (time.monotonic_ns() // 1000 % 1_000_000)


def loss_with_uuid(w):
    return w * (uuid.uuid4().int % 2**24)


def loss_with_urandom(w):
    return w * int.from_bytes(os.urandom(3), "big")


def loss_with_random(w):
    return w * random.randrange(2**24)


def loss_with_numpys_random(w):
    return w * np.random.randint(2**24)


def loss_with_a_global_counter(w):
    global calls_of_a_loss
    calls_of_a_loss += 1
    return w * calls_of_a_loss


@pytest.mark.parametrize(
    "loss",
    [
        loss_with_now,
        loss_with_an_imported_class,
        loss_with_an_imported_now,
        loss_with_an_aliased_clock,
        loss_with_monotonic,
        loss_with_uuid,
        loss_with_urandom,
        loss_with_random,
        loss_with_numpys_random,
        loss_with_a_global_counter,
    ],
)
def test_every_replica_and_step_has_a_number_of_its_own_from_a(loss, strategy, w):
    def step():
        return mx.grad(lambda: loss(w), w)()

    found = [x for _ in range(STEPS) for x in parts(strategy, strategy.run(step))]
    assert len(set(found)) == EACH_TIME


def test_a_loss_logs_in_every_step(strategy, w, caplog):
    def loss():
        logging.info("a loss")
        return w * 2.0

    with caplog.at_level(logging.INFO):
        for _ in range(STEPS):
            strategy.run(mx.grad(loss, w))
    assert caplog.messages.count("a loss") == EACH_TIME


def test_a_loss_logs_by_a_logger_of_its_module_in_every_step(strategy, w, caplog):
    def loss():
        events.warning("a loss")
        return w * 2.0

    for _ in range(STEPS):
        strategy.run(mx.grad(loss, w))
    assert caplog.messages.count("a loss") == EACH_TIME


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_loss_writes_to_a_stream_in_every_step(stream, strategy, w, capsys):
    def loss():
        if stream == "stdout":
            sys.stdout.write("loss\n")
        else:
            sys.stderr.write("loss\n")
        return w * 2.0

    for _ in range(STEPS):
        strategy.run(mx.grad(loss, w))
    written = getattr(capsys.readouterr(), "out" if stream == "stdout" else "err")
    assert written == "loss\n" * EACH_TIME


def test_a_loss_sleeps_in_every_step(strategy, w, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)

    def loss():
        time.sleep(0.25)
        return w * 2.0

    for _ in range(STEPS):
        strategy.run(mx.grad(loss, w))
    assert slept == [0.25] * EACH_TIME


def test_a_loss_reads_a_file_anew_in_every_step(strategy, w, tmp_path):
    path = tmp_path / "scale"

    def loss():
        return w * float(path.read_text())

    for scale in (2.0, 5.0, 7.0):
        path.write_text(str(scale))
        assert parts(strategy, strategy.run(mx.grad(loss, w))) == [scale, scale]


def test_a_loss_reads_the_environment_anew_in_every_step(strategy, w, monkeypatch):
    def loss():
        return w * float(os.environ["MIRRAX_TEST_SCALE"])

    for scale in (2.0, 5.0, 7.0):
        monkeypatch.setenv("MIRRAX_TEST_SCALE", str(scale))
        assert parts(strategy, strategy.run(mx.grad(loss, w))) == [scale, scale]


def test_a_loss_writes_to_a_file_in_every_step(strategy, w, tmp_path):
    happen, count = written_case(tmp_path / "log")

    def loss():
        happen()
        return w * 2.0

    for _ in range(STEPS):
        strategy.run(mx.grad(loss, w))
    assert count() == EACH_TIME


def test_a_loss_outside_replicas_runs_in_every_step():
    times = []
    v = mx.Variable(3.0)

    def loss():
        times.append(tick_tock())
        return v * v

    gradient = mx.grad(loss, v)
    for _ in range(STEPS):
        assert float(gradient()) == 6.0
    assert len(times) == STEPS


def test_what_a_loss_reads_from_a_clock_is_read_anew(strategy, w):
    """The number that the loss uses is the one of this step, not of the first one."""
    now = iter(range(100))
    clock = types.SimpleNamespace(read=lambda: next(now))

    def step():
        return mx.grad(lambda: w * float(clock.read()), w)()

    found = [parts(strategy, strategy.run(step)) for _ in range(STEPS)]
    assert found == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize("depth", [1, 2])
def test_helpers_that_a_loss_calls_run_in_every_step(depth, strategy, w):
    seen = []

    def helper(level):
        return helper(level - 1) if level else seen.append(tick_tock())

    def loss():
        helper(depth)
        return w * 2.0

    for _ in range(STEPS):
        strategy.run(mx.grad(loss, w))
    assert len(seen) == EACH_TIME


def test_an_assignment_beside_an_effect_in_a_loss_happens_each_time(strategy, w):
    seen = []
    with strategy.scope():
        count = mx.Variable(0.0, aggregation=mx.VariableAggregation.SUM)

    def loss():
        count.assign_add(jnp.float32(1.0))
        seen.append(uuid.uuid4())
        return w * 2.0

    for _ in range(STEPS):
        strategy.run(mx.grad(loss, w))
    assert len(set(seen)) == EACH_TIME
    assert float(count) == EACH_TIME


def test_a_function_still_compiles_and_runs_its_python_once(strategy, w):
    """`mx.function`, as `tf.function`: Python effects happen when it is traced."""
    seen = []

    def loss():
        seen.append(1)
        return w * 2.0

    step = mx.function(lambda: mx.grad(loss, w)())
    strategy.run(step)
    traced = len(seen)
    for _ in range(STEPS):
        assert parts(strategy, strategy.run(step)) == [2.0, 2.0]
    assert len(seen) == traced


# Eager steps compile nothing of their own ------------------------------------------------


def average_loss(w, x):
    per_example = (w * x - 1.0) ** 2
    return mx.nn.compute_average_loss(per_example, global_batch_size=4)


def default_average_loss(w, x):
    return mx.nn.compute_average_loss((w * x - 1.0) ** 2)


def reduced_loss(w, x):
    return jnp.sum(all_sum(w * x) ** 2)


def gathered_loss(w, x):
    return jnp.sum(mx.get_replica_context().all_gather(w * x, axis=0) ** 2)


def reduced_tree_loss(w, x):
    total, mean = mx.get_replica_context().all_reduce("MEAN", (w * x, w * w))
    return jnp.sum(total) + mean


def plain_loss(w, x):
    return jnp.sum(jnp.tanh(w * x) ** 2)


LOSSES = [
    plain_loss,
    average_loss,
    default_average_loss,
    reduced_loss,
    gathered_loss,
    reduced_tree_loss,
]


@pytest.mark.parametrize("loss", LOSSES)
def test_eager_steps_compile_nothing_after_the_first_ones(loss, strategy, w):
    x = per_replica(strategy, [1.0, 2.0], [3.0, 4.0])

    def step(x):
        return mx.value_and_grad(lambda: loss(w, x), w)()

    assert compilations_after_warm_up(lambda _: strategy.run(step, (x,))) == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_that_is_defined_anew_each_time_compiles_nothing(loss, strategy, w):
    def step(k):
        x = per_replica(strategy, [1.0 * k, 2.0], [3.0, 4.0])

        def replica_fn(x):
            def inner():
                return loss(w, x)

            value, gradient = mx.value_and_grad(inner, w)()
            return value, all_sum(gradient)

        strategy.run(replica_fn, (x,))

    assert compilations_after_warm_up(step) == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_functions_that_run_eagerly_compile_nothing(loss, strategy, w):
    x = per_replica(strategy, [1.0, 2.0], [3.0, 4.0])

    @mx.function
    def step(x):
        return mx.value_and_grad(lambda: loss(w, x), w)()

    mx.config.run_functions_eagerly(True)
    try:
        assert compilations_after_warm_up(lambda _: strategy.run(step, (x,))) == 0
    finally:
        mx.config.run_functions_eagerly(False)


def test_a_python_number_that_changes_compiles_nothing(strategy, w):
    def step(k):
        rate = 0.1 * k
        return strategy.run(lambda: mx.grad(lambda: w * w * rate, w)())

    assert compilations_after_warm_up(step) == 0


def test_an_eager_training_step_compiles_nothing(strategy):
    with strategy.scope():
        w = mx.Variable([1.0, 2.0])
        seen = mx.Variable(0.0, aggregation=mx.VariableAggregation.SUM)
        mean = mx.Variable(
            0.0,
            synchronization=mx.VariableSynchronization.ON_READ,
            aggregation=mx.VariableAggregation.MEAN,
        )

    def replica_fn(x):
        value, gradient = mx.value_and_grad(lambda: average_loss(w, x), w)()
        w.assign_sub(0.1 * all_sum(gradient))
        seen.assign_add(jnp.float32(2.0))
        mean.assign(value)
        return value

    def step(k):
        x = per_replica(strategy, [1.0 * k, 2.0], [3.0, 4.0])
        values = strategy.run(replica_fn, (x,))
        strategy.reduce("SUM", values, axis=None)
        return float(mean), float(seen), w.numpy()

    assert compilations_after_warm_up(step) == 0


def test_an_eager_gradient_outside_replicas_compiles_nothing():
    v = mx.Variable([1.0, 2.0])
    x = jnp.ones(2)

    def step(_):
        return mx.value_and_grad(lambda: jnp.sum(v * x) ** 2, v)()

    assert compilations_after_warm_up(step) == 0


def test_eager_gradients_on_one_replica_compile_nothing():
    strategy = mirrored(1)
    with strategy.scope():
        v = mx.Variable([1.0, 2.0])

    def step(_):
        return strategy.run(lambda: mx.grad(lambda: jnp.sum(all_sum(v * v)), v)())

    assert compilations_after_warm_up(step) == 0


@pytest.mark.slow
def test_memory_does_not_grow_over_eager_steps():
    done = run_script(
        """
        import os
        import jax.numpy as jnp
        import mirrax as mx

        strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            w = mx.Variable([1.0, 2.0])

        def combine(y):
            context = mx.get_replica_context()
            summed, gathered = context.all_reduce("SUM", y), context.all_gather(y, 0)
            return mx.nn.compute_average_loss(y) + jnp.sum(summed) + jnp.sum(gathered)

        def step(x):
            value, gradient = mx.value_and_grad(lambda: combine((w * x) ** 2), w)()
            w.assign_sub(0.001 * mx.get_replica_context().all_reduce("MEAN", gradient))
            return value

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        x = jnp.ones(2)
        for _ in range(20):
            strategy.run(step, (x,))
        before = resident()
        for done in range(1, 251):
            strategy.run(step, (x,))
            growth = (resident() - before) / 2**20
            if growth > 10:
                break
        print(f"{growth:.1f} {done}")
        """
    )
    assert done.returncode == 0, done.stderr
    growth, steps = done.stdout.split()
    # JAX keeps up to 8192 signatures of what is called in gradients, about 8 KiB a step here.
    assert float(growth) < 5, f"{growth} MiB more after {steps} steps"
    assert steps == "250"
