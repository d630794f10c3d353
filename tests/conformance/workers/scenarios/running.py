"""run: replica ids, results, collectives of replicas, merge_call (5.1, 2.3, 2.4)."""

from itertools import product

from . import scenario

MANY = ("two", "three", "two_by_two")
OPS = [("SUM",), ("MEAN",)]


def run(api, engine, strategy, fn, *args):
    """Each replica's result of `fn(context, *args)` on this worker.

    The arguments are computed with first: in a function TensorFlow does not know where
    those of a worker's only replica are, and so not where to reduce them.
    """

    def replica_fn(*args):
        context = api.distribute.get_replica_context()
        return fn(context, *(arg * 1 for arg in args))

    result = strategy.run(api.compile_if(engine, replica_fn), args=args)
    return results(api, strategy, result)


def results(api, strategy, tree):
    if isinstance(tree, dict):
        return {key: results(api, strategy, part) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return [results(api, strategy, part) for part in tree]
    return api.local_results(strategy, tree)


@scenario("2.3", "5.1", clusters=(*MANY, "chief", "one", "none"))
def replica_ids(api, engine):
    def fn(context):
        return {
            "id": api.cast(context.replica_id_in_sync_group, "int32"),
            "count": api.array(context.num_replicas_in_sync, "int32"),
        }

    return run(api, engine, api.multi_worker(), fn)


@scenario("2.3")
def replica_ids_are_counted_over_the_cluster(api, engine):
    strategy = api.multi_worker()
    return run(
        api,
        engine,
        strategy,
        lambda context: context.all_reduce("SUM", context.replica_id_in_sync_group),
    )


@scenario(
    "2.3",
    differs="TensorFlow looks up a worker's device by the number of its replica",
    expect=[[[True, 1]], [[True, 1]]],
)
def context_of_a_replica(api):
    strategy = api.multi_worker()
    seen = []

    def replica_fn():
        context = api.distribute.get_replica_context()
        seen.append([context.strategy is strategy, len(context.devices)])

    strategy.run(replica_fn)
    return seen


@scenario("5.1", clusters=MANY)
def results_are_the_workers_own(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1.0 * i, 2.0])

    def fn(context, x):
        return {"double": x * 2.0, "list": [x + 1.0, api.sum(x)]}

    return run(api, engine, strategy, fn, value)


@scenario("5.1")
def results_of_other_kinds(api):
    strategy = api.multi_worker()
    shared = api.array(5.0)
    return [
        strategy.run(lambda: None),
        strategy.run(lambda: 3),
        strategy.run(lambda: "text"),
        api.local_results(strategy, strategy.run(lambda: shared)),
        api.class_name(strategy.run(lambda: (1, [2]))),
        strategy.run(lambda: ()),
    ]


@scenario(
    "12.4",
    clusters=("two", "two_by_two"),
    differs="an array that all replicas of a worker return may differ from the others'",
    expect=[[False, True]] * 2,
)
def object_that_all_replicas_of_a_worker_return(api):
    strategy = api.multi_worker()
    shared, thing = api.array([1.0, 2.0]), object()
    return [
        strategy.run(lambda: shared) is shared,
        strategy.run(lambda: thing) is thing,
    ]


@scenario("5.1")
def keyword_arguments_and_plain_values(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: 1.0 + i)
    fn = api.compile_if(engine, lambda x, scale: x * scale)
    result = strategy.run(fn, args=(value,), kwargs={"scale": api.array(10.0)})
    own = strategy.run(fn, args=(value, api.array(1.0 + api.worker)))
    return [api.local_results(strategy, each) for each in (result, own)]


@scenario("5.1")
def values_captured_from_the_worker(api, engine):
    """What a function takes from around it is each worker's own."""
    strategy = api.multi_worker()
    own = api.array(1.0 + api.worker)
    number = 10.0 * api.worker

    def fn(context):
        return [own * 2.0, own + number, context.all_reduce("SUM", own)]

    return run(api, engine, strategy, fn)


@scenario("5.3")
def run_outside_of_the_scope_and_inside(api, engine):
    strategy = api.multi_worker()
    fn = api.compile_if(engine, lambda: api.array(2.0))
    outside = api.local_results(strategy, strategy.run(fn))
    with strategy.scope():
        return [outside, api.local_results(strategy, strategy.run(fn))]


@scenario("5.5", "5.4")
def run_in_a_function(api, engine):
    strategy = api.multi_worker()

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        return context.all_reduce("MEAN", x * 1.0) - x

    def step(value):
        moved = strategy.run(replica_fn, args=(value,))
        again = strategy.run(replica_fn, args=(moved,))
        return moved, strategy.reduce("SUM", again, axis=None)

    value = api.of_replica(strategy, lambda i: [1.0 + i, 4.0 * i])
    moved, total = api.compile_if(engine, step)(value)
    return [api.local_results(strategy, moved), total]


@scenario("2.3", cases=product(("SUM", "MEAN"), ("float32", "float16", "int32")))
def all_reduce(api, engine, op, dtype):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1 + i, 4 + 3 * i], dtype)
    return run(
        api, engine, strategy, lambda context, x: context.all_reduce(op, x), value
    )


@scenario("2.3", cases=OPS, clusters=("three", "two_by_two", "one", "none"))
def all_reduce_in_other_clusters(api, engine, op):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1.0 + i, 10.0 * i])
    return run(
        api, engine, strategy, lambda context, x: context.all_reduce(op, x), value
    )


@scenario(
    "2.3",
    differs="the only replica of a worker needs no destinations in a function either",
    expect=[[{"float32[2]": [3.0, 2.0]}], [{"float32[2]": [3.0, 2.0]}]],
    differs_in=("compiled",),
)
def all_reduce_of_an_argument(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1.0 + i, 1.0])

    def replica_fn(x):
        return api.distribute.get_replica_context().all_reduce("SUM", x)

    step = api.compile_if(engine, replica_fn)
    return api.local_results(strategy, strategy.run(step, args=(value,)))


@scenario("2.3")
def all_reduce_of_a_nested_structure(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1.0 + i, 2.0])

    def fn(context, x):
        tree = {"a": x, "b": (api.sum(x), [x * 10.0])}
        return context.all_reduce("MEAN", tree)

    return run(api, engine, strategy, fn, value)


@scenario("2.3")
def all_reduce_of_bools(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [i, 1], "int32")

    def fn(context, x):
        return context.all_reduce("SUM", x > 0)

    return api.fails(lambda: run(api, engine, strategy, fn, value))


@scenario("2.3", "6.4", clusters=("two", "two_by_two"))
def all_reduce_of_indexed_slices(api, engine):
    strategy = api.multi_worker()
    values = api.of_replica(strategy, lambda i: [[1.0 + i], [2.0]])
    indices = api.of_replica(strategy, lambda i: [i % 3, 2], "int32")

    def fn(context, values, indices):
        slices = api.IndexedSlices(values, indices, api.array([3, 1], "int32"))
        total = context.all_reduce("SUM", slices)
        return {"values": total.values, "indices": total.indices}

    return run(api, engine, strategy, fn, values, indices)


@scenario("2.3", "5.6")
def all_reduce_of_uneven_indexed_slices(api, engine):
    strategy = api.multi_worker()
    values = api.of_replica(strategy, lambda i: [[1.0 + i]] * (1 + i))
    indices = api.of_replica(strategy, lambda i: list(range(1 + i)), "int32")

    def fn(context, values, indices):
        slices = api.IndexedSlices(values, indices, api.array([3, 1], "int32"))
        total = context.all_reduce("SUM", slices)
        return {"values": total.values, "indices": total.indices}

    return run(api, engine, strategy, fn, values, indices)


@scenario("2.3", cases=[("0",), ("1",)], clusters=MANY)
def all_gather(api, engine, axis):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [[1.0 + i, 2.0]])

    def fn(context, x):
        return context.all_gather(x, axis=int(axis))

    return run(api, engine, strategy, fn, value)


@scenario("2.3", "5.6", cases=[("0",), ("1",)], clusters=("two", "three"))
def all_gather_of_uneven_parts(api, engine, axis):
    strategy = api.multi_worker()
    shape = (2, 3) if axis == "1" else (3, 2)

    def part(i):
        rows, columns = (shape[0], 1 + i) if axis == "1" else (1 + i, shape[1])
        return [[10.0 * i + r + c for c in range(columns)] for r in range(rows)]

    def fn(context, x):
        return context.all_gather(x, axis=int(axis))

    return run(api, engine, strategy, fn, api.of_replica(strategy, part))


@scenario("2.3", "5.6")
def all_gather_with_nothing_on_one_worker(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1.0, 2.0] if i == 0 else [])

    def fn(context, x):
        return context.all_gather(x, axis=0)

    return run(api, engine, strategy, fn, value)


@scenario("2.3")
def all_gather_of_a_structure_of_integers(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1 + i, 2], "int32")

    def fn(context, x):
        return context.all_gather({"a": x, "b": [x * 2]}, axis=0)

    return run(api, engine, strategy, fn, value)


@scenario("2.3")
def all_gather_of_scalars(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: 1.0 + i)

    def fn(context, x):
        return context.all_gather(x, axis=0)

    return api.fails(lambda: run(api, engine, strategy, fn, value))


@scenario("2.4", clusters=MANY)
def what_merge_fn_sees(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: 1.0 + i)
    seen = []

    def merge_fn(given, x):
        parts = given.experimental_local_results(x)
        seen.append([given is strategy, len(parts)])
        return given.reduce("SUM", x, axis=None)

    def fn(context, x):
        return context.merge_call(merge_fn, args=(x,))

    # What all replicas get from it is one value in TensorFlow, a copy each in mirrax.
    return [run(api, engine, strategy, fn, value)[0], seen]


@scenario("2.4", clusters=MANY)
def results_of_merge_fn(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: 1.0 + i)

    def merge_fn(strategy, x):
        return {
            "per replica": x,
            "mirrored": strategy.extended.reduce_to("MEAN", x, x),
            "own": api.array(5.0 + api.worker),
        }

    def fn(context, x):
        out = context.merge_call(merge_fn, args=(x,))
        return {name: part * 10.0 for name, part in out.items()}

    return run(api, engine, strategy, fn, value)


@scenario("2.4")
def updating_in_merge_fn(api, engine):
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable(10.0)
    value = api.of_replica(strategy, lambda i: 1.0 + i)

    def merge_fn(strategy, x):
        total = strategy.extended.reduce_to("SUM", x, variable)
        strategy.extended.update(variable, lambda v, t: v.assign_sub(t), args=(total,))

    def fn(context, x):
        context.merge_call(merge_fn, args=(x,))
        return variable * 1.0

    return [run(api, engine, strategy, fn, value), api.copies(variable)]


@scenario("2.4")
def assigning_in_merge_fn(api, engine):
    """In cross-replica context each worker assigns its own."""
    strategy = api.multi_worker()
    with strategy.scope():
        variable = api.Variable(10.0)
    value = api.of_replica(strategy, lambda i: 1.0 + i)

    def merge_fn(strategy, x):
        variable.assign(strategy.reduce("SUM", x, axis=None))

    def fn(context, x):
        context.merge_call(merge_fn, args=(x,))
        return variable * 1.0

    return [run(api, engine, strategy, fn, value), api.copies(variable)]


@scenario("5.8")
def gradient_through_all_reduce(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: 1.0 + i)

    def fn(context, x):
        def loss(x):
            return context.all_reduce("SUM", x * x * (1.0 + x))

        return api.gradient(loss, x)

    return run(api, engine, strategy, fn, value)


@scenario("5.8")
def gradient_through_a_mean(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1.0 + i, 2.0])

    def fn(context, x):
        def loss(x):
            return api.sum(context.all_reduce("MEAN", x * x) * x)

        return api.gradient(loss, x)

    return run(api, engine, strategy, fn, value)


@scenario("5.8")
def gradient_through_all_gather(api, engine):
    strategy = api.multi_worker()
    value = api.of_replica(strategy, lambda i: [1.0 + i, 2.0])

    def fn(context, x):
        def loss(x):
            gathered = context.all_gather(x, axis=0)
            return api.sum(gathered * gathered) * x[0]

        return api.gradient(loss, x)

    return run(api, engine, strategy, fn, value)


@scenario("5.8")
def gradients_of_variables_are_the_workers_own(api, engine):
    strategy = api.multi_worker()
    with strategy.scope():
        weights = api.Variable([1.0, 2.0])
    value = api.of_replica(strategy, lambda i: [1.0 + i, 3.0 * i])

    def fn(context, x):
        loss, (gradient,) = api.variable_gradients(
            lambda: api.sum(weights * weights * x), [weights]
        )
        return [loss, gradient, context.all_reduce("SUM", gradient)]

    return run(api, engine, strategy, fn, value)


@scenario("5.7")
def exception_on_all_workers(api, engine):
    strategy = api.multi_worker()

    def replica_fn():
        raise KeyError("as raised")

    failed = api.attempt(lambda: strategy.run(api.compile_if(engine, replica_fn)))
    value = api.array(1.0 + api.worker)
    return [failed, strategy.reduce("SUM", value, axis=None)]


@scenario("5.7")
def exception_on_one_worker_before_any_collective(api):
    """The others do not notice, and all go on; but a compiled step is one of all."""
    strategy = api.multi_worker()

    def replica_fn():
        if api.worker == 1:
            raise KeyError("as raised")
        return api.array(3.0)

    result = api.attempt(lambda: strategy.run(replica_fn))
    failed = isinstance(result, Exception)
    value = api.array(1.0 + api.worker)
    return [
        result if failed else api.local_results(strategy, result),
        strategy.reduce("SUM", value, axis=None),
    ]


@scenario("2.3")
def collectives_in_cross_replica_context(api):
    strategy = api.multi_worker()
    with strategy.scope():
        return [
            api.attempt(
                lambda: api.distribute.get_replica_context().all_reduce("SUM", 1.0)
            ),
            api.attempt(
                lambda: strategy.run(lambda: strategy.reduce("SUM", 1.0, None))
            ),
        ]


@scenario("5.1", clusters=("two_by_two",))
def replicas_of_a_worker_may_differ(api):
    strategy = api.multi_worker()
    count = []

    def replica_fn():
        count.append(api.distribute.get_replica_context().replica_id_in_sync_group)
        return api.array(1.0 * len(count))

    result = strategy.run(replica_fn)
    return [api.local_results(strategy, result), len(count)]
