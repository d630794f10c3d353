"""Strategy.reduce (3.4, 12.4, 12.5)."""

import numpy as np

from . import scenario

OPS = [("SUM",), ("MEAN",)]
TYPES = ("float32", "float16", "bfloat16", "int32", "int64")
AXES = {
    "none": None,
    "0": 0,
    "1": 1,
    "-1": -1,
    "-2": -2,
    "0,1": (0, 1),
    "empty": (),
}


def reduce_parts(api, engine, op, axis, *parts, dtype="float32"):
    strategy = api.mirrored(len(parts))
    value = api.per_replica(strategy, *parts, dtype=dtype)
    return api.compile_if(engine, lambda: strategy.reduce(op, value, axis=axis))()


@scenario("3.4", cases=[(op, dtype) for op in ("SUM", "MEAN") for dtype in TYPES])
def reduce_over_replicas(api, engine, op, dtype):
    return reduce_parts(api, engine, op, None, [3, 1], [4, 1], dtype=dtype)


@scenario("3.4", cases=[(op, dtype) for op in ("SUM", "MEAN") for dtype in TYPES])
def reduce_over_replicas_and_axis_0(api, engine, op, dtype):
    return reduce_parts(api, engine, op, 0, [3, 1], [4, 1], dtype=dtype)


@scenario("3.4", "12.5", cases=[(op, axis) for op in ("SUM", "MEAN") for axis in AXES])
def reduce_of_matrices_along(api, engine, op, axis):
    first, second = [[1, 2, 3], [4, 5, 6]], [[10, 20, 30], [40, 50, 60]]
    return reduce_parts(api, engine, op, AXES[axis], first, second)


@scenario(
    "3.4", cases=[(op, axis) for op in ("SUM", "MEAN") for axis in ("0", "1", "-1")]
)
def reduce_of_integer_matrices_along(api, engine, op, axis):
    first, second = [[1, 2], [3, 4]], [[10, 20], [30, 45]]
    return reduce_parts(api, engine, op, AXES[axis], first, second, dtype="int32")


@scenario("3.4", "5.6", cases=OPS)
def reduce_of_a_partial_batch_counts_real_examples(api, engine, op):
    return reduce_parts(api, engine, op, 0, [0.0, 1.0, 2.0, 3.0], [4.0, 5.0])


@scenario("3.4", "5.6", cases=OPS)
def reduce_of_a_partial_batch_of_matrices(api, engine, op):
    return reduce_parts(api, engine, op, 0, [[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]])


@scenario("3.4", "5.6", cases=OPS)
def reduce_of_parts_uneven_in_both_axes(api, engine, op):
    return reduce_parts(api, engine, op, (0, 1), [[1.0, 2.0, 3.0]], [[5.0], [6.0]])


@scenario("3.4", "5.6", cases=OPS)
def reduce_with_an_empty_part(api, engine, op):
    return reduce_parts(api, engine, op, 0, [1.0, 2.0], [])


@scenario("12.5", cases=OPS)
def reduce_of_nothing(api, engine, op):
    return reduce_parts(api, engine, op, 0, [], [])


@scenario("3.4", "5.6", cases=OPS)
def reduce_of_uneven_shapes_without_an_axis(api, engine, op):
    return api.fails(
        lambda: reduce_parts(api, engine, op, None, [1.0, 2.0, 3.0], [4.0, 5.0])
    )


@scenario("3.4", cases=OPS)
def reduce_of_broadcastable_shapes_without_an_axis(api, engine, op):
    return api.fails(lambda: reduce_parts(api, engine, op, None, [1.0, 2.0], [4.0]))


@scenario("3.4")
def reduce_along_an_axis_that_is_not_there(api, engine):
    return reduce_parts(api, engine, "SUM", 2, [1.0], [2.0])


@scenario("3.4")
def reduce_of_scalars_along_axis_0(api, engine):
    return api.fails(lambda: reduce_parts(api, engine, "MEAN", 0, 1.0, 2.0))


@scenario("3.4", cases=[("sum",), ("Mean",), ("MEAN",), ("max",)])
def reduce_op_by_name(api, name):
    return reduce_parts(api, "eager", name, None, 1.0, 3.0)


@scenario("3.4", cases=OPS)
def reduce_op_by_enum(api, name):
    return reduce_parts(api, "eager", getattr(api.ReduceOp, name), None, 1.0, 3.0)


@scenario("3.4")
def reduce_op_from_a_variable_aggregation(api):
    aggregation = api.VariableAggregation
    convert = api.ReduceOp.from_variable_aggregation
    return [
        convert(aggregation.SUM),
        convert(aggregation.MEAN),
        api.attempt(lambda: convert(aggregation.NONE)),
    ]


@scenario("12.5")
def axis_is_required(api):
    strategy = api.mirrored(2)
    return strategy.reduce("SUM", api.per_replica(strategy, 1.0, 2.0))


@scenario("3.4")
def reduce_of_bools(api, engine):
    return api.fails(
        lambda: reduce_parts(api, engine, "SUM", None, True, False, dtype="bool")
    )


@scenario(
    "3.4",
    differs="structures reduce along an axis too",
    expect={"a": np.float32(2.5), "b": [np.float32(2.5), [np.float32(2.5)]]},
)
def reduce_of_a_structure_along_an_axis(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    tree = {"a": value, "b": (value, [value])}
    return api.compile_if(engine, lambda: strategy.reduce("MEAN", tree, axis=0))()


@scenario("3.4")
def reduce_of_a_structure_without_an_axis(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    tree = {"a": value, "b": (value, [value])}
    return api.compile_if(engine, lambda: strategy.reduce("SUM", tree, axis=None))()


@scenario(
    "12.5", cases=[("SUM", "none"), ("MEAN", "none"), ("SUM", "0"), ("MEAN", "0")]
)
def reduce_of_a_plain_array(api, engine, op, axis):
    strategy = api.mirrored(2)
    value = api.array([1.0, 3.0])
    return api.compile_if(engine, lambda: strategy.reduce(op, value, axis=AXES[axis]))()


@scenario("12.5")
def reduce_of_a_python_number(api):
    strategy = api.mirrored(2)
    return [
        api.attempt(lambda: strategy.reduce("SUM", 3.0, axis=None)),
        api.attempt(lambda: strategy.reduce("MEAN", 3.0, axis=None)),
        api.attempt(lambda: strategy.reduce("MEAN", 3, axis=None)),
    ]


@scenario("12.4")
def sum_of_equal_outputs_counts_every_replica(api, engine):
    strategy = api.mirrored(2)
    result = strategy.run(api.compile_if(engine, lambda: api.array(3.0)))
    return [strategy.reduce(op, result, axis=None) for op in ("SUM", "MEAN")]


@scenario("12.4")
def sum_of_an_all_reduced_output_counts_every_replica(api, engine):
    strategy = api.mirrored(2)

    def replica_fn(x):
        return api.distribute.get_replica_context().all_reduce("SUM", x)

    value = api.per_replica(strategy, 1.0, 3.0)
    total = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return [strategy.reduce(op, total, axis=None) for op in ("SUM", "MEAN")]


@scenario("12.4")
def sum_of_one_object_returned_by_all_replicas(api):
    strategy = api.mirrored(2)
    shared = api.array(3.0)
    result = strategy.run(lambda: shared)
    return api.attempt(lambda: strategy.reduce("SUM", result, axis=None))


@scenario(
    "3.4",
    "12.4",
    differs="what is mirrored sums as n copies, with or without an axis",
    expect=[np.float32([2.0, 6.0]), np.float32([1.0, 3.0])],
)
def reduce_of_a_mirrored_variable(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable([1.0, 3.0])
    return [
        api.compile_if(engine, lambda o=op: strategy.reduce(o, variable, axis=None))()
        for op in ("SUM", "MEAN")
    ]


@scenario("3.4", cases=OPS)
def reduce_of_a_mirrored_variable_along_axis_0(api, engine, op):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable([1.0, 3.0])
    return api.compile_if(engine, lambda: strategy.reduce(op, variable, axis=0))()


@scenario("3.4", cases=[("mirrored",), ("one_device",), ("default",)])
def reduce_with_one_replica(api, engine, kind):
    strategy = {
        "mirrored": lambda: api.mirrored(1),
        "one_device": api.one_device,
        "default": api.distribute.get_strategy,
    }[kind]()
    value = api.array([[1.0, 2.0], [3.0, 5.0]])

    def reduce(op, axis):
        return api.compile_if(engine, lambda: strategy.reduce(op, value, axis=axis))()

    return [reduce(op, axis) for op in ("SUM", "MEAN") for axis in (None, 0, 1)]


@scenario("3.4")
def integer_mean_with_one_replica(api):
    strategies = api.mirrored(1), api.one_device(), api.distribute.get_strategy()
    value = api.array([3, 4], "int32")
    return [
        [each.reduce("MEAN", value, axis=axis) for axis in (None, 0)]
        for each in strategies
    ]


@scenario("3.4")
def reduce_inside_the_scope(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        value = api.per_replica(strategy, 1.0, 3.0)
        return strategy.reduce("SUM", value, axis=None)


@scenario("3.4", "6.4")
def reduce_of_indexed_slices(api):
    strategy = api.mirrored(2)

    def replica_fn(values):
        return api.IndexedSlices(values, api.array([0, 1], "int32"))

    value = api.per_replica(strategy, [[1.0], [2.0]], [[3.0], [4.0]])
    result = strategy.run(replica_fn, args=(value,))
    return [strategy.reduce(op, result, axis=None) for op in ("SUM", "MEAN")]
