"""`scatter_add` and its kin, of every kind of variable in every context (4.1, 4.3, 4.4)."""

from itertools import product

import numpy as np

from . import scenario

METHODS = {
    "arithmetic": ("add", "sub", "mul", "div"),
    "choices": ("min", "max", "update"),
}
AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
KINDS = list(product(METHODS, ("ON_WRITE", "ON_READ"), AGGREGATIONS))
INITIAL = [2.0, 4.0, 8.0]
LOSES_NOTHING = (
    "integers lose nothing as floats; TensorFlow takes no array of another dtype"
)


def make(api, strategy, synchronization, aggregation):
    with strategy.scope():
        return api.Variable(
            INITIAL,
            synchronization=getattr(api.VariableSynchronization, synchronization),
            aggregation=getattr(api.VariableAggregation, aggregation),
        )


def slices(api, values=(5.0, 6.0), indices=(0, 2), dtype="float32"):
    return api.IndexedSlices(api.array(values, dtype), api.array(indices, "int32"))


def with_each_method(api, methods, synchronization, aggregation, fn):
    """What `fn(strategy, variable, name)` does to a new variable, for each method."""
    strategy = api.mirrored(2)
    answers = {}
    for method in METHODS[methods]:
        variable = make(api, strategy, synchronization, aggregation)
        name = f"scatter_{method}"
        words = (name, "ON_READ") if synchronization == "ON_READ" else (name,)
        given = api.complaint(lambda: fn(strategy, variable, name), *words)  # noqa: B023
        answers[method] = [given, api.copies(variable)]
    return answers


@scenario("4.3", "4.4", cases=KINDS)
def scattering_outside_of_the_scope(api, engine, methods, synchronization, aggregation):
    def scatter(strategy, variable, name):
        def step():
            getattr(variable, name)(slices(api))

        api.compile_if(engine, step)()

    return with_each_method(api, methods, synchronization, aggregation, scatter)


@scenario("4.3", "4.4", cases=KINDS)
def scattering_in_the_scope(api, engine, methods, synchronization, aggregation):
    def scatter(strategy, variable, name):
        def step():
            getattr(variable, name)(slices(api))

        with strategy.scope():
            api.compile_if(engine, step)()

    return with_each_method(api, methods, synchronization, aggregation, scatter)


@scenario("4.3", "4.4", cases=KINDS)
def scattering_equal_slices_in_replicas(
    api, engine, methods, synchronization, aggregation
):
    def scatter(strategy, variable, name):
        def replica_fn():
            return getattr(variable, name)(slices(api)) + 0.0

        return strategy.run(api.compile_if(engine, replica_fn))

    return with_each_method(api, methods, synchronization, aggregation, scatter)


@scenario("4.3", "4.4", cases=KINDS)
def scattering_own_slices_in_replicas(
    api, engine, methods, synchronization, aggregation
):
    def scatter(strategy, variable, name):
        def replica_fn(values, indices):
            delta = api.IndexedSlices(values, indices)
            return getattr(variable, name)(delta) + 0.0

        values = api.per_replica(strategy, [1.0, 5.0], [3.0, 16.0])
        indices = api.per_replica(strategy, [0, 1], [1, 2], dtype="int32")
        step = api.compile_if(engine, replica_fn)
        return strategy.run(step, args=(values, indices))

    return with_each_method(api, methods, synchronization, aggregation, scatter)


@scenario("4.3", "4.4", cases=KINDS)
def scattering_in_merge_call(api, engine, methods, synchronization, aggregation):
    def scatter(strategy, variable, name):
        def merge_fn(strategy):
            getattr(variable, name)(slices(api))

        def replica_fn():
            api.distribute.get_replica_context().merge_call(merge_fn)

        return strategy.run(api.compile_if(engine, replica_fn))

    return with_each_method(api, methods, synchronization, aggregation, scatter)


@scenario("4.3", "4.4", "6.3", cases=KINDS)
def scattering_in_update(api, engine, methods, synchronization, aggregation):
    def scatter(strategy, variable, name):
        def update(copy, values):
            getattr(copy, name)(api.IndexedSlices(values, api.array([0, 2], "int32")))

        def merge_fn(strategy, values):
            strategy.extended.update(variable, update, args=(values,))

        def replica_fn(values):
            context = api.distribute.get_replica_context()
            context.merge_call(merge_fn, args=(values,))

        values = api.per_replica(strategy, [1.0, 5.0], [3.0, 16.0])
        return strategy.run(api.compile_if(engine, replica_fn), args=(values,))

    return with_each_method(api, methods, synchronization, aggregation, scatter)


@scenario("4.3", cases=product(("ON_WRITE",), AGGREGATIONS))
@scenario(
    "4.3",
    cases=product(("ON_READ",), AGGREGATIONS),
    differs="as into the copy; TensorFlow refuses",
    expect=[None, [np.float32([7, 4, 14])] * 2],
)
def scattering_into_the_variable_that_is_updated(api, synchronization, aggregation):
    """`update` gives the copy; the variable itself stands for it too."""
    strategy = api.mirrored(2)
    variable = make(api, strategy, synchronization, aggregation)

    def update(copy):
        variable.scatter_add(slices(api))

    with strategy.scope():
        failed = api.attempt(lambda: strategy.extended.update(variable, update) is None)
    failed = failed if isinstance(failed, Exception) else None
    return [failed, api.copies(variable)]


@scenario("4.3", cases=product(("add", "sub", "mul", "div", "min", "max", "update")))
def scattering_into_an_ordinary_variable(api, engine, method):
    variable = api.Variable(INITIAL)
    matrix = api.Variable([[2.0, 4.0], [8.0, 16.0]])
    deltas = {
        "rows": (variable, slices(api)),
        "duplicates": (variable, slices(api, [5.0, 6.0, 2.0], [1, 1, 0])),
        "none": (variable, slices(api, [], [])),
        "one": (variable, slices(api, 3.0, 1)),
        "a number for all": (variable, slices(api, 3.0, [1, 2])),
        "lists": (variable, api.IndexedSlices([2.0, 3.0], [0, 1])),
        "matrix": (matrix, slices(api, [[1.0, 32.0]], [1])),
        "matrix of indices": (
            matrix,
            slices(api, [[[1.0, 32.0], [3.0, 4.0]]], [[1, 0]]),
        ),
    }

    def of(variable, delta):
        def step():
            return getattr(variable, f"scatter_{method}")(delta) + 0.0

        return [api.compile_if(engine, step)(), variable.numpy()]

    return {name: of(*case) for name, case in deltas.items()}


@scenario("4.1", cases=product(("add", "mul", "update")))
def scattering_what_does_not_fit(api, method):
    variable = api.Variable(INITIAL)
    scatter = getattr(variable, f"scatter_{method}")
    answers = {
        "an array": api.complaint(
            lambda: scatter(api.array([1.0, 2.0, 3.0])), "sparse_delta", "IndexedSlices"
        ),
        "a list": api.complaint(lambda: scatter([1.0]), "sparse_delta"),
        "too many values": api.complaint(
            lambda: scatter(slices(api, [1.0, 2.0], [1])), "shape", "indices"
        ),
        "indices with a fraction": api.fails(
            lambda: scatter(api.IndexedSlices(api.array([1.0]), api.array([1.0])))
        ),
        "a row for a number": api.complaint(
            lambda: scatter(slices(api, [[1.0]], [1])), "shape", "indices"
        ),
    }
    return [answers, variable.numpy()]


@scenario("4.1", differs=LOSES_NOTHING, expect=[False, np.float32([3, 4, 10])])
def scattering_integers_into_floats(api, engine):
    variable = api.Variable(INITIAL)
    delta = slices(api, [1, 2], dtype="int32")

    def step():
        variable.scatter_add(delta)

    return [api.fails(api.compile_if(engine, step)), variable.numpy()]


@scenario("4.1")
def scattering_floats_into_integers(api, engine):
    variable = api.Variable(api.array([1, 2, 3], "int32"))
    delta = slices(api)

    def step():
        variable.scatter_add(delta)

    return [api.fails(api.compile_if(engine, step)), variable.numpy()]


@scenario("4.1", cases=product(("add", "update"), ("3", "-1")))
def scattering_to_an_index_that_is_not_there(api, method, index):
    variable = api.Variable(INITIAL)
    scatter = getattr(variable, f"scatter_{method}")
    failed = api.complaint(
        lambda: scatter(slices(api, [1.0], [int(index)])), "indices[0]", index, "[0, 3)"
    )
    return [failed, variable.numpy()]


@scenario(
    "4.1",
    cases=product(("add", "sub", "mul", "div", "min", "max", "update"), ("3", "-1")),
    differs="a compiled program cannot raise: nothing is scattered",
    expect=[False, np.float32(INITIAL)],
    differs_in=("compiled",),
)
def scattering_to_an_argument_that_is_not_there(api, engine, method, index):
    variable = api.Variable(INITIAL)

    def step(indices):
        delta = api.IndexedSlices(api.array([9.0]), indices)
        getattr(variable, f"scatter_{method}")(delta)

    step = api.compile_if(engine, step)
    failed = api.fails(lambda: step(api.array([int(index)], "int32")))
    return [failed, variable.numpy()]


@scenario("4.1")
def scattering_into_a_number(api):
    variable = api.Variable(1.0)
    return api.fails(lambda: variable.scatter_add(slices(api, [1.0], [0])))


@scenario("4.1")
def scattering_into_integers(api):
    variable = api.Variable(api.array([1, 0, 7], "int32"))

    def after(name, value):
        getattr(variable, name)(slices(api, [value], [2], "int32"))
        return variable.numpy()

    return [
        after("scatter_update", 9),
        after("scatter_add", 1),
        after("scatter_div", 4),
        after("scatter_sub", 5),
        after("scatter_div", 2),
        after("scatter_max", 3),
    ]


@scenario("4.1")
def scattering_into_truth_values(api):
    variable = api.Variable(api.array([True, False], "bool"))
    delta = slices(api, [False, True], [0, 1], "bool")
    variable.scatter_update(delta)
    return [variable.numpy(), api.fails(lambda: variable.scatter_add(delta))]


@scenario("4.1")
def what_the_scatter_methods_take(api):
    variable = api.Variable([[1.0]])
    return {
        name: api.parameters(getattr(variable, name))
        for name in (
            f"scatter_{method}" for group in METHODS.values() for method in group
        )
    }


@scenario("4.1")
def locking_and_a_name_are_accepted(api):
    variable = api.Variable(INITIAL)
    variable.scatter_add(slices(api), True, "name")
    variable.scatter_add(slices(api), use_locking=False, name="name")
    return variable.numpy()


@scenario("4.1")
def scatter_calls_can_be_chained(api):
    variable = api.Variable(INITIAL)
    delta = slices(api)
    again = variable.scatter_add(delta).scatter_mul(delta).scatter_sub(delta)
    return [again.numpy(), variable.numpy(), tuple(again.shape)]


@scenario("4.3")
def scattering_into_a_copy(api):
    strategy = api.mirrored(2)
    variable = make(api, strategy, "ON_WRITE", "SUM")
    variable.values[1].scatter_update(slices(api))
    return api.copies(variable)


@scenario("4.3", cases=product(("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")))
def scattering_per_replica_slices_in_the_scope(api, engine, aggregation):
    """As an assignment: part by part."""
    strategy = api.mirrored(2)
    variable = make(api, strategy, "ON_WRITE", aggregation)
    values = api.per_replica(strategy, [1.0], [2.0])
    indices = api.per_replica(strategy, [0], [2], dtype="int32")
    delta = strategy.run(api.IndexedSlices, args=(values, indices))

    def step(delta):
        variable.scatter_add(delta)

    with strategy.scope():
        api.compile_if(engine, step)(delta)
    return api.copies(variable)


@scenario("4.3", cases=product(("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")))
def scattering_slices_that_were_passed_to_run(api, engine, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, "ON_WRITE", aggregation)
    values = api.per_replica(strategy, [1.0], [2.0])
    indices = api.per_replica(strategy, [0], [2], dtype="int32")
    delta = strategy.run(api.IndexedSlices, args=(values, indices))

    def replica_fn(delta):
        variable.scatter_add(delta)

    strategy.run(api.compile_if(engine, replica_fn), args=(delta,))
    return api.copies(variable)


@scenario("4.3", cases=product(("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")))
def scattering_what_does_not_fit_in_replicas(api, engine, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, "ON_WRITE", aggregation)

    def array():
        variable.scatter_add(api.array([1.0, 2.0, 3.0]))

    step = api.compile_if(engine, array)
    failed = api.complaint(lambda: strategy.run(step), "sparse_delta", "IndexedSlices")
    return [failed, api.copies(variable)]


@scenario(
    "4.3",
    cases=product(("NONE", "MEAN", "ONLY_FIRST_REPLICA")),
    differs=LOSES_NOTHING,
    expect=[False, [np.float32([3, 4, 10])] * 2],
)
@scenario(
    "4.3",
    cases=[("SUM",)],
    differs=LOSES_NOTHING,
    expect=[False, [np.float32([4, 4, 12])] * 2],
)
def scattering_another_dtype_in_replicas(api, engine, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, "ON_WRITE", aggregation)

    def replica_fn():
        variable.scatter_add(slices(api, [1, 2], dtype="int32"))

    step = api.compile_if(engine, replica_fn)
    return [api.fails(lambda: strategy.run(step)), api.copies(variable)]


@scenario("4.3", cases=product(("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")))
def scattering_with_one_replica(api, engine, aggregation):
    strategy = api.mirrored(1)
    variable = make(api, strategy, "ON_WRITE", aggregation)

    def replica_fn():
        variable.scatter_add(slices(api))

    strategy.run(api.compile_if(engine, replica_fn))
    with strategy.scope():
        variable.scatter_mul(slices(api))
        failed = api.fails(lambda: variable.scatter_update(slices(api)))
    return [failed, api.copies(variable)]


@scenario("4.3", cases=product(("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")))
def scattering_with_one_device(api, engine, aggregation):
    strategy = api.one_device()
    variable = make(api, strategy, "ON_WRITE", aggregation)

    def replica_fn():
        variable.scatter_add(slices(api))
        variable.scatter_max(slices(api))

    strategy.run(api.compile_if(engine, replica_fn))
    with strategy.scope():
        variable.scatter_update(slices(api, [1.0], [1]))
    return variable.numpy()


@scenario(
    "4.3",
    differs="replicas cannot assign the one copy of a variable from outside the scope",
    expect=[ValueError, np.float32(INITIAL)],
)
def scattering_into_an_ordinary_variable_in_replicas(api, engine):
    strategy = api.mirrored(2)
    variable = api.Variable(INITIAL)

    def replica_fn():
        variable.scatter_add(slices(api))

    step = api.compile_if(engine, replica_fn)
    return [api.attempt(lambda: strategy.run(step)), variable.numpy()]


@scenario("4.3", cases=product(("AUTO", "ON_WRITE"), AGGREGATIONS))
def auto_scatters_as_on_write(api, engine, synchronization, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, synchronization, aggregation)
    values = api.per_replica(strategy, [1.0], [3.0])

    def replica_fn(values):
        variable.scatter_sub(api.IndexedSlices(values, api.array([1], "int32")))

    strategy.run(api.compile_if(engine, replica_fn), args=(values,))
    return api.copies(variable)
