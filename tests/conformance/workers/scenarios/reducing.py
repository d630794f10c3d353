"""Strategy.reduce and gather over workers (3.4, 3.5, 12.5, 12.6)."""

from itertools import product

import numpy as np

from . import scenario

OPS = [("SUM",), ("MEAN",)]
AXES = {"none": None, "0": 0, "1": 1, "-1": -1, "-2": -2, "0,1": (0, 1), "empty": ()}
MANY = ("two", "three", "two_by_two")
OTHERS = ("three", "two_by_two", "one", "none", "chief")


def reduce_of(api, engine, op, axis, part, dtype="float32"):
    """Reduces `part(replica_id)` of all replicas."""
    strategy = api.multi_worker()
    value = api.of_replica(strategy, part, dtype)
    return api.compile_if(engine, lambda: strategy.reduce(op, value, axis=AXES[axis]))()


@scenario("3.4", "12.5", cases=product(("SUM", "MEAN"), AXES))
def matrices(api, engine, op, axis):
    return reduce_of(
        api, engine, op, axis, lambda i: [[1.0 + i, 2.0, 3.0], [4.0, 5.0, 6.0 * i]]
    )


@scenario("3.4", "12.5", cases=product(("SUM", "MEAN"), ("none", "0", "1", "-1")))
def integer_matrices(api, engine, op, axis):
    return reduce_of(
        api, engine, op, axis, lambda i: [[1 + i, 2], [3, 4 * i]], dtype="int32"
    )


@scenario("3.4", cases=product(("SUM", "MEAN"), ("none", "0")), clusters=OTHERS)
def vectors_in_other_clusters(api, engine, op, axis):
    return reduce_of(api, engine, op, axis, lambda i: [1.0 + i, 10.0 * i])


@scenario("3.4", "5.6", cases=OPS, clusters=MANY)
def uneven_rows(api, engine, op):
    """MEAN counts the rows that exist."""
    return reduce_of(api, engine, op, "0", lambda i: [1.0 + i] * (1 + 2 * i))


@scenario("3.4", "5.6", cases=OPS)
def uneven_rows_of_matrices(api, engine, op):
    return reduce_of(api, engine, op, "0", lambda i: [[1.0 + i, 2.0]] * (1 + i))


@scenario("3.4", "5.6", cases=OPS)
def uneven_rows_of_integers(api, engine, op):
    return reduce_of(api, engine, op, "0", lambda i: [2 + i] * (1 + i), dtype="int32")


@scenario("3.4", "5.6", cases=OPS)
def uneven_in_both_axes(api, engine, op):
    return reduce_of(
        api, engine, op, "0,1", lambda i: [[1.0, 2.0, 3.0]] if i else [[5.0], [6.0]]
    )


@scenario("3.4", "5.6", cases=product(("SUM", "MEAN"), ("first", "last")))
def nothing_on_one_worker(api, engine, op, which):
    empty = 0 if which == "first" else 1
    return reduce_of(api, engine, op, "0", lambda i: [] if i == empty else [1.0, 3.0])


@scenario("12.5", cases=OPS)
def nothing_at_all(api, engine, op):
    return reduce_of(api, engine, op, "0", lambda i: [])


@scenario("3.4")
def scalars_along_an_axis(api):
    return api.fails(lambda: reduce_of(api, "eager", "SUM", "0", lambda i: 1.0))


PLAIN = [("SUM", "none"), ("MEAN", "none"), ("MEAN", "0")]


@scenario("12.5", cases=PLAIN, clusters=MANY)
@scenario("12.5", cases=[("SUM", "0")], clusters=("two", "three"))
@scenario(
    "12.5",
    cases=[("SUM", "0")],
    clusters=("two_by_two",),
    differs="a plain value counts once for each worker, with an axis as without one",
    expect=[np.float32(8.0)] * 2,
)
def plain_array(api, engine, op, axis):
    strategy = api.multi_worker()
    value = api.array([1.0, 3.0])
    return api.attempt(
        api.compile_if(engine, lambda: strategy.reduce(op, value, axis=AXES[axis]))
    )


@scenario("12.5", cases=product(("SUM", "MEAN"), ("none", "0")))
def plain_array_of_each_worker(api, engine, op, axis):
    strategy = api.multi_worker()
    value = api.array([1.0 + api.worker, 3.0])
    return api.attempt(
        api.compile_if(engine, lambda: strategy.reduce(op, value, axis=AXES[axis]))
    )


@scenario("12.5", cases=OPS)
def python_numbers(api, op):
    strategy = api.multi_worker()
    return [
        api.attempt(lambda n=n: strategy.reduce(op, n, axis=None)) for n in (3.0, 3)
    ]


@scenario("12.5", cases=OPS, clusters=("two", "two_by_two"))
def numpy_array(api, op):
    strategy = api.multi_worker()
    value = api.to_numpy(api.array([1.0, 2.0 + api.worker]))
    return api.attempt(lambda: strategy.reduce(op, value, axis=None))


@scenario("12.4", clusters=("two", "two_by_two"))
def outputs_of_run(api, engine):
    strategy = api.multi_worker()
    equal = strategy.run(api.compile_if(engine, lambda: api.array(3.0)))
    return [strategy.reduce(op, equal, axis=None) for op in ("SUM", "MEAN")]


@scenario("12.4")
def python_outputs_of_run(api):
    strategy = api.multi_worker()
    equal = strategy.run(lambda: 3.0)
    return [
        api.attempt(lambda o=op: strategy.reduce(o, equal, axis=None))
        for op in ("SUM", "MEAN")
    ]


@scenario("12.4", clusters=("two", "two_by_two"))
def all_reduced_outputs_of_run(api, engine):
    strategy = api.multi_worker()

    def replica_fn(x):
        return api.distribute.get_replica_context().all_reduce("SUM", x * 1.0)

    value = api.of_replica(strategy, lambda i: 1.0 + i)
    total = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return [strategy.reduce(op, total, axis=None) for op in ("SUM", "MEAN")]


MIRRORED = "what is mirrored sums as n copies, with or without an axis"
WEIGHTS = np.float32([1.0, 3.0])


@scenario("3.4", "12.4", cases=[("0",)], clusters=("two", "two_by_two"))
@scenario(
    "12.4",
    cases=[("none",)],
    differs=MIRRORED,
    expect=[[2 * WEIGHTS, WEIGHTS]] * 2,
)
@scenario(
    "12.4",
    cases=[("none",)],
    clusters=("two_by_two",),
    differs=MIRRORED,
    expect=[[4 * WEIGHTS, WEIGHTS]] * 2,
)
def mirrored_variable(api, engine, axis):
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable([1.0, 3.0])

    def reduce(op):
        return strategy.reduce(op, variable, axis=AXES[axis])

    return [
        api.attempt(api.compile_if(engine, lambda o=op: reduce(o)))
        for op in ("SUM", "MEAN")
    ]


TOTAL = np.float32([3.0, 4.0])


@scenario(
    "3.4",
    differs="structures are reduced over workers too",
    expect=[{"a": TOTAL, "b": [TOTAL, [TOTAL]]}] * 2,
)
def structure(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1.0 + i, 2.0])
    tree = {"a": value, "b": (value, [value])}
    return api.compile_if(engine, lambda: strategy.reduce("SUM", tree, axis=None))()


@scenario("3.4", "6.4")
def indexed_slices(api):
    strategy = api.multi_worker()

    def replica_fn(values):
        return api.IndexedSlices(values, api.array([0, 1], "int32"))

    value = api.of_replica(strategy, lambda i: [[1.0 + i], [2.0]])
    result = strategy.run(replica_fn, args=(value,))
    return [strategy.reduce(op, result, axis=None) for op in ("SUM", "MEAN")]


@scenario("3.4", cases=[("float16",), ("bfloat16",), ("int64",), ("bool",)])
def other_types(api, dtype):
    def part(i):
        return [i == 0, True] if dtype == "bool" else [1 + i, 2]

    return [
        api.attempt(lambda o=op: reduce_of(api, "eager", o, "none", part, dtype=dtype))
        for op in ("SUM", "MEAN")
    ]


@scenario("3.4")
def many_reductions_in_a_row(api):
    strategy = api.multi_worker()
    value = api.array(1.0 + api.worker)
    for _ in range(20):
        value = strategy.reduce("MEAN", value, axis=None) + api.worker
    return value


def gather_of(api, engine, axis, part, dtype="float32"):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, part, dtype)
    return api.compile_if(engine, lambda: strategy.gather(value, axis=axis))()


@scenario("3.5", cases=[("0",), ("1",)], clusters=(*MANY, "one", "none"))
def gather(api, engine, axis):
    return gather_of(api, engine, int(axis), lambda i: [[1.0 + i, 2.0], [3.0, 4.0 * i]])


@scenario("3.5", "12.6", cases=[("0",), ("1",)], clusters=MANY)
def gather_of_uneven_parts(api, engine, axis):
    def part(i):
        rows, columns = (1 + i, 2) if axis == "0" else (2, 1 + i)
        return [[10.0 * i + r + c for c in range(columns)] for r in range(rows)]

    return gather_of(api, engine, int(axis), part)


@scenario("3.5", "12.6")
def gather_with_nothing_on_one_worker(api, engine):
    return gather_of(api, engine, 0, lambda i: [] if i == 0 else [1.0, 3.0])


@scenario("3.5", cases=[("int32",), ("int64",), ("float16",)])
@scenario(
    "3.5",
    cases=[("bool",)],
    differs="all types can be gathered",
    expect=[np.array([True, True, False, True])] * 2,
)
def gather_of_other_types(api, dtype):
    def part(i):
        return [i == 0, True] if dtype == "bool" else [1 + i, 2]

    return api.attempt(lambda: gather_of(api, "eager", 0, part, dtype))


@scenario("3.5")
def gather_along_an_axis_that_is_not_there(api):
    return api.fails(lambda: gather_of(api, "eager", 2, lambda i: [1.0]))


@scenario("3.5")
def gather_of_scalars(api):
    return api.fails(lambda: gather_of(api, "eager", 0, lambda i: 1.0))


@scenario("3.5")
def gather_of_different_ranks_in_the_other_axis(api):
    return api.fails(lambda: gather_of(api, "eager", 0, lambda i: [[1.0] * (1 + i)]))


@scenario("12.6", cases=[("0",), ("1",)], clusters=("two", "three"))
def gather_of_a_plain_array(api, engine, axis):
    strategy = api.multi_worker()
    value = api.array([[1.0 + api.worker, 3.0]])
    return api.attempt(
        api.compile_if(engine, lambda: strategy.gather(value, axis=int(axis)))
    )


@scenario("12.6")
def gather_of_uneven_plain_arrays(api):
    strategy = api.multi_worker()
    value = api.array([1.0 + api.worker] * (1 + api.worker))
    return api.attempt(lambda: strategy.gather(value, axis=0))


@scenario("12.6", clusters=("two", "two_by_two"))
def gather_of_a_mirrored_variable(api):
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable([1.0, 3.0])
    return api.attempt(lambda: strategy.gather(variable, axis=0))


GATHERED = np.float32([1.0, 2.0])


@scenario(
    "3.5",
    differs="structures are gathered over workers too",
    expect=[{"a": GATHERED, "b": [GATHERED]}] * 2,
)
def gather_of_a_structure(api):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1.0 + i])
    return api.attempt(lambda: strategy.gather({"a": value, "b": [value]}, axis=0))


@scenario("3.5")
def gather_of_outputs_of_run(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1.0 + i])
    result = strategy.run(api.compile_if(engine, lambda x: x * 2.0), args=(value,))
    return strategy.gather(result, axis=0)
