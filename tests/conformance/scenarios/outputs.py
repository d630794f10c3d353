"""What comes out of Strategy.run (5.1, 12.4)."""

from . import scenario


@scenario("5.1")
def outputs_keep_their_structure(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 2.0)

    def replica_fn(x):
        return {"a": x, "b": (x + 1.0, [x + 2.0])}

    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("5.1")
def outputs_keep_their_containers(api):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 2.0)
    out = strategy.run(lambda x: {"a": (x, x), "b": [x], "c": ()}, args=(value,))
    return [api.class_name(part) for part in (out, *out.values())]


@scenario("5.1")
def no_output(api, engine):
    strategy = api.mirrored(2)
    return strategy.run(api.compile_if(engine, lambda: None))


@scenario("5.1")
def output_with_nothing_in_a_part(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 2.0)
    return strategy.run(api.compile_if(engine, lambda x: (x, None)), args=(value,))


@scenario("12.4")
def python_outputs(api):
    strategy = api.mirrored(2)
    big = 10**6 + 1
    return [
        strategy.run(lambda: 3),
        strategy.run(lambda: "text"),
        strategy.run(lambda: True),
        strategy.run(lambda: big),
        strategy.run(lambda: [1, "two"]),
    ]


@scenario("12.4")
def python_outputs_that_differ(api):
    strategy = api.mirrored(2)

    def replica_fn():
        index = int(api.distribute.get_replica_context().replica_id_in_sync_group)
        return {"text": f"replica {index}", "number": index, "flag": index == 0}

    return strategy.run(replica_fn)


@scenario("12.4")
def one_object_returned_by_all_comes_back_unwrapped(api):
    strategy = api.mirrored(2)
    shared, thing = api.array([1.0, 2.0]), object()
    return [
        strategy.run(lambda: shared) is shared,
        strategy.run(lambda: thing) is thing,
    ]


@scenario("12.4")
def argument_returned_as_it_is(api, engine):
    strategy = api.mirrored(2)
    shared = api.array([1.0, 2.0])
    return strategy.run(api.compile_if(engine, lambda x: x), args=(shared,))


@scenario("12.4")
def equal_outputs_are_still_one_for_each_replica(api, engine):
    strategy = api.mirrored(2)
    fn = api.compile_if(engine, lambda x: x * 2.0)
    return strategy.run(fn, args=(api.array(3.0),))


@scenario("5.1", "12.4")
def variable_returned_by_all_comes_back_as_itself(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(1.0)
    return strategy.run(lambda: variable) is variable


@scenario("5.1")
def replicas_return_different_structures(api):
    strategy = api.mirrored(2)

    def replica_fn():
        x = api.array(1.0)
        index = int(api.distribute.get_replica_context().replica_id_in_sync_group)
        return [x] if index == 0 else [x, x]

    return api.fails(lambda: strategy.run(replica_fn))


@scenario("5.1")
def replicas_return_dictionaries_with_different_keys(api):
    strategy = api.mirrored(2)

    def replica_fn():
        index = int(api.distribute.get_replica_context().replica_id_in_sync_group)
        return {f"key {index}": api.array(1.0)}

    return api.fails(lambda: strategy.run(replica_fn))


@scenario("5.1", cases=[("mirrored",), ("one_device",), ("default",)])
def one_replica_gives_plain_values(api, engine, kind):
    strategy = {
        "mirrored": lambda: api.mirrored(1),
        "one_device": api.one_device,
        "default": api.distribute.get_strategy,
    }[kind]()

    def replica_fn(x, scale):
        return {"a": x * scale, "b": [x]}

    return strategy.run(
        api.compile_if(engine, replica_fn),
        args=(api.array([1.0, 2.0]),),
        kwargs={"scale": api.array(3.0)},
    )


@scenario("5.1")
def default_strategy_runs_in_its_replica_context(api):
    seen = []

    def replica_fn():
        context = api.distribute.get_replica_context()
        seen.append([context.replica_id_in_sync_group, context.num_replicas_in_sync])
        seen.append(api.distribute.in_cross_replica_context())

    api.distribute.get_strategy().run(replica_fn)
    return seen
