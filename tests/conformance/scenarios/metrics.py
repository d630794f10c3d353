"""Metrics: replicas add to their own sums, reading combines them (11.6)."""

from . import scenario

PAIRS = [1.0, 2.0], [3.0, 4.0]
SQUARES = [[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]
LABELS = [1, 0], [2, 2]
SCORES = (
    [[0.1, 0.8, 0.1], [0.2, 0.5, 0.3]],
    [[0.1, 0.1, 0.8], [0.9, 0.1, 0.0]],
)

WEIGHTS = {
    "vector": [1.0, 3.0],
    "ints": [1, 3],
    "bools": [True, False],
    "scalar": 2.0,
    "one": [2.0],
    "column": [[1.0], [3.0]],
    "zeros": [0.0, 0.0],
    "scalar_zero": 0.0,
    "that_cancel": [-1.0, 1.0],
}
ROW_WEIGHTS = {
    "scalar": 2.0,
    "each_row": [1.0, 0.5],
    "column": [[1.0], [0.5]],
    "each_number": [[1.0, 0.0], [0.0, 1.0]],
    "row": [[1.0, 3.0]],
}
SUMS = [("Mean",), ("Sum",)]
ALL = [("Mean",), ("Sum",), ("Accuracy",), ("SparseCategoricalAccuracy",)]


def state(api, metric):
    """The result, and each sum's copies."""
    return {
        "result": metric.result(),
        "copies": [api.copies(v) for v in api.metric_variables(metric)],
    }


def updated(api, engine, name, *columns, dtypes=(), steps=1, weight=None, **kwargs):
    """A metric after replicas have added their parts of each column."""
    strategy = api.mirrored(len(columns[0]))
    with strategy.scope():
        metric = getattr(api, name)(**kwargs)

    def replica_fn(*values):
        metric.update_state(*values, sample_weight=weight)

    step = api.compile_if(engine, replica_fn)
    dtypes = [*dtypes, *["float32"] * len(columns)]
    args = [
        api.per_replica(strategy, *parts, dtype=dtype)
        for parts, dtype in zip(columns, dtypes, strict=False)
    ]
    for _ in range(steps):
        strategy.run(step, args=tuple(args))
    return strategy, metric


def after(api, engine, name, *columns, **kwargs):
    return state(api, updated(api, engine, name, *columns, **kwargs)[1])


@scenario("11.6", cases=SUMS)
def metric_of_two_replicas(api, engine, name):
    return after(api, engine, name, PAIRS)


@scenario("11.6", cases=SUMS)
def metric_of_three_replicas(api, engine, name):
    return after(api, engine, name, ([1.0], [2.0], [6.0]))


@scenario("11.6", cases=SUMS)
def metric_of_one_replica(api, engine, name):
    return after(api, engine, name, ([1.0, 2.0],))


@scenario("11.6", cases=SUMS)
def metric_over_several_steps(api, engine, name):
    return after(api, engine, name, PAIRS, steps=3)


@scenario("11.6", cases=SUMS)
def metric_of_scalars(api, engine, name):
    return after(api, engine, name, (1.0, 2.0))


@scenario("11.6", cases=SUMS)
def metric_of_scalars_with_a_weight(api, engine, name):
    return after(api, engine, name, (1.0, 2.0), weight=3.0)


@scenario("11.6", cases=SUMS)
def metric_of_uneven_batches(api, engine, name):
    return after(api, engine, name, ([1.0, 2.0], [9.0]))


@scenario("11.6", cases=SUMS)
def metric_with_an_empty_batch_on_one_replica(api, engine, name):
    return after(api, engine, name, ([1.0, 2.0], []))


@scenario("11.6", cases=SUMS)
def metric_of_empty_batches(api, engine, name):
    return after(api, engine, name, ([], []))


@scenario("11.6", cases=SUMS)
def metric_of_rows(api, engine, name):
    return after(api, engine, name, SQUARES)


@scenario("11.6", cases=[(*s, w) for s in SUMS for w in WEIGHTS])
def metric_with_weights(api, engine, name, weight):
    return after(api, engine, name, PAIRS, weight=WEIGHTS[weight])


@scenario("11.6", cases=[(*s, w) for s in SUMS for w in ROW_WEIGHTS])
def metric_of_rows_with_weights(api, engine, name, weight):
    return after(api, engine, name, SQUARES, weight=ROW_WEIGHTS[weight])


@scenario("11.6", cases=SUMS)
def metric_of_a_block_with_weights(api, engine, name):
    block = [[[1.0, 2.0], [3.0, 4.0]]] * 3, [[[5.0, 6.0], [7.0, 8.0]]] * 3
    weights = [1.0, 0.0, 2.0], [[1.0, 0.0]] * 3, [[[1.0, 0.5], [2.0, 0.0]]] * 3
    return [after(api, engine, name, block, weight=w) for w in weights]


@scenario("11.6", cases=SUMS)
def metric_with_weights_of_a_wrong_shape(api, engine, name):
    return [
        api.attempt(lambda: after(api, engine, name, PAIRS, weight=[1.0, 2.0, 3.0])),
        api.attempt(lambda: after(api, engine, name, (1.0, 2.0), weight=[1.0, 2.0])),
    ]


@scenario("11.6")
def metric_with_other_weights_on_each_replica(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        metric = api.Mean()
    step = api.compile_if(engine, lambda x, w: metric.update_state(x, w))
    value = api.per_replica(strategy, *PAIRS)
    weight = api.per_replica(strategy, [1.0, 0.0], [0.5, 2.0])
    strategy.run(step, args=(value, weight))
    return state(api, metric)


@scenario("11.6")
def metric_with_zero_weights_then_others(api, engine):
    strategy, metric = updated(api, engine, "Mean", PAIRS, weight=0.0)
    first = metric.result()
    step = api.compile_if(engine, lambda x: metric.update_state(x))
    strategy.run(step, args=(api.per_replica(strategy, [8.0], [6.0]),))
    return [first, state(api, metric)]


@scenario("11.6", cases=[(*s, d) for s in SUMS for d in ("int32", "float16")])
def metric_of_values_of_dtype(api, engine, name, dtype):
    return after(api, engine, name, ([1, 2], [3, 5]), dtypes=[dtype])


@scenario("11.6", cases=SUMS)
def metric_of_bools(api, engine, name):
    return after(api, engine, name, ([True, False], [True, True]), dtypes=["bool"])


@scenario("11.6", cases=[(*s, d) for s in SUMS for d in ("float16", "bfloat16")])
def metric_of_its_own_dtype(api, engine, name, dtype):
    return after(api, engine, name, PAIRS, dtype=dtype)


@scenario("11.6", cases=SUMS)
def metric_of_integer_dtype(api, engine, name):
    return after(api, engine, name, ([1, 2], [3, 5]), dtypes=["int32"], dtype="int32")


@scenario("11.6", cases=SUMS)
def metric_of_nan(api, engine, name):
    return after(api, engine, name, ([1.0, float("nan")], [3.0, 4.0]))


@scenario("11.6", cases=SUMS)
def metric_result_inside_a_replica(api, engine, name):
    strategy = api.mirrored(2)
    with strategy.scope():
        metric = getattr(api, name)()

    def replica_fn(x):
        metric.update_state(x)
        return metric.result()

    value = api.per_replica(strategy, *PAIRS)
    step = api.compile_if(engine, replica_fn)
    results = [strategy.run(step, args=(value,)) for _ in range(2)]
    return [results, state(api, metric)]


@scenario("11.6", cases=SUMS)
def metric_called_inside_a_replica(api, engine, name):
    strategy = api.mirrored(2)
    with strategy.scope():
        metric = getattr(api, name)()
    step = api.compile_if(engine, lambda x: metric(x))
    value = api.per_replica(strategy, *PAIRS)
    results = [strategy.run(step, args=(value,)) for _ in range(2)]
    return [results, state(api, metric)]


@scenario("11.6", cases=ALL)
def metric_without_updates(api, name):
    with api.mirrored(2).scope():
        metric = getattr(api, name)()
    return state(api, metric)


@scenario("11.6")
def metric_result_in_the_scope_and_outside(api, engine):
    strategy, metric = updated(api, engine, "Mean", PAIRS)
    outside = metric.result()
    with strategy.scope():
        return [outside, metric.result()]


@scenario("11.6")
def metric_result_in_a_function(api, engine):
    strategy, metric = updated(api, engine, "Mean", PAIRS)
    return api.function(lambda: metric.result() * 2.0)()


@scenario("11.6")
def metric_result_in_merge_call(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        metric = api.Sum()

    def replica_fn(x):
        metric.update_state(x)
        context = api.distribute.get_replica_context()
        return x * context.merge_call(lambda strategy: metric.result())

    value = api.per_replica(strategy, *PAIRS)
    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("11.6", cases=SUMS)
def metric_reset(api, engine, name):
    strategy, metric = updated(api, engine, name, PAIRS)
    returned = metric.reset_state()
    return [returned, state(api, metric)]


@scenario("11.6", cases=SUMS)
def metric_reset_in_the_scope(api, engine, name):
    strategy, metric = updated(api, engine, name, PAIRS)
    with strategy.scope():
        metric.reset_state()
        return state(api, metric)


@scenario("11.6")
def metric_reset_inside_a_replica(api, engine):
    strategy, metric = updated(api, engine, "Mean", PAIRS)
    strategy.run(api.compile_if(engine, lambda: metric.reset_state()))
    return state(api, metric)


@scenario("11.6")
def metric_reset_and_updated_inside_a_replica(api, engine):
    strategy, metric = updated(api, engine, "Mean", PAIRS)

    def replica_fn(x):
        metric.reset_state()
        metric.update_state(x)
        return metric.result()

    value = api.per_replica(strategy, [5.0], [6.0, 8.0])
    results = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return [results, state(api, metric)]


@scenario("11.6")
def metric_updated_after_a_reset(api, engine):
    strategy, metric = updated(api, engine, "Mean", PAIRS)
    metric.reset_state()
    step = api.compile_if(engine, lambda x: metric.update_state(x))
    strategy.run(step, args=(api.per_replica(strategy, [5.0], [7.0, 9.0]),))
    return state(api, metric)


@scenario("11.6")
def metric_reset_in_a_function(api, engine):
    strategy, metric = updated(api, engine, "Mean", PAIRS)
    api.compile_if(engine, lambda: metric.reset_state())()
    return state(api, metric)


@scenario("11.6", cases=SUMS)
def metric_updated_in_cross_replica_context(api, name):
    strategy = api.mirrored(2)
    with strategy.scope():
        metric = getattr(api, name)()
        returned = metric.update_state([1.0, 2.0])
        inside = state(api, metric)
    metric.update_state([6.0])
    return [returned, inside, state(api, metric)]


@scenario("11.6", cases=SUMS)
def metric_called_in_cross_replica_context(api, name):
    with api.mirrored(2).scope():
        metric = getattr(api, name)()
        return [metric([1.0, 2.0]), metric([6.0])]


@scenario("11.6")
def metric_updated_in_replicas_and_outside(api, engine):
    strategy, metric = updated(api, engine, "Mean", PAIRS)
    metric.update_state([10.0])
    return state(api, metric)


@scenario("11.6")
def metric_updated_by_one_replica_only(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        metric = api.Mean()

    def replica_fn(x):
        context = api.distribute.get_replica_context()
        if int(api.to_numpy(context.replica_id_in_sync_group)) == 0:
            metric.update_state(x)

    strategy.run(replica_fn, args=(api.per_replica(strategy, *PAIRS),))
    return state(api, metric)


@scenario("11.6", cases=SUMS)
def metric_outside_of_any_scope(api, engine, name):
    metric = getattr(api, name)()
    update = api.compile_if(engine, lambda x: metric.update_state(x))
    update(api.array([1.0, 2.0, 6.0]))
    first = state(api, metric)
    called = metric(api.array([1.0]))
    metric.reset_state()
    return [first, called, state(api, metric)]


@scenario("11.6")
def metric_on_one_device(api, engine):
    strategy = api.one_device()
    with strategy.scope():
        metric = api.Mean()
    step = api.compile_if(engine, lambda x: metric.update_state(x))
    strategy.run(step, args=(api.array([1.0, 2.0]),))
    return state(api, metric)


@scenario(
    "11.6",
    "4.2",
    differs="one copy cannot be written by several replicas at once: an error says so",
    expect=ValueError,
)
def metric_made_outside_of_the_scope(api, engine):
    metric = api.Mean()
    strategy = api.mirrored(2)
    step = api.compile_if(engine, lambda x: metric.update_state(x))
    value = api.per_replica(strategy, *PAIRS)

    def use():
        strategy.run(step, args=(value,))
        return state(api, metric)

    return api.attempt(use)


@scenario("11.6")
def metric_made_inside_a_replica_function(api):
    strategy = api.mirrored(2)

    def replica_fn(x):
        metric = api.Mean()
        metric.update_state(x)
        return metric.result()

    return strategy.run(replica_fn, args=(api.per_replica(strategy, *PAIRS),))


@scenario("11.6")
def metrics_side_by_side(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        mean, total, accuracy = api.Mean(), api.Sum(), api.Accuracy()

    def replica_fn(x):
        mean.update_state(x)
        total.update_state(x)
        accuracy.update_state(x, api.array([1.0, 4.0]))

    step = api.compile_if(engine, replica_fn)
    value = api.per_replica(strategy, *PAIRS)
    for _ in range(2):
        strategy.run(step, args=(value,))
    first = [mean.result(), total.result(), accuracy.result()]
    mean.reset_state()
    return [first, [mean.result(), total.result(), accuracy.result()]]


@scenario("11.6")
def metric_with_the_step_in_a_function(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        metric = api.Mean()
    value = api.per_replica(strategy, *PAIRS)

    def step():
        strategy.run(lambda x: metric.update_state(x), args=(value,))
        return metric.result()

    step = api.function(step)
    return [step(), step(), state(api, metric)]


@scenario("11.6")
def metric_over_a_distributed_dataset(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        metric = api.Mean()
    dataset = api.data.Dataset.range(11).batch(4)
    step = api.compile_if(engine, lambda x: metric.update_state(x))
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, args=(batch,))
    return metric.result()


@scenario("11.6")
def metric_state_assigned(api):
    with api.mirrored(2).scope():
        metric = api.Mean()
    metric.total.assign(5.0)
    metric.count.assign(4.0)
    return state(api, metric)


@scenario("11.6", cases=ALL)
def metric_names(api, name):
    cls = getattr(api, name)
    return [cls().name, cls(name="mine").name, repr(cls()), repr(cls(name="mine"))]


@scenario("11.6", cases=ALL)
def metric_variables_and_their_kinds(api, name):
    with api.mirrored(2).scope():
        variables = api.metric_variables(getattr(api, name)())
    return [
        [
            api.class_name(v),
            v.name.split(":")[0].split("/")[-1],
            tuple(v.shape),
            v.trainable,
            v.synchronization,
            v.aggregation,
        ]
        for v in variables
    ]


@scenario("11.6")
def metric_of_nothing(api):
    metric = api.Mean()
    return [
        api.fails(lambda: metric.update_state()),
        api.attempt(lambda: metric.update_state(None)),
        api.attempt(lambda: metric.update_state({"a": [1.0]})),
        api.fails(lambda: metric.update_state(["text"])),
        metric.result(),
    ]


@scenario("11.6")
def accuracy_of_two_replicas(api, engine):
    return after(api, engine, "Accuracy", PAIRS, ([1.0, 0.0], [3.0, 4.0]))


@scenario("11.6")
def accuracy_of_uneven_batches(api, engine):
    columns = ([1.0, 2.0], [3.0]), ([1.0, 0.0], [3.0])
    return after(api, engine, "Accuracy", *columns)


@scenario("11.6")
def accuracy_of_scalars(api, engine):
    return after(api, engine, "Accuracy", (1.0, 2.0), (1.0, 0.0))


@scenario("11.6")
def accuracy_of_rows(api, engine):
    predicted = [[1.0, 2.0], [0.0, 4.0]], [[5.0, 6.0], [0.0, 0.0]]
    return after(api, engine, "Accuracy", SQUARES, predicted)


@scenario("11.6")
def accuracy_of_a_column_and_a_vector(api, engine):
    column = [[1.0], [0.0]], [[3.0], [4.0]]
    return [
        after(api, engine, "Accuracy", PAIRS, column),
        after(api, engine, "Accuracy", column, PAIRS),
    ]


@scenario("11.6")
def accuracy_of_a_vector_and_one_number(api, engine):
    return after(api, engine, "Accuracy", PAIRS, ([1.0], [4.0]))


@scenario("11.6")
def accuracy_of_rows_and_a_vector(api, engine):
    return after(api, engine, "Accuracy", SQUARES, ([1.0, 3.0], [5.0, 0.0]))


@scenario("11.6")
def accuracy_of_shapes_that_do_not_fit(api, engine):
    other = [1.0, 0.0, 1.0], [3.0, 4.0, 1.0]
    return api.attempt(lambda: after(api, engine, "Accuracy", PAIRS, other))


@scenario("11.6")
def accuracy_of_different_dtypes(api, engine):
    ints, floats = ([1, 2], [3, 4]), ([1.0, 2.5], [3.0, 4.0])
    return [
        after(api, engine, "Accuracy", ints, floats, dtypes=["int32"]),
        after(api, engine, "Accuracy", floats, ints, dtypes=["float32", "int32"]),
    ]


@scenario("11.6")
def accuracy_of_bools(api, engine):
    columns = ([True, False], [True, True]), ([True, True], [True, True])
    return after(api, engine, "Accuracy", *columns, dtypes=["bool", "bool"])


@scenario("11.6", cases=[(name,) for name in WEIGHTS])
def accuracy_with_weights(api, engine, weight):
    columns = PAIRS, ([1.0, 0.0], [3.0, 4.0])
    return after(api, engine, "Accuracy", *columns, weight=WEIGHTS[weight])


def categorical(api, engine, labels, scores, dtype="int32", **kwargs):
    name = "SparseCategoricalAccuracy"
    return after(api, engine, name, labels, scores, dtypes=[dtype], **kwargs)


@scenario("11.6")
def categorical_accuracy_of_two_replicas(api, engine):
    return categorical(api, engine, LABELS, SCORES)


@scenario("11.6")
def categorical_accuracy_of_a_column_of_labels(api, engine):
    return categorical(api, engine, ([[1], [0]], [[2], [2]]), SCORES)


@scenario("11.6")
def categorical_accuracy_of_float_labels(api, engine):
    return categorical(api, engine, LABELS, SCORES, dtype="float32")


@scenario("11.6")
def categorical_accuracy_takes_the_first_of_equal_scores(api, engine):
    even = [[0.5, 0.5], [0.5, 0.5]]
    return categorical(api, engine, ([0, 1], [1, 1]), (even, even))


@scenario("11.6")
def categorical_accuracy_of_a_label_out_of_range(api, engine):
    return categorical(api, engine, ([7, 1], [-1, 0]), SCORES)


@scenario("11.6")
def categorical_accuracy_with_weights(api, engine):
    return [
        categorical(api, engine, LABELS, SCORES, weight=[0.7, 0.3]),
        categorical(api, engine, LABELS, SCORES, weight=2.0),
        categorical(api, engine, LABELS, SCORES, weight=[[0.7], [0.3]]),
    ]


@scenario("11.6")
def categorical_accuracy_of_sequences(api, engine):
    labels, scores = ([[1, 0]], [[2, 2]]), ([SCORES[0]], [SCORES[1]])
    return [
        categorical(api, engine, labels, scores),
        categorical(api, engine, labels, scores, weight=[[1.0, 0.0]]),
        categorical(api, engine, labels, scores, weight=[2.0]),
    ]


@scenario("11.6")
def categorical_accuracy_of_uneven_batches(api, engine):
    return categorical(api, engine, ([1, 0], [2]), (SCORES[0], SCORES[1][:1]))


@scenario("11.6")
def categorical_accuracy_of_shapes_that_do_not_fit(api, engine):
    labels = [1, 0, 0], [2, 2, 1]
    return api.attempt(lambda: categorical(api, engine, labels, SCORES))


@scenario("11.6")
def categorical_accuracy_as_in_the_documentation(api):
    metric = api.SparseCategoricalAccuracy()
    metric.update_state([[2], [1]], [[0.1, 0.6, 0.3], [0.05, 0.95, 0.0]])
    first = metric.result()
    metric.reset_state()
    metric.update_state(
        [[2], [1]], [[0.1, 0.6, 0.3], [0.05, 0.95, 0]], sample_weight=[0.7, 0.3]
    )
    return [first, metric.result()]
