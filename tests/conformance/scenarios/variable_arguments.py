"""What a variable can be made from, and what can be assigned to it (4.1, 4.3 to 4.5)."""

from itertools import product

import numpy as np

from . import scenario
from .assigning import AGGREGATIONS, METHODS, make
from .variables import KINDS
from .variables import make as make_kind

CONTEXTS = ("ON_WRITE", "ON_READ")


@scenario("4.1", cases=KINDS)
def without_an_initial_value(api, kind):
    return [
        api.attempt(lambda: make_kind(api, kind)),
        api.attempt(lambda: make_kind(api, kind, None)),
    ]


@scenario("4.1", cases=KINDS)
def initial_values_that_do_not_fit_the_dtype(api, kind):
    def create(value, dtype):
        made = api.attempt(lambda: make_kind(api, kind, value, dtype=dtype))
        return made if isinstance(made, Exception) else made.numpy()

    return {
        "float for int": create(1.5, "int32"),
        "floats for int": create([1.0, 2.5], "int32"),
        "array for int": create(api.array([1.5]), "int32"),
        "NumPy for int": create(np.array([1.5], "float32"), "int32"),
        "int for bool": create(1, "bool"),
        "int for float": create(1, "float32"),
        "NumPy for float": create(np.array([1], "int32"), "float32"),
        "a function": create(lambda: api.array([2.5]), "int32"),
    }


@scenario("4.1", cases=KINDS)
def the_shape_of_the_initial_value(api, kind):
    def create(value, shape):
        made = api.attempt(lambda: make_kind(api, kind, value, shape=shape))
        return made if isinstance(made, Exception) else made.numpy()

    return [
        create([1.0, 2.0], [2]),
        create([1.0, 2.0], (2,)),
        create(lambda: api.array([1.0, 2.0]), [2]),
        create(1.0, []),
        create([1.0, 2.0], [3]),
        create([1.0, 2.0], [1, 2]),
    ]


@scenario(
    "4.1",
    differs="a misspelt argument is an error; TensorFlow passes it over",
    expect=[TypeError, ["trainables"]],
)
def an_argument_that_no_variable_has(api):
    return api.complaint(lambda: api.Variable(1.0, trainables=True), "trainables")


@scenario("4.3", cases=KINDS)
def values_of_another_dtype(api, kind):
    def assign(initial, value):
        variable = make_kind(api, kind, initial)
        return api.fails(lambda: variable.assign(value)) or variable.numpy()

    return {
        "int to float": assign(1.0, 2),
        "bool to float": assign(1.0, True),
        "bool to int": assign(1, True),
        "NumPy's double": assign(1.0, np.float64(2.0)),
        "float to int": assign(1, 1.5),
        "whole float to int": assign(1, 2.0),
        "array to int": assign(1, api.array(2.0)),
        "int to bool": assign(True, 1),
        "nothing": assign(1.0, None),
    }


@scenario("4.3", cases=KINDS)
def the_error_of_a_value_that_does_not_fit(api, kind):
    variable = make_kind(api, kind, [1, 2])
    return [
        api.attempt(lambda: variable.assign([1.5, 2.5])),
        api.attempt(lambda: variable.assign(api.array([1.5, 2.5]))),
        api.attempt(lambda: variable.assign_add([1.5, 2.5])),
    ]


@scenario("4.3", "4.4", cases=product(METHODS, CONTEXTS, AGGREGATIONS))
def a_variable_whose_copies_differ(api, engine, method, synchronization, aggregation):
    """A variable in step takes it copy by copy, one that is summed when read as read."""
    strategy = api.mirrored(2)
    source = make(api, strategy, 2.0, "ON_READ", "SUM")
    variable = make(api, strategy, 1.0, synchronization, aggregation)
    value = api.per_replica(strategy, 2.0, 6.0)
    strategy.run(lambda x: source.assign(x), args=(value,))

    def step():
        getattr(variable, method)(source)

    with strategy.scope():
        failed = api.attempt(api.compile_if(engine, step))
    return failed or api.copies(variable)


@scenario("4.5")
def colocate_vars_with_a_variable_from_outside(api):
    strategy, variable = api.mirrored(2), api.Variable(1.0)
    with strategy.scope(), strategy.extended.colocate_vars_with(variable):
        return api.copies(api.Variable(2.0))


@scenario("5.1")
def arguments_of_run_that_are_no_tuple(api):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 2.0)
    return api.complaint(
        lambda: strategy.run(lambda x: x, args=value), "positional", "list", "tuple"
    )


@scenario("3.5")
def gathering_along_no_axis(api):
    strategy = api.mirrored(2)
    return strategy.gather(api.per_replica(strategy, [1.0], [2.0]), axis=None)
