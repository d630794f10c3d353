"""Assigning to every kind of variable in either context (4.3, 4.4, 12.7-12.9)."""

from itertools import product

import numpy as np

from . import scenario

AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
SYNCHRONIZATIONS = ("AUTO", "ON_WRITE", "ON_READ", "NONE")
METHODS = ("assign", "assign_add", "assign_sub")
DTYPES = ("float32", "int32")
# An integer variable with MEAN cannot be made; see `creating_an_integer_mean`.
KINDS = [
    (synchronization, aggregation, dtype)
    for synchronization in ("ON_WRITE", "ON_READ")
    for aggregation in AGGREGATIONS
    for dtype in DTYPES
    if (aggregation, dtype) != ("MEAN", "int32")
]


def make(api, strategy, initial, synchronization, aggregation, **kwargs):
    with strategy.scope():
        return api.Variable(
            initial,
            synchronization=getattr(api.VariableSynchronization, synchronization),
            aggregation=getattr(api.VariableAggregation, aggregation),
            **kwargs,
        )


@scenario("12.8", cases=product(SYNCHRONIZATIONS, AGGREGATIONS))
def creating(api, synchronization, aggregation):
    def create(**kwargs):
        made = make(api, api.mirrored(2), 1.0, synchronization, aggregation, **kwargs)
        facts = [made.synchronization, made.aggregation, made.trainable]
        return [api.class_name(made), *facts]

    return {
        "default": api.attempt(create),
        "trainable": api.attempt(lambda: create(trainable=True)),
        "fixed": api.attempt(lambda: create(trainable=False)),
    }


@scenario("12.8", cases=product(SYNCHRONIZATIONS, AGGREGATIONS))
def creating_with_one_device(api, synchronization, aggregation):
    made = make(api, api.one_device(), 1.0, synchronization, aggregation)
    return [made.synchronization, made.aggregation, made.trainable]


@scenario("12.8", cases=product(("ON_WRITE", "ON_READ")))
def creating_an_integer_mean(api, synchronization):
    return make(api, api.mirrored(2), 1, synchronization, "MEAN")


@scenario("12.8")
def creating_with_what_is_no_aggregation(api):
    with api.mirrored(2).scope():
        return api.fails(lambda: api.Variable(1.0, aggregation="sum"))


@scenario("4.3", "4.4", cases=[(m, *kind) for m in METHODS for kind in KINDS])
def replica_context(api, engine, method, synchronization, aggregation, dtype):
    """Each replica assigns its own array."""
    strategy = api.mirrored(2)
    initial = api.array([10], dtype)
    variable = make(api, strategy, initial, synchronization, aggregation)
    value = api.per_replica(strategy, [1], [3], dtype=dtype)

    def replica_fn(x):
        getattr(variable, method)(x)
        return variable.read_value()

    step = api.compile_if(engine, replica_fn)
    return {
        "read": api.attempt(lambda: strategy.run(step, args=(value,))),
        "copies": api.copies(variable),
    }


@scenario("4.3", "4.4", cases=[(m, *kind) for m in METHODS for kind in KINDS])
def cross_replica_context(api, engine, method, synchronization, aggregation, dtype):
    """One array is assigned to all copies."""
    strategy = api.mirrored(2)
    initial = api.array([10], dtype)
    variable = make(api, strategy, initial, synchronization, aggregation)

    def step():
        getattr(variable, method)(api.array([5], dtype))

    with strategy.scope():
        failed = api.attempt(api.compile_if(engine, step))
        return failed or [api.copies(variable), variable.read_value()]


@scenario("4.3", "4.4", cases=product(METHODS, ("ON_WRITE", "ON_READ"), AGGREGATIONS))
def outside_of_the_scope(api, method, synchronization, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, 10.0, synchronization, aggregation)
    failed = api.attempt(lambda: getattr(variable, method)(4.0) is None)
    return failed or [api.copies(variable), variable.numpy()]


@scenario(
    "12.9",
    differs="an assignment that fails changes nothing; TensorFlow fails after it",
    expect=[ValueError, [np.float32(10.0), np.float32(10.0)]],
    differs_in=("eager",),
)
def failing_assignment_to_a_sync_on_read_variable(api, engine):
    strategy = api.mirrored(2)
    variable = make(api, strategy, 10.0, "ON_READ", "NONE")

    def step():
        variable.assign(5.0)

    with strategy.scope():
        failed = api.attempt(api.compile_if(engine, step))
    return [failed, api.copies(variable)]


@scenario("12.7", cases=product(METHODS, ("ON_WRITE", "ON_READ"), AGGREGATIONS))
def python_number_in_replica_context(api, engine, method, synchronization, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, 10.0, synchronization, aggregation)

    def replica_fn():
        getattr(variable, method)(4.0)

    step = api.compile_if(engine, replica_fn)
    return [api.attempt(lambda: strategy.run(step)), api.copies(variable)]


@scenario("12.7", cases=product(METHODS, AGGREGATIONS))
def per_replica_value_in_cross_replica_context(api, method, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, 10.0, "ON_WRITE", aggregation)
    value = api.per_replica(strategy, 1.0, 3.0)
    with strategy.scope():
        failed = api.attempt(lambda: getattr(variable, method)(value) is None)
    return [failed, api.copies(variable)]


@scenario("4.4", cases=[kind[1:] for kind in KINDS if kind[0] == "ON_READ"])
def reading_a_sync_on_read_variable(api, engine, aggregation, dtype):
    strategy = api.mirrored(2)
    variable = make(api, strategy, api.array([0], dtype), "ON_READ", aggregation)
    value = api.per_replica(strategy, [1], [4], dtype=dtype)

    def replica_fn(x):
        variable.assign_add(x)
        return variable + x

    inside = api.attempt(
        lambda: strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    )
    return {
        "inside": inside,
        "copies": api.copies(variable),
        "outside": api.attempt(variable.read_value),
        "numpy": api.attempt(variable.numpy),
        "arithmetic": api.attempt(lambda: variable + variable),
        "in a function": api.attempt(api.compile_if(engine, variable.read_value)),
    }


@scenario("12.9")
def sync_on_read_sum_starts_as_n_times_its_initial_value(api):
    strategy = api.mirrored(4)
    variable = make(api, strategy, 2.0, "ON_READ", "SUM")
    return [api.copies(variable), variable.read_value()]


@scenario("12.9", cases=[("float32",), ("int32",)])
def assigning_to_a_sync_on_read_sum_divides(api, dtype):
    strategy = api.mirrored(2)
    variable = make(api, strategy, api.array(0, dtype), "ON_READ", "SUM")
    with strategy.scope():
        variable.assign(api.array(5, dtype))
    return [api.copies(variable), variable.read_value()]


@scenario("4.4")
def sync_on_read_variable_counts_over_steps(api, engine):
    strategy = api.mirrored(2)
    total = make(api, strategy, 0.0, "ON_READ", "SUM")
    count = make(api, strategy, 0, "ON_READ", "SUM")

    def replica_fn(x):
        total.assign_add(api.sum(x))
        count.assign_add(api.array(2, "int32"))

    step = api.compile_if(engine, replica_fn)
    value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    for _ in range(3):
        strategy.run(step, args=(value,))
    return [total.read_value(), count.read_value(), api.copies(total)]


@scenario("4.5", cases=product(AGGREGATIONS))
def read_var_of_a_sync_on_read_variable(api, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, 3.0, "ON_READ", aggregation)
    with strategy.scope():
        return strategy.extended.read_var(variable)


@scenario("4.3")
def only_first_replica_ignores_the_others(api, engine):
    strategy = api.mirrored(4)
    variable = make(api, strategy, 0.0, "ON_WRITE", "ONLY_FIRST_REPLICA")
    value = api.per_replica(strategy, 7.0, 1.0, 2.0, 3.0)

    def replica_fn(x):
        variable.assign_add(x)

    strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return api.copies(variable)


@scenario("4.3", cases=product(("SUM", "MEAN", "NONE")))
def replica_reads_what_was_just_aggregated(api, engine, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, 1.0, "ON_WRITE", aggregation)
    value = api.per_replica(strategy, 1.0, 3.0)

    def replica_fn(x):
        variable.assign_add(x)
        variable.assign_add(variable * 1.0)
        return variable * 1.0

    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("4.3")
def assign_in_replica_context_returns_the_aggregated_value(api, engine):
    strategy = api.mirrored(2)
    variable = make(api, strategy, 1.0, "ON_WRITE", "MEAN")
    value = api.per_replica(strategy, 1.0, 3.0)

    def replica_fn(x):
        return variable.assign(x) * 10.0

    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("4.3", cases=product(("ON_WRITE", "ON_READ"), ("SUM", "MEAN")))
def assigning_with_one_replica(api, engine, synchronization, aggregation):
    strategy = api.mirrored(1)
    variable = make(api, strategy, 1.0, synchronization, aggregation)

    def replica_fn():
        variable.assign_add(api.array(2.0))

    strategy.run(api.compile_if(engine, replica_fn))
    with strategy.scope():
        outside = api.attempt(lambda: variable.assign_add(10.0) is None)
    return [outside, api.copies(variable), variable.read_value()]
