"""Distributed datasets: what each worker gets at each step (7.3-7.6, 12.12-12.15).

recorded/workers.json of the folder above has more datasets, which are asked without
processes.
"""

from itertools import product
from pathlib import Path

import numpy as np

from . import scenario

POLICIES = ("AUTO", "DATA", "OFF")
SIZES = ((10, 4), (8, 4), (9, 4), (10, 5), (7, 3), (3, 8), (11, 8), (1, 4), (0, 3))
MANY = ("two", "three", "two_by_two")


def ranges(api, n, batch, **kwargs):
    return api.data.Dataset.range(n).batch(batch, **kwargs)


def with_policy(api, dataset, policy):
    options = api.data.Options()
    policies = api.data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = policies[policy]
    return dataset.with_options(options)


def distribute(api, strategy, dataset, policy="AUTO"):
    return strategy.experimental_distribute_dataset(with_policy(api, dataset, policy))


def values(steps):
    """Only the values, where the types are clear."""
    return [[next(iter(part.values())) for part in step] for step in steps]


@scenario(
    "7.3",
    "12.12",
    "12.13",
    cases=product(POLICIES, ("keep", "drop")),
    clusters=(*MANY, "one", "none"),
)
def batches(api, policy, remainder):
    strategy = api.multi_worker()
    results = {}
    for n, batch in SIZES:
        dataset = ranges(api, n, batch, drop_remainder=remainder == "drop")
        distributed = distribute(api, strategy, dataset, policy)
        steps = values(api.steps(strategy, distributed))
        results[f"{n} by {batch}"] = [api.spec(distributed), steps]
    return results


ROWS = [[[0]], [[]], [[1]], [[]], [[2]]]


@scenario(
    "7.3",
    "12.13",
    differs="TensorFlow has one more step at the end, in which nobody has a row",
    expect=[[*ROWS, [[]]], [[[]], *ROWS]],
)
def batches_of_one_row_on_two_workers(api):
    strategy = api.multi_worker()
    distributed = distribute(api, strategy, ranges(api, 3, 1), "OFF")
    return values(api.steps(strategy, distributed))


def generator(api, sizes):
    return api.data.Dataset.from_generator(
        lambda: ([10 * size + i for i in range(size)] for size in sizes),
        output_signature=api.TensorSpec((None,), "int32"),
    )


PIPELINES = {
    "repeat": lambda api: ranges(api, 5, 4).repeat(2),
    "repeat_for_ever": lambda api: ranges(api, 5, 3).repeat(),
    "repeat_before_batch": lambda api: api.data.Dataset.range(5).repeat(2).batch(4),
    "map": lambda api: ranges(api, 9, 4).map(lambda x: x * 2),
    "take": lambda api: ranges(api, 20, 4).take(3),
    "skip": lambda api: ranges(api, 11, 4).skip(1),
    "filter_before_batch": lambda api: (
        api.data.Dataset.range(11).filter(lambda x: x % 3 != 0).batch(4)
    ),
    "filter_after_batch": lambda api: ranges(api, 16, 4).filter(lambda x: x[0] != 4),
    "filter_of_one_workers": lambda api: (
        api.data.Dataset.range(10).filter(lambda x: x % 2 == 0).batch(2)
    ),
    "generator": lambda api: generator(api, [4, 2, 4, 1]),
    "generator_of_fewer": lambda api: generator(api, [4]),
    "prefetch": lambda api: ranges(api, 10, 4).prefetch(2),
    "cache": lambda api: ranges(api, 6, 4).cache().repeat(2),
    "concatenate": lambda api: ranges(api, 5, 4).concatenate(ranges(api, 4, 4)),
    "zip": lambda api: api.data.Dataset.zip((ranges(api, 6, 4), ranges(api, 6, 4))),
    "tuple": lambda api: (
        api.data.Dataset.range(5).map(lambda x: (x, {"y": x * 10})).batch(4)
    ),
    "shuffle_of_one": lambda api: ranges(api, 9, 4).shuffle(1),
    "unbatch_and_batch": lambda api: ranges(api, 12, 2).unbatch().batch(5),
    "vectors": lambda api: api.data.Dataset.from_tensor_slices([[1, 2], [3, 4]]),
    "matrices": lambda api: api.data.Dataset.from_tensor_slices(
        np.arange(15.0, dtype="float32").reshape(5, 3)
    ).batch(4),
    "strings": lambda api: api.data.Dataset.from_tensor_slices(
        ["a", "bc", "", "d", "e"]
    ).batch(2),
}


@scenario("7.3", "12.12", cases=product(PIPELINES, ("AUTO", "OFF")))
def pipelines(api, pipeline, policy):
    strategy = api.multi_worker()
    distributed = distribute(api, strategy, PIPELINES[pipeline](api), policy)
    return {
        "spec": api.spec(distributed),
        "steps": api.steps(strategy, distributed, 7),
    }


@scenario("12.14", cases=product(("AUTO", "DATA", "OFF")))
def unbatched_scalars(api, policy):
    strategy = api.multi_worker()
    dataset = api.data.Dataset.range(4)
    return api.fails(
        lambda: api.steps(strategy, distribute(api, strategy, dataset, policy))
    )


@scenario("12.13")
def file_policy_without_files(api):
    strategy = api.multi_worker()
    dataset = ranges(api, 8, 4)
    return api.fails(
        lambda: api.steps(strategy, distribute(api, strategy, dataset, "FILE"))
    )


@scenario("12.13", cases=product(("AUTO", "FILE", "DATA", "OFF"), ("lines", "list")))
def files(api, policy, reader):
    """Four files of three lines."""
    strategy = api.multi_worker()
    with api.directory() as directory:
        names = []
        for i in range(4):
            path = Path(directory) / f"{i}.txt"
            path.write_text("".join(f"{i}{j}\n" for j in range(3)))
            names.append(str(path))
        if reader == "lines":
            dataset = api.data.TextLineDataset(names)
        else:
            found = api.data.Dataset.list_files(f"{directory}/*.txt", shuffle=False)
            dataset = found.flat_map(api.data.TextLineDataset)
        distributed = distribute(api, strategy, dataset.batch(4), policy)
        return values(api.steps(strategy, distributed))


@scenario("7.3", "12.15", cases=product(("AUTO", "OFF")))
def several_passes(api, policy):
    strategy = api.multi_worker()
    distributed = distribute(api, strategy, ranges(api, 10, 4), policy)
    passes = [values(api.steps(strategy, distributed)) for _ in range(2)]
    one, other = iter(distributed), iter(distributed)
    taken = [next(one), next(other), next(one), next(other), next(other)]
    return [passes, [api.local_results(strategy, batch) for batch in taken]]


@scenario("7.3")
def a_loop_that_is_left_and_begun_again(api):
    strategy = api.multi_worker()
    distributed = distribute(api, strategy, ranges(api, 10, 4))
    seen = []
    for _ in range(2):
        for batch in distributed:
            seen.append(api.local_results(strategy, batch))
            break
    return seen


@scenario("7.5", "12.15", cases=[("keep",), ("drop",)])
def past_the_end(api, remainder):
    strategy = api.multi_worker()
    dataset = ranges(api, 6, 4, drop_remainder=remainder == "drop")
    iterator = iter(distribute(api, strategy, dataset))
    results = []
    for _ in range(4):
        batch = api.attempt(iterator.get_next)
        failed = isinstance(batch, Exception)
        results.append(batch if failed else api.local_results(strategy, batch))
    results.append(api.attempt(lambda: next(iterator)))
    results.append(next(iterator, "nothing"))
    return results


@scenario("7.5", cases=product(("keep", "drop"), ("6", "5", "0")), clusters=MANY)
def get_next_as_optional(api, remainder, n):
    strategy = api.multi_worker()
    dataset = ranges(api, int(n), 4, drop_remainder=remainder == "drop")
    iterator = iter(distribute(api, strategy, dataset))
    results = []
    for _ in range(4):
        optional = iterator.get_next_as_optional()
        has_value = bool(optional.has_value())
        results.append(has_value)
        if has_value:
            results.append(api.local_results(strategy, optional.get_value()))
    return results


@scenario("7.5")
def optional_of_an_infinite_dataset(api):
    strategy = api.multi_worker()
    iterator = iter(distribute(api, strategy, ranges(api, 5, 4).repeat()))
    optionals = [iterator.get_next_as_optional() for _ in range(3)]
    return [
        [bool(each.has_value()), api.local_results(strategy, each.get_value())]
        for each in optionals
    ]


LENGTHS = {
    "equal": (6, 6, 6),
    "fewer_on_the_first": (6, 10, 8),
    "fewer_on_the_last": (10, 6, 4),
    "partial": (5, 4, 3),
    "none_on_the_first": (0, 4, 2),
    "none_on_the_last": (4, 3, 0),
    "none": (0, 0, 0),
}


@scenario(
    "7.4",
    cases=product(LENGTHS, ("keep", "drop")),
    clusters=("two", "three", "two_by_two"),
)
def lengths_of_datasets_from_a_function(api, lengths, remainder):
    strategy = api.multi_worker()

    def dataset_fn(context):
        worker = context.input_pipeline_id
        first, count = 100 * worker, LENGTHS[lengths][worker]
        dataset = api.data.Dataset.range(first, first + count)
        return dataset.batch(2, drop_remainder=remainder == "drop")

    distributed = strategy.distribute_datasets_from_function(dataset_fn)
    return [api.spec(distributed), api.steps(strategy, distributed)]


@scenario("7.4", cases=product(("fewer_on_the_first", "fewer_on_the_last")))
def lengths_that_only_show_at_the_end(api, lengths):
    """Nothing says how long a filtered dataset is."""
    strategy = api.multi_worker()

    def dataset_fn(context):
        count = LENGTHS[lengths][context.input_pipeline_id]
        return api.data.Dataset.range(20).filter(lambda x: x < count).batch(2)

    distributed = strategy.distribute_datasets_from_function(dataset_fn)
    return values(api.steps(strategy, distributed))


@scenario("7.4", cases=product(("fewer_on_the_first", "fewer_on_the_last")))
def optionals_of_datasets_of_different_length(api, lengths):
    strategy = api.multi_worker()

    def dataset_fn(context):
        return ranges(api, LENGTHS[lengths][context.input_pipeline_id], 2)

    iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))
    results = []
    for _ in range(7):
        optional = iterator.get_next_as_optional()
        results.append(bool(optional.has_value()))
        if results[-1]:
            results.append(api.local_results(strategy, optional.get_value()))
    return results


@scenario("7.4")
def unbatched_datasets_from_a_function(api):
    strategy = api.multi_worker()

    def dataset_fn(context):
        return api.data.Dataset.range(3 + 2 * context.input_pipeline_id)

    distributed = strategy.distribute_datasets_from_function(dataset_fn)
    return [api.spec(distributed), api.steps(strategy, distributed)]


@scenario("7.4", clusters=(*MANY, "chief", "one", "none"))
def contexts_of_the_dataset_function(api):
    strategy = api.multi_worker()
    calls = []

    def dataset_fn(context):
        size = context.get_per_replica_batch_size(12)
        calls.append(
            [
                context.num_input_pipelines,
                context.input_pipeline_id,
                context.num_replicas_in_sync,
                size,
            ]
        )
        return (
            api.data.Dataset.range(30)
            .shard(context.num_input_pipelines, context.input_pipeline_id)
            .batch(size)
        )

    distributed = strategy.distribute_datasets_from_function(dataset_fn)
    passes = [values(api.steps(strategy, distributed)) for _ in range(2)]
    return [calls, passes]


FIVE = [[{"int32[2]": [0, 1]}], [{"int32[2]": [2, 3]}], [{"int32[1]": [4]}]]


@scenario("7.6", cases=[("PER_WORKER",)])
@scenario(
    "7.6",
    cases=[("PER_REPLICA",)],
    differs="a dataset for each replica can be had on many workers too",
    expect=[[[[2, worker]], FIVE, NotImplementedError] for worker in range(2)],
)
def replication_modes(api, mode):
    strategy = api.multi_worker()
    mode = api.distribute.InputReplicationMode[mode]
    options = api.distribute.InputOptions(experimental_replication_mode=mode)
    seen = []

    def dataset_fn(context):
        seen.append([context.num_input_pipelines, context.input_pipeline_id])
        return ranges(api, 5, 2)

    steps = api.attempt(
        lambda: api.steps(
            strategy, strategy.distribute_datasets_from_function(dataset_fn, options)
        )
    )
    whole = api.attempt(
        lambda: api.steps(
            strategy,
            strategy.experimental_distribute_dataset(ranges(api, 6, 4), options),
        )
    )
    return [seen, steps, whole]


@scenario("7.5", "5.6", cases=product(("AUTO", "OFF")), clusters=MANY)
def batches_in_run(api, engine, policy):
    """A partial batch leaves workers with less, or nothing."""
    strategy = api.multi_worker()
    dataset = api.data.Dataset.from_tensor_slices(np.arange(9, dtype="float32"))
    replica_fn = api.compile_if(engine, lambda x: x * 2.0)
    results = []
    for batch in distribute(api, strategy, dataset.batch(4), policy):
        result = strategy.run(replica_fn, args=(batch,))
        results.append(
            [
                api.local_results(strategy, result),
                strategy.reduce("SUM", result, axis=0),
                strategy.reduce("MEAN", result, axis=0),
            ]
        )
    return results


@scenario("7.5", "5.4")
def step_that_takes_from_an_iterator(api, engine):
    strategy = api.multi_worker()
    dataset = api.data.Dataset.from_tensor_slices(np.arange(8, dtype="float32"))
    iterator = iter(distribute(api, strategy, dataset.batch(4)))

    def step(iterator):
        result = strategy.run(lambda x: api.sum(x), args=(next(iterator),))
        return strategy.reduce("SUM", result, axis=None)

    if engine == "compiled":
        step = api.function_with_loop(step)
    return [step(iterator), step(iterator), api.fails(lambda: step(iterator))]


@scenario("7.4", "5.6")
def training_over_datasets_of_different_length(api, engine):
    """Worker 0 ends first and goes on with empty batches."""
    strategy = api.multi_worker()
    with strategy.scope():
        total = api.Variable(0.0, aggregation=api.VariableAggregation.SUM)

    def dataset_fn(context):
        count = 4 + 3 * context.input_pipeline_id
        return api.data.Dataset.from_tensor_slices(
            np.arange(1.0, 1 + count, dtype="float32")
        ).batch(2)

    def replica_fn(x):
        total.assign_add(api.sum(x))
        return x

    step = api.compile_if(engine, replica_fn)
    seen = []
    for batch in strategy.distribute_datasets_from_function(dataset_fn):
        result = strategy.run(step, args=(batch,))
        seen.append(api.local_results(strategy, result))
    return [seen, api.copies(total)]


@scenario("7.3")
def numbers_of_elements(api):
    strategy = api.multi_worker()
    datasets = {
        "range": ranges(api, 10, 4),
        "static": ranges(api, 10, 4, drop_remainder=True),
        "infinite": ranges(api, 10, 4).repeat(),
        "filtered": ranges(api, 10, 4).filter(lambda x: x[0] > 2),
    }
    return {
        name: [
            api.plain(strategy.experimental_distribute_dataset(each).cardinality),
            api.attempt(
                lambda d=each: len(strategy.experimental_distribute_dataset(d))
            ),
        ]
        for name, each in datasets.items()
    }


@scenario("7.3")
def element_specs(api):
    strategy = api.multi_worker()
    Dataset = api.data.Dataset
    datasets = {
        "partial": ranges(api, 6, 4),
        "static": ranges(api, 6, 4, drop_remainder=True),
        "static_odd": ranges(api, 6, 5, drop_remainder=True),
        "infinite": ranges(api, 6, 4).repeat(),
        "tuple": Dataset.range(6).map(lambda x: (x, {"y": x})).batch(4),
        "matrix": Dataset.from_tensor_slices(np.zeros((4, 3))).batch(2),
    }
    return {
        name: [
            api.spec(distribute(api, strategy, dataset)),
            api.spec(distribute(api, strategy, dataset, "OFF")),
            api.attempt(
                lambda d=dataset: api.spec(
                    strategy.distribute_datasets_from_function(lambda context: d)
                )
            ),
        ]
        for name, dataset in datasets.items()
    }
