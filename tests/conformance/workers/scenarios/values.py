"""Values of many workers: each worker makes and sees its own (3.1, 3.3, 8.4)."""

from . import scenario

MANY = ("two", "three", "two_by_two")


@scenario("3.3", clusters=(*MANY, "chief", "one", "none"))
def values_from_a_function(api):
    strategy = api.multi_worker()
    seen = []

    def value_fn(context):
        seen.append([context.replica_id_in_sync_group, context.num_replicas_in_sync])
        return api.array(10.0 * context.replica_id_in_sync_group + api.worker)

    value = strategy.experimental_distribute_values_from_function(value_fn)
    return [seen, api.local_results(strategy, value)]


@scenario("3.3", clusters=("two", "two_by_two"))
def structures_from_a_function(api):
    strategy = api.multi_worker()

    def value_fn(context):
        number = api.array(1.0 + context.replica_id_in_sync_group)
        return {"a": number, "b": [number * 2.0]}

    value = strategy.experimental_distribute_values_from_function(value_fn)
    return [
        api.local_results(strategy, value["a"]),
        api.local_results(strategy, value["b"][0]),
    ]


@scenario("3.3")
def uneven_values_from_a_function(api):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1.0] * (1 + i))
    doubled = strategy.run(lambda x: x * 2.0, args=(value,))
    return [api.local_results(strategy, each) for each in (value, doubled)]


@scenario("3.3")
def python_values_from_a_function(api):
    strategy = api.multi_worker()
    value = strategy.experimental_distribute_values_from_function(
        lambda context: 5.0 + context.replica_id_in_sync_group
    )
    return strategy.reduce(
        "SUM", strategy.run(lambda x: api.array(x) * 2.0, (value,)), None
    )


@scenario(
    "3.3",
    differs="values are made in cross-replica context, which replicas cannot enter",
    expect=[[[True, True], RuntimeError]] * 2,
)
def context_of_a_value(api):
    strategy = api.multi_worker()
    seen = []

    def value_fn(context):
        seen.append(api.distribute.in_cross_replica_context())
        return api.array(1.0)

    strategy.experimental_distribute_values_from_function(value_fn)
    with strategy.scope():
        strategy.experimental_distribute_values_from_function(value_fn)
    failed = api.attempt(
        lambda: strategy.run(
            lambda: strategy.experimental_distribute_values_from_function(value_fn)
        )
    )
    return [seen, failed]


@scenario("3.3")
def value_fn_that_fails_on_one_worker(api):
    strategy = api.multi_worker()

    def value_fn(context):
        if context.replica_id_in_sync_group == 1:
            raise KeyError("as raised")
        return api.array(1.0)

    made = api.attempt(
        lambda: strategy.experimental_distribute_values_from_function(value_fn)
    )
    failed = isinstance(made, Exception)
    return made if failed else api.local_results(strategy, made)


@scenario("3.1", "8.4", clusters=("two", "two_by_two"))
def local_results(api, engine):
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable([1.0, 2.0 + api.worker])
    value = api.of_replica(strategy, lambda i: 1.0 + i)
    doubled = strategy.run(
        api.compile_if(engine, lambda x: {"x": x * 2.0}), args=(value,)
    )
    return {
        "class": api.class_name(strategy.experimental_local_results(value)),
        "value": api.local_results(strategy, value),
        "result": api.local_results(strategy, doubled["x"]),
        "variable": api.local_results(strategy, variable),
        "array": api.local_results(strategy, api.array(5.0 + api.worker)),
        "number": [str(each) for each in strategy.experimental_local_results(3)],
        "reduced": api.local_results(
            strategy, strategy.reduce("SUM", value, axis=None)
        ),
    }


@scenario("3.1", clusters=("two_by_two",))
def values_and_classes(api):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: 1.0 + i)
    with strategy.scope():
        total = strategy.extended.reduce_to("SUM", value, value)
    return [
        api.class_name(value),
        len(value.values),
        api.class_name(total),
        len(total.values),
        isinstance(value, api.distribute.DistributedValues),
    ]
