"""StrategyExtended (6.3, 12.3, 12.10)."""

from . import scenario

KINDS = [("mirrored",), ("one_replica",), ("one_device",)]


def make_strategy(api, kind):
    return {
        "mirrored": lambda: api.mirrored(2),
        "one_replica": lambda: api.mirrored(1),
        "one_device": api.one_device,
        "default": api.distribute.get_strategy,
    }[kind]()


@scenario("6.3", cases=KINDS)
def worker_and_parameter_devices(api, kind):
    extended = make_strategy(api, kind).extended
    return [
        api.class_name(extended.worker_devices),
        len(extended.worker_devices),
        extended.worker_devices == extended.parameter_devices,
    ]


@scenario("6.3")
def worker_devices_are_spelled_in_full(api):
    strategy = api.distribute.MirroredStrategy(["cpu:1", "/cpu:0"])
    return [str(device) for device in strategy.extended.worker_devices]


@scenario("6.3")
def default_strategy_has_no_devices(api):
    extended = api.distribute.get_strategy().extended
    return [
        api.attempt(lambda: extended.worker_devices),
        api.attempt(lambda: extended.parameter_devices),
    ]


@scenario("6.3", cases=[*KINDS, ("default",)])
def facts_about_the_strategy(api, kind):
    extended = make_strategy(api, kind).extended
    return [
        extended.should_checkpoint,
        extended.should_save_summary,
        extended.experimental_require_static_shapes,
    ]


@scenario("6.3", cases=[("SUM",), ("MEAN",)])
def reduce_to_a_variable(api, op):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable([0.0, 0.0])
        value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
        reduced = strategy.extended.reduce_to(op, value, destinations=variable)
    return [reduced, api.class_name(reduced)]


@scenario("6.3")
def reduce_to_a_value(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        value = api.per_replica(strategy, 1.0, 3.0)
        reduced = strategy.extended.reduce_to("MEAN", value, destinations=value)
    return [reduced, api.class_name(reduced)]


@scenario("6.3")
def reduce_to_a_device(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        value = api.per_replica(strategy, 1.0, 3.0)
        return strategy.extended.reduce_to("SUM", value, destinations="CPU:1")


@scenario("6.3")
def reduce_to_of_integers(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        value = api.per_replica(strategy, 1, 4, dtype="int32")
        extended = strategy.extended
        return [extended.reduce_to(op, value, value) for op in ("SUM", "MEAN")]


@scenario("6.3")
def reduce_to_of_a_plain_value(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        to = api.Variable(0.0)
        value, extended = api.array(2.0), strategy.extended
        return [
            api.attempt(lambda: extended.reduce_to("SUM", value, to)),
            api.attempt(lambda: extended.reduce_to("MEAN", value, to)),
        ]


@scenario("6.3")
def mean_of_what_is_mirrored_already(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        value = api.per_replica(strategy, 1.0, 3.0)
        total = strategy.extended.reduce_to("SUM", value, value)
        return strategy.extended.reduce_to("MEAN", total, total)


@scenario("6.3")
def reduce_to_with_an_unknown_op(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        value = api.per_replica(strategy, 1.0, 3.0)
        return api.fails(lambda: strategy.extended.reduce_to("MAX", value, value))


@scenario("6.3")
def reduce_to_inside_a_replica_function(api):
    strategy = api.mirrored(2)
    x = api.array(1.0)
    return strategy.run(lambda: strategy.extended.reduce_to("SUM", x, "CPU:0"))


@scenario("6.3")
def batch_reduce_to(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(0.0)
        value = api.per_replica(strategy, 1.0, 3.0)
        other = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])

        def step():
            return strategy.extended.batch_reduce_to(
                "SUM", [(value, variable), (other, variable)]
            )

        return api.compile_if(engine, step)()


@scenario("6.3")
def broadcast_to_a_variable(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(0.0)
        sent = strategy.extended.broadcast_to(api.array([1.0, 2.0]), variable)
    return [sent, api.class_name(sent)]


@scenario("6.3", "12.10")
def update_with_a_plain_argument(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable([1.0, 2.0])

        def step():
            strategy.extended.update(
                variable, lambda v, x: v.assign_add(x), args=(api.array([1.0, 1.0]),)
            )

        api.compile_if(engine, step)()
    return api.copies(variable)


@scenario("6.3", "12.7")
def update_with_a_per_replica_argument(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(10.0)
    value = api.per_replica(strategy, 1.0, 3.0)

    def step():
        strategy.extended.update(
            variable, lambda v, x: v.assign_sub(x), kwargs={"x": value}
        )

    with strategy.scope():
        api.compile_if(engine, step)()
    return api.copies(variable)


@scenario("6.3", "12.10", cases=[("group",), ("no group",)])
def result_of_update(api, group):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(10.0)
        value = api.per_replica(strategy, 1.0, 3.0)
        results = [
            strategy.extended.update(
                variable, fn, args=(value,), group=(group == "group")
            )
            for fn in (
                lambda v, x: v + x,
                lambda v, x: {"a": v + x},
                lambda v, x: 3,
                lambda v, x: None,
            )
        ]
    return results


@scenario("12.10")
def update_gives_one_result_for_each_component_without_group(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(10.0)
        results = strategy.extended.update(variable, lambda v: v * 1.0, group=False)
    return [api.class_name(results), len(results)]


@scenario("12.10")
def update_gets_the_component_on_its_device(api):
    strategy = api.mirrored(2)
    seen = []
    with strategy.scope():
        variable = api.Variable(10.0)
        strategy.extended.update(variable, lambda v: seen.append(v))
    return [part is own for part, own in zip(seen, variable.values, strict=True)]


@scenario("12.10")
def update_with_another_variable(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable, other = api.Variable(1.0), api.Variable(5.0)
        strategy.extended.update(variable, lambda v, o: v.assign_add(o), args=(other,))
    return api.copies(variable)


@scenario("12.10")
def update_in_replica_context(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(1.0)

    def replica_fn(x):
        strategy.extended.update(variable, lambda v, x: v.assign_add(x), args=(x,))
        return variable * 1.0

    value = api.per_replica(strategy, 10.0, 20.0)
    result = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return [result, api.copies(variable)]


@scenario("12.10")
def assign_inside_update_does_not_aggregate(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(1.0, aggregation=api.VariableAggregation.SUM)
        strategy.extended.update(variable, lambda v: v.assign_add(api.array(2.0)))
    return api.copies(variable)


@scenario("6.3")
def update_of_an_ordinary_variable(api):
    variable = api.Variable(1.0)
    strategy = api.mirrored(2)
    with strategy.scope():
        return api.fails(
            lambda: strategy.extended.update(variable, lambda v: v.assign_add(1.0))
        )


@scenario("6.3", cases=[*KINDS, ("default",)])
def update_outside_of_the_scope(api, kind):
    strategy = make_strategy(api, kind)
    with strategy.scope():
        variable = api.Variable(1.0)
    strategy.extended.update(variable, lambda v: v.assign_add(2.0))
    return api.copies(variable)


@scenario("6.3", cases=KINDS)
def update_non_slot(api, kind):
    strategy = make_strategy(api, kind)
    calls = []
    with strategy.scope():
        variable = api.Variable(1.0)
        devices = strategy.extended.non_slot_devices([variable])

        def fn(x):
            calls.append(1)
            return x * 2.0

        result = strategy.extended.update_non_slot(devices, fn, args=(api.array(3.0),))
        parts = strategy.extended.update_non_slot(
            devices, fn, args=(api.array(3.0),), group=False
        )
    return [len(devices), len(calls), result, parts]


@scenario("6.3", cases=[*KINDS, ("default",)])
def call_for_each_replica(api, kind):
    strategy = make_strategy(api, kind)
    with strategy.scope():
        return strategy.extended.call_for_each_replica(
            lambda x, y: x * y, args=(api.array(2.0),), kwargs={"y": api.array(3.0)}
        )


@scenario("6.3")
def call_for_each_replica_with_the_replica_id(api, engine):
    strategy = api.mirrored(2)

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        return x + api.cast(context.replica_id_in_sync_group, "float32")

    fn = api.compile_if(engine, replica_fn)
    with strategy.scope():
        return strategy.extended.call_for_each_replica(fn, args=(api.array(10.0),))


@scenario("6.3")
def call_for_each_replica_outside_of_the_scope(api):
    strategy = api.mirrored(2)
    return strategy.extended.call_for_each_replica(lambda: api.array(1.0))


@scenario("6.3")
def value_container(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(1.0)
    container = strategy.extended.value_container
    ordinary, number = api.Variable(1.0), 3.0
    return [
        [container(part) is variable for part in variable.values],
        container(variable) is variable,
        container(ordinary) is ordinary,
        container(number),
    ]
