"""`ExponentialMovingAverage` of every kind of variable in every context (9.1)."""

from itertools import product

from . import scenario

AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
KINDS = list(product(("ON_WRITE", "ON_READ"), AGGREGATIONS))


def make(api, strategy, synchronization, aggregation):
    with strategy.scope():
        return api.Variable(
            [1.0, 2.0],
            name="w",
            trainable=True,
            synchronization=getattr(api.VariableSynchronization, synchronization),
            aggregation=getattr(api.VariableAggregation, aggregation),
        )


def follow(api, strategy, variable, averages, apply):
    """The average after a call of `apply`, and after replicas have assigned."""

    def replica_fn(x):
        variable.assign(x)

    apply()
    average = averages.average(variable)
    first = api.copies(average)
    values = api.per_replica(strategy, [10.0, 20.0], [30.0, 40.0])
    strategy.run(replica_fn, args=(values,))
    apply()
    return {
        "kind": [api.class_name(average), average.synchronization, average.aggregation],
        "trainable": average.trainable,
        "names": [each.name.removesuffix(":0") for each in average.values],
        "first": first,
        "second": api.copies(average),
    }


@scenario("9.1", cases=KINDS)
def averages_in_the_scope(api, engine, synchronization, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, synchronization, aggregation)
    averages = api.ExponentialMovingAverage(0.5)

    def apply():
        averages.apply([variable])

    step = api.compile_if(engine, apply)
    with strategy.scope():
        return follow(api, strategy, variable, averages, step)


@scenario("9.1", cases=KINDS)
def averages_in_replicas(api, engine, synchronization, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, synchronization, aggregation)
    averages = api.ExponentialMovingAverage(0.5)

    def replica_fn():
        averages.apply([variable])

    step = api.compile_if(engine, replica_fn)
    return follow(api, strategy, variable, averages, lambda: strategy.run(step))


@scenario("9.1", cases=KINDS)
def averages_in_a_function_that_runs_replicas(
    api, engine, synchronization, aggregation
):
    strategy = api.mirrored(2)
    variable = make(api, strategy, synchronization, aggregation)
    averages = api.ExponentialMovingAverage(0.5)

    def replica_fn():
        averages.apply([variable])

    def step():
        strategy.run(replica_fn)

    return follow(api, strategy, variable, averages, api.compile_if(engine, step))


@scenario("9.1", cases=KINDS)
def averages_in_merge_call(api, engine, synchronization, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, synchronization, aggregation)
    averages = api.ExponentialMovingAverage(0.5)

    def merge_fn(strategy):
        averages.apply([variable])

    def replica_fn():
        api.distribute.get_replica_context().merge_call(merge_fn)

    step = api.compile_if(engine, replica_fn)
    return follow(api, strategy, variable, averages, lambda: strategy.run(step))


@scenario("9.1", cases=KINDS)
def averages_in_update(api, synchronization, aggregation):
    strategy = api.mirrored(2)
    variable = make(api, strategy, synchronization, aggregation)
    averages = api.ExponentialMovingAverage(0.5)

    def update(copy):
        averages.apply([variable])

    def apply():
        with strategy.scope():
            strategy.extended.update(variable, update)

    return follow(api, strategy, variable, averages, apply)


@scenario(
    "9.1",
    differs="TensorFlow fails outside of the scope; mirrax needs none to find the copies",
    expect=[[10.5, 16.0], [10.5, 16.0]],
)
def averages_outside_of_the_scope(api):
    strategy = api.mirrored(2)
    variable = make(api, strategy, "ON_WRITE", "MEAN")
    averages = api.ExponentialMovingAverage(0.5)
    answer = follow(
        api, strategy, variable, averages, lambda: averages.apply([variable])
    )
    return [each.tolist() for each in answer["second"]]


@scenario("9.1", cases=product(("one_device", "one_replica")))
def averages_with_one(api, engine, kind):
    strategy = api.one_device() if kind == "one_device" else api.mirrored(1)
    variable = make(api, strategy, "ON_WRITE", "SUM")
    averages = api.ExponentialMovingAverage(0.5)

    def replica_fn():
        averages.apply([variable])

    step = api.compile_if(engine, replica_fn)
    strategy.run(step)
    variable.assign([10.0, 20.0])
    strategy.run(step)
    with strategy.scope():
        averages.apply([variable])
    return averages.average(variable).numpy()


@scenario("9.1")
def averages_of_ordinary_variables(api, engine):
    variable, other = api.Variable(10.0, name="v"), api.Variable([1.0], name="w")
    averages = api.ExponentialMovingAverage(0.5)

    def apply():
        averages.apply([variable, other])

    step = api.compile_if(engine, apply)
    before = [averages.average(variable), averages.average_name(variable)]
    step()
    variable.assign(20.0)
    step()
    other.assign([2.0])
    step()
    average = averages.average(variable)
    return [
        before,
        [average.numpy(), averages.average(other).numpy()],
        [average.name.removesuffix(":0"), averages.average_name(other)],
        [average.trainable, average.synchronization, average.aggregation],
    ]


@scenario("9.1", cases=product(("scope", "run")))
def averages_of_an_ordinary_variable_in_a_strategy(api, engine, context):
    strategy = api.mirrored(2)
    variable = api.Variable(10.0)
    averages = api.ExponentialMovingAverage(0.5)

    def apply():
        averages.apply([variable])

    step = api.compile_if(engine, apply)
    if context == "run":
        return api.complaint(lambda: strategy.run(step), "scope")
    with strategy.scope():
        return api.complaint(step, "scope")


@scenario("9.1", cases=product(("number", "array", "variable")))
def decay_may_be(api, engine, kind):
    make = {"number": float, "array": api.array, "variable": api.Variable}[kind]
    decay = make(0.75)
    variable = api.Variable(0.0)
    averages = api.ExponentialMovingAverage(decay)

    def apply():
        averages.apply([variable])

    step = api.compile_if(engine, apply)
    step()
    variable.assign(16.0)
    step()
    if kind == "variable":
        decay.assign(0.5)
    step()
    return averages.average(variable).numpy()


@scenario("9.1", cases=product(("number", "array", "variable")))
def num_updates_may_be(api, engine, kind):
    make = {
        "number": int,
        "array": lambda n: api.array(n, "int32"),
        "variable": api.Variable,
    }[kind]
    count = make(0)
    variable = api.Variable(0.0)
    averages = api.ExponentialMovingAverage(0.2, num_updates=count)

    def apply():
        averages.apply([variable])

    step = api.compile_if(engine, apply)
    step()
    variable.assign(10.0)
    step()
    first = averages.average(variable).numpy()
    if kind == "variable":
        count.assign(100)
    variable.assign(20.0)
    step()
    return [first, averages.average(variable).numpy()]


@scenario("9.1")
def num_updates_and_decay_of_a_strategy(api, engine):
    strategy = api.mirrored(2)
    variable = make(api, strategy, "ON_WRITE", "MEAN")
    with strategy.scope():
        count, decay = api.Variable(0), api.Variable(0.5)
    averages = api.ExponentialMovingAverage(decay, count)

    def replica_fn():
        averages.apply([variable])

    step = api.compile_if(engine, replica_fn)
    for value in ([1.0, 2.0], [11.0, 12.0], [21.0, 22.0]):
        variable.assign(value)
        strategy.run(step)
        count.assign_add(4)
    return api.copies(averages.average(variable))


@scenario("9.1")
def zero_debias_leaves_averages_of_variables(api):
    variable = api.Variable(8.0)
    averages = api.ExponentialMovingAverage(0.5, zero_debias=True)
    averages.apply([variable])
    variable.assign(4.0)
    averages.apply([variable])
    return averages.average(variable).numpy()


@scenario("9.1", cases=product(("plain", "debias"), ("none", "mirrored")))
def averages_of_values(api, debias, kind):
    averages = api.ExponentialMovingAverage(0.5, zero_debias=debias == "debias")
    make_strategy = {
        "none": api.distribute.get_strategy,
        "mirrored": lambda: api.mirrored(2),
    }[kind]
    return api.averages_of_values(averages, make_strategy, [1.0, 2.0, 5.0])


@scenario(
    "9.1",
    differs="arrays are averaged, which TensorFlow does only in graphs",
    expect=None,
)
def averages_of_values_in_eager_code(api):
    return api.ExponentialMovingAverage(0.5).apply([api.array(1.0)])


@scenario("9.1", cases=product(("float16", "float32")))
def averages_have_the_dtype_of_the_variable(api, dtype):
    variable = api.Variable(api.array(1.0, dtype))
    averages = api.ExponentialMovingAverage(0.5)
    averages.apply([variable])
    variable.assign(api.array(4.0, dtype))
    averages.apply([variable])
    return averages.average(variable).numpy()


@scenario("9.1")
def what_cannot_be_averaged(api):
    averages = api.ExponentialMovingAverage(0.5)
    return [
        api.attempt(lambda: averages.apply([api.Variable(1)])),
        api.attempt(lambda: averages.apply(api.Variable(1.0))),
        api.fails(lambda: averages.apply(["text"])),
    ]


@scenario(
    "9.1",
    differs="mirrax keeps no collection of variables; TensorFlow's is empty when eager",
    expect=ValueError,
)
def averages_of_no_list(api):
    return api.ExponentialMovingAverage(0.5).apply()


@scenario("9.1")
def a_variable_that_is_listed_twice_moves_twice(api):
    variable = api.Variable(0.0)
    averages = api.ExponentialMovingAverage(0.5)
    averages.apply((variable,))
    variable.assign(8.0)
    averages.apply([variable, variable])
    return averages.average(variable).numpy()


@scenario("9.1")
def names_of_averages(api):
    averages = api.ExponentialMovingAverage(0.5, name="slow")
    variable, other = api.Variable(1.0, name="v"), api.Variable(1.0, name="w")
    averages.apply([variable])
    restored = averages.variables_to_restore([variable, other])
    return [
        averages.name,
        averages.average_name(variable),
        averages.average_name(other),
        averages.average(other),
        {name: each.name.removesuffix(":0") for name, each in restored.items()},
        sorted(averages.variables_to_restore()),
    ]


@scenario("9.1")
def what_an_exponential_moving_average_takes(api):
    kind = api.ExponentialMovingAverage
    methods = ("apply", "average", "average_name", "variables_to_restore")
    return [
        api.parameters(kind.__init__),
        {name: api.parameters(getattr(kind, name)) for name in methods},
    ]
