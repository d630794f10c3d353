"""`scatter_add` and its kin, of every kind of variable in every context (4.1, 4.3, 4.4)."""

from itertools import product

from . import scenario

METHODS = {
    "arithmetic": ("add", "sub", "mul", "div"),
    "choices": ("min", "max", "update"),
}
AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
KINDS = list(product(METHODS, ("ON_WRITE", "ON_READ"), AGGREGATIONS))
INITIAL = [2.0, 4.0, 8.0]


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


@scenario("4.3", cases=product(("ON_WRITE", "ON_READ"), AGGREGATIONS))
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
        "another dtype": api.complaint(
            lambda: scatter(slices(api, [1, 2], dtype="int32")), "dtype", "int32"
        ),
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


@scenario("4.1", cases=product(("add", "update"), ("3", "-1")))
def scattering_to_an_index_that_is_not_there(api, method, index):
    variable = api.Variable(INITIAL)
    scatter = getattr(variable, f"scatter_{method}")
    failed = api.complaint(
        lambda: scatter(slices(api, [1.0], [int(index)])), "indices[0]", index, "[0, 3)"
    )
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
            *(f"scatter_{method}" for group in METHODS.values() for method in group),
            "batch_scatter_update",
            *(f"scatter_nd_{m}" for m in ("add", "sub", "update", "min", "max")),
            "sparse_read",
            "gather_nd",
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


@scenario("4.1")
def batch_scatter_update(api, engine):
    variable = api.Variable([[1.0, 2.0], [3.0, 4.0]])
    cube = api.Variable([[[1.0], [2.0]], [[3.0], [4.0]]])
    delta = slices(api, [[10.0], [20.0]], [[0], [1]])
    row = slices(api, [[[10.0]], [[20.0]]], [[1], [0]])

    def step():
        variable.batch_scatter_update(delta)
        cube.batch_scatter_update(row)

    api.compile_if(engine, step)()
    return [variable.numpy(), cube.numpy()]


@scenario("4.1", cases=product(("add", "sub", "update", "min", "max")))
def scatter_nd(api, engine, method):
    variable = api.Variable([[1.0, 2.0], [3.0, 4.0]])

    def scatter(indices, updates):
        def step():
            update = getattr(variable, f"scatter_nd_{method}")
            return update(api.array(indices, "int32"), api.array(updates)) + 0.0

        return [api.compile_if(engine, step)(), variable.numpy()]

    return {
        "elements": scatter([[0, 1], [1, 0]], [5.0, 2.0]),
        "rows": scatter([[1]], [[10.0, 1.0]]),
        "duplicates": scatter([[0, 0], [0, 0]], [5.0, 7.0]),
    }


@scenario("4.1")
def scatter_nd_of_what_does_not_fit(api):
    variable = api.Variable([[1.0, 2.0], [3.0, 4.0]])
    update, i = variable.scatter_nd_update, api.array([[0, 0]], "int32")
    answers = [
        api.complaint(lambda: update(i, api.array([7], "int32")), "dtype", "int32"),
        api.fails(lambda: update(i, api.array([7.0, 8.0]))),
        update([[0, 0]], [7]).numpy(),
    ]
    return [answers, variable.numpy()]


@scenario("4.1")
def scatter_nd_to_an_index_that_is_not_there(api):
    variable = api.Variable([[1.0, 2.0], [3.0, 4.0]])
    index = api.array([[5, 0]], "int32")
    failed = api.complaint(
        lambda: variable.scatter_nd_update(index, api.array([7.0])), "indices", "5, 0"
    )
    return [failed, variable.numpy()]


@scenario("4.1")
def reading_rows_and_elements(api, engine):
    variable = api.Variable([[1.0, 2.0], [3.0, 4.0]])

    def step():
        return [
            variable.sparse_read(api.array([1, 0, 1], "int32")),
            variable.gather_nd(api.array([[1, 0], [0, 1]], "int32")),
            variable.gather_nd(api.array([[1]], "int32")),
        ]

    return api.compile_if(engine, step)()


@scenario("4.3", cases=product(("ON_WRITE", "ON_READ"), ("NONE", "SUM")))
def mirrored_variables_have_only_the_plain_scatter_methods(
    api, synchronization, aggregation
):
    strategy = api.mirrored(2)
    variable = make(api, strategy, synchronization, aggregation)
    i, x = api.array([[0]], "int32"), api.array([1.0])
    calls = {
        "scatter_nd_add": lambda: variable.scatter_nd_add(i, x),
        "scatter_nd_update": lambda: variable.scatter_nd_update(i, x),
        "batch_scatter_update": lambda: variable.batch_scatter_update(slices(api)),
    }
    outside = {name: api.attempt(call) for name, call in calls.items()}
    with strategy.scope():
        inside = {name: api.attempt(call) for name, call in calls.items()}
    return [outside, inside, api.copies(variable)]


@scenario("4.3")
def a_copy_of_a_mirrored_variable_has_all_scatter_methods(api):
    strategy = api.mirrored(2)
    variable = make(api, strategy, "ON_WRITE", "SUM")
    copy = variable.values[1]
    copy.scatter_update(slices(api))
    copy.scatter_nd_add(api.array([[1]], "int32"), api.array([100.0]))
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


@scenario("4.3", cases=product(("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")))
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
    variable.scatter_nd_sub(api.array([[1]], "int32"), api.array([5.0]))
    return variable.numpy()


@scenario("4.3")
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
