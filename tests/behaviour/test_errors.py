"""When replicas go wrong: the right error, at once, and the strategy works afterwards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers.engines import (
    all_sum,
    both_engines,
    compile_if,
    mirrored,
    parts,
    per_replica,
    replica_id,
    run,
)
from helpers.recovery import fails
from jax import lax

import mirrax as mx


@pytest.fixture(scope="module")
def strategy():
    """One for all tests here: whatever fails, the next one still works with it."""
    return mirrored(2)


def notes(caught):
    return "\n".join(getattr(caught.value, "__notes__", []))


def is_replica(i):
    """A Python question about the replica id, which only eager replicas can ask."""
    return int(replica_id()) == i


class ModelError(Exception):
    """An exception of the user's own."""


# A replica raises ----------------------------------------------------------------------


@pytest.mark.parametrize("error", [ModelError, KeyError, StopIteration, SystemExit])
def test_an_exception_passes_as_itself_with_the_replica_in_a_note(error, strategy):
    mine = error("boom")

    def replica_fn():
        if is_replica(1):
            raise mine

    with fails(strategy, error, "boom") as caught:
        strategy.run(replica_fn)
    assert caught.value is mine
    assert "replica 1 (CPU:1)" in notes(caught)


@both_engines
@pytest.mark.parametrize("n", [1, 2])
def test_an_exception_on_all_replicas_passes_as_itself(engine, n):
    strategy = mirrored(n)

    def replica_fn():
        raise ModelError("boom")

    with fails(strategy, ModelError, "boom") as caught:
        run(strategy, replica_fn, engine=engine)
    assert "replica" in notes(caught)


def test_an_exception_on_a_partial_batch_names_the_replica(strategy):
    @mx.function
    def replica_fn(x):
        if x.shape[0] == 0:
            raise ModelError("an empty batch")
        return jnp.sum(x)

    x = per_replica(strategy, [1.0, 2.0, 3.0], [])
    with fails(strategy, ModelError, "an empty batch") as caught:
        strategy.run(replica_fn, (x,))
    assert "replica 1 (CPU:1)" in notes(caught)


def test_the_traceback_leads_to_the_users_line(strategy):
    def deep():
        raise ModelError("boom")

    with fails(strategy, ModelError, "boom") as caught:
        strategy.run(deep)
    assert caught.traceback[-1].name == "deep"


def test_replicas_that_wait_are_ended_when_another_raises():
    strategy = mirrored(4)
    ended = []

    def replica_fn():
        try:
            if is_replica(2):
                raise ModelError("boom")
            all_sum(1.0)
        finally:
            ended.append(int(replica_id()))

    with fails(strategy, ModelError, "boom"):
        strategy.run(replica_fn)
    assert sorted(ended) in ([0, 1, 2], [0, 1, 2, 3])


def test_except_exception_in_a_waiting_replica_does_not_hide_the_failure(strategy):
    def replica_fn():
        try:
            if is_replica(1):
                raise KeyboardInterrupt("stop")
            all_sum(1.0)
        except Exception:
            return 0.0

    with fails(strategy, KeyboardInterrupt, "stop"):
        strategy.run(replica_fn)


def test_a_merge_fn_that_raises_passes_as_itself(strategy):
    def merge(strategy, x):
        raise ModelError("boom")

    for engine in ("eager", "compiled"):
        with fails(strategy, ModelError, "boom"):
            run(
                strategy,
                lambda: mx.get_replica_context().merge_call(merge, (1.0,)),
                engine=engine,
            )


def test_a_compiled_step_that_failed_once_works_the_next_time(strategy):
    with strategy.scope():
        v = mx.Variable(1.0)
    fail = True

    @mx.function
    def step(x):
        v.assign_add(x)
        if fail:
            raise ModelError("boom")
        return v.read_value()

    with fails(strategy, ModelError, "boom"):
        strategy.run(step, (2.0,))
    assert float(v) == 1.0, "a failed compiled step changes nothing"
    fail = False
    assert parts(strategy, strategy.run(step, (2.0,))) == [3.0, 3.0]


# Replicas do not do the same -----------------------------------------------------------


@pytest.mark.parametrize("leaver, waiter", [(0, 1), (1, 0)])
@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "merge_call"])
def test_a_replica_returns_while_another_waits(call, leaver, waiter, strategy):
    def replica_fn():
        context = mx.get_replica_context()
        if is_replica(leaver):
            return None
        if call == "all_reduce":
            context.all_reduce("SUM", 1.0)
        elif call == "all_gather":
            context.all_gather(jnp.ones(1), axis=0)
        else:
            context.merge_call(lambda strategy: None)
        return None

    message = (
        rf"(?s)Replica {leaver} \(CPU:{leaver}\) returned while replica {waiter} "
        rf"\(CPU:{waiter}\) waits in `{call}.*` \(.*\.py:\d+\).*equally often.*`if`"
    )
    with fails(strategy, RuntimeError, message):
        strategy.run(replica_fn)


def test_a_replica_skips_a_merge_call(strategy):
    def replica_fn():
        context = mx.get_replica_context()
        for _ in range(3 - int(replica_id())):
            context.merge_call(lambda strategy: None)

    message = (
        r"Replica 1 \(CPU:1\) returned while replica 0 \(CPU:0\) waits in `merge_c"
    )
    with fails(strategy, RuntimeError, message):
        strategy.run(replica_fn)


def test_replicas_call_different_collectives(strategy):
    def replica_fn():
        context = mx.get_replica_context()
        if is_replica(0):
            context.all_reduce("SUM", jnp.ones(1))
        else:
            context.all_gather(jnp.ones(1), axis=0)

    message = (
        r"(?s)Replica 1 \(CPU:1\) called `all_gather.*` \(.*\.py:\d+\) while replica "
        r"0 \(CPU:0\) waits in `all_reduce.*same calls in the same order"
    )
    with fails(strategy, RuntimeError, message):
        strategy.run(replica_fn)


def test_replicas_reduce_by_different_operations(strategy):
    def replica_fn():
        op = "SUM" if is_replica(0) else "MEAN"
        return mx.get_replica_context().all_reduce(op, 1.0)

    with fails(strategy, (RuntimeError, ValueError), "(?s)replica 1.*(SUM|MEAN)"):
        strategy.run(replica_fn)


def test_replicas_gather_along_different_axes(strategy):
    def replica_fn():
        axis = int(replica_id())
        return mx.get_replica_context().all_gather(jnp.ones((2, 2)), axis=axis)

    with fails(strategy, (RuntimeError, ValueError), "(?s)replica 1.*axis"):
        strategy.run(replica_fn)


def test_replicas_bring_different_structures_to_a_collective(strategy):
    def replica_fn():
        return all_sum({"a": 1.0} if is_replica(0) else {"b": 1.0, "c": 2.0})

    message = r"(?s)replica 0 \(CPU:0\).*'a'.*replica 1 \(CPU:1\).*'b'"
    with fails(strategy, ValueError, message):
        strategy.run(replica_fn)


def test_replicas_bring_structures_with_other_names_to_a_collective(strategy):
    def replica_fn():
        all_sum({"a": 1.0} if is_replica(0) else {"b": 1.0})

    message = r"(?s)replica 0 \(CPU:0\).*'a'.*replica 1 \(CPU:1\).*'b'"
    with fails(strategy, ValueError, message):
        strategy.run(replica_fn)


@both_engines
def test_replicas_bring_different_shapes_to_an_all_reduce(engine, strategy):
    x = per_replica(strategy, [1.0, 2.0], [3.0])
    message = (
        r"(?s)replica 0 \(CPU:0\): \(2,\).*replica 1 \(CPU:1\): \(1,\).*partial last"
    )
    with fails(strategy, ValueError, message):
        run(strategy, all_sum, x, engine=engine)


def test_replicas_return_different_structures(strategy):
    def replica_fn():
        return {"a": 1.0} if is_replica(0) else (1.0, 2.0)

    message = r"(?s)different structures.*replica 0 \(CPU:0\).*'a'.*replica 1 \(CPU:1\).*\*, \*"
    with fails(strategy, ValueError, message):
        strategy.run(replica_fn)


def test_a_variable_is_made_in_only_one_replica(strategy):
    def replica_fn():
        if is_replica(0):
            mx.Variable(1.0, name="only_here")

    message = (
        r"(?s)Replica 1 \(CPU:1\) returned while replica 0 \(CPU:0\) .*mx.Variable"
    )
    with fails(strategy, RuntimeError, message):
        strategy.run(replica_fn)


def test_replicas_make_different_variables(strategy):
    def replica_fn():
        mx.Variable(1.0, name="first" if is_replica(0) else "second")

    message = r"(?s)name is 'first' in replica 0 .*'second' in replica 1 \(CPU:1\)"
    with fails(strategy, ValueError, message):
        strategy.run(replica_fn)


# The wrong place -----------------------------------------------------------------------


@both_engines
@pytest.mark.parametrize(
    "call, what",
    [
        (
            lambda s: s.scope().__enter__(),
            r"scope of MirroredStrategy.* inside a replica",
        ),
        (lambda s: s.run(lambda: 1.0), "`run` is called inside a replica function"),
        (
            lambda s: s.reduce("SUM", 1.0, axis=None),
            "`reduce` is called inside a replica",
        ),
        (lambda s: s.gather(1.0, axis=0), "`gather` is called inside a replica"),
        (
            lambda s: s.extended.reduce_to("SUM", 1.0, "CPU:0"),
            "reduce_to` is called inside a replica",
        ),
    ],
    ids=["scope", "run", "reduce", "gather", "reduce_to"],
)
def test_cross_replica_methods_inside_a_replica(engine, call, what, strategy):
    def replica_fn():
        call(strategy)

    with fails(strategy, RuntimeError, what):
        run(strategy, replica_fn, engine=engine)


def test_another_strategys_run_inside_a_replica(strategy):
    other = mirrored(4)
    with fails(strategy, RuntimeError, "inside a replica function"):
        strategy.run(lambda: other.run(lambda: 1.0))


def test_scopes_of_different_strategies_cannot_be_nested(strategy):
    other = mirrored(4)
    message = (
        r"CPU:2.*inside the scope of MirroredStrategy\(\['CPU:0', 'CPU:1'\]\).*Leave"
    )
    with fails(strategy, RuntimeError, message):
        with strategy.scope():
            with other.scope():
                pass


@pytest.mark.parametrize("method", ["run", "reduce", "gather"])
def test_another_strategys_methods_inside_a_scope(method, strategy):
    other = mirrored(4)
    calls = {
        "run": lambda: other.run(lambda: 1.0),
        "reduce": lambda: other.reduce("SUM", mx.distribute.PerReplica([1] * 4), None),
        "gather": lambda: other.gather(mx.distribute.PerReplica([1] * 4), 0),
    }
    with fails(strategy, RuntimeError, "inside the scope of"):
        with strategy.scope():
            calls[method]()


def test_setting_a_strategy_inside_a_scope(strategy):
    with fails(
        strategy, RuntimeError, "experimental_set_strategy.*inside a strategy's scope"
    ):
        with strategy.scope():
            mx.distribute.experimental_set_strategy(mirrored(4))


def test_a_collective_under_jit_in_an_eager_replica(strategy):
    message = (
        r"`all_reduce.*` \(.*\) is called on values that JAX is tracing.*mx\.function"
    )
    with fails(strategy, RuntimeError, message):
        strategy.run(lambda: jax.jit(all_sum)(jnp.float32(1.0)))


@pytest.mark.parametrize("call", ["all_gather", "merge_call"])
def test_other_exchanges_under_jit_in_an_eager_replica(call, strategy):
    def exchange(x):
        context = mx.get_replica_context()
        if call == "all_gather":
            return context.all_gather(x, axis=0)
        return context.merge_call(lambda s, x: x, (x,))

    message = (
        rf"`{call}.*` \(.*\) is called on values that JAX is tracing.*mx\.function"
    )
    with fails(strategy, RuntimeError, message):
        strategy.run(lambda: jax.jit(exchange)(jnp.ones(1)))


def test_a_collective_in_a_scan_of_an_eager_replica(strategy):
    def replica_fn(x):
        return lax.scan(lambda c, a: (c + all_sum(a), None), jnp.zeros(()), x)[0]

    with fails(strategy, RuntimeError, r"JAX is tracing.*lax\.scan.*mx\.function"):
        strategy.run(replica_fn, (jnp.ones(3),))


def test_devices_of_a_replica_in_a_compiled_function(strategy):
    with fails(strategy, RuntimeError, "worker_devices"):
        strategy.run(mx.function(lambda: mx.get_replica_context().devices))


# Arguments -----------------------------------------------------------------------------


@both_engines
@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_per_replica_value_with_the_wrong_number_of_parts(engine, count, strategy):
    x = mx.distribute.PerReplica([jnp.float32(i) for i in range(count)])
    message = rf"{count} part.* 2 replicas"
    with fails(strategy, ValueError, message):
        run(strategy, lambda x: x + replica_id(), x, engine=engine)


@pytest.mark.parametrize("method", ["reduce", "gather"])
def test_combining_a_value_with_the_wrong_number_of_parts(method, strategy):
    x = mx.distribute.PerReplica([jnp.ones(2)] * 3)
    with fails(strategy, ValueError, r"3 parts"):
        if method == "reduce":
            strategy.reduce("SUM", x, axis=None)
        else:
            strategy.gather(x, axis=0)


def test_a_value_of_another_strategys_devices_is_moved_or_refused(strategy):
    other = mx.MirroredStrategy(["CPU:2", "CPU:3"])
    x = per_replica(other, [1.0], [2.0])
    for engine in ("eager", "compiled"):
        out = run(strategy, lambda x: x * 2, x, engine=engine)
        assert parts(strategy, out) == [[2.0], [4.0]]
        found = [v.devices() for v in strategy.experimental_local_results(out)]
        assert found == [{device} for device in jax.devices()[:2]]


@pytest.mark.parametrize(
    "fn, args, error, message",
    [
        (3, (), TypeError, "`run` needs a function, got 3"),
        (lambda x: x, jnp.ones(2), ValueError, r"`args` must be a tuple.*args=\(x,\)"),
        (lambda x: x, "ab", ValueError, r"`args` must be a tuple"),
    ],
)
def test_arguments_of_run(fn, args, error, message, strategy):
    with fails(strategy, error, message):
        strategy.run(fn, args)


@both_engines
def test_a_missing_argument_is_pythons_own_error(engine, strategy):
    def needs_two(a, b):
        return a + b

    with fails(strategy, TypeError, r"needs_two\(\) missing 1 required positional"):
        strategy.run(compile_if(engine, needs_two), (1.0,))


# Reducing ------------------------------------------------------------------------------


def test_reducing_unequal_shapes_shows_both_and_says_to_give_an_axis(strategy):
    x = {"loss": per_replica(strategy, [1.0, 2.0, 3.0, 4.0], [5.0, 6.0])}
    message = (
        r"(?s)`reduce\(axis=None\)` needs equal shapes.*value\['loss'\] has\n"
        r"  replica 0 \(CPU:0\): \(4,\)\n  replica 1 \(CPU:1\): \(2,\)\n"
        r"This is usually a partial last batch\. Pass `axis=0`"
    )
    with fails(strategy, ValueError, message):
        strategy.reduce("SUM", x, axis=None)


@pytest.mark.parametrize(
    "axis, shapes", [(0, [(4, 2), (4, 3)]), (-1, [(4, 2), (3, 2)])]
)
def test_reducing_along_an_axis_with_unequal_other_axes(axis, shapes, strategy):
    x = per_replica(strategy, *(jnp.ones(shape) for shape in shapes))
    message = (
        rf"(?s)`reduce\(axis={axis}\)`.*replica 0 \(CPU:0\): .*replica 1 \(CPU:1\): "
    )
    with fails(strategy, ValueError, message):
        strategy.reduce("SUM", x, axis=axis)


@pytest.mark.parametrize("axis", [1, -2, (0, 1)])
def test_reducing_along_an_axis_that_is_not_there(axis, strategy):
    x = {"loss": per_replica(strategy, [1.0], [2.0])}
    with fails(strategy, ValueError, r"value\['loss'\] has shape \(1,\).*no axis"):
        strategy.reduce("SUM", x, axis=axis)


def test_reducing_by_an_unknown_operation(strategy):
    with fails(strategy, ValueError, r"ReduceOp\.SUM, ReduceOp\.MEAN.* got 'MAX'"):
        strategy.reduce("MAX", per_replica(strategy, 1.0, 2.0), axis=None)


def test_summing_a_plain_value(strategy):
    message = (
        r"(?s)got value = 3\.0, which is not distributed.*SUM.*num_replicas_in_sync"
    )
    with fails(strategy, ValueError, message):
        strategy.reduce("SUM", 3.0, axis=None)


def test_reducing_objects(strategy):
    out = strategy.run(lambda: f"replica {int(replica_id())}")
    with fails(strategy, TypeError, "`reduce` needs arrays or numbers.*str"):
        strategy.reduce("SUM", {"name": out}, axis=None)


def test_gathering_scalars_and_missing_axes(strategy):
    with fails(strategy, ValueError, r"Scalars cannot be gathered.*\(1,\)"):
        strategy.gather(per_replica(strategy, 1.0, 2.0), axis=0)
    with fails(strategy, ValueError, "Axis 1 is out of range.* 1 ax"):
        strategy.gather(per_replica(strategy, [1.0], [2.0]), axis=1)


def test_gathering_parts_that_do_not_fit(strategy):
    x = per_replica(strategy, jnp.ones((2, 2)), jnp.ones((2, 3)))
    message = r"(?s)replica 0 \(CPU:0\): \(2, 2\).*replica 1 \(CPU:1\): \(2, 3\)"
    with fails(strategy, ValueError, message):
        strategy.gather(x, axis=0)


@both_engines
def test_summing_booleans_in_replicas(engine, strategy):
    with fails(strategy, TypeError, r"Booleans cannot be summed.*astype\(int\)"):
        run(strategy, lambda: all_sum(replica_id() == 0), engine=engine)
