"""Assigning to every kind of variable, and reading it, on many workers (4.3, 4.4)."""

from itertools import product

import numpy as np

from . import scenario
from .variables import AGGREGATIONS, make

METHODS = ("assign", "assign_add", "assign_sub")
DTYPES = ("float32", "int32")
# An integer variable with MEAN cannot be made.
KINDS = [
    (synchronization, aggregation, dtype)
    for synchronization in ("ON_WRITE", "ON_READ")
    for aggregation in AGGREGATIONS
    for dtype in DTYPES
    if (aggregation, dtype) != ("MEAN", "int32")
]

# See `only_the_first_replica_of_all`.
OTHER_KINDS = [kind for kind in KINDS if kind[:2] != ("ON_WRITE", "ONLY_FIRST_REPLICA")]
FIRST = (
    "all take the first worker's first replica; TensorFlow's take their own and differ"
)
NUMBER = "a SUM of a number is a mistake, however many replicas a worker has"


@scenario("4.3", "4.4", cases=[(m, *kind) for m in METHODS for kind in OTHER_KINDS])
def replica_context(api, engine, method, synchronization, aggregation, dtype):
    """Each worker assigns its own array."""
    strategy = api.multi_worker()
    initial = api.array([10], dtype)
    variable = make(api, strategy, initial, synchronization, aggregation)
    value = api.of_replica(strategy, lambda i: [1 + 2 * i], dtype)

    def replica_fn(x):
        getattr(variable, method)(x)
        return variable.read_value()

    step = api.compile_if(engine, replica_fn)
    read = api.attempt(lambda: strategy.run(step, args=(value,)))
    return {
        "read": read
        if isinstance(read, Exception)
        else api.local_results(strategy, read),
        "copies": api.copies(variable),
    }


@scenario(
    "4.3",
    "4.4",
    cases=sorted({kind[:2] for kind in OTHER_KINDS}),
    clusters=("three", "two_by_two"),
)
def replica_context_of_more_replicas(api, engine, synchronization, aggregation):
    strategy = api.multi_worker()
    variable = make(api, strategy, 10.0, synchronization, aggregation)
    value = api.of_replica(strategy, lambda i: 1.0 + 2 * i)

    def replica_fn(x):
        variable.assign_add(x)
        return variable * 1.0

    step = api.compile_if(engine, replica_fn)
    read = api.attempt(lambda: strategy.run(step, args=(value,)))
    return {
        "read": read
        if isinstance(read, Exception)
        else api.local_results(strategy, read),
        "copies": api.copies(variable),
        "outside": api.attempt(variable.read_value),
    }


def copies_of(number, workers, replicas=1):
    return [[np.float32(number)] * replicas] * workers


@scenario("4.3", cases=[("assign",)], differs=FIRST, expect=copies_of(1.0, 2))
@scenario("4.3", cases=[("assign_add",)], differs=FIRST, expect=copies_of(11.0, 2))
@scenario("4.3", cases=[("assign_sub",)], differs=FIRST, expect=copies_of(9.0, 2))
@scenario(
    "4.3",
    cases=[("assign",)],
    clusters=("three",),
    differs=FIRST,
    expect=copies_of(1.0, 3),
)
@scenario(
    "4.3",
    cases=[("assign",)],
    clusters=("two_by_two",),
    differs=FIRST,
    expect=copies_of(1.0, 2, 2),
)
def only_the_first_replica_of_all(api, engine, method):
    strategy = api.multi_worker()
    variable = make(api, strategy, 10.0, "ON_WRITE", "ONLY_FIRST_REPLICA")
    value = api.of_replica(strategy, lambda i: 1.0 + 2 * i)

    def replica_fn(x):
        getattr(variable, method)(x)

    strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return api.copies(variable)


@scenario("4.3", "4.4", cases=[(m, *kind) for m in METHODS for kind in KINDS])
def cross_replica_context(api, engine, method, synchronization, aggregation, dtype):
    """Each worker assigns the same array to its copies."""
    strategy = api.multi_worker()
    initial = api.array([10], dtype)
    variable = make(api, strategy, initial, synchronization, aggregation)

    def step():
        getattr(variable, method)(api.array([5], dtype))

    with strategy.scope():
        failed = api.attempt(api.compile_if(engine, step))
        return failed or [api.copies(variable), api.attempt(variable.read_value)]


@scenario("8.4", "4.3", cases=product(METHODS, ("ON_WRITE",), AGGREGATIONS))
@scenario("8.4", "4.3", cases=product(("assign",), ("ON_READ",), AGGREGATIONS[1:]))
@scenario(
    "8.4",
    "4.3",
    cases=[("assign", "ON_READ", "NONE")],
    differs="an assignment that fails changes nothing; TensorFlow fails after it",
    expect=[[ValueError, [np.float32(10.0)], ValueError]] * 2,
)
def cross_replica_context_with_different_values(
    api, method, synchronization, aggregation
):
    """Each worker assigns an array of its own."""
    strategy = api.multi_worker()
    variable = make(api, strategy, 10.0, synchronization, aggregation)
    with strategy.scope():
        failed = api.attempt(
            lambda: getattr(variable, method)(api.array(1.0 + api.worker)) is None
        )
    return [failed, api.copies(variable), api.attempt(variable.read_value)]


@scenario("8.4", "4.3", cases=product(METHODS))
def outside_of_the_scope_with_different_values(api, method):
    strategy = api.multi_worker()
    variable = make(api, strategy, 10.0)
    getattr(variable, method)(1.0 + api.worker)
    return [api.copies(variable), variable.numpy()]


@scenario("12.7", cases=product(METHODS, AGGREGATIONS))
def per_replica_value_in_cross_replica_context(api, method, aggregation):
    strategy = api.multi_worker()
    variable = make(api, strategy, 10.0, "ON_WRITE", aggregation)
    value = api.of_replica(strategy, lambda i: 1.0 + 2 * i)
    with strategy.scope():
        failed = api.attempt(lambda: getattr(variable, method)(value) is None)
    return [failed, api.copies(variable)]


@scenario("12.7", cases=product(METHODS, ("ON_READ",), AGGREGATIONS))
@scenario(
    "12.7",
    cases=product(METHODS, ("ON_WRITE",), ("NONE", "MEAN", "ONLY_FIRST_REPLICA")),
)
@scenario(
    "12.7",
    cases=product(METHODS, ("ON_WRITE",), ("SUM",)),
    differs=NUMBER,
    expect=[[ValueError, [np.float32(10.0)]]] * 2,
)
def python_number_in_replica_context(api, engine, method, synchronization, aggregation):
    strategy = api.multi_worker()
    variable = make(api, strategy, 10.0, synchronization, aggregation)

    def replica_fn():
        getattr(variable, method)(4.0)

    step = api.compile_if(engine, replica_fn)
    return [api.attempt(lambda: strategy.run(step)), api.copies(variable)]


@scenario("4.4", cases=[kind[1:] for kind in KINDS if kind[0] == "ON_READ"])
def reading_a_sync_on_read_variable(api, engine, aggregation, dtype):
    strategy = api.multi_worker()
    variable = make(api, strategy, api.array([0], dtype), "ON_READ", aggregation)
    value = api.of_replica(strategy, lambda i: [1 + 3 * i], dtype)

    def replica_fn(x):
        variable.assign_add(x)
        return variable + x

    inside = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    with strategy.scope():
        in_scope = api.attempt(lambda: variable + variable)
    return {
        "inside": api.local_results(strategy, inside),
        "copies": api.copies(variable),
        "outside": api.attempt(variable.read_value),
        "numpy": api.attempt(variable.numpy),
        "arithmetic": in_scope,
        "in a function": api.attempt(api.compile_if(engine, variable.read_value)),
    }


@scenario("4.5", cases=product(AGGREGATIONS))
def read_var_of_a_sync_on_read_variable(api, aggregation):
    strategy = api.multi_worker()
    variable = make(api, strategy, 3.0, "ON_READ", aggregation)
    with strategy.scope():
        return api.attempt(lambda: strategy.extended.read_var(variable))


@scenario("4.4", cases=product(AGGREGATIONS))
def reducing_a_sync_on_read_variable(api, aggregation):
    strategy = api.multi_worker()
    variable = make(api, strategy, 0.0, "ON_READ", aggregation)
    value = api.of_replica(strategy, lambda i: 1.0 + 2 * i)
    strategy.run(lambda x: variable.assign(x) is None, args=(value,))
    return [
        api.attempt(lambda o=op: strategy.reduce(o, variable, axis=None))
        for op in ("SUM", "MEAN")
    ]


@scenario("12.9", cases=[("float32",), ("int32",)], clusters=("two", "three"))
def assigning_to_a_sync_on_read_sum_divides(api, dtype):
    strategy = api.multi_worker()
    variable = make(api, strategy, api.array(0, dtype), "ON_READ", "SUM")
    with strategy.scope():
        variable.assign(api.array(5, dtype))
    return [api.copies(variable), variable.read_value()]


@scenario("4.4", clusters=("two", "three", "two_by_two"))
def sync_on_read_variable_counts_over_steps(api, engine):
    strategy = api.multi_worker()
    total = make(api, strategy, 0.0, "ON_READ", "SUM")
    count = make(api, strategy, 0, "ON_READ", "SUM")

    def replica_fn(x):
        total.assign_add(api.sum(x))
        count.assign_add(api.array(2, "int32"))

    step = api.compile_if(engine, replica_fn)
    value = api.of_replica(strategy, lambda i: [1.0 + i, 2.0])
    for _ in range(3):
        strategy.run(step, args=(value,))
    return [total.read_value(), count.read_value(), api.copies(total)]


@scenario("4.3", cases=[("SUM",), ("MEAN",)])
@scenario(
    "4.3",
    cases=[("ONLY_FIRST_REPLICA",)],
    differs=FIRST,
    expect=[[{"float32[]": 4.0}]] * 2,
)
def replica_reads_what_was_just_aggregated(api, engine, aggregation):
    strategy = api.multi_worker()
    variable = make(api, strategy, 1.0, "ON_WRITE", aggregation)
    value = api.of_replica(strategy, lambda i: 1.0 + 2 * i)

    def replica_fn(x):
        variable.assign_add(x)
        variable.assign_add(variable * 1.0)
        return variable * 1.0

    step = api.compile_if(engine, replica_fn)
    return api.local_results(strategy, strategy.run(step, args=(value,)))


@scenario("4.3")
def assign_in_replica_context_returns_the_aggregated_value(api, engine):
    strategy = api.multi_worker()
    variable = make(api, strategy, 1.0, "ON_WRITE", "MEAN")
    value = api.of_replica(strategy, lambda i: 1.0 + 2 * i)

    def replica_fn(x):
        return variable.assign(x) * 10.0

    step = api.compile_if(engine, replica_fn)
    return api.local_results(strategy, strategy.run(step, args=(value,)))


@scenario("4.3", cases=product(("ON_READ",), ("NONE", "ONLY_FIRST_REPLICA")))
@scenario("4.3", cases=[("ON_WRITE", "NONE")])
@scenario(
    "4.3",
    cases=[("ON_WRITE", "ONLY_FIRST_REPLICA")],
    differs=FIRST,
    expect=[[None, [False], False]] * 2,
)
def assigning_bools(api, engine, synchronization, aggregation):
    strategy = api.multi_worker()
    variable = make(api, strategy, False, synchronization, aggregation)
    value = api.of_replica(strategy, lambda i: i == 1, "bool")

    def replica_fn(x):
        variable.assign(x)

    step = api.compile_if(engine, replica_fn)
    failed = api.attempt(lambda: strategy.run(step, args=(value,)))
    return [
        failed,
        api.copies(variable),
        api.attempt(variable.read_value),
    ]


@scenario("4.3")
def step_that_is_compiled_as_a_whole(api, engine):
    """Variables change in a function around `run`, as in a training loop."""
    strategy = api.multi_worker()
    weights = make(api, strategy, 1.0, "ON_WRITE", "MEAN")
    steps = make(api, strategy, 0, "ON_READ", "SUM")

    def replica_fn(x):
        weights.assign_sub(x * 0.5)
        steps.assign_add(api.array(1, "int32"))
        return weights * x

    def step(value):
        losses = strategy.run(replica_fn, args=(value,))
        return strategy.reduce("SUM", losses, axis=None)

    step = api.compile_if(engine, step)
    value = api.of_replica(strategy, lambda i: 1.0 + i)
    return [step(value), step(value), api.copies(weights), steps.read_value()]
