"""Losses: the replicas' shares of the global batch's mean (9.2, 12.16)."""

from . import replicas, scenario

PAIRS = [1.0, 2.0], [3.0, 4.0]
ROWS = [[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]], [[5.0, 6.0], [7.0, 8.0], [0.0, 0.0]]
SQUARES = [[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]
BLOCK = [[[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]]

WEIGHTS = {
    "vector": [1.0, 3.0],
    "ints": [1, 3],
    "bools": [True, False],
    "scalar": 3.0,
    "one": [3.0],
    "column": [[1.0], [3.0]],
    "zeros": [0.0, 0.0],
    "negative": [-1.0, 1.0],
    "two_ranks_more": [[[1.0]], [[3.0]]],
}
WRONG_WEIGHTS = {"longer": [1.0, 2.0, 3.0], "square": [[1.0, 3.0], [1.0, 1.0]]}
ROW_WEIGHTS = {
    "scalar": 2.0,
    "each_row": [1.0, 2.0, 0.5],
    "column": [[1.0], [2.0], [0.5]],
    "each_number": [[1.0, 2.0]] * 3,
    "row": [[1.0, 2.0]],
}
DTYPES = [("float16",), ("bfloat16",), ("float64",), ("int32",)]


def shares(api, engine, *parts, dtype="float32", **kwargs):
    """What each replica gets for its losses."""
    strategy = api.mirrored(len(parts))

    def replica_fn(losses):
        return api.compute_average_loss(losses, **kwargs)

    value = api.per_replica(strategy, *parts, dtype=dtype)
    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


def scaled(api, engine, *parts, dtype="float32"):
    strategy = api.mirrored(len(parts))
    value = api.per_replica(strategy, *parts, dtype=dtype)
    fn = api.compile_if(engine, lambda x: api.scale_regularization_loss(x))
    return strategy.run(fn, args=(value,))


@scenario("9.2")
def average_loss_of_two_replicas(api, engine):
    return shares(api, engine, *PAIRS)


@scenario("9.2")
def average_loss_of_three_replicas(api, engine):
    return shares(api, engine, *PAIRS, [5.0, 6.0])


@scenario("9.2")
def average_loss_of_one_replica(api, engine):
    return shares(api, engine, [3.0, 4.0])


@scenario("9.2")
def average_loss_on_one_device(api, engine):
    fn = api.compile_if(engine, lambda: api.compute_average_loss(api.array([1.0, 2.0])))
    return api.one_device().run(fn)


@scenario("9.2")
def average_loss_sums_up_to_the_mean(api, engine):
    strategy = api.mirrored(2)
    fn = api.compile_if(engine, lambda x: api.compute_average_loss(x))
    parts = strategy.run(fn, args=(api.per_replica(strategy, *PAIRS),))
    return strategy.reduce("SUM", parts, axis=None)


@scenario("9.2")
def average_loss_with_a_global_batch_size(api, engine):
    return shares(api, engine, *PAIRS, global_batch_size=8)


@scenario("9.2")
def average_loss_with_a_global_batch_size_and_weights(api, engine):
    return shares(api, engine, *PAIRS, sample_weight=[1.0, 3.0], global_batch_size=8)


@scenario("9.2")
def average_loss_with_a_global_batch_size_that_is_an_array(api, engine):
    return shares(api, engine, *PAIRS, global_batch_size=api.array(4, "int32"))


@scenario("9.2")
def average_loss_with_a_global_batch_size_that_is_computed(api, engine):
    strategy = api.mirrored(2)

    def replica_fn(x):
        size = api.distribute.get_replica_context().all_reduce(
            "SUM", api.cast(api.sum(x * 0.0 + 1.0), "int32")
        )
        return api.compute_average_loss(x, global_batch_size=size)

    value = api.per_replica(strategy, [1.0, 2.0, 3.0], [6.0])
    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario("9.2")
def average_loss_with_a_global_batch_size_of_zero(api, engine):
    return shares(api, engine, *PAIRS, global_batch_size=0)


@scenario("9.2")
def average_loss_with_a_negative_global_batch_size(api, engine):
    return api.attempt(lambda: shares(api, engine, *PAIRS, global_batch_size=-1))


@scenario(
    "9.2",
    differs="a number that is only known on the device cannot be checked",
    expect=replicas(-0.75, -3.5),
    differs_in=("compiled",),
)
def average_loss_with_a_computed_negative_global_batch_size(api, engine):
    strategy = api.mirrored(2)

    def replica_fn(x):
        size = api.cast(x[0], "int32") - 5
        return api.compute_average_loss(x, global_batch_size=size)

    value = api.per_replica(strategy, *PAIRS)
    fn = api.compile_if(engine, replica_fn)
    return api.attempt(lambda: strategy.run(fn, args=(value,)))


@scenario("9.2")
def average_loss_with_a_global_batch_size_that_is_no_integer(api, engine):
    wrong = [4.0, True, api.array(4.0)]
    return [
        api.attempt(lambda w=w: shares(api, engine, *PAIRS, global_batch_size=w))
        for w in wrong
    ]


@scenario("9.2")
def average_loss_with_a_global_batch_size_that_is_no_scalar(api, engine):
    return api.attempt(lambda: shares(api, engine, *PAIRS, global_batch_size=[4]))


@scenario(
    "9.2",
    "11.1",
    differs="all examples of the global batch count the same",
    expect=replicas(1.0, 1.0),
)
def average_loss_of_uneven_batches(api, engine):
    return shares(api, engine, [1.0, 2.0], [3.0])


@scenario(
    "9.2",
    "11.1",
    differs="all examples of the global batch count the same",
    expect=replicas(0.5, 1.5, 1.0),
)
def average_loss_of_uneven_batches_on_three_replicas(api, engine):
    return shares(api, engine, [1.0, 2.0], [4.0, 5.0, 0.0], [6.0])


@scenario(
    "9.2",
    "11.1",
    differs="all examples of the global batch count the same",
    expect=replicas(2.0, 3.0),
)
def average_loss_of_uneven_batches_with_a_weight_for_all(api, engine):
    return shares(api, engine, [1.0, 2.0], [4.5], sample_weight=2.0)


@scenario("9.2")
def average_loss_of_uneven_batches_with_a_global_batch_size(api, engine):
    return shares(api, engine, [1.0, 2.0], [3.0], global_batch_size=3)


@scenario(
    "9.2",
    "11.1",
    differs="all examples of the global batch count the same",
    expect=replicas(1.5, 0.0),
)
def average_loss_with_an_empty_batch_on_one_replica(api, engine):
    return shares(api, engine, [1.0, 2.0], [])


@scenario("9.2")
def average_loss_without_any_examples(api, engine):
    return shares(api, engine, [], [])


@scenario("9.2", cases=[(name,) for name in WEIGHTS])
def average_loss_with_sample_weights(api, engine, weights):
    return shares(api, engine, *PAIRS, sample_weight=WEIGHTS[weights])


@scenario("9.2")
def average_loss_with_other_weights_on_each_replica(api, engine):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, *PAIRS)
    weight = api.per_replica(strategy, [1.0, 0.0], [0.5, 2.0])
    fn = api.compile_if(engine, lambda x, w: api.compute_average_loss(x, w))
    return strategy.run(fn, args=(value, weight))


@scenario("9.2", cases=[(name,) for name in WRONG_WEIGHTS])
def average_loss_with_weights_of_a_wrong_shape(api, engine, weights):
    kwargs = {"sample_weight": WRONG_WEIGHTS[weights]}
    return api.attempt(lambda: shares(api, engine, *PAIRS, **kwargs))


@scenario("9.2")
def average_loss_of_rows(api, engine):
    return shares(api, engine, *ROWS)


@scenario("9.2", cases=[(name,) for name in ROW_WEIGHTS])
def average_loss_of_rows_with_weights(api, engine, weights):
    return shares(api, engine, *ROWS, sample_weight=ROW_WEIGHTS[weights])


@scenario("9.2")
def average_loss_of_rows_with_too_few_weights(api, engine):
    return api.attempt(lambda: shares(api, engine, *ROWS, sample_weight=[1.0, 2.0]))


@scenario("9.2")
def average_loss_weights_belong_to_rows_also_of_a_square(api, engine):
    return shares(api, engine, *SQUARES, sample_weight=[1.0, 2.0])


@scenario("9.2")
def average_loss_of_blocks(api, engine):
    return shares(api, engine, BLOCK, BLOCK)


@scenario("9.2")
def average_loss_of_blocks_with_weights_for_each_row(api, engine):
    weight = [[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]]
    return shares(api, engine, BLOCK, BLOCK, sample_weight=weight)


@scenario("9.2")
def average_loss_of_blocks_with_weights_that_are_two_ranks_less(api, engine):
    return shares(api, engine, BLOCK, BLOCK, sample_weight=[1.0, 2.0])


@scenario("9.2")
def average_loss_of_a_scalar(api, engine):
    return [
        api.attempt(lambda: shares(api, engine, 1.0, 2.0)),
        api.attempt(lambda: shares(api, engine, 1.0, 2.0, global_batch_size=2)),
    ]


@scenario("9.2", cases=DTYPES)
def average_loss_of_dtype(api, engine, dtype):
    return shares(api, engine, [1, 2], [3, 5], dtype=dtype)


@scenario("9.2", cases=DTYPES)
def average_loss_of_dtype_with_a_global_batch_size(api, engine, dtype):
    return shares(api, engine, [1, 2], [3, 5], dtype=dtype, global_batch_size=2)


@scenario("9.2", cases=DTYPES)
def average_loss_of_dtype_with_weights(api, engine, dtype):
    return shares(api, engine, [1, 2], [3, 5], dtype=dtype, sample_weight=[1.5, 0.5])


@scenario("9.2")
def average_loss_of_bools(api, engine):
    parts = [True, False], [True, True]
    return api.attempt(lambda: shares(api, engine, *parts, dtype="bool"))


@scenario("9.2")
def average_loss_of_a_python_list(api, engine):
    strategy = api.mirrored(2)
    fn = api.compile_if(engine, lambda: api.compute_average_loss([1.0, 2.0]))
    return strategy.run(fn)


@scenario("9.2")
def average_loss_of_nothing(api):
    return api.attempt(lambda: api.mirrored(2).run(api.compute_average_loss, (None,)))


@scenario("9.2")
def average_loss_keeps_nan_on_its_replica(api, engine):
    return shares(api, engine, [1.0, float("nan")], [3.0, 4.0])


@scenario("9.2")
def average_loss_has_a_gradient(api, engine):
    strategy = api.mirrored(2)

    def replica_fn(x):
        return api.gradient(lambda x: api.compute_average_loss(x * x), x)

    value = api.per_replica(strategy, *PAIRS)
    return strategy.run(api.compile_if(engine, replica_fn), args=(value,))


@scenario(
    "9.2",
    "11.1",
    differs="all examples of the global batch count the same",
    expect=replicas([2 / 3, 4 / 3], [2.0]),
)
def average_loss_of_uneven_batches_has_a_gradient(api, engine):
    strategy = api.mirrored(2)

    def replica_fn(x):
        return api.gradient(lambda x: api.compute_average_loss(x * x), x)

    value = api.per_replica(strategy, [1.0, 2.0], [3.0])
    result = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    parts = strategy.experimental_local_results(result)
    return replicas(*(api.plain(part) for part in parts))


@scenario("9.2", "12.16")
def average_loss_in_cross_replica_context(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        return [
            api.attempt(lambda: api.compute_average_loss([1.0, 2.0])),
            api.compute_average_loss([1.0, 2.0], global_batch_size=4),
            api.compute_average_loss([1.0, 2.0], [1.0, 0.0], global_batch_size=4),
        ]


@scenario("9.2", "12.16")
def average_loss_in_cross_replica_context_of_one_replica(api):
    with api.mirrored(1).scope():
        return api.attempt(lambda: api.compute_average_loss([1.0, 2.0]))


@scenario("9.2", "12.16")
def average_loss_in_the_scope_of_one_device(api):
    with api.one_device().scope():
        return api.attempt(lambda: api.compute_average_loss([1.0, 2.0]))


@scenario("9.2", "12.16")
def average_loss_in_a_function_in_cross_replica_context(api):
    with api.mirrored(2).scope():
        fn = api.function(lambda: api.compute_average_loss([1.0, 2.0]))
        return api.attempt(fn)


@scenario("9.2", "12.16")
def average_loss_of_distributed_values_in_cross_replica_context(api):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, *PAIRS)
    with strategy.scope():
        return api.fails(lambda: api.compute_average_loss(value, global_batch_size=4))


@scenario("9.2")
def average_loss_in_merge_call(api, engine):
    strategy = api.mirrored(2)

    def replica_fn():
        return api.distribute.get_replica_context().merge_call(
            lambda strategy: api.compute_average_loss([1.0, 2.0])
        )

    return api.attempt(lambda: strategy.run(api.compile_if(engine, replica_fn)))


@scenario("9.2")
def average_loss_in_merge_call_with_a_global_batch_size(api, engine):
    strategy = api.mirrored(2)

    def replica_fn():
        return api.distribute.get_replica_context().merge_call(
            lambda strategy: api.compute_average_loss([1.0, 2.0], global_batch_size=4)
        )

    return strategy.run(api.compile_if(engine, replica_fn))


@scenario("9.2")
def average_loss_in_update(api):
    strategy = api.mirrored(2)
    with strategy.scope():
        variable = api.Variable(1.0)
    update = strategy.extended.update
    return api.attempt(
        lambda: update(variable, lambda v: api.compute_average_loss([1.0, 2.0]))
    )


@scenario("9.2")
def average_loss_outside_of_any_scope(api):
    return [
        api.compute_average_loss([1.0, 2.0]),
        api.compute_average_loss([1.0, 2.0], [1.0, 0.0]),
        api.compute_average_loss([1.0, 2.0], global_batch_size=4),
        api.attempt(lambda: api.compute_average_loss(4.0)),
    ]


@scenario("9.2")
def average_loss_outside_of_any_scope_in_a_function(api):
    return api.function(lambda: api.compute_average_loss(api.array([1.0, 2.0])))()


@scenario("9.2")
def average_loss_with_the_step_in_a_function(api):
    strategy = api.mirrored(2)
    value = api.per_replica(strategy, *PAIRS)

    def step():
        parts = strategy.run(api.compute_average_loss, args=(value,))
        return strategy.reduce("SUM", parts, axis=None)

    return api.function(step)()


@scenario("9.2")
def regularization_loss_is_divided_by_the_replicas(api, engine):
    return [scaled(api, engine, 1.0, 2.0), scaled(api, engine, 3.0, 3.0)]


@scenario("9.2")
def regularization_loss_on_three_replicas(api, engine):
    return scaled(api, engine, 3.0, 6.0, 9.0)


@scenario("9.2")
def regularization_loss_on_one_replica(api, engine):
    return scaled(api, engine, 3.0)


@scenario("9.2")
def regularization_loss_of_an_array_is_summed(api, engine):
    return [scaled(api, engine, *PAIRS), scaled(api, engine, *SQUARES)]


@scenario("9.2")
def regularization_loss_of_an_empty_array(api, engine):
    return scaled(api, engine, [], [])


@scenario("9.2")
def regularization_loss_of_a_list(api, engine):
    strategy = api.mirrored(2)
    fn = api.compile_if(engine, lambda x: api.scale_regularization_loss([x, x * 3.0]))
    return strategy.run(fn, args=(api.per_replica(strategy, 1.0, 2.0),))


@scenario("9.2")
def regularization_loss_of_an_empty_list(api, engine):
    fn = api.compile_if(engine, lambda: api.scale_regularization_loss([]))
    return api.mirrored(2).run(fn)


@scenario("9.2")
def regularization_loss_of_python_numbers(api, engine):
    strategy = api.mirrored(2)

    def replica_fn():
        return api.scale_regularization_loss(6.0), api.scale_regularization_loss(7)

    return strategy.run(api.compile_if(engine, replica_fn))


@scenario("9.2", cases=DTYPES)
def regularization_loss_of_dtype(api, engine, dtype):
    return scaled(api, engine, 3, 4, dtype=dtype)


@scenario("9.2")
def regularization_loss_of_bools(api, engine):
    return api.attempt(lambda: scaled(api, engine, True, False, dtype="bool"))


@scenario("9.2")
def regularization_loss_of_a_variable(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        w = api.Variable([1.0, 2.0])

    def replica_fn():
        return api.variable_gradients(
            lambda: api.scale_regularization_loss(api.sum(w * w)), [w]
        )

    return strategy.run(api.compile_if(engine, replica_fn))


@scenario("9.2")
def regularization_loss_in_cross_replica_context(api):
    with api.mirrored(2).scope():
        return api.attempt(lambda: api.scale_regularization_loss(4.0))


@scenario("9.2")
def regularization_loss_outside_of_any_scope(api):
    return api.scale_regularization_loss(4.0)


@scenario("9.2")
def average_and_regularization_loss_together(api, engine):
    strategy = api.mirrored(2)
    with strategy.scope():
        w = api.Variable([1.0, 2.0])

    def replica_fn(x):
        loss = api.compute_average_loss(api.sum(x * w, axis=1), global_batch_size=4)
        return loss + api.scale_regularization_loss(api.sum(w * w))

    value = api.per_replica(strategy, *SQUARES)
    parts = strategy.run(api.compile_if(engine, replica_fn), args=(value,))
    return [parts, strategy.reduce("SUM", parts, axis=None)]
