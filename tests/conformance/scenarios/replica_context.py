"""What a replica function can do: its context, all_reduce, all_gather (2.3)."""

import numpy as np

from . import replicas, scenario


def run_with_context(api, engine, strategy, fn, *args):
    """Runs `fn(context, *args)` on each replica."""

    def replica_fn(*args):
        return fn(api.distribute.get_replica_context(), *args)

    return strategy.run(api.compile_if(engine, replica_fn), args=args)


@scenario("2.3")
def replica_id_and_number_of_replicas(api, engine):
    def fn(context):
        ids = api.cast(context.replica_id_in_sync_group, "int32")
        return {"id": ids, "count": context.num_replicas_in_sync}

    return run_with_context(api, engine, api.mirrored(4), fn)


@scenario("2.3")
def context_knows_its_strategy(api):
    strategy = api.mirrored(2)
    seen = []
    strategy.run(
        lambda: seen.append(api.distribute.get_replica_context().strategy is strategy)
    )
    return seen


@scenario("2.3")
def context_of_the_default_strategy(api):
    context = api.distribute.get_replica_context()
    return [
        context.replica_id_in_sync_group,
        context.num_replicas_in_sync,
        context.strategy is api.distribute.get_strategy(),
    ]


@scenario("2.3")
def all_reduce_in_the_default_context(api):
    context = api.distribute.get_replica_context()
    return [
        context.all_reduce("SUM", api.array([1.0, 2.0])),
        context.all_reduce("MEAN", api.array([1.0, 2.0])),
        context.all_gather(api.array([[1.0], [2.0]]), axis=0),
    ]


@scenario("2.4")
def merge_call_in_the_default_context(api):
    seen = []

    def merge_fn(strategy, value):
        seen.append(api.distribute.in_cross_replica_context())
        return value + 1.0

    context = api.distribute.get_replica_context()
    return [context.merge_call(merge_fn, args=(api.array(1.0),)), seen]


OPS = [("SUM",), ("MEAN",)]
OPS_AND_TYPES = [
    (op, dtype)
    for op in ("SUM", "MEAN")
    for dtype in ("float32", "float16", "bfloat16", "int32", "int64")
]


@scenario("2.3", cases=OPS_AND_TYPES)
def all_reduce(api, engine, op, dtype):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [1, 4], [2, 7], dtype=dtype)
    return run_with_context(
        api, engine, strategy, lambda context, x: context.all_reduce(op, x), value
    )


@scenario("2.3", cases=[("sum",), ("Sum",), ("mean",), ("MAX",), ("",)])
def all_reduce_op_by_name(api, engine, name):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 3.0)
    return run_with_context(
        api, engine, strategy, lambda context, x: context.all_reduce(name, x), value
    )


@scenario("2.3", cases=OPS)
def all_reduce_with_the_enum(api, engine, op):
    strategy = api.mirrored(2)
    reduce_op = getattr(api.ReduceOp, op)
    value = api.per_replica(strategy, 1.0, 3.0)
    return run_with_context(
        api,
        engine,
        strategy,
        lambda context, x: context.all_reduce(reduce_op, x),
        value,
    )


@scenario("2.3")
def all_reduce_of_bools(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [True, False], [True, True], dtype="bool")

    def fn(context, x):
        return context.all_reduce("SUM", x)

    return api.fails(lambda: run_with_context(api, engine, strategy, fn, value))


@scenario("2.3")
def all_reduce_of_a_nested_structure(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])

    def fn(context, x):
        tree = {"a": x, "b": (api.sum(x), [x * 10.0])}
        return context.all_reduce("MEAN", tree)

    return run_with_context(api, engine, strategy, fn, value)


@scenario("2.3")
def all_reduce_keeps_the_containers_types(api):
    def replica_fn():
        context = api.distribute.get_replica_context()
        x = api.array(1.0)
        out = context.all_reduce("SUM", {"a": (x, x), "b": [x]})
        return [api.class_name(part) for part in (out, out["a"], out["b"])]

    return api.mirrored(2).run(replica_fn)


@scenario("2.3", differs="nothing to reduce is no reason to fail", expect=[])
def all_reduce_of_an_empty_structure(api, engine):
    return run_with_context(
        api, engine, api.mirrored(2), lambda context: context.all_reduce("SUM", [])
    )


@scenario(
    "2.3",
    differs="eager mode takes what compiled mode takes",
    expect=[replicas(6.0, 6.0), replicas(3.0, 3.0), replicas(6, 6), replicas(3.0, 3.0)],
    differs_in=("eager",),
)
def all_reduce_of_python_numbers(api, engine):
    def fn(context):
        return [
            context.all_reduce(op, number)
            for number in (3.0, 3)
            for op in ("SUM", "MEAN")
        ]

    return run_with_context(api, engine, api.mirrored(2), fn)


@scenario("2.3")
def all_reduce_of_the_replica_id(api, engine):
    return run_with_context(
        api,
        engine,
        api.mirrored(4),
        lambda context: context.all_reduce("SUM", context.replica_id_in_sync_group),
    )


@scenario("2.3")
def all_reduce_of_a_variable(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable([1.0, 2.0])
    return run_with_context(
        api, engine, strategy, lambda context: context.all_reduce("SUM", variable)
    )


@scenario("2.3", "5.6")
def all_reduce_of_uneven_shapes(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [1.0, 2.0], [3.0])

    def fn(context, x):
        return context.all_reduce("SUM", x)

    return api.fails(lambda: run_with_context(api, engine, strategy, fn, value))


@scenario("2.3")
def all_reduce_with_one_device(api, engine):
    def fn(context, x):
        return [context.all_reduce(op, x) for op in ("SUM", "MEAN")]

    return run_with_context(api, engine, api.one_device(), fn, api.array([1.0, 2.0]))


@scenario(
    "2.3",
    differs="one replica needs no destinations; TensorFlow asks for them in a function",
    expect=np.float32([1.0, 2.0]),
    differs_in=("compiled",),
)
def all_reduce_with_one_mirrored_replica(api, engine):
    def fn(context, x):
        return context.all_reduce("SUM", x)

    return run_with_context(api, engine, api.mirrored(1), fn, api.array([1.0, 2.0]))


@scenario("2.3", "6.2")
def all_reduce_with_options(api, engine):
    strategy = api.mirrored(2)
    options = api.distribute.experimental.CommunicationOptions(bytes_per_pack=8)
    value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])

    def fn(context, x):
        return context.all_reduce("SUM", [x, x * 2.0, x * 3.0], options=options)

    return run_with_context(api, engine, strategy, fn, value)


@scenario("2.3", "6.4")
def all_reduce_of_indexed_slices(api, engine):
    strategy = api.mirrored(2)
    values = api.per_replica(strategy, [[1.0], [2.0]], [[3.0], [4.0]])
    indices = api.per_replica(strategy, [0, 2], [2, 1], dtype="int32")

    def fn(context, values, indices):
        slices = api.IndexedSlices(values, indices, api.array([3, 1], "int32"))
        total = context.all_reduce("SUM", slices)
        return {"values": total.values, "indices": total.indices}

    return run_with_context(api, engine, strategy, fn, values, indices)


@scenario("2.3")
def all_gather_along_the_first_axis(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [[1.0, 2.0]], [[3.0, 4.0]])
    return run_with_context(
        api, engine, strategy, lambda context, x: context.all_gather(x, axis=0), value
    )


@scenario("2.3")
def all_gather_along_the_second_axis(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [[1.0, 2.0]], [[3.0, 4.0]])
    return run_with_context(
        api, engine, strategy, lambda context, x: context.all_gather(x, axis=1), value
    )


@scenario("2.3")
def all_gather_of_a_nested_structure_and_ints(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [1, 2], [3, 4], dtype="int32")
    return run_with_context(
        api,
        engine,
        strategy,
        lambda context, x: context.all_gather({"a": x, "b": [x * 2]}, axis=0),
        value,
    )


@scenario("2.3", "5.6")
def all_gather_of_uneven_shapes(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [[1.0], [2.0]], [[3.0]])
    return run_with_context(
        api, engine, strategy, lambda context, x: context.all_gather(x, axis=0), value
    )


@scenario("2.3")
def all_gather_of_scalars(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, 1.0, 2.0)
    return run_with_context(
        api, engine, strategy, lambda context, x: context.all_gather(x, axis=0), value
    )


@scenario(
    "2.3",
    differs="negative axes count from the end, as everywhere in JAX",
    expect={"replicas": [np.array([[1, 2, 3, 4]], "float32")] * 2},
)
def all_gather_along_a_negative_axis(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [[1.0, 2.0]], [[3.0, 4.0]])
    return run_with_context(
        api, engine, strategy, lambda context, x: context.all_gather(x, axis=-1), value
    )


@scenario("2.3")
def all_gather_along_an_axis_that_is_not_there(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [1.0], [2.0])
    return run_with_context(
        api, engine, strategy, lambda context, x: context.all_gather(x, axis=3), value
    )


@scenario("2.3")
def all_gather_of_indexed_slices(api):
    def replica_fn():
        slices = api.IndexedSlices(api.array([[1.0]]), api.array([0], "int32"))
        return api.distribute.get_replica_context().all_gather(slices, axis=0)

    return api.mirrored(2).run(replica_fn)
