"""`mx.train.Optimizer` gives Optax's numbers for the whole batch, wherever it is called."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import all_styles, both_engines, compile_if, parts, per_replica
from hypothesis import given
from hypothesis import strategies as st
from property.examples import examples

import mirrax as mx

from .training import (
    SHAPES,
    STRATEGIES,
    Plain,
    assert_close,
    assert_in_step,
    assert_slots,
    assert_trained,
    copies,
    distribute,
    gradients_of,
    initial_values,
    make_variables,
    pairs,
    step_of,
    sum_of,
)

pytestmark = pytest.mark.slow

AGGREGATIONS = list(mx.VariableAggregation)

TRANSFORMATIONS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.01),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "clipped sgd": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5)),
    "schedule": lambda: optax.sgd(optax.exponential_decay(0.5, 1, 0.5)),
    "warm-up": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.5, 2, 4)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.5), {"w": True, "b": False}),
        optax.sgd(0.1),
    ),
    "masked by a function": lambda: optax.masked(
        optax.trace(0.9), lambda params: {name: name == "w" for name in SHAPES}
    ),
    "labelled": lambda: optax.partition(
        {"fast": optax.sgd(1.0), "slow": optax.adam(0.1)}, {"w": "fast", "b": "slow"}
    ),
    "frozen": lambda: optax.partition(
        {"trained": optax.adam(0.1), "frozen": optax.set_to_zero()},
        {"w": "trained", "b": "frozen"},
    ),
    "noisy": lambda: optax.chain(optax.add_noise(0.1, 0.5, 7), optax.sgd(0.1)),
}
# Those of another kind than the rest: they look at all gradients, keep a key, or take groups.
EAGER = ["sgd", "clipped sgd", "labelled", "noisy"]


def momentum():
    return optax.sgd(0.125, momentum=0.5)


def train(engine, optimizer, variables, plain, steps=3, n=2, **extra):
    """Some steps of the same training, by mirrax and by Optax."""
    strategy = STRATEGIES[n]
    step = step_of(engine, optimizer, variables)
    for i in range(steps):
        gradients = gradients_of(n, i)
        strategy.run(step, (distribute(strategy, gradients),), extra)
        plain.step(sum_of(gradients), **extra)
    return step


# The same numbers as Optax ---------------------------------------------------------------


# XLA of JAX 0.11 crashes on programs for several CPUs that return an empty array.
SMALLEST = 0 if jax.__version_info__ < (0, 11) else 1


@pytest.mark.parametrize(
    "engine, name",
    [
        *(("compiled", name) for name in TRANSFORMATIONS),
        *(("eager", name) for name in EAGER),
    ],
)
def test_the_numbers_of_optax(engine, name):
    variables = make_variables(STRATEGIES[2])
    optimizer = mx.train.Optimizer(TRANSFORMATIONS[name]())
    plain = Plain(TRANSFORMATIONS[name]())
    step = train(engine, optimizer, variables, plain)
    assert_trained(optimizer, variables, plain)
    assert_in_step(optimizer.iterations)
    assert int(optimizer.iterations) == 3
    if engine == "compiled":
        assert step.trace_count == 1


@both_engines
@examples(3)
@given(
    n=st.integers(1, 4),
    name=st.sampled_from(["sgd", "momentum", "nesterov", "clipped sgd"]),
    shapes=st.dictionaries(
        st.sampled_from("abc"),
        st.lists(st.integers(SMALLEST, 3), max_size=3).map(tuple),
        min_size=1,
    ),
)
def test_any_shapes_and_any_number_of_replicas(engine, n, name, shapes):
    strategy, values = STRATEGIES[n], initial_values(shapes)
    variables = make_variables(strategy, values)
    optimizer = mx.train.Optimizer(TRANSFORMATIONS[name]())
    plain = Plain(TRANSFORMATIONS[name](), values)
    step = step_of(engine, optimizer, variables)
    for i in range(2):
        gradients = gradients_of(n, i, shapes)
        strategy.run(step, (distribute(strategy, gradients),))
        plain.step(sum_of(gradients))
    assert_trained(optimizer, variables, plain)


@both_engines
def test_gradients_are_clipped_after_they_are_summed(engine):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy, {"v": np.zeros(2, "float32")})
    optimizer = mx.train.Optimizer(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    )
    step = step_of(engine, optimizer, variables)
    strategy.run(step, ({"v": per_replica(strategy, [3.0, 5.0], [0.0, -1.0])},))
    np.testing.assert_allclose(variables["v"].numpy(), [-0.6, -0.8], rtol=1e-6)


@both_engines
def test_a_hyperparameter_can_be_assigned_between_steps(engine):
    variables = make_variables(STRATEGIES[2], {"v": np.zeros((), "float32")})
    optimizer = mx.train.Optimizer(
        optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    )
    optimizer.build(list(variables.values()))
    step = step_of(engine, optimizer, variables)
    seen = []
    for rate in (1.0, 0.25, 0.5):
        optimizer.state.hyperparams["learning_rate"].assign(rate)
        STRATEGIES[2].run(step, ({"v": per_replica(STRATEGIES[2], 1.0, 3.0)},))
        seen.append(float(variables["v"]))
    assert seen == [-4.0, -5.0, -7.0]
    assert_in_step(optimizer.state.hyperparams["learning_rate"])
    if engine == "compiled":
        assert step.trace_count == 1


@both_engines
def test_a_hyperparameter_assigned_in_the_step(engine):
    variables = make_variables(STRATEGIES[2], {"v": np.zeros((), "float32")})
    optimizer = mx.train.Optimizer(
        optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    )
    optimizer.build(list(variables.values()))

    def step(gradient):
        optimizer.apply_gradients([(gradient, variables["v"])])
        rate = optimizer.state.hyperparams["learning_rate"]
        rate.assign(rate * 0.5)

    step = compile_if(engine, step)
    for expected in (-4.0, -6.0, -7.0):
        STRATEGIES[2].run(step, (per_replica(STRATEGIES[2], 1.0, 3.0),))
        assert parts(STRATEGIES[2], variables["v"]) == [expected] * 2


def plateau():
    return optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)
    )


@all_styles
def test_extra_arguments_reach_the_transformation(engine):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy)
    optimizer, plain = mx.train.Optimizer(plateau()), Plain(plateau())

    def replica_fn(gradients, loss):
        total = mx.get_replica_context().all_reduce("SUM", loss)
        optimizer.apply_gradients(pairs(gradients, variables), value=total)

    if engine == "caller":
        step = mx.function(lambda *args: strategy.run(replica_fn, args))
    else:
        fn = compile_if(engine, replica_fn)
        step = lambda *args: strategy.run(fn, args)  # noqa: E731
    for i in range(4):
        gradients = gradients_of(2, i)
        step(distribute(strategy, gradients), per_replica(strategy, 1.0, 2.0))
        plain.step(sum_of(gradients), value=3.0)
    assert float(plain.state[1].scale) == 0.125
    assert_trained(optimizer, variables, plain)


@both_engines
def test_a_python_number_as_an_extra_argument(engine):
    variables = make_variables(STRATEGIES[2])
    optimizer, plain = mx.train.Optimizer(plateau()), Plain(plateau())
    train(engine, optimizer, variables, plain, steps=4, value=1.5)
    assert_trained(optimizer, variables, plain)


@both_engines
def test_a_replicas_own_loss_does_not_tear_copies_apart(engine):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy)
    optimizer = mx.train.Optimizer(plateau())
    step = step_of(engine, optimizer, variables)
    for i in range(4):
        gradients = distribute(strategy, gradients_of(2, i))
        losses = per_replica(strategy, 1.0, float(i))
        strategy.run(step, (gradients,), {"value": losses})
    for variable in (*variables.values(), *optimizer.variables):
        assert len(set(copies(variable))) == 1, variable.name


# Places ----------------------------------------------------------------------------------


def in_replicas(strategy, apply, gradients):
    strategy.run(apply, (gradients,))


def in_compiled_replicas(strategy, apply, gradients):
    strategy.run(mx.function(apply), (gradients,))


def in_a_compiled_caller(strategy, apply, gradients):
    mx.function(lambda g: strategy.run(apply, (g,)))(gradients)


def in_scope(strategy, apply, gradients):
    with strategy.scope():
        apply(gradients)


def outside_scope(strategy, apply, gradients):
    apply(gradients)


def in_scope_compiled(strategy, apply, gradients):
    with strategy.scope():
        mx.function(apply)(gradients)


def outside_scope_compiled(strategy, apply, gradients):
    mx.function(apply)(gradients)


def after_run_in_a_compiled_caller(strategy, apply, gradients):
    mx.function(lambda g: apply(strategy.run(lambda g: g, (g,))))(gradients)


def in_merge_call(strategy, apply, gradients):
    def replica_fn(gradients):
        merge = lambda strategy, gradients: apply(gradients)  # noqa: E731
        mx.get_replica_context().merge_call(merge, (gradients,))

    strategy.run(replica_fn, (gradients,))


def in_compiled_merge_call(strategy, apply, gradients):
    def replica_fn(gradients):
        merge = lambda strategy, gradients: apply(gradients)  # noqa: E731
        mx.get_replica_context().merge_call(merge, (gradients,))

    strategy.run(mx.function(replica_fn), (gradients,))


def in_an_update_of_the_default_strategy(strategy, apply, gradients):
    with mx.distribute.get_strategy().scope():
        apply(gradients)


PLACES = [
    in_replicas,
    in_compiled_replicas,
    in_a_compiled_caller,
    in_scope,
    outside_scope,
    in_scope_compiled,
    outside_scope_compiled,
    after_run_in_a_compiled_caller,
    in_merge_call,
    in_compiled_merge_call,
    in_an_update_of_the_default_strategy,
]
every_place = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)


@every_place
def test_every_place_gives_the_same_update(place):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy)
    optimizer = mx.train.Optimizer(momentum())
    plain = Plain(momentum())

    def apply(gradients):
        optimizer.apply_gradients(pairs(gradients, variables))

    for i in range(2):
        gradients = gradients_of(2, i)
        place(strategy, apply, distribute(strategy, gradients))
        plain.step(sum_of(gradients))
        assert int(optimizer.iterations) == i + 1
    assert_trained(optimizer, variables, plain)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_gradients_that_are_summed_already(place):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy)
    optimizer = mx.train.Optimizer(momentum())
    plain = Plain(momentum())
    gradients = sum_of(gradients_of(2, 0))

    def apply(gradients):
        optimizer.apply_gradients(pairs(gradients, variables), aggregate=False)

    for _ in range(2):
        place(strategy, apply, jax.tree.map(jnp.asarray, gradients))
        plain.step(gradients)
    # Eager replicas each update their own copy: nobody knows that they agree.
    assert_close(optimizer, variables, plain)


@both_engines
def test_plain_gradients_outside_of_replicas_are_taken_as_they_are(engine):
    variables = make_variables(STRATEGIES[2])
    optimizer, plain = mx.train.Optimizer(momentum()), Plain(momentum())
    step = step_of(engine, optimizer, variables)
    for i in range(2):
        gradients = sum_of(gradients_of(1, i))
        step(gradients)
        with STRATEGIES[2].scope():
            step(gradients)
        plain.step(gradients)
        plain.step(gradients)
    assert_trained(optimizer, variables, plain)


def test_what_all_reduce_gives_can_be_applied_without_summing():
    strategy = STRATEGIES[2]
    variables = make_variables(strategy)
    optimizer, plain = mx.train.Optimizer(momentum()), Plain(momentum())

    def replica_fn(gradients):
        gradients = mx.get_replica_context().all_reduce("SUM", gradients)
        optimizer.apply_gradients(pairs(gradients, variables), aggregate=False)

    for fn in (replica_fn, mx.function(replica_fn)):
        gradients = gradients_of(2, 0)
        strategy.run(fn, (distribute(strategy, gradients),))
        plain.step(sum_of(gradients))
    assert_trained(optimizer, variables, plain)


@both_engines
def test_without_a_strategy(engine):
    variables = {k: mx.Variable(v, name=k) for k, v in initial_values().items()}
    optimizer, plain = mx.train.Optimizer(momentum()), Plain(momentum())
    step = step_of(engine, optimizer, variables)
    for i in range(3):
        gradients = sum_of(gradients_of(1, i))
        step(gradients)
        plain.step(gradients)
    for name, variable in variables.items():
        np.testing.assert_allclose(variable.numpy(), plain.params[name], 2e-6, 1e-6)
    assert int(optimizer.iterations) == 3


@both_engines
def test_on_one_device(engine):
    strategy = mx.distribute.OneDeviceStrategy("CPU:1")
    variables = make_variables(strategy)
    optimizer, plain = mx.train.Optimizer(momentum()), Plain(momentum())
    step = step_of(engine, optimizer, variables)
    for i in range(2):
        gradients = sum_of(gradients_of(1, i))
        strategy.run(step, (gradients,))
        plain.step(gradients)
    for name, variable in variables.items():
        np.testing.assert_allclose(variable.numpy(), plain.params[name], 2e-6, 1e-6)


@both_engines
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: a.name)
def test_the_aggregation_of_a_variable_does_not_matter(engine, aggregation):
    variables = make_variables(STRATEGIES[2], aggregation=aggregation)
    optimizer, plain = mx.train.Optimizer(momentum()), Plain(momentum())
    train(engine, optimizer, variables, plain, steps=2)
    assert_trained(optimizer, variables, plain)


@both_engines
@pytest.mark.parametrize("aggregation", AGGREGATIONS[1:], ids=lambda a: a.name)
def test_every_copy_of_a_variable_that_is_combined_when_read(engine, aggregation):
    strategy = STRATEGIES[2]
    variables = make_variables(
        strategy,
        {"v": np.array([1.0, 2.0], "float32")},
        synchronization=mx.VariableSynchronization.ON_READ,
        aggregation=aggregation,
    )
    optimizer = mx.train.Optimizer(optax.sgd(0.5))
    step = step_of(engine, optimizer, variables)
    strategy.run(step, ({"v": per_replica(strategy, [1.0, 0.0], [3.0, 1.0])},))
    assert parts(strategy, variables["v"]) == [[-1.0, 1.5]] * 2


@both_engines
def test_a_variable_whose_copies_have_been_torn_apart(engine):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy, {"v": np.zeros((), "float32")})
    v = variables["v"]
    strategy.run(lambda x: v.assign(x), (per_replica(strategy, 1.0, 5.0),))
    step = step_of(engine, mx.train.Optimizer(optax.sgd(0.5)), variables)
    strategy.run(step, ({"v": per_replica(strategy, 1.0, 3.0)},))
    assert parts(strategy, v) == [-1.0, 3.0], "each copy moves by as much"


# Building --------------------------------------------------------------------------------


@both_engines
@pytest.mark.parametrize("made_in", ["scope", "no scope"])
@pytest.mark.parametrize("built", ["build", "build in scope", "first step"])
def test_where_the_optimizer_is_made_and_built(engine, made_in, built):
    strategy = STRATEGIES[2]
    variables, plain = make_variables(strategy), Plain(momentum())
    if made_in == "scope":
        with strategy.scope():
            optimizer = mx.train.Optimizer(momentum())
    else:
        optimizer = mx.train.Optimizer(momentum())
    if built == "build":
        optimizer.build(list(variables.values()))
    elif built == "build in scope":
        with strategy.scope():
            optimizer.build(list(variables.values()))
    train(engine, optimizer, variables, plain, steps=2)
    assert_trained(optimizer, variables, plain)
    for variable in optimizer.variables:
        assert isinstance(variable, mx.distribute.MirroredVariable)
        assert not variable.trainable


@pytest.mark.parametrize("engine", ["compiled", "caller"])
def test_an_optimizer_made_at_the_first_trace(engine):
    strategy = STRATEGIES[2]
    variables, plain = make_variables(strategy), Plain(momentum())
    made = []

    def replica_fn(gradients):
        if not made:
            made.append(mx.train.Optimizer(momentum()))
        made[0].apply_gradients(pairs(gradients, variables))

    if engine == "compiled":
        fn = mx.function(replica_fn)
        step = lambda g: strategy.run(fn, (g,))  # noqa: E731
    else:
        step = fn = mx.function(lambda g: strategy.run(replica_fn, (g,)))
    for i in range(3):
        gradients = gradients_of(2, i)
        step(distribute(strategy, gradients))
        plain.step(sum_of(gradients))
    assert_trained(made[0], variables, plain)
    assert int(made[0].iterations) == 3


def test_building_twice_changes_nothing():
    variables = list(make_variables(STRATEGIES[2]).values())
    optimizer = mx.train.Optimizer(optax.adam(0.1))
    with pytest.raises(
        AttributeError, match=r"'optimizer' has no state before .*build"
    ):
        _ = optimizer.state.hyperparams
    assert optimizer.variables == [optimizer.iterations]
    optimizer.build(variables)
    before = optimizer.variables
    optimizer.build(variables[:1])
    assert [a is b for a, b in zip(optimizer.variables, before)] == [True] * 6
    assert [v.name for v in before[:3]] == [
        "optimizer/iterations",
        "optimizer/0/count",
        "optimizer/0/mu/b",
    ]


def test_apply_gradients_returns_the_iterations():
    variables = make_variables(STRATEGIES[2], {"v": np.zeros((), "float32")})
    optimizer = mx.train.Optimizer(optax.sgd(0.1), name="mine")
    returned = optimizer.apply_gradients([(1.0, variables["v"])])
    assert returned is optimizer.iterations
    assert (int(returned), returned.name) == (1, "mine/iterations")
    assert returned.dtype == jnp.int32


@both_engines
def test_a_generator_of_pairs(engine):
    variables = make_variables(STRATEGIES[2])
    optimizer = mx.train.Optimizer(optax.sgd(1.0))

    def replica_fn(gradients):
        optimizer.apply_gradients((g, variables[k]) for k, g in gradients.items())

    gradients = gradients_of(2, 0)
    step = compile_if(engine, replica_fn)
    STRATEGIES[2].run(step, (distribute(STRATEGIES[2], gradients),))
    for name, total in sum_of(gradients).items():
        expected = initial_values()[name] - total
        np.testing.assert_allclose(variables[name].numpy(), expected, rtol=1e-6)


@both_engines
def test_variables_of_the_same_name(engine):
    strategy = STRATEGIES[2]
    with strategy.scope():
        twins = [mx.Variable(1.0, name="v"), mx.Variable(2.0, name="v")]
    optimizer = mx.train.Optimizer(optax.sgd(1.0, momentum=0.5))

    def replica_fn(a, b):
        optimizer.apply_gradients(zip([a, b], twins))

    step = compile_if(engine, replica_fn)
    args = per_replica(strategy, 1.0, 2.0), per_replica(strategy, 10.0, 20.0)
    strategy.run(step, args)
    assert [float(v) for v in twins] == [-2.0, -28.0]
    assert sorted(optimizer.state[0].trace) == ["v", "v_1"]


@both_engines
def test_the_order_of_pairs_does_not_matter(engine):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy)
    optimizer, plain = mx.train.Optimizer(momentum()), Plain(momentum())

    def replica_fn(gradients, is_turned):
        given = pairs(gradients, variables)
        optimizer.apply_gradients(given[::-1] if is_turned else given)

    step = compile_if(engine, replica_fn)
    for i, is_turned in enumerate([False, True, False]):
        gradients = gradients_of(2, i)
        strategy.run(step, (distribute(strategy, gradients), is_turned))
        plain.step(sum_of(gradients))
    assert_trained(optimizer, variables, plain)


@all_styles
def test_of_variables_that_are_left_out_nothing_changes(engine):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy)
    optimizer = mx.train.Optimizer(optax.sgd(0.5, momentum=0.5))
    every = step_of(engine, optimizer, variables)
    some = step_of(engine, optimizer, {"w": variables["w"]})
    if engine == "caller":
        every, some = every.fn, some.fn

    def call(fn, gradients):
        if engine == "caller":
            mx.function(lambda g: strategy.run(fn, (g,)))(gradients)
        else:
            strategy.run(fn, (gradients,))

    first, second = gradients_of(2, 0), gradients_of(2, 1)
    call(every, distribute(strategy, first))
    b, slot = variables["b"], optimizer.state[0].trace["b"]
    before = copies(b), copies(slot)
    call(some, {"w": distribute(strategy, second)["w"]})
    assert (copies(b), copies(slot)) == before
    plain = Plain(optax.sgd(0.5, momentum=0.5), {"w": initial_values()["w"]})
    for gradients in (first, second):
        plain.step({"w": sum_of(gradients)["w"]})
    np.testing.assert_allclose(variables["w"].numpy(), plain.params["w"], rtol=1e-6)
    assert_in_step(b)
    assert int(optimizer.iterations) == 2


# Sparse gradients and dtypes -------------------------------------------------------------


@both_engines
@examples(3)
@given(
    indices=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=2, max_size=2),
    name=st.sampled_from(["momentum", "clipped sgd"]),
)
def test_rows_of_a_gradient(engine, indices, name):
    """Also duplicates, none at all, and another number on each replica."""
    strategy, values = STRATEGIES[2], {"table": np.ones((5, 2), "float32")}
    variables = make_variables(strategy, values)
    optimizer = mx.train.Optimizer(TRANSFORMATIONS[name]())
    plain = Plain(TRANSFORMATIONS[name](), values)
    rows = [np.full((len(i), 2), r + 1.0, "float32") for r, i in enumerate(indices)]
    total = np.zeros((5, 2), "float32")
    for index, row in zip(indices, rows):
        np.add.at(total, np.array(index, int), row)

    def replica_fn(rows, index):
        gradient = mx.IndexedSlices(rows, index, (5, 2))
        optimizer.apply_gradients([(gradient, variables["table"])])

    step = compile_if(engine, replica_fn)
    arrays = [np.array(index, "int32") for index in indices]
    args = per_replica(strategy, *rows), per_replica(strategy, *arrays)
    for _ in range(2):
        strategy.run(step, args)
        plain.step({"table": total})
    assert_trained(optimizer, variables, plain)


def test_rows_of_a_gradient_in_cross_replica_context():
    strategy = STRATEGIES[2]
    variables = make_variables(strategy, {"table": np.zeros((3, 1), "float32")})
    optimizer = mx.train.Optimizer(optax.sgd(1.0))
    rows = per_replica(strategy, [[1.0], [2.0]], [[4.0], [8.0]])
    index = per_replica(strategy, [0, 2], [2, 2])
    gradient = mx.IndexedSlices(rows, index, (3, 1))
    optimizer.apply_gradients([(gradient, variables["table"])])
    plain = mx.IndexedSlices(jnp.ones((2, 1)), jnp.array([1, 1]))
    optimizer.apply_gradients([(plain, variables["table"])])
    assert parts(strategy, variables["table"]) == [[[-1.0], [-2.0], [-14.0]]] * 2


@both_engines
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_variables_of_half_precision_stay_what_they_are(engine, dtype):
    strategy = STRATEGIES[2]
    values = {k: jnp.asarray(v, dtype) for k, v in initial_values().items()}
    variables = make_variables(strategy, values)
    optimizer = mx.train.Optimizer(optax.sgd(0.125, momentum=0.5))
    plain = Plain(optax.sgd(0.125, momentum=0.5), values)
    step = step_of(engine, optimizer, variables)
    for i in range(2):
        gradients = gradients_of(2, i)
        strategy.run(step, (distribute(strategy, gradients),))
        plain.step({k: jnp.asarray(g, dtype) for k, g in sum_of(gradients).items()})
    assert [v.dtype.name for v in variables.values()] == [dtype] * 2
    for name, variable in variables.items():
        assert_in_step(variable)
        expected = np.asarray(plain.params[name], "float32")
        rtol = 4 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(
            variable.numpy().astype("float32"), expected, rtol, rtol
        )
    assert optimizer.state[0].trace["w"].dtype == dtype


@both_engines
@pytest.mark.parametrize("dtype", ["int32", "float16", "bool"])
def test_gradients_are_converted_to_the_type_of_their_variable(engine, dtype):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy, {"v": np.array([1.0, 2.0], "float32")})
    step = step_of(engine, mx.train.Optimizer(optax.sgd(0.5)), variables)
    gradient = per_replica(strategy, [1, 0], [1, 1], dtype=dtype)
    strategy.run(step, ({"v": gradient},))
    assert parts(strategy, variables["v"]) == [[0.0, 1.5]] * 2


@both_engines
def test_a_nan_is_not_hidden(engine):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy, {"v": np.array([1.0, 2.0], "float32")})
    step = step_of(engine, mx.train.Optimizer(optax.sgd(0.5)), variables)
    gradient = per_replica(strategy, [np.nan, 0.0], [1.0, 1.0])
    strategy.run(step, ({"v": gradient},))
    np.testing.assert_array_equal(variables["v"].numpy(), [np.nan, 1.5])


# A whole training step -------------------------------------------------------------------


def loss_of(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


@all_styles
def test_gradients_of_a_loss(engine):
    strategy = STRATEGIES[2]
    variables = make_variables(strategy)
    optimizer, plain = mx.train.Optimizer(momentum()), Plain(momentum())

    def replica_fn(x):
        loss, gradients = mx.value_and_grad(
            lambda: loss_of(variables, x) / 2, variables
        )()
        optimizer.apply_gradients(pairs(gradients, variables))
        return loss

    if engine == "caller":
        step = mx.function(lambda x: strategy.run(replica_fn, (x,)))
    else:
        fn = compile_if(engine, replica_fn)
        step = lambda x: strategy.run(fn, (x,))  # noqa: E731
    rng = np.random.default_rng(0)
    for _ in range(3):
        batch = rng.normal(size=(8, 2)).astype("float32")
        expected, gradients = jax.value_and_grad(loss_of)(plain.params, batch)
        losses = step(per_replica(strategy, batch[:4], batch[4:]))
        plain.step(gradients)
        total = strategy.reduce("SUM", losses, axis=None)
        np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert_trained(optimizer, variables, plain, rtol=1e-4)


@pytest.fixture
def plain_python():
    mx.config.run_functions_eagerly(True)
    yield
    mx.config.run_functions_eagerly(False)


@pytest.mark.usefixtures("plain_python")
def test_everything_as_plain_python():
    variables = make_variables(STRATEGIES[2])
    optimizer, plain = mx.train.Optimizer(momentum()), Plain(momentum())
    train("compiled", optimizer, variables, plain, steps=2)
    assert_close(optimizer, variables, plain)
    assert int(optimizer.iterations) == 2


def test_eager_and_compiled_steps_take_turns():
    strategy = STRATEGIES[2]
    variables = make_variables(strategy)
    optimizer, plain = mx.train.Optimizer(momentum()), Plain(momentum())
    compiled = step_of("compiled", optimizer, variables)
    eager = step_of("eager", optimizer, variables)
    for i, step in enumerate([compiled, eager, compiled, eager, eager, compiled]):
        gradients = gradients_of(2, i)
        strategy.run(step, (distribute(strategy, gradients),))
        plain.step(sum_of(gradients))
    assert_trained(optimizer, variables, plain)
    assert compiled.trace_count == 1


def test_two_optimizers_for_two_groups():
    strategy = STRATEGIES[2]
    variables = make_variables(strategy)
    fast = mx.train.Optimizer(optax.sgd(1.0), name="fast")
    slow = mx.train.Optimizer(optax.adam(0.1), name="slow")

    @mx.function
    def replica_fn(gradients):
        fast.apply_gradients([(gradients["w"], variables["w"])])
        slow.apply_gradients([(gradients["b"], variables["b"])])

    label = {"w": "fast", "b": "slow"}
    plain = Plain(
        optax.partition({"fast": optax.sgd(1.0), "slow": optax.adam(0.1)}, label)
    )
    for i in range(2):
        gradients = gradients_of(2, i)
        strategy.run(replica_fn, (distribute(strategy, gradients),))
        plain.step(sum_of(gradients))
    for name, variable in variables.items():
        np.testing.assert_allclose(variable.numpy(), plain.params[name], 2e-6, 1e-6)
    assert [int(fast.iterations), int(slow.iterations)] == [2, 2]


def test_one_optimizer_twice_in_a_step():
    strategy = STRATEGIES[2]
    variables, plain = make_variables(strategy), Plain(momentum())
    optimizer = mx.train.Optimizer(momentum())

    @mx.function
    def replica_fn(gradients):
        optimizer.apply_gradients(pairs(gradients, variables))
        optimizer.apply_gradients(pairs(gradients, variables))

    gradients = gradients_of(2, 0)
    strategy.run(replica_fn, (distribute(strategy, gradients),))
    plain.step(sum_of(gradients))
    plain.step(sum_of(gradients))
    assert_trained(optimizer, variables, plain)
    assert int(optimizer.iterations) == 2


def test_the_slots_of_a_variable_have_its_shape():
    variables = make_variables(STRATEGIES[2])
    optimizer = mx.train.Optimizer(optax.adam(0.1))
    optimizer.build(list(variables.values()))
    adam = optimizer.state[0]
    assert {k: v.shape for k, v in adam.mu.items()} == {"b": (3,), "w": (2, 3)}
    assert adam.count.shape == ()
    assert_slots(optimizer, Plain(optax.adam(0.1)))
