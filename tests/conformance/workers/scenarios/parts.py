"""Assigning to parts of variables, averages of them, and copies, on many workers (4.1, 4.3, 9.1)."""

import copy
from itertools import product

import numpy as np

from . import scenario
from .assigning import FIRST
from .variables import AGGREGATIONS, make

METHODS = ("scatter_add", "scatter_mul", "scatter_max", "scatter_update")
KINDS = list(product(("ON_WRITE", "ON_READ"), AGGREGATIONS))
OF_THE_FIRST = ("ON_WRITE", "ONLY_FIRST_REPLICA")
OTHER_KINDS = [kind for kind in KINDS if kind != OF_THE_FIRST]
INITIAL = [2.0, 4.0, 8.0]


def slices(api, values=(5.0, 6.0), indices=(0, 2)):
    return api.IndexedSlices(api.array(values, "float32"), api.array(indices, "int32"))


def outcome(api, variable, fn, *words):
    """What `fn` raises, and the copies afterwards."""
    return [api.complaint(fn, *words), api.copies(variable)]


def of_the_first(method, *numbers):
    """What sets apart the scenario of a method with the first replica's aggregation."""
    cases, expect = [(method, *OF_THE_FIRST)], [[None, [np.float32(numbers)]]] * 2
    return scenario("4.3", cases=cases, differs=FIRST, expect=expect)


@scenario("4.3", "4.4", cases=[(m, *kind) for m in METHODS for kind in OTHER_KINDS])
@scenario("4.3", "4.4", cases=[("scatter_max", *OF_THE_FIRST)])
@of_the_first("scatter_add", 3, 4, 13)
@of_the_first("scatter_mul", 2, 4, 40)
@of_the_first("scatter_update", 1, 4, 5)
def scattering_in_replicas(api, engine, method, synchronization, aggregation):
    strategy = api.multi_worker()
    variable = make(api, strategy, INITIAL, synchronization, aggregation)

    def replica_fn(values):
        indices = api.array([0, 2], "int32")
        getattr(variable, method)(api.IndexedSlices(values, indices))

    values = api.of_replica(strategy, lambda i: [1.0 + i, 5.0])
    step = api.compile_if(engine, replica_fn)
    return outcome(api, variable, lambda: strategy.run(step, args=(values,)), method)


@scenario("4.3", "4.4", cases=[(m, *kind) for m in METHODS for kind in KINDS])
def scattering_in_the_scope(api, engine, method, synchronization, aggregation):
    strategy = api.multi_worker()
    variable = make(api, strategy, INITIAL, synchronization, aggregation)

    def step():
        getattr(variable, method)(slices(api))

    with strategy.scope():
        return outcome(api, variable, api.compile_if(engine, step), method)


@scenario("4.1", "4.3", cases=product(("ON_WRITE",), AGGREGATIONS))
def assigning_to_slices_in_replicas(api, engine, synchronization, aggregation):
    strategy = api.multi_worker()
    variable = make(api, strategy, INITIAL, synchronization, aggregation)

    def replica_fn(x):
        variable[0].assign(x)

    value = api.of_replica(strategy, lambda i: 10.0 + i)
    step = api.compile_if(engine, replica_fn)
    return outcome(api, variable, lambda: strategy.run(step, args=(value,)))


@scenario("9.1", cases=OTHER_KINDS)
@scenario(
    "9.1",
    cases=[OF_THE_FIRST],
    differs=FIRST,
    expect=[[np.float32([5.5, 11.0])]] * 2,
)
def averages_in_replicas(api, engine, synchronization, aggregation):
    strategy = api.multi_worker()
    variable = make(api, strategy, [1.0, 2.0], synchronization, aggregation)
    averages = api.ExponentialMovingAverage(0.5)

    def replica_fn():
        averages.apply([variable])

    def assign(x):
        variable.assign(x)

    step = api.compile_if(engine, replica_fn)
    strategy.run(step)
    values = api.of_replica(strategy, lambda i: [10.0 + 20 * i, 20.0 + 20 * i])
    strategy.run(assign, args=(values,))
    strategy.run(step)
    return api.copies(averages.average(variable))


@scenario("9.1", cases=product(("ON_WRITE",), AGGREGATIONS))
def averages_in_the_scope(api, engine, synchronization, aggregation):
    strategy = api.multi_worker()
    variable = make(api, strategy, [1.0, 2.0], synchronization, aggregation)
    averages = api.ExponentialMovingAverage(0.5)

    def apply():
        averages.apply([variable])

    with strategy.scope():
        step = api.compile_if(engine, apply)
        step()
        variable.assign([10.0, 20.0])
        step()
        return [
            api.copies(averages.average(variable)),
            averages.average(variable).read_value(),
        ]


@scenario("4.1", cases=product(("ON_WRITE",), AGGREGATIONS))
def deep_copies(api, synchronization, aggregation):
    strategy = api.multi_worker()
    variable = make(api, strategy, INITIAL, synchronization, aggregation)
    with strategy.scope():
        other = copy.deepcopy(variable)
        other.assign([1.0, 1.0, 1.0])
    return [api.copies(variable), api.copies(other)]
