"""Variables: made, read, computed with (4.1, 4.2, 4.5, 12.11)."""

from . import scenario

KINDS = [("mirrored",), ("one_replica",), ("one_device",), ("ordinary",)]


def make(api, kind, *args, **kwargs):
    """A variable as the scope of this kind of strategy creates it."""
    if kind == "ordinary":
        return api.Variable(*args, **kwargs)
    strategy = {
        "mirrored": lambda: api.mirrored(2),
        "one_replica": lambda: api.mirrored(1),
        "one_device": api.one_device,
    }[kind]()
    with strategy.scope():
        return api.Variable(*args, **kwargs)


@scenario("4.1", cases=KINDS)
def shape_dtype_and_value(api, kind):
    variable = make(api, kind, [[1.0, 2.0], [3.0, 4.0]])
    return {
        "shape": tuple(variable.shape),
        "is_float": variable.dtype == api.array(1.0).dtype,
        "numpy": variable.numpy(),
        "read_value": variable.read_value(),
    }


@scenario("4.1", cases=KINDS)
def initial_values_may_be(api, kind):
    return [
        api.copies(make(api, kind, 3)),
        api.copies(make(api, kind, True)),
        api.copies(make(api, kind, [1, 2])),
        api.copies(make(api, kind, api.array([1.0, 2.0]))),
        api.copies(make(api, kind, lambda: api.array([3.0]))),
        api.copies(make(api, kind, 3, dtype="float32")),
        api.copies(make(api, kind, lambda: 3, dtype="float32")),
    ]


@scenario("4.1", cases=KINDS)
def trainable_synchronization_and_aggregation(api, kind):
    variable = make(api, kind, 1.0)
    other = make(
        api, kind, 1.0, trainable=False, aggregation=api.VariableAggregation.MEAN
    )
    return [
        [variable.trainable, variable.synchronization, variable.aggregation],
        [other.trainable, other.synchronization, other.aggregation],
    ]


@scenario("4.1")
def initial_callable_is_called_for_each_copy(api):
    calls = []

    def initial_value():
        calls.append(1)
        return api.array(1.0)

    make(api, "mirrored", initial_value)
    return len(calls) <= 2


@scenario("4.1")
def copies_start_equal_even_if_the_callable_differs(api):
    values = iter([1.0, 2.0, 3.0])
    return api.copies(make(api, "mirrored", lambda: api.array(next(values))))


@scenario("4.1")
def variable_from_another_variable(api):
    first = make(api, "mirrored", [1.0, 2.0])
    with api.mirrored(2).scope():
        second = api.Variable(first)
    second.assign_add([1.0, 1.0])
    return [api.copies(first), api.copies(second)]


@scenario("4.1", cases=KINDS)
def variable_arithmetic(api, kind):
    a, b = make(api, kind, [1.0, 2.0]), make(api, kind, [4.0, 8.0])
    return [
        a + b,
        a - b,
        a * b,
        a / b,
        a + 1.0,
        1.0 - a,
        2.0 * a,
        1.0 / a,
        -a,
        a**2.0,
        b // a,
        b % 3.0,
        abs(-a),
        a < b,
        a >= 2.0,
        a + api.array([1.0, 1.0]),
        api.array([1.0, 1.0]) + a,
    ]


@scenario("4.1", cases=KINDS)
def variable_matrix_product(api, kind):
    a = make(api, kind, [[1.0, 2.0], [3.0, 4.0]])
    x = api.array([[1.0], [1.0]])
    return [api.matmul(a, x), a @ x, api.matmul(api.array([[1.0, 1.0]]), a)]


@scenario("4.1", cases=KINDS)
def variable_indexing(api, kind):
    a = make(api, kind, [[1.0, 2.0], [3.0, 4.0]])
    return [a[0], a[1, 0], a[:, 1], a[-1, ::-1]]


@scenario("4.1", cases=KINDS)
def variable_in_functions_of_arrays(api, kind):
    a = make(api, kind, [[1.0, 2.0], [3.0, 4.0]])
    return [
        api.sum(a),
        api.mean(a, axis=0),
        api.stack([a, a]),
        api.concat([a, a], 0),
        api.square(a),
        api.cast(a, "int32"),
    ]


@scenario("4.1", cases=KINDS)
def assigning_one_after_another(api, kind):
    variable = make(api, kind, [1.0, 2.0])
    seen = [api.copies(variable)]
    variable.assign([3.0, 4.0])
    seen.append(api.copies(variable))
    variable.assign_add([1.0, 1.0])
    seen.append(api.copies(variable))
    variable.assign_sub(api.array([10.0, 10.0]))
    seen.append(api.copies(variable))
    return seen


@scenario("4.1", cases=KINDS)
def assign_returns_the_new_value(api, kind):
    variable = make(api, kind, [1.0, 2.0])
    results = [
        variable.assign([3.0, 4.0]),
        variable.assign_add([1.0, 1.0]),
        variable.assign_sub([5.0, 5.0]),
    ]
    return [api.copies(results[-1]), api.copies(variable)]


@scenario("4.1", cases=KINDS)
def assign_of_another_shape_fails(api, kind):
    variable = make(api, kind, [1.0, 2.0])
    return [
        api.attempt(lambda: variable.assign([1.0, 2.0, 3.0])),
        api.attempt(lambda: variable.assign(1.0)),
        api.copies(variable),
    ]


@scenario("4.1", cases=KINDS)
def assign_add_broadcasting_fails(api, kind):
    variable = make(api, kind, [1.0, 2.0])
    return [api.fails(lambda: variable.assign_add(1.0)), api.copies(variable)]


@scenario("4.1", cases=KINDS)
def assign_of_a_python_int_to_a_float_variable(api, kind):
    variable = make(api, kind, 1.0)
    variable.assign(3)
    return api.copies(variable)


@scenario("4.1", cases=KINDS)
def assign_of_a_float_to_an_integer_variable(api, kind):
    variable = make(api, kind, 1)
    return [api.fails(lambda: variable.assign(2.5)), api.copies(variable)]


@scenario("4.1", cases=KINDS)
def assign_of_another_variable(api, kind):
    variable, other = make(api, kind, 1.0), make(api, kind, 5.0)
    variable.assign(other)
    other.assign(7.0)
    return [api.copies(variable), api.copies(other)]


@scenario(
    "4.1",
    differs="a variable works wherever an array does",
    expect=[2.0, 2, True],
)
def python_conversions_of_a_scalar_variable(api):
    variable = make(api, "mirrored", 2.0)
    return [float(variable), int(variable), bool(variable > 1.0)]


@scenario("4.1")
def variables_have_names(api):
    variable = make(api, "mirrored", 1.0, name="weight")
    return variable.name.split(":")[0]


@scenario("4.2", "12.11", cases=KINDS)
def class_of_a_variable(api, kind):
    if kind in ("ordinary", "one_device"):
        return hasattr(make(api, kind, 1.0), "values")
    return api.class_name(make(api, kind, 1.0))


@scenario("4.2", "12.11")
def components_of_a_mirrored_variable(api):
    variable = make(api, "mirrored", [1.0, 2.0])
    return [
        api.class_name(variable.values),
        len(variable.values),
        [part.numpy() for part in variable.values],
    ]


@scenario("4.2")
def repr_of_a_mirrored_variable_shows_its_components(api):
    lines = repr(make(api, "mirrored", 1.0)).splitlines()
    return [lines[0], lines[1].split(":")[0], lines[2].split(":")[0], lines[-1]]


@scenario("4.2")
def variable_remembers_its_strategy(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(1.0)
    variable.assign(5.0)
    variable.assign_add(1.0)
    return [
        variable.distribute_strategy is strategy,
        api.copies(variable),
        variable + 1.0,
    ]


@scenario("4.2")
def variable_made_inside_a_function(api):
    strategy = api.mirrored(2)
    made = []

    def create():
        if not made:
            made.append(api.Variable(1.0))
        return made[0] + 1.0

    with strategy.scope():
        create = api.function(create)
        results = [create(), create()]
    return [api.class_name(made[0]), len(made), api.copies(made[0]), results]


@scenario("4.2")
def variable_made_inside_a_replica_function(api):
    strategy = api.mirrored(2)
    made = []

    def replica_fn():
        variable = api.Variable(1.0)
        made.append(variable)
        return variable + 1.0

    result = strategy.run(replica_fn)
    return [result, len(made), made[0] is made[1], api.class_name(made[0])]


@scenario("4.2")
def ordinary_variable_inside_run(api, engine):
    variable = api.Variable(1.0)
    strategy = api.mirrored(2)

    def replica_fn():
        return variable * 2.0

    return strategy.run(api.compile_if(engine, replica_fn))


@scenario(
    "4.2",
    differs="one copy cannot be written by several replicas at once: an error says so",
    expect=ValueError,
)
def ordinary_variable_assigned_inside_run(api):
    variable = api.Variable(1.0)
    strategy = api.mirrored(2)
    return api.attempt(lambda: strategy.run(lambda: variable.assign_add(1.0) * 1.0))


@scenario("4.2")
def variable_read_in_a_plain_function(api, engine):
    variable = make(api, "mirrored", [1.0, 2.0])
    read = api.compile_if(engine, lambda: variable * 2.0)
    first = read()
    variable.assign([5.0, 6.0])
    return [first, read()]


@scenario("4.2")
def variable_assigned_in_a_plain_function(api, engine):
    variable = make(api, "mirrored", 1.0)

    def step():
        variable.assign_add(2.0)
        return variable * 1.0

    step = api.compile_if(engine, step)
    return [step(), step(), api.copies(variable)]


@scenario("4.2")
def variables_of_one_strategy_in_the_run_of_another(api):
    variable = make(api, "mirrored", 1.0)
    return api.mirrored(2).run(lambda: variable * 2.0)


@scenario("4.5")
def colocate_vars_with(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        first = api.Variable(1.0)
        with strategy.extended.colocate_vars_with(first):
            second = api.Variable(2.0)
    return [api.class_name(second), api.copies(second)]


@scenario("4.5")
def colocate_vars_with_what_is_no_variable(api):
    strategy = api.mirrored(2)
    with strategy.scope(), strategy.extended.colocate_vars_with(3.0):
        return api.copies(api.Variable(2.0))


@scenario("4.5")
def variable_created_in_scope(api):
    strategy, other = api.mirrored(2), api.mirrored(2)
    with strategy.scope():
        inside = api.Variable(1.0)
    with other.scope():
        foreign = api.Variable(1.0)
    ask = strategy.extended.variable_created_in_scope
    return [ask(inside), ask(foreign), ask(api.Variable(1.0))]


@scenario("4.5")
def read_var_of_a_mirrored_variable(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable([1.0, 2.0])
        return strategy.extended.read_var(variable)
