"""Distributed datasets: who gets what at which step (7.3-7.6, 12.11-12.15)."""

from collections import namedtuple

import numpy as np

from . import scenario

POLICIES = ("AUTO", "DATA", "OFF", "FILE", "HINT")
REPLICAS = ("1", "2", "3", "4")
SIZES = (
    (10, 4),
    (11, 8),
    (14, 8),
    (6, 6),
    (9, 5),
    (7, 3),
    (3, 8),
    (5, 2),
    (1, 4),
    (8, 4),
    (0, 3),
    (3, 1),
)
Pair = namedtuple("Pair", ["x", "y"])


@scenario(
    "7.3",
    "12.12",
    cases=[
        (policy, replicas, remainder)
        for policy in POLICIES
        for replicas in REPLICAS
        for remainder in ("keep", "drop")
    ],
)
def batches_are_split(api, policy, replicas, remainder):
    strategy = api.mirrored(int(replicas))

    def split(n, batch):
        dataset = api.data.Dataset.range(n).batch(
            batch, drop_remainder=remainder == "drop"
        )
        distributed = _distribute(api, strategy, dataset, policy)
        return [api.spec(distributed), _values(api.steps(strategy, distributed))]

    return {f"{n} by {batch}": split(n, batch) for n, batch in SIZES}


def _range(api, n, batch, **kwargs):
    return api.data.Dataset.range(n).batch(batch, **kwargs)


def _generator(api, sizes, shape=(None,)):
    return api.data.Dataset.from_generator(
        lambda: ([10 * size + i for i in range(size)] for size in sizes),
        output_signature=api.TensorSpec(shape, "int32"),
    )


PIPELINES = {
    "repeat": lambda api: _range(api, 5, 4).repeat(2),
    "repeat_for_ever": lambda api: _range(api, 5, 3).repeat(),
    "repeat_before_batch": lambda api: api.data.Dataset.range(5).repeat(2).batch(4),
    "map": lambda api: _range(api, 5, 3).map(lambda x: x * 2),
    "map_of_static_batches": lambda api: _range(api, 11, 3, drop_remainder=True).map(
        lambda x: x * 2
    ),
    "map_to_more_rows": lambda api: _range(api, 5, 3).map(
        lambda x: api.ops.constant([1, 2, 3, 4, 5])
    ),
    "parallel_map": lambda api: _range(api, 5, 3).map(
        lambda x: x * 2, num_parallel_calls=2
    ),
    "parallel_batch": lambda api: _range(api, 5, 3, num_parallel_calls=2),
    "filter": lambda api: _range(api, 11, 3).filter(lambda x: x[0] > 2),
    "take": lambda api: _range(api, 20, 3).take(2),
    "take_of_the_partial_batch": lambda api: _range(api, 7, 3).take(3).repeat(2),
    "skip": lambda api: _range(api, 11, 3).skip(1),
    "shard": lambda api: _range(api, 13, 3).shard(2, 0),
    "cache": lambda api: _range(api, 5, 3).cache().repeat(2),
    "prefetch": lambda api: _range(api, 5, 3).prefetch(2).repeat(2),
    "shuffle": lambda api: _range(api, 5, 3).shuffle(1),
    "concatenate": lambda api: _range(api, 5, 3).concatenate(_range(api, 4, 3)),
    "concatenate_other_size": lambda api: _range(api, 7, 3).concatenate(
        _range(api, 10, 4)
    ),
    "zip": lambda api: api.data.Dataset.zip((_range(api, 5, 3), _range(api, 5, 3))),
    "flat_map": lambda api: api.data.Dataset.range(2).flat_map(
        lambda i: _range(api, 5, 3)
    ),
    "interleave": lambda api: api.data.Dataset.range(2).interleave(
        lambda i: _range(api, 5, 3), cycle_length=2
    ),
    "interleave_before_batch": lambda api: (
        api.data.Dataset.range(2)
        .interleave(lambda i: api.data.Dataset.range(5), cycle_length=2)
        .batch(3)
    ),
    "batch_of_batch": lambda api: _range(api, 13, 2).batch(3),
    "unbatch_and_batch": lambda api: _range(api, 12, 2).unbatch().batch(5),
    "unbatch": lambda api: _range(api, 12, 2).unbatch(),
    "padded_batch": lambda api: (
        api.data.Dataset.range(1, 6).map(lambda x: api.ops.fill([x], x)).padded_batch(3)
    ),
    "matrix": lambda api: api.data.Dataset.from_tensors([[1, 2], [3, 4], [5, 6]]),
    "vectors": lambda api: api.data.Dataset.from_tensor_slices([[1, 2, 3], [4, 5, 6]]),
    "generator": lambda api: _generator(api, [3, 4, 1, 5]),
    "generator_of_static_batches": lambda api: _generator(api, [3, 3], (3,)),
    "generator_of_unknown_rank": lambda api: _generator(api, [3, 1], None),
    "generator_with_an_empty_batch": lambda api: _generator(api, [3, 0, 2]),
    "tuple": lambda api: _range(api, 5, 3).map(lambda x: (x, x * 10)),
    "tuple_before_batch": lambda api: (
        api.data.Dataset.range(5).map(lambda x: (x, {"y": x * 10})).batch(3)
    ),
    "namedtuple": lambda api: (
        api.data.Dataset.range(5).map(lambda x: Pair(x, x * 10)).batch(3)
    ),
    "different_static_sizes": lambda api: api.data.Dataset.from_tensors(
        ([1, 2, 3], [1, 2, 3, 4, 5])
    ),
    "matrices_of_batches": lambda api: api.data.Dataset.from_tensor_slices(
        np.arange(15.0).reshape(5, 3)
    ).batch(4),
    "strings": lambda api: api.data.Dataset.from_tensor_slices(
        ["a", "bc", "", "d", "é"]
    ).batch(3),
    "floats_and_bools": lambda api: api.data.Dataset.from_tensor_slices(
        {"x": np.float32([0.5, 1.5, 2.5]), "flag": [True, False, True]}
    ).batch(3),
    "rebatch": lambda api: _range(api, 11, 4).rebatch(5),
    "rebatch_drop": lambda api: _range(api, 11, 4).rebatch(5, drop_remainder=True),
    "rebatch_in_turn": lambda api: _range(api, 11, 4).rebatch([2, 4]),
    "take_while": lambda api: _range(api, 11, 4).take_while(
        lambda x: api.ops.sum(x) < 30
    ),
    "scan": lambda api: _range(api, 11, 4).scan(
        np.int64(0), lambda total, x: (total + api.ops.sum(x), x + total)
    ),
    "scan_static": lambda api: _range(api, 12, 4, drop_remainder=True).scan(
        np.int64(1), lambda state, x: (state, x * state)
    ),
    "window": lambda api: (
        api.data.Dataset.range(11).window(4).flat_map(lambda window: window.batch(4))
    ),
    "window_drop": lambda api: (
        api.data.Dataset.range(11)
        .window(4)
        .flat_map(lambda window: window.batch(4, drop_remainder=True))
    ),
    "window_before_batch": lambda api: (
        api.data.Dataset.range(11).window(3).flat_map(lambda window: window).batch(4)
    ),
    "group_by_window": lambda api: api.data.Dataset.range(11).group_by_window(
        lambda x: x % 2, lambda key, window: window.batch(4), window_size=4
    ),
    "choose": lambda api: api.data.Dataset.choose_from_datasets(
        [_range(api, 11, 4), _range(api, 8, 4)], api.data.Dataset.range(2).repeat()
    ),
    "choose_before_batch": lambda api: api.data.Dataset.choose_from_datasets(
        [api.data.Dataset.range(5), api.data.Dataset.range(10, 15)],
        api.data.Dataset.range(2).repeat(),
    ).batch(4),
    "unique": lambda api: _range(api, 11, 4).repeat(2).unique(),
    "ignore_errors": lambda api: (
        _range(api, 11, 4)
        .map(lambda x: api.ops.refuse(x, api.ops.sum(x) == 22))
        .ignore_errors()
    ),
    "counter": lambda api: api.data.Dataset.counter(step=2).batch(4).take(3),
}


@scenario(
    "7.3",
    "12.12",
    cases=[(name, policy) for name in PIPELINES for policy in ("AUTO", "OFF")],
)
def pipelines_are_split(api, pipeline, policy):
    def split(num_replicas):
        strategy = api.mirrored(num_replicas)
        dataset = PIPELINES[pipeline](api)
        distributed = _distribute(api, strategy, dataset, policy)
        steps = api.steps(strategy, distributed, 7)
        if pipeline in ("batch_of_batch", "padded_batch"):
            # An empty part has inner lengths 0 in TensorFlow, its neighbours' in mirrax.
            steps = _values(steps)
        return {"spec": api.spec(distributed), "steps": steps}

    counts = (1,) if pipeline == "unbatch" else (1, 2, 3)
    return {f"{n} replicas": split(n) for n in counts}


@scenario("7.3", cases=[("DATA",), ("FILE",), ("HINT",)])
def repeated_batches_under_other_policies(api, policy):
    strategy = api.mirrored(2)
    results = {}
    for name in ("repeat", "map", "take", "concatenate_other_size", "generator"):
        distributed = _distribute(api, strategy, PIPELINES[name](api), policy)
        results[name] = _values(api.steps(strategy, distributed))
    return results


@scenario("7.3")
def the_last_policy_counts(api):
    strategy = api.mirrored(2)
    dataset = _with_policy(api, _range(api, 11, 8), "OFF")
    later = _with_policy(api, dataset, "DATA")
    before = _with_policy(api, api.data.Dataset.range(11), "OFF").batch(8)
    return [
        _values(api.steps(strategy, strategy.experimental_distribute_dataset(each)))
        for each in (dataset, later, before)
    ]


@scenario("12.14")
def unbatched_scalars_cannot_be_split(api):
    numbers = api.data.Dataset.range(4)

    def distribute(num_replicas, dataset, policy):
        strategy = api.mirrored(num_replicas)
        return lambda: api.steps(strategy, _distribute(api, strategy, dataset, policy))

    return [
        [api.fails(distribute(2, numbers, policy)) for policy in POLICIES],
        api.fails(distribute(2, numbers.batch(2).enumerate(), "AUTO")),
        api.fails(distribute(2, numbers.batch(2).unbatch(), "AUTO")),
        distribute(1, numbers, "AUTO")(),
        distribute(1, numbers.batch(3).enumerate(), "AUTO")(),
    ]


@scenario("7.3")
def what_is_no_dataset_cannot_be_distributed(api):
    return [
        api.fails(lambda: api.mirrored(2).experimental_distribute_dataset(5)),
        api.fails(lambda: api.mirrored(1).experimental_distribute_dataset(None)),
    ]


@scenario("7.3")
def hint_without_its_policy(api):
    hint = api.data.experimental.SHARD_HINT
    strategy = api.mirrored(2)
    dataset = api.data.Dataset.range(6).shard(hint, hint).batch(4)

    def under(policy):
        distributed = _distribute(api, strategy, dataset, policy)
        return lambda: api.steps(strategy, distributed)

    return [
        hint,
        under("HINT")(),
        api.fails(under("AUTO")),
        api.fails(under("OFF")),
        api.fails(lambda: api.elements(dataset)),
    ]


@scenario("7.3")
def one_device_strategy_gets_whole_batches(api):
    strategy = api.one_device()
    distributed = strategy.experimental_distribute_dataset(_range(api, 5, 3))
    return [api.spec(distributed), api.steps(strategy, distributed)]


@scenario("7.3")
def default_strategy_gives_the_dataset_back(api):
    strategy = api.distribute.get_strategy()
    distributed = strategy.experimental_distribute_dataset(_range(api, 5, 3))
    return [api.spec(distributed), api.steps(strategy, distributed)]


@scenario("7.3", "12.15")
def iterating_twice(api):
    strategy = api.mirrored(2)
    distributed = strategy.experimental_distribute_dataset(_range(api, 6, 4))
    return [api.steps(strategy, distributed), api.steps(strategy, distributed)]


@scenario("7.3")
def two_iterators_at_once(api):
    strategy = api.mirrored(2)
    distributed = strategy.experimental_distribute_dataset(_range(api, 10, 4))
    one, other = iter(distributed), iter(distributed)
    taken = [next(one), next(other), next(one), next(one), next(other)]
    return [api.local_results(strategy, batch) for batch in taken]


@scenario("7.3")
def an_iterator_is_its_own_iterator(api):
    strategy = api.mirrored(2)
    distributed = strategy.experimental_distribute_dataset(_range(api, 10, 4))
    iterator = iter(distributed)
    first = next(iterator)
    return [
        iter(iterator) is iterator,
        api.local_results(strategy, first),
        api.steps(strategy, iterator),
    ]


@scenario("7.3")
def a_loop_may_be_left_and_begun_again(api):
    strategy = api.mirrored(2)
    distributed = strategy.experimental_distribute_dataset(_range(api, 10, 4))
    seen = []
    for _ in range(2):
        for batch in distributed:
            seen.append(api.local_results(strategy, batch))
            break
    return seen


@scenario("7.5", "12.15")
def past_the_end(api):
    strategy = api.mirrored(2)
    results = []
    for drop in (False, True):
        dataset = _range(api, 6, 4, drop_remainder=drop)
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        results.append([api.local_results(strategy, iterator.get_next())])
        results += [api.attempt(iterator.get_next) for _ in range(3)]
        results.append(api.attempt(lambda it=iterator: next(it)))
        results.append(list(iterator))
    return [
        part
        if isinstance(part, list | Exception)
        else api.local_results(strategy, part)
        for part in results
    ]


@scenario("12.15")
def next_with_a_default_past_the_end(api):
    strategy = api.mirrored(2)
    iterator = iter(strategy.experimental_distribute_dataset(_range(api, 4, 4)))
    next(iterator)
    return next(iterator, "nothing")


@scenario("7.5", cases=[("1",), ("2",), ("3",)])
def get_next_as_optional(api, replicas):
    strategy = api.mirrored(int(replicas))
    results = []
    for dataset in (
        _range(api, 5, 4),
        _range(api, 5, 4, drop_remainder=True),
        _range(api, 0, 4),
        _range(api, 0, 4, drop_remainder=True),
    ):
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        for _ in range(4):
            optional = iterator.get_next_as_optional()
            has_value = bool(optional.has_value())
            results.append(has_value)
            if has_value:
                value = api.local_results(strategy, optional.get_value())
                results.append(value)
        results.append(api.attempt(optional.get_value))
    return results


@scenario("7.5")
def optional_and_get_next_share_the_iterator(api):
    strategy = api.mirrored(2)
    iterator = iter(strategy.experimental_distribute_dataset(_range(api, 9, 4)))
    first = iterator.get_next_as_optional()
    second = iterator.get_next()
    third = iterator.get_next_as_optional()
    return [
        api.local_results(strategy, first.get_value()),
        api.local_results(strategy, second),
        api.local_results(strategy, third.get_value()),
        api.local_results(strategy, first.get_value()),
        bool(iterator.get_next_as_optional().has_value()),
    ]


@scenario("7.5", cases=[("1",), ("2",)])
def optional_of_an_infinite_dataset(api, replicas):
    strategy = api.mirrored(int(replicas))
    dataset = _range(api, 5, 4).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    optionals = [iterator.get_next_as_optional() for _ in range(3)]
    return [
        [bool(each.has_value()), api.local_results(strategy, each.get_value())]
        for each in optionals
    ]


@scenario("7.5")
def next_inside_a_replica_is_an_error(api):
    strategy = api.mirrored(2)
    iterator = iter(strategy.experimental_distribute_dataset(_range(api, 8, 4)))
    return api.attempt(lambda: strategy.run(lambda: next(iterator)))


@scenario("7.3")
def classes_and_what_they_lack(api):
    strategy = api.mirrored(2)
    distributed = strategy.experimental_distribute_dataset(_range(api, 6, 4))
    function = strategy.distribute_datasets_from_function(lambda c: _range(api, 6, 4))
    return [
        isinstance(distributed, api.distribute.DistributedDataset),
        isinstance(function, api.distribute.DistributedDataset),
        isinstance(iter(distributed), api.distribute.DistributedIterator),
        isinstance(iter(function), api.distribute.DistributedIterator),
        api.attempt(lambda: len(distributed)),
        api.attempt(lambda: distributed.map(lambda x: x)),
        api.attempt(lambda: distributed.batch(2)),
        api.attempt(lambda: distributed.as_numpy_iterator()),
    ]


@scenario("7.3", "12.11", cases=[("1",), ("2",), ("3",)])
def element_specs(api, replicas):
    strategy = api.mirrored(int(replicas))
    Dataset = api.data.Dataset
    datasets = {
        "partial": _range(api, 6, 4),
        "static": _range(api, 6, 4, drop_remainder=True),
        "static_odd": _range(api, 6, 5, drop_remainder=True),
        "static_six": _range(api, 6, 6, drop_remainder=True),
        "infinite": _range(api, 6, 4).repeat(),
        "structure": Dataset.from_tensors(([1, 2], {"a": [[1.0], [2.0]]})),
        "structure_of_six": Dataset.from_tensors(([1] * 6, {"a": [[1.0]] * 6})),
        "tuple": Dataset.range(6).map(lambda x: (x, {"y": x})).batch(3),
        "strings": Dataset.from_tensor_slices(["a", "b"]).batch(2),
        "unknown_rank": _generator(api, [1], None),
        "matrix": Dataset.from_tensor_slices(np.zeros((4, 3))).batch(2),
    }
    return {
        name: [
            api.spec(strategy.experimental_distribute_dataset(dataset)),
            api.spec(_distribute(api, strategy, dataset, "OFF")),
            api.spec(iter(strategy.experimental_distribute_dataset(dataset))),
            api.spec(
                strategy.distribute_datasets_from_function(lambda context, d=dataset: d)
            ),
        ]
        for name, dataset in datasets.items()
    }


FUNCTIONS = {
    "partial": lambda api: _range(api, 10, 2),
    "partial_odd": lambda api: _range(api, 9, 2),
    "static": lambda api: _range(api, 9, 2, drop_remainder=True),
    "scalars": lambda api: api.data.Dataset.range(5),
    "vectors": lambda api: api.data.Dataset.from_tensor_slices(
        [[1, 2], [3, 4], [5, 6]]
    ),
    "infinite": lambda api: _range(api, 5, 2).repeat(),
    "infinite_scalars": lambda api: api.data.Dataset.range(3).repeat(),
    "structure": lambda api: _range(api, 5, 2).map(
        lambda x: (x, {"fixed": api.ops.constant([1, 2, 3]), "one": x[0]})
    ),
    "two_unknown_sizes": lambda api: api.data.Dataset.from_generator(
        lambda: iter([[[1, 2]], [[3]], [[4, 5], [6, 7]], [[8]]]),
        output_signature=api.TensorSpec([None, None], "int32"),
    ),
    "strings": lambda api: api.data.Dataset.from_tensor_slices(["a", "b", "c"]).batch(
        2
    ),
    "matrices": lambda api: api.data.Dataset.from_tensor_slices(
        np.arange(15.0, dtype="float32").reshape(5, 3)
    ).batch(2),
    "empty": lambda api: _range(api, 0, 2),
    "one": lambda api: _range(api, 2, 2),
}


@scenario(
    "7.4",
    "12.14",
    cases=[(name, replicas) for name in FUNCTIONS for replicas in REPLICAS],
)
def datasets_from_a_function(api, dataset, replicas):
    strategy = api.mirrored(int(replicas))
    distributed = strategy.distribute_datasets_from_function(
        lambda context: FUNCTIONS[dataset](api)
    )
    return [api.spec(distributed), api.steps(strategy, distributed, 6)]


@scenario("7.4")
def older_name_of_datasets_from_function(api):
    strategy = api.mirrored(2)
    distributed = strategy.experimental_distribute_datasets_from_function(
        lambda context: _range(api, 10, 2)
    )
    return api.steps(strategy, distributed)


@scenario(
    "7.4",
    "7.6",
    "12.15",
    cases=[(mode, r) for mode in ("PER_WORKER", "PER_REPLICA") for r in "123"],
)
def contexts_of_the_dataset_function(api, mode, replicas):
    strategy = api.mirrored(int(replicas))
    calls = []

    def dataset_fn(context):
        batch = context.get_per_replica_batch_size(12)
        calls.append(
            [
                context.num_input_pipelines,
                context.input_pipeline_id,
                context.num_replicas_in_sync,
                batch,
            ]
        )
        offset = 100 * context.input_pipeline_id
        return (
            api.data.Dataset.range(30)
            .shard(context.num_input_pipelines, context.input_pipeline_id)
            .map(lambda x: x + offset)
            .batch(batch)
        )

    mode = api.distribute.InputReplicationMode[mode]
    options = api.distribute.InputOptions(experimental_replication_mode=mode)
    distributed = strategy.distribute_datasets_from_function(dataset_fn, options)
    before = len(calls)
    results = [api.steps(strategy, distributed), api.steps(strategy, distributed)]
    return [before, calls, results]


@scenario("7.4", cases=[("2",), ("3",)])
def per_replica_datasets_of_different_length(api, replicas):
    strategy = api.mirrored(int(replicas))
    mode = api.distribute.InputReplicationMode.PER_REPLICA
    options = api.distribute.InputOptions(experimental_replication_mode=mode)

    def steps(drop, lengths):
        def dataset_fn(context):
            n = lengths[context.input_pipeline_id]
            return _range(api, n, 2, drop_remainder=drop)

        return api.steps(
            strategy, strategy.distribute_datasets_from_function(dataset_fn, options)
        )

    return {
        f"{lengths} {drop}": steps(drop, lengths)
        for lengths in ((2, 5, 7), (7, 2, 0), (0, 3, 3), (4, 4, 4))
        for drop in (False, True)
    }


@scenario("7.4")
def input_contexts(api):
    Context = api.distribute.InputContext
    context = Context(
        num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4
    )
    default = Context()
    return [
        context.num_input_pipelines,
        context.input_pipeline_id,
        context.num_replicas_in_sync,
        context.get_per_replica_batch_size(8),
        context.get_per_replica_batch_size(0),
        api.attempt(lambda: context.get_per_replica_batch_size(6)),
        [
            default.num_input_pipelines,
            default.input_pipeline_id,
            default.num_replicas_in_sync,
            default.get_per_replica_batch_size(7),
        ],
        str(context).partition("InputContext")[2],
        Context(3, 2, 6).input_pipeline_id,
    ]


@scenario("7.4")
def dataset_functions_that_fail(api):
    strategy = api.mirrored(2)
    distribute = strategy.distribute_datasets_from_function

    def dataset_fn(context):
        raise KeyError("as raised")

    return [
        api.attempt(lambda: distribute(dataset_fn)),
        api.fails(lambda: distribute(lambda context: 5)),
        api.fails(lambda: distribute(lambda context: None)),
        api.fails(lambda: distribute(api.data.Dataset.range(3))),
        api.fails(lambda: distribute(lambda: api.data.Dataset.range(3))),
    ]


@scenario("7.6")
def input_options_have_defaults(api):
    options = api.distribute.InputOptions()
    return [
        options.experimental_fetch_to_device,
        options.experimental_replication_mode,
        options.experimental_place_dataset_on_device,
        options.experimental_per_replica_buffer_size,
        options == api.distribute.InputOptions(),
        api.distribute.InputOptions(
            False, api.distribute.InputReplicationMode.PER_REPLICA
        ).experimental_replication_mode,
    ]


@scenario("7.6")
def replication_modes(api):
    modes = api.distribute.InputReplicationMode
    return [[each.name, each.value] for each in modes]


def _all_options(api, place):
    for mode in api.distribute.InputReplicationMode:
        for fetch in (True, False):
            for buffer in (1, 3):
                name = f"{mode.name} {fetch} {buffer}"
                yield name, (fetch, mode, place == "on_device", buffer)


ON_HOST = [(n, "on_host") for n in "123"]
ON_DEVICE = {
    "cases": [(n, "on_device") for n in "123"],
    "differs": "datasets are never placed on a device, which an error says",
    "expect": {
        f"{mode} {fetch} {buffer}": ValueError
        for mode in ("PER_WORKER", "PER_REPLICA")
        for fetch in (True, False)
        for buffer in (1, 3)
    },
}


@scenario("7.6", cases=ON_HOST)
@scenario("7.6", **ON_DEVICE)
def options_for_a_dataset(api, replicas, place):
    strategy = api.mirrored(int(replicas))
    results = {}
    for name, options in _all_options(api, place):
        results[name] = api.attempt(
            lambda o=options: _values(
                api.steps(
                    strategy,
                    strategy.experimental_distribute_dataset(
                        _range(api, 9, 4), api.distribute.InputOptions(*o)
                    ),
                )
            )
        )
    return results


@scenario("7.6", cases=ON_HOST)
@scenario("7.6", **ON_DEVICE)
def options_for_a_dataset_function(api, replicas, place):
    strategy = api.mirrored(int(replicas))
    results = {}
    for name, options in _all_options(api, place):

        def dataset_fn(context):
            offset = 100 * context.input_pipeline_id
            return _range(api, 5, 2).map(lambda x: x + offset)

        results[name] = api.attempt(
            lambda o=options, f=dataset_fn: _values(
                api.steps(
                    strategy,
                    strategy.distribute_datasets_from_function(
                        f, api.distribute.InputOptions(*o)
                    ),
                )
            )
        )
    return results


NUMPY_INPUTS = {
    "array": lambda: np.arange(6, dtype="float32").reshape(3, 2),
    "integers": lambda: np.arange(3),
    "tuple": lambda: (np.float32([1, 2, 3]), np.int32([4, 5, 6])),
    "dict": lambda: {"x": np.float32([1, 2, 3]), "y": np.int32([[4], [5], [6]])},
    "nested": lambda: ({"x": np.float32([1, 2])}, np.int32([3, 4])),
}


@scenario("7.5", cases=[(name,) for name in NUMPY_INPUTS])
def numpy_dataset(api, kind):
    strategy = api.mirrored_v1(2)
    dataset = strategy.experimental_make_numpy_dataset(NUMPY_INPUTS[kind]())
    return [api.spec(dataset), api.elements(dataset)]


LISTS = "lists of numbers are taken for arrays"


@scenario("7.5", cases=[("list_of_arrays",)])
@scenario(
    "7.5",
    cases=[("list",)],
    differs=LISTS,
    expect=[{"float32[]": 1.0}, {"float32[]": 2.0}, {"float32[]": 3.0}],
)
@scenario(
    "7.5",
    cases=[("lists",)],
    differs=LISTS,
    expect=[{"int32[2]": [1, 2]}, {"int32[2]": [3, 4]}],
)
def numpy_dataset_of_lists(api, kind):
    strategy = api.mirrored_v1(2)
    value = {
        "list": [1.0, 2.0, 3.0],
        "lists": [[1, 2], [3, 4]],
        "list_of_arrays": [np.float32([1, 2]), np.float32([3, 4])],
    }[kind]
    return api.elements(strategy.experimental_make_numpy_dataset(value))


@scenario("7.5")
def numpy_dataset_distributed(api):
    strategy = api.mirrored_v1(2)
    inputs = np.ones(10, dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(inputs).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset)
    return api.steps(strategy, distributed)


@scenario("7.5", "5.6")
def batches_in_run(api, engine):
    strategy = api.mirrored(2)
    dataset = api.data.Dataset.from_tensor_slices(np.arange(11, dtype="float32"))
    replica_fn = api.compile_if(engine, lambda x: x * 2.0)
    results = []
    for batch in strategy.experimental_distribute_dataset(dataset.batch(4)):
        result = strategy.run(replica_fn, args=(batch,))
        results.append(
            [
                strategy.reduce("SUM", result, axis=0),
                strategy.reduce("MEAN", result, axis=0),
            ]
        )
    return results


@scenario("7.3", "5.6", cases=[("AUTO",), ("OFF",)])
def structures_of_batches_in_run(api, engine, policy):
    strategy = api.mirrored(3)
    dataset = api.data.Dataset.from_tensor_slices(
        (
            {"x": np.arange(14, dtype="float32").reshape(7, 2)},
            np.arange(7, dtype="int32"),
        )
    ).batch(4)

    def replica_fn(features, labels):
        return {"sum": api.sum(features["x"]), "labels": labels * 10}

    replica_fn = api.compile_if(engine, replica_fn)
    results = []
    for features, labels in _distribute(api, strategy, dataset, policy):
        out = strategy.run(replica_fn, args=(features, labels))
        results.append(
            [
                strategy.reduce("SUM", out["sum"], axis=None),
                strategy.reduce("SUM", out["labels"], axis=0),
                api.local_results(strategy, out["labels"]),
            ]
        )
    return results


@scenario("7.4", "5.6")
def batches_of_a_function_in_run(api, engine):
    strategy = api.mirrored(4)
    distributed = strategy.distribute_datasets_from_function(
        lambda context: api.data.Dataset.from_tensor_slices(
            np.arange(1, 11, dtype="float32")
        ).batch(2)
    )

    def step(batch):
        result = strategy.run(lambda x: api.sum(x), args=(batch,))
        return strategy.reduce("SUM", result, axis=None)

    step = api.compile_if(engine, step)
    return [step(batch) for batch in distributed]


@scenario("5.4", "7.3")
def epoch_function_over_a_distributed_dataset(api, engine):
    strategy = api.mirrored(2)
    dataset = api.data.Dataset.from_tensor_slices(np.arange(10, dtype="float32"))
    distributed = strategy.experimental_distribute_dataset(dataset.batch(4))
    with strategy.scope():
        total = api.Variable(0.0, aggregation=api.VariableAggregation.SUM)

    def replica_fn(x):
        total.assign_add(api.sum(x))

    def epoch(batches):
        for batch in batches:
            strategy.run(replica_fn, args=(batch,))

    if engine == "compiled":
        epoch = api.function_with_loop(epoch)
    epoch(distributed)
    once = float(total.numpy())
    epoch(distributed)
    return [once, float(total.numpy())]


@scenario("5.4", "7.3")
def function_that_takes_from_an_iterator(api, engine):
    strategy = api.mirrored(2)
    dataset = api.data.Dataset.from_tensor_slices(np.arange(10, dtype="float32"))
    iterator = iter(strategy.experimental_distribute_dataset(dataset.batch(4)))

    def step(iterator):
        result = strategy.run(lambda x: api.sum(x), args=(next(iterator),))
        return strategy.reduce("SUM", result, axis=None)

    if engine == "compiled":
        step = api.function_with_loop(step)
    return [
        step(iterator),
        step(iterator),
        step(iterator),
        api.fails(lambda: step(iterator)),
    ]


@scenario("7.5", cases=[("1",), ("2",), ("3",)])
def dataset_iterator_of_v1(api, replicas):
    strategy = api.mirrored_v1(int(replicas))
    iterator = strategy.make_dataset_iterator(_range(api, 10, 4))
    iterator.initialize()
    results = _drain(api, strategy, iterator)
    iterator.initialize()
    return [results, api.local_results(strategy, iterator.get_next())]


@scenario("7.5")
def dataset_iterator_of_v1_begins_again(api):
    strategy = api.mirrored_v1(2)
    iterator = strategy.make_dataset_iterator(_range(api, 10, 4))
    iterator.initialize()
    first = api.local_results(strategy, iterator.get_next())
    iterator.initialize()
    return [first, api.local_results(strategy, iterator.get_next())]


@scenario("7.5", cases=[("1",), ("2",), ("3",)])
def function_iterator_of_v1(api, replicas):
    strategy = api.mirrored_v1(int(replicas))
    calls = []

    def input_fn(context):
        calls.append(
            [
                context.num_input_pipelines,
                context.input_pipeline_id,
                context.num_replicas_in_sync,
            ]
        )
        return _range(api, 10, 2)

    iterator = strategy.make_input_fn_iterator(input_fn)
    iterator.initialize()
    return [calls, _drain(api, strategy, iterator)]


@scenario("7.5")
def function_iterator_of_v1_with_its_mode(api):
    strategy = api.mirrored_v1(2)
    mode = api.distribute.InputReplicationMode
    iterator = strategy.make_input_fn_iterator(
        lambda context: _range(api, 4, 2), replication_mode=mode.PER_WORKER
    )
    iterator.initialize()
    return [
        api.local_results(strategy, iterator.get_next()),
        api.fails(
            lambda: strategy.make_input_fn_iterator(
                lambda context: _range(api, 4, 2), replication_mode=mode.PER_REPLICA
            )
        ),
    ]


@scenario("7.5", "5.10")
def experimental_run_of_v1(api):
    strategy = api.mirrored_v1(2)
    dataset = api.data.Dataset.from_tensor_slices(np.arange(8, dtype="float32"))
    iterator = strategy.make_dataset_iterator(dataset.batch(4))
    iterator.initialize()
    result = strategy.experimental_run(lambda x: x * 2.0, iterator)
    return api.local_results(strategy, result)


def _with_policy(api, dataset, policy):
    options = api.data.Options()
    policies = api.data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = policies[policy]
    return dataset.with_options(options)


def _distribute(api, strategy, dataset, policy):
    return strategy.experimental_distribute_dataset(_with_policy(api, dataset, policy))


def _values(steps):
    """Only the values, where the types are clear."""
    return [[next(iter(part.values())) for part in step] for step in steps]


def _drain(api, strategy, iterator, limit=20):
    """All steps, and what ends them."""
    results = []
    for _ in range(limit):
        batch = api.attempt(iterator.get_next)
        if isinstance(batch, Exception):
            return [*results, batch]
        results.append(api.local_results(strategy, batch))
    return results
