"""Everything that an optimizer cannot do: the message names the variable, nothing changes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import both_engines, compile_if, mirrored, per_replica
from helpers.recovery import fails

import mirrax as mx

from .training import copies, make_variables

VALUES = {"first": np.zeros((2, 3), "float32"), "second": np.ones(2, "float32")}


@pytest.fixture(scope="module")
def strategy():
    """One for all tests here: whatever fails, the next one still works with it."""
    return mirrored(2)


@pytest.fixture(scope="module")
def trained(strategy):
    """Two variables that have been trained for a step."""
    return Trained(strategy)


class Trained:
    """Variables and an optimizer with slots, and what they are."""

    def __init__(self, strategy, **kwargs):
        self.strategy = strategy
        self.variables = make_variables(strategy, VALUES)
        self.first, self.second = self.variables.values()
        self.optimizer = mx.train.Optimizer(optax.sgd(0.5, momentum=0.5), **kwargs)
        ones = [(jnp.ones(v.shape), v) for v in self.variables.values()]
        self.optimizer.apply_gradients(ones)

    def state(self):
        every = (*self.variables.values(), *self.optimizer.variables)
        return {v.name: copies(v) for v in every}


def good(variable):
    return jnp.ones(variable.shape), variable


def assert_refused(trained, make_pairs, error, match, engine="outside"):
    """`apply_gradients` of these pairs is an error that leaves everything as it was."""
    before = trained.state()

    def apply():
        trained.optimizer.apply_gradients(make_pairs(trained))

    with fails(trained.strategy, error, match):
        if engine == "outside":
            apply()
        elif engine == "in scope":
            with trained.strategy.scope():
                apply()
        elif engine == "caller":
            mx.function(lambda: trained.strategy.run(apply))()
        else:
            trained.strategy.run(compile_if(engine, apply))
    assert trained.state() == before


class Outsider:
    """Something that is no array."""

    def __repr__(self):
        return "<an outsider>"


NO_GRADIENT = r"no gradient \(None\) for "
SHAPE = r"gradient of variable 'second' has shape .*the variable has \(2,\)"
ONE_ARRAY = r"gradient of variable 'second' must be one array, got"
NOT_PAIRS = r"takes pairs of a gradient and its variable, `zip\(gradients, variables\)`"

BAD: dict[str, Any] = {
    # what: (pairs, error, message)
    "one None": (
        lambda t: [good(t.first), (None, t.second)],
        ValueError,
        NO_GRADIENT + r"'second'.*leave the pair out.*Nothing has been updated",
    ),
    "all None": (
        lambda t: [(None, t.first), (None, t.second)],
        ValueError,
        NO_GRADIENT + r"'first', 'second'",
    ),
    "too long": (lambda t: [good(t.first), (jnp.ones(3), t.second)], ValueError, SHAPE),
    "a scalar": (lambda t: [good(t.first), (1.0, t.second)], ValueError, SHAPE),
    "one row": (
        lambda t: [good(t.first), (jnp.ones((1, 2)), t.second)],
        ValueError,
        SHAPE,
    ),
    "an empty array": (
        lambda t: [good(t.first), (jnp.ones(0), t.second)],
        ValueError,
        SHAPE,
    ),
    "rows of another length": (
        lambda t: [
            (mx.IndexedSlices(jnp.ones((1, 4)), jnp.array([0]), (2, 3)), t.first)
        ],
        ValueError,
        r"gradient of variable 'first' has shape \(1, 4\)",
    ),
    "rows that are a scalar": (
        lambda t: [(mx.IndexedSlices(jnp.ones(()), jnp.array(0), (2, 3)), t.first)],
        ValueError,
        "gradient of variable 'first' has shape",
    ),
    "a nested list": (
        lambda t: [good(t.first), ([jnp.ones(2), [jnp.ones(2)]], t.second)],
        TypeError,
        ONE_ARRAY,
    ),
    "a dict": (
        lambda t: [good(t.first), ({"g": jnp.ones(2)}, t.second)],
        TypeError,
        ONE_ARRAY,
    ),
    "a string": (lambda t: [good(t.first), ("no", t.second)], TypeError, ONE_ARRAY),
    "an object": (
        lambda t: [good(t.first), (Outsider(), t.second)],
        TypeError,
        ONE_ARRAY + ".*<an outsider>",
    ),
    "a dataset": (
        lambda t: [good(t.first), (mx.data.Dataset.range(2), t.second)],
        TypeError,
        ONE_ARRAY + ".*Dataset",
    ),
    "empty": (lambda t: [], ValueError, "no variables to train.*empty"),
    "not pairs": (lambda t: [jnp.ones(())], TypeError, NOT_PAIRS),
    "only gradients": (
        lambda t: [jnp.ones((2, 3)), jnp.ones(2)],
        TypeError,
        r"trains mx\.Variable objects, got",
    ),
    "triples": (lambda t: [(1, 2, 3)], TypeError, NOT_PAIRS),
    "a number": (lambda t: 3, TypeError, NOT_PAIRS + ".*got int: 3"),
    "None": (lambda t: None, TypeError, NOT_PAIRS),
    "a dict of pairs": (lambda t: {1: t.first}, TypeError, NOT_PAIRS),
    "a pair turned round": (
        lambda t: [(t.second, jnp.ones(2))],
        TypeError,
        r"gradient first, then the variable, got .*'second'.*Swap each pair",
    ),
    "an array in the place of a variable": (
        lambda t: [(jnp.ones(2), jnp.ones(2))],
        TypeError,
        r"trains mx\.Variable objects, got .*pytree of arrays use `init` and `update`",
    ),
    "a number for a variable": (
        lambda t: [(1.0, 3)],
        TypeError,
        r"trains mx\.Variable objects, got int: 3",
    ),
    "a variable twice": (
        lambda t: [good(t.second), good(t.first), good(t.second)],
        ValueError,
        "'second' is given twice",
    ),
}


@pytest.mark.parametrize("engine", ["outside", "eager", "compiled"])
@pytest.mark.parametrize("what", BAD)
def test_gradients_that_cannot_be_applied(engine, what, trained):
    assert_refused(trained, *BAD[what], engine=engine)


@pytest.mark.parametrize("what", ["one None", "too long", "a dict", "a variable twice"])
def test_gradients_that_cannot_be_applied_by_a_compiled_caller(what, trained):
    assert_refused(trained, *BAD[what], engine="caller")


@both_engines
@pytest.mark.parametrize("what", ["one None", "too long", "a dict", "empty"])
def test_the_first_step_fails(engine, what, strategy):
    """Also if nothing has been built the next step works."""
    make_pairs, error, match = BAD[what]
    fresh = Trained.__new__(Trained)
    fresh.strategy, fresh.variables = strategy, make_variables(strategy, VALUES)
    fresh.first, fresh.second = fresh.variables.values()
    fresh.optimizer = mx.train.Optimizer(optax.sgd(1.0))

    def step(is_good):
        every = [good(fresh.first), good(fresh.second)]
        fresh.optimizer.apply_gradients(every if is_good else make_pairs(fresh))

    step = compile_if(engine, step)
    with fails(strategy, error, match):
        strategy.run(step, (False,))
    assert int(fresh.optimizer.iterations) == 0
    np.testing.assert_array_equal(fresh.second.numpy(), [1.0, 1.0])
    strategy.run(step, (True,))
    assert int(fresh.optimizer.iterations) == 1
    np.testing.assert_array_equal(fresh.second.numpy(), [-1.0, -1.0])


@both_engines
def test_gradients_of_different_shapes_on_the_replicas(engine, strategy, trained):
    before = trained.state()

    def step(gradient):
        trained.optimizer.apply_gradients([good(trained.first), (gradient, second)])

    second = trained.second
    gradient = per_replica(strategy, [1.0, 1.0], [1.0])
    with fails(strategy, ValueError, r"(?s)'second'.*\(1,\)|\(2,\).*\(1,\)"):
        strategy.run(compile_if(engine, step), (gradient,))
    assert trained.state() == before


def test_a_gradient_that_one_replica_does_not_have(strategy, trained):
    before = trained.state()

    def step():
        is_first = mx.get_replica_context().replica_id_in_sync_group == 0
        gradient = jnp.ones(2) if is_first else None
        trained.optimizer.apply_gradients([(gradient, trained.second)])

    with fails(strategy, (ValueError, RuntimeError), "'second'"):
        strategy.run(step)
    assert trained.state() == before


def test_replicas_that_name_different_variables(strategy):
    with strategy.scope():
        pair = [mx.Variable(0.0, name="left"), mx.Variable(0.0, name="right")]
    optimizer = mx.train.Optimizer(optax.sgd(1.0))
    optimizer.build(pair)

    def step():
        own = pair[mx.get_replica_context().replica_id_in_sync_group]
        optimizer.apply_gradients([good(own)])

    with fails(strategy, (ValueError, RuntimeError), "right"):
        strategy.run(step)
    assert [float(v) for v in pair] == [0.0, 0.0]
    assert int(optimizer.iterations) == 0


def test_replicas_that_name_variables_in_different_orders(strategy):
    with strategy.scope():
        pair = [mx.Variable(0.0, name="left"), mx.Variable(0.0, name="right")]
    optimizer = mx.train.Optimizer(optax.sgd(1.0))

    def step(gradients):
        order = [1, -1][mx.get_replica_context().replica_id_in_sync_group]
        optimizer.apply_gradients(list(zip(gradients, pair))[::order])

    gradients = [per_replica(strategy, x, x) for x in (1.0, 10.0)]
    strategy.run(step, (gradients,))
    assert [float(v) for v in pair] == [-2.0, -20.0]


@pytest.mark.parametrize("engine", ["outside", "eager", "compiled"])
def test_a_variable_that_was_not_there_when_the_slots_were_made(engine, strategy):
    trained = Trained(strategy)
    with strategy.scope():
        late = mx.Variable([1.0], name="late")
    match = r"'optimizer' does not know 'late'.*made for 'first', 'second'.*`build`"
    assert_refused(
        trained, lambda t: [good(t.first), good(late)], ValueError, match, engine
    )
    with pytest.raises(ValueError, match="does not know 'late'"):
        trained.optimizer.build([late])
    assert late.numpy().tolist() == [1.0]


@pytest.mark.parametrize("engine", ["in scope", "eager", "compiled"])
def test_a_variable_made_outside_the_scope(engine, trained):
    ordinary = mx.Variable([1.0], name="ordinary")
    for pairs in ([good(ordinary)], [good(trained.first), good(ordinary)]):
        assert_refused(
            trained,
            lambda _, pairs=pairs: pairs,
            ValueError,
            "'ordinary' was made outside the scope.*with strategy.scope",
            engine,
        )
    assert ordinary.numpy().tolist() == [1.0]


@pytest.mark.parametrize("engine", ["outside", "in scope", "eager", "compiled"])
def test_a_variable_of_another_strategy(engine, trained):
    with mirrored(4).scope():
        foreign = mx.Variable([1.0], name="foreign")
    assert_refused(
        trained,
        lambda t: [good(t.first), good(foreign)],
        ValueError,
        "'foreign' was made outside the scope",
        engine,
    )


@pytest.mark.parametrize("engine", ["outside", "eager", "compiled"])
@pytest.mark.parametrize("value", [1, True, [1, 2]])
def test_a_variable_that_is_no_float(engine, strategy, trained, value):
    with strategy.scope():
        count = mx.Variable(value, name="count")
    assert_refused(
        trained,
        lambda t: [good(t.first), (jnp.ones(count.shape), count)],
        TypeError,
        f"'count' has dtype {count.dtype}; an optimizer trains floating-point",
        engine,
    )


@pytest.mark.parametrize("place", ["outside", "in scope"])
def test_plain_and_distributed_gradients_together(place, strategy, trained):
    def mixed(t):
        return [
            (jnp.ones((2, 3)), t.first),
            (per_replica(strategy, [1.0, 1.0], [2.0, 2.0]), t.second),
        ]

    match = r"those of 'first' are plain arrays.*`aggregate=False`"
    assert_refused(trained, mixed, ValueError, match, place)


def test_a_gradient_of_another_number_of_replicas(strategy, trained):
    other = per_replica(mirrored(4), *np.ones((4, 2), "float32"))
    assert_refused(
        trained, lambda t: [(other, t.second)], ValueError, "4 parts.*2 replicas"
    )


@both_engines
def test_nothing_is_accumulated_either(engine, strategy):
    trained = Trained(strategy, gradient_accumulation_steps=3)
    for what in ("one None", "too long"):
        assert_refused(trained, *BAD[what], engine=engine)
    assert int(trained.optimizer.state.micro_step) == 1


# Making an optimizer ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "transformation",
    [None, 0.1, optax.adam, optax.adam(0.1).init, {"init": 1}, object()],
    ids=["None", "a rate", "function", "init", "dict", "object"],
)
def test_not_a_transformation(transformation):
    with pytest.raises(TypeError, match=r"needs an Optax transformation.*adam\(1e-3\)"):
        mx.train.Optimizer(transformation)


@pytest.mark.parametrize("steps", [0, -1, 1.5, 2.0, "2", None, True, [2]])
def test_bad_gradient_accumulation_steps(steps):
    with pytest.raises(
        ValueError,
        match="`gradient_accumulation_steps` must be a positive integer",
    ):
        mx.train.Optimizer(optax.sgd(0.1), gradient_accumulation_steps=steps)


def test_shard_state_is_a_boolean():
    with pytest.raises(TypeError, match="`shard_state` must be True or False.*'yes'"):
        mx.train.Optimizer(optax.sgd(0.1), shard_state="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["int32", jnp.int8, bool, "uint8"], ids=str)
def test_a_reduce_dtype_that_is_no_float(dtype):
    with pytest.raises(ValueError, match="`reduce_dtype` must be a floating-point"):
        mx.train.Optimizer(optax.sgd(0.1), reduce_dtype=dtype)


@pytest.mark.parametrize(
    "dtype", ["nonsense", 3, object()], ids=["name", "number", "object"]
)
def test_a_reduce_dtype_that_is_no_dtype(dtype):
    with pytest.raises((TypeError, ValueError), match="`reduce_dtype`"):
        mx.train.Optimizer(optax.sgd(0.1), reduce_dtype=dtype)


def test_a_numpy_integer_counts_as_a_number_of_steps(strategy):
    optimizer = mx.train.Optimizer(
        optax.sgd(1.0),
        gradient_accumulation_steps=np.int64(2),  # pyright: ignore
    )
    variables = make_variables(strategy, VALUES)
    for _ in range(2):
        optimizer.apply_gradients([good(v) for v in variables.values()])
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize(
    "variables, error, match",
    [
        ([], ValueError, "no variables to train"),
        ([jnp.ones(2)], TypeError, "trains mx.Variable objects"),
        ([None], TypeError, "trains mx.Variable objects"),
    ],
    ids=["empty", "array", "None"],
)
def test_building_for_what_cannot_be_trained(variables, error, match):
    optimizer = mx.train.Optimizer(optax.sgd(0.1))
    with pytest.raises(error, match=match):
        optimizer.build(variables)
    assert not hasattr(optimizer, "state")


def test_a_keyword_of_keras():
    with pytest.raises(TypeError, match="learning_rate"):
        mx.train.Optimizer(optax.sgd(0.1), learning_rate=1.0)  # pyright: ignore


@both_engines
def test_an_argument_that_the_transformation_needs(engine, strategy):
    variables = make_variables(strategy, VALUES)
    optimizer = mx.train.Optimizer(optax.contrib.reduce_on_plateau())

    def step():
        optimizer.apply_gradients([good(v) for v in variables.values()])

    with fails(strategy, TypeError, "value"):
        strategy.run(compile_if(engine, step))
    assert int(optimizer.iterations) == 0
    assert variables["second"].numpy().tolist() == [1.0, 1.0]
