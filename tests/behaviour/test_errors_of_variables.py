"""Variables that are made, assigned, differentiated or donated in ways that cannot work."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import pytest
from helpers.engines import (
    both_engines,
    compile_if,
    mirrored,
    parts,
    per_replica,
    run,
)
from helpers.recovery import fails
from jax import lax

import mirrax as mx

SUM = mx.VariableAggregation.SUM


@pytest.fixture(scope="module")
def strategy():
    """One for all tests here: whatever fails, the next one still works with it."""
    return mirrored(2)


@pytest.fixture
def v(strategy):
    with strategy.scope():
        return mx.Variable(jnp.zeros(2), name="v")


@pytest.fixture
def summed(strategy):
    with strategy.scope():
        return mx.Variable(0.0, name="summed", aggregation=SUM)


# Assigning -----------------------------------------------------------------------------


@both_engines
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_a_value_of_another_shape(engine, method, strategy, v):
    message = r"Variable 'v' has shape \(2,\); a value of shape \(3,\) cannot"
    with fails(strategy, ValueError, message):
        run(strategy, lambda: getattr(v, method)(jnp.ones(3)), engine=engine)
    with fails(strategy, ValueError, message):
        getattr(v, method)(jnp.ones(3))
    assert parts(strategy, v) == [[0.0, 0.0]] * 2


@both_engines
def test_a_sum_of_another_shape(engine, strategy, summed):
    with fails(strategy, ValueError, r"'summed' has shape \(\).*shape \(2,\)"):
        run(strategy, lambda: summed.assign(jnp.ones(2)), engine=engine)
    assert parts(strategy, summed) == [0.0, 0.0]


@both_engines
def test_a_value_that_would_lose_information(engine, strategy):
    with strategy.scope():
        count = mx.Variable(1, name="count")
    message = r"'count' has dtype int32; .*float32 would lose.*astype\(int32\)"
    with fails(strategy, ValueError, message):
        run(strategy, lambda: count.assign(jnp.float32(1.5)), engine=engine)
    assert int(count) == 1


@both_engines
def test_a_python_number_for_a_sum(engine, strategy, summed):
    message = r"'summed' has aggregation SUM.*2\.0.*jnp\.asarray"
    with fails(strategy, ValueError, message):
        run(strategy, lambda: summed.assign_add(2.0), engine=engine)


@both_engines
def test_an_ordinary_variable_assigned_in_replicas(engine, strategy):
    ordinary = mx.Variable(0.0, name="ordinary")
    message = r"'ordinary' was made outside the scope.*with strategy\.scope\(\)"
    with fails(strategy, ValueError, message):
        run(strategy, lambda: ordinary.assign(1.0), engine=engine)
    assert float(ordinary) == 0.0


@both_engines
def test_another_strategys_variable_assigned_in_replicas(engine, strategy):
    with mirrored(4).scope():
        foreign = mx.Variable(0.0, name="foreign")
    message = r"'foreign' was made in the scope of .*CPU:3.*Mixing different strategies"
    with fails(strategy, RuntimeError, message):
        run(strategy, lambda: foreign.assign(1.0), engine=engine)
    assert float(foreign) == 0.0


@both_engines
def test_replicas_assign_different_shapes(engine, strategy):
    with strategy.scope():
        v = mx.Variable(jnp.zeros(2), aggregation=SUM, name="v")
    x = per_replica(strategy, [1.0, 2.0], [3.0])
    with fails(strategy, ValueError, r"(?s)replica 1 \(CPU:1\).*\(1,\)|shape \(1,\)"):
        run(strategy, lambda x: v.assign(x), x, engine=engine)
    assert parts(strategy, v) == [[0.0, 0.0]] * 2


# Leaks ---------------------------------------------------------------------------------


def assign_in_a_scan(v, x):
    def body(carry, a):
        v.assign(x * a)
        return carry, None

    return lax.scan(body, 0.0, x)


LEAKS = {
    "scan": assign_in_a_scan,
    "jit": lambda v, x: jax.jit(lambda a: v.assign(2 * a).read_value())(x),
    "grad": lambda v, x: jax.grad(lambda a: jnp.sum(v.assign(2 * a).read_value()))(x),
    "vmap": lambda v, x: jax.vmap(lambda a: v.assign(x * a).read_value())(x),
    "cond": lambda v, x: lax.cond(
        x[0] > 0, lambda a: v.assign(2 * a).read_value(), lambda a: a, x
    ),
}


@both_engines
@pytest.mark.parametrize("leak", LEAKS)
def test_assigning_inside_a_body_that_jax_traces(engine, leak, strategy, v):
    message = r"Variable 'v' is assigned.*(leak|traced).*(return|Return)"
    with fails(strategy, RuntimeError, message):
        run(strategy, lambda x: LEAKS[leak](v, x), jnp.ones(2), engine=engine)
    assert parts(strategy, v) == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("leak", LEAKS)
def test_assigning_outside_run_inside_a_body_that_jax_traces(leak, strategy, v):
    for fn in (LEAKS[leak], mx.function(LEAKS[leak])):
        with fails(strategy, RuntimeError, r"Variable 'v' is assigned.*leak"):
            fn(v, jnp.ones(2))
    assert parts(strategy, v) == [[0.0, 0.0]] * 2


@both_engines
def test_assigning_a_sum_inside_a_scan(engine, strategy, summed):
    def replica_fn(x):
        def body(carry, a):
            summed.assign_add(a)
            return carry, None

        return lax.scan(body, 0.0, x)[0]

    with fails(strategy, RuntimeError, r"lax\.scan"):
        run(strategy, replica_fn, jnp.ones(3), engine=engine)
    assert parts(strategy, summed) == [0.0, 0.0]


@both_engines
def test_assigning_a_constant_inside_a_jit(engine, strategy, v):
    def replica_fn():
        @jax.jit
        def body(a):
            v.assign(jnp.ones(2))
            return a

        return body(1.0)

    with fails(strategy, RuntimeError, "Variable 'v' is assigned"):
        run(strategy, replica_fn, engine=engine)
    assert parts(strategy, v) == [[0.0, 0.0]] * 2


def test_a_run_that_assigns_inside_jit(strategy, v):
    message = r"'v' is assigned in a `run` inside `jax.jit`.*mx\.function"
    with fails(strategy, RuntimeError, message):
        jax.jit(lambda x: strategy.run(lambda x: v.assign(x), (x,)))(jnp.ones(2))


# Making --------------------------------------------------------------------------------


@both_engines
def test_a_variable_without_a_value(engine, strategy):
    with fails(strategy, ValueError, "needs an `initial_value`"):
        run(strategy, lambda: mx.Variable(None), engine=engine)
    with fails(strategy, ValueError, "needs an `initial_value`"):
        with strategy.scope():
            mx.Variable(None)


@pytest.mark.parametrize("field", ["synchronization", "aggregation"])
def test_a_variable_with_an_unknown_setting(field, strategy):
    message = rf"`{field}` must be one of .*SUM|`{field}` must be one of .*ON_READ"
    with fails(strategy, ValueError, message):
        with strategy.scope():
            mx.Variable(1.0, **{field: "often"})


def test_a_compiled_function_that_makes_variables_each_time(strategy):
    def replica_fn():
        return mx.Variable(1.0, name="fresh") * 2

    message = (
        r"(?s)'replica_fn' makes new variables \('fresh'\).*first call only.*if self"
    )
    with fails(strategy, ValueError, message):
        strategy.run(mx.function(replica_fn))
    with fails(strategy, ValueError, message):
        mx.function(replica_fn)()


def test_a_function_around_run_that_makes_variables_each_time(strategy):
    def step():
        return strategy.run(lambda: mx.Variable(1.0, name="fresh") * 2)

    message = r"'step' makes new variables \('fresh'\)"
    with fails(strategy, ValueError, message):
        mx.function(step)()


def test_a_variable_cannot_be_pickled(strategy, v):
    with fails(strategy, TypeError, r"'v' cannot be pickled.*v\.numpy\(\)"):
        pickle.dumps({"v": v})


# Differentiating -----------------------------------------------------------------------


@both_engines
def test_the_gradient_of_an_integer_variable(engine, strategy):
    with strategy.scope():
        count = mx.Variable(1, name="count")
    message = r"'count' has dtype int32; gradients need a floating-point variable"
    with fails(strategy, TypeError, message):
        run(strategy, lambda: mx.grad(lambda: count * 1.0, count)(), engine=engine)


@pytest.mark.parametrize("wrong", [jnp.ones(2), 1.0, {"w": 3}, "w"])
def test_the_gradient_of_what_is_no_variable(wrong, strategy):
    with fails(strategy, TypeError, r"mx\.Variable objects only.*jax\.grad"):
        mx.grad(lambda: 1.0, wrong)


@both_engines
def test_a_loss_that_is_no_scalar(engine, strategy, v):
    with fails(strategy, TypeError, r"(?i)scalar"):
        run(strategy, lambda: mx.grad(lambda: v * 1.0, v)(), engine=engine)


@both_engines
def test_a_loss_without_the_aux_it_promised(engine, strategy, v):
    message = r"has_aux=True.*pair \(value, aux\)"
    with fails(strategy, TypeError, message):
        run(
            strategy,
            lambda: mx.grad(lambda: jnp.sum(v), v, has_aux=True)(),
            engine=engine,
        )


# Donating and static arguments ---------------------------------------------------------


def test_reading_a_donated_value_says_that_it_was_donated(strategy):
    state = strategy.replicate({"w": jnp.ones(2)})
    step = mx.function(lambda s: {"w": s["w"] + 1}, donate_argnums=0)
    new = strategy.run(step, (state,))
    with fails(strategy, RuntimeError, "donate"):
        _ = state["w"] + 1
    assert "donated" in repr(state["w"])
    assert parts(strategy, new["w"]) == [[2.0, 2.0]] * 2


def test_a_static_argument_that_cannot_be_compared(strategy):
    step = mx.function(lambda x, sizes: x * sizes[0], static_argnames="sizes")
    with fails(strategy, (TypeError, ValueError), "sizes.*hash"):
        strategy.run(step, (1.0,), {"sizes": [1, 2]})


def test_a_static_argument_that_the_function_does_not_have():
    with pytest.raises(ValueError, match="'trainin'.*training"):
        mx.function(lambda x, training: x, static_argnames="trainin")


def test_a_donated_argument_that_the_function_does_not_have():
    with pytest.raises(ValueError, match="donate_argnums.*3"):
        mx.function(lambda x: x, donate_argnums=3)


def test_a_function_of_no_function():
    with pytest.raises(TypeError, match="`mx.function` needs a function, got 3"):
        mx.function(3)  # type: ignore[arg-type]


@both_engines
def test_branching_on_a_value(engine, strategy):
    step = compile_if(engine, lambda x: x if x > 0 else -x)
    x = per_replica(strategy, 1.0, -2.0)
    if engine == "eager":
        assert parts(strategy, strategy.run(step, (x,))) == [1.0, 2.0]
    else:
        with fails(strategy, jax.errors.TracerBoolConversionError, "traced"):
            strategy.run(step, (x,))
