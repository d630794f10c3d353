"""Variables: where they begin and what a worker sees of them (4.1, 4.2, 8.4)."""

from itertools import product

import numpy as np

from . import scenario

AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
MANY = ("two", "three", "two_by_two")


def make(api, strategy, initial, synchronization="AUTO", aggregation="NONE", **kwargs):
    with strategy.scope():
        return api.Variable(
            initial,
            synchronization=getattr(api.VariableSynchronization, synchronization),
            aggregation=getattr(api.VariableAggregation, aggregation),
            **kwargs,
        )


@scenario("8.4", clusters=(*MANY, "chief", "one", "none"))
def initial_value_is_the_first_workers(api):
    return api.copies(make(api, api.multi_worker(), 10.0 + api.worker))


@scenario("8.4", cases=[("float32",), ("float16",), ("int32",), ("int64",), ("bool",)])
def initial_values_of_each_type(api, dtype):
    first = api.worker == 0
    numbers = [first, True] if dtype == "bool" else [int(first), 1]
    return api.copies(make(api, api.multi_worker(), api.array(numbers, dtype)))


@scenario("8.4", clusters=MANY)
def initial_value_from_a_function(api):
    calls = []

    def initial():
        calls.append(1)
        return api.array([1.0 + api.worker, 2.0])

    variable = make(api, api.multi_worker(), initial)
    return [len(calls), api.copies(variable)]


@scenario("8.4", clusters=MANY)
def random_initial_values_are_equal(api):
    strategy = api.multi_worker()
    numbers = np.random.default_rng(api.worker).normal(size=3).astype("float32")
    variable = make(api, strategy, lambda: api.array(numbers))
    own = api.copies(variable)[0]
    total = strategy.reduce("SUM", api.array(own), axis=None)
    return [
        bool(np.allclose(own, numbers)),
        bool(np.allclose(total, own * api.num_workers)),
    ]


@scenario("8.4", cases=product(("ON_WRITE", "ON_READ"), AGGREGATIONS))
def initial_values_of_each_kind(api, synchronization, aggregation):
    strategy = api.multi_worker()
    variable = make(api, strategy, 3.0 + api.worker, synchronization, aggregation)
    return [api.copies(variable), api.attempt(variable.read_value)]


@scenario("8.4")
def several_variables_in_one_scope(api):
    strategy = api.multi_worker()
    with strategy.scope():
        made = [api.Variable(each + api.worker) for each in (1.0, 2.0)]
        made.append(api.Variable([[1, 2 + api.worker]]))
    return [api.copies(each) for each in made]


@scenario("8.4")
def variable_outside_of_the_scope(api):
    """Nothing is sent: each worker has its own."""
    api.multi_worker()
    variable = api.Variable(1.0 + api.worker)
    return api.copies(variable)


@scenario("8.4", "4.1", clusters=("two", "two_by_two"))
def variable_made_in_a_replica_function(api):
    strategy = api.multi_worker()
    made = []

    def replica_fn():
        if not made:
            made.append(api.Variable(1.0 + api.worker))
        return made[0] * 1.0

    result = strategy.run(replica_fn)
    return [api.local_results(strategy, result), api.copies(made[0])]


@scenario("8.4", "4.1")
def variable_made_in_a_function(api):
    strategy = api.multi_worker()
    made = []

    def step():
        if not made:
            made.append(api.Variable(1.0 + api.worker))
        made[0].assign_add(1.0)
        return made[0].read_value()

    with strategy.scope():
        result = api.function(step)()
    return [result, api.copies(made[0])]


@scenario("8.4", "4.1")
def variable_made_in_a_replica_function_that_is_compiled(api):
    strategy = api.multi_worker()
    made = []

    def replica_fn():
        if not made:
            made.append(api.Variable(1.0 + api.worker))
        return made[0] * 1.0

    result = strategy.run(api.function(replica_fn))
    return [api.local_results(strategy, result), api.copies(made[0])]


@scenario("4.1", "12.11", cases=product(("AUTO", "ON_READ")), clusters=MANY)
def what_a_variable_is(api, synchronization):
    strategy = api.multi_worker()
    variable = make(api, strategy, [1.0, 2.0], synchronization, "SUM", name="weights")
    return {
        "class": api.class_name(variable),
        "copies": api.copies(variable),
        "number of values": len(variable.values),
        "local results": api.local_results(strategy, variable),
        "trainable": variable.trainable,
        "aggregation": variable.aggregation,
        "synchronization": variable.synchronization,
        "shape": list(variable.shape),
        "is its own": strategy.extended.value_container(variable.values[0]) is variable,
        "numpy": variable.numpy(),
    }


@scenario("12.8", cases=product(("ON_WRITE", "ON_READ"), ("NONE", "MEAN")))
def integer_variables(api, synchronization, aggregation):
    return api.attempt(
        lambda: api.copies(
            make(api, api.multi_worker(), 3 + api.worker, synchronization, aggregation)
        )
    )


@scenario("4.1")
def initial_value_of_another_variable(api):
    strategy = api.multi_worker()
    first = make(api, strategy, 1.0 + api.worker)
    second = make(api, strategy, first)
    third = make(api, strategy, lambda: first * 2.0)
    return [api.copies(second), api.copies(third)]


@scenario("4.2", "8.4")
def variables_are_colocated(api):
    strategy = api.multi_worker()
    variable = make(api, strategy, 1.0)
    with strategy.scope(), strategy.extended.colocate_vars_with(variable):
        slot = api.Variable(2.0 + api.worker)
    return api.copies(slot)
