"""Elements chosen, drawn and carried along, and datasets in files (7.1)."""

from collections import namedtuple

import numpy as np

from . import scenario

Pair = namedtuple("Pair", ["a", "b"])


def _seen(api, dataset, limit=30):
    return [api.spec(dataset), int(dataset.cardinality()), api.numbers(dataset, limit)]


def _parts(api):
    Dataset = api.data.Dataset
    return [Dataset.range(3), Dataset.range(10, 12), Dataset.range(20, 25)]


def _choices(api, *numbers):
    return api.data.Dataset.from_tensor_slices(np.array(numbers, np.int64))


# Choosing and sampling.


@scenario("7.1", cases=[("stop",), ("go_on",)])
def choose_from_datasets(api, at_the_end):
    parts, stop = _parts(api), at_the_end == "stop"
    nothing = api.data.Dataset.range(0)

    def choose(datasets, choices):
        Dataset = api.data.Dataset
        return _seen(api, Dataset.choose_from_datasets(datasets, choices, stop))

    turns = api.data.Dataset.range(3).repeat()
    return {
        "listed": choose(parts, _choices(api, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 2, 2)),
        "in_turn": choose(parts, turns),
        "few": choose(parts, _choices(api, 2, 0)),
        "past_the_end": choose(parts[:2], _choices(api, 0, 0, 0, 0, 0, 1, 1)),
        "empty": choose([parts[0], nothing], _choices(api, 1, 0, 1, 0)),
        "one": choose(parts[:1], _choices(api, 0, 0)),
        "tuple": choose(tuple(parts), _choices(api, 2, 1)),
        "nothing": choose(parts, _choices(api, 0).take(0)),
        "repeated": choose([part.repeat() for part in parts], turns)[1:],
        "one_repeated": choose([parts[0].repeat(), *parts[1:]], turns)[1],
        "unknown": choose([parts[0].filter(lambda x: x > 0), *parts[1:]], turns)[1],
    }


@scenario("7.1")
def specs_of_chosen_elements(api):
    a, b, _ = _parts(api)

    def spec(*datasets):
        choose = api.data.Dataset.choose_from_datasets
        return api.spec(choose(list(datasets), _choices(api, 0)))

    return [
        spec(a.batch(2, True), b.batch(3, True)),
        spec(a.batch(2, True), b.batch(2, True)),
        spec(a.batch(2), b.batch(3, True)),
        spec(a.batch(2).batch(2), b.batch(3, True)),
    ]


@scenario("7.1")
def choose_from_datasets_errors(api):
    a, b, _ = _parts(api)
    choose = api.data.Dataset.choose_from_datasets
    floats = api.data.Dataset.from_tensor_slices([1.0])

    def elements(datasets, choices):
        return api.attempt(lambda: api.numbers(choose(datasets, choices)))

    return {
        "no_datasets": elements([], _choices(api, 0)),
        "no_choices": elements([a], 5),
        "int32_choices": elements([a], api.data.Dataset.from_tensor_slices([0])),
        "too_large": elements([a, b], _choices(api, 0, 2)),
        "negative": elements([a, b], _choices(api, 0, -1)),
        "types": elements([a, floats], _choices(api, 0)),
        "structures": elements([a, api.data.Dataset.zip((a, b))], _choices(api, 0)),
    }


@scenario("7.1", cases=[("stop",), ("go_on",)])
def sample_from_datasets(api, at_the_end):
    parts, stop = _parts(api), at_the_end == "stop"
    Dataset = api.data.Dataset

    def sample(datasets, weights=None, **kwargs):
        return Dataset.sample_from_datasets(
            datasets, weights, seed=1, stop_on_empty_dataset=stop, **kwargs
        )

    by_turns = Dataset.from_tensor_slices(
        [[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    )
    many = sample([Dataset.range(200), Dataset.range(200, 400)], [0.9, 0.1])
    first = api.numbers(many, 50)
    return {
        "weight_0": _seen(api, sample(parts[:2], [0.0, 1.0])),
        "weights_0": _seen(api, sample(parts[:2], [0.0, 0.0])),
        "negative": _seen(api, sample(parts[:2], [-1.0, 1.0])),
        "array": _seen(api, sample(parts[:2], np.array([0.0, 1.0]))),
        "one": _seen(api, sample(parts[:1])),
        "one_weight": _seen(api, sample(parts[:1], [0.3])),
        "dataset": _seen(api, sample(parts[:2], by_turns)),
        "sizes": [
            int(sample(parts).cardinality()),
            int(sample([part.repeat() for part in parts]).cardinality()),
            int(sample([parts[0], parts[1].repeat()]).cardinality()),
        ],
        "all": sorted(api.numbers(sample(parts)))
        == sorted(number for part in parts for number in api.numbers(part)),
        "mostly_the_first": sum(number < 200 for number in first) > 30,
        "in_order": sorted(n for n in first if n < 200)
        == [n for n in first if n < 200],
    }


@scenario("7.1")
def samples_are_drawn_again(api):
    Dataset = api.data.Dataset

    def orders(**kwargs):
        dataset = Dataset.sample_from_datasets(
            [Dataset.range(50), Dataset.range(50, 100)], **kwargs
        )
        twice = api.numbers(dataset.repeat(2), 200)
        return [
            api.numbers(dataset) == api.numbers(dataset),
            twice[:100] == twice[100:],
        ]

    def numbers(**kwargs):
        dataset = Dataset.random(**kwargs).take(5)
        twice = api.numbers(dataset.repeat(2))
        return [
            api.numbers(dataset) == api.numbers(dataset),
            twice[:5] == twice[5:],
        ]

    return {
        "seed": orders(seed=3),
        "no_seed": orders(),
        "again": orders(seed=3, rerandomize_each_iteration=True),
        "no_seed_again": orders(rerandomize_each_iteration=True),
        "not_again": orders(rerandomize_each_iteration=False),
        "random": numbers(seed=3),
        "random_no_seed": numbers(),
        "random_again": numbers(seed=3, rerandomize_each_iteration=True),
    }


@scenario("7.1")
def sample_from_datasets_errors(api):
    a, b, _ = _parts(api)
    sample = api.data.Dataset.sample_from_datasets
    floats = api.data.Dataset.from_tensor_slices([1.0])
    return {
        "no_datasets": api.attempt(lambda: sample([])),
        "few_weights": api.attempt(lambda: sample([a, b], [1.0])),
        "integers": api.attempt(lambda: sample([a, b], [1, 2])),
        "matrix": api.fails(lambda: sample([a, b], [[1.0, 2.0]])),
        "types": api.attempt(lambda: sample([a, floats])),
    }


@scenario("7.1")
def random_numbers(api):
    dataset = api.data.Dataset.random(seed=4)
    found = api.numbers(dataset, 1000)
    return [
        api.spec(dataset),
        int(dataset.cardinality()),
        min(found) >= 0,
        2**31 < max(found) < 2**32,
        len(set(found)),
    ]


@scenario("7.1")
def counters(api):
    counter = api.data.Dataset.counter
    return [
        _seen(api, counter(), 4),
        _seen(api, counter(5, -2), 4),
        _seen(api, counter(1.5, 0.5, dtype=api.float32), 4),
        _seen(api, counter(250, 3, dtype="uint8"), 4),
        _seen(api, counter(2**31 - 2, dtype="int32"), 4),
        _seen(api, counter(3, 0), 4),
        _seen(api, counter(1).batch(3).map(lambda x: x * x), 2),
        api.attempt(lambda: counter(1.5)),
        api.attempt(lambda: counter("a")),
    ]


@scenario("7.1")
def rejection_resample_where_nothing_is_random(api):
    numbers = api.data.Dataset.range(8)

    def kind(x):
        return api.ops.cast(x % 2, "int32")

    pairs = api.data.Dataset.zip((numbers, numbers))
    return [
        _seen(api, numbers.rejection_resample(kind, [0.5, 0.5], [0.5, 0.5])),
        _seen(api, numbers.rejection_resample(kind, [0.0, 1.0], [0.5, 0.5]))[::2],
        api.numbers(
            pairs.rejection_resample(lambda x, y: kind(y), [0.0, 1.0], [0.5, 0.5])
        ),
    ]


@scenario("7.1", cases=[("given",), ("estimated",)])
def rejection_resample_changes_shares(api, initial):
    data = np.int32([0] * 9 + [1]).tolist() * 400
    dataset = api.data.Dataset.from_tensor_slices(data).rejection_resample(
        lambda x: x,
        target_dist=[0.5, 0.5],
        initial_dist=[0.9, 0.1] if initial == "given" else None,
        seed=5,
    )
    found = [kind for kind, x in api.numbers(dataset, 4000)]
    return [0.4 < sum(found) / len(found) < 0.6, 400 < len(found) < 1600]


# What is carried along, what passes.


@scenario("7.1")
def scan(api):
    numbers = api.data.Dataset.range(5)
    zero = np.int64(0)
    pairs = api.data.Dataset.from_tensor_slices(([1, 2], [3, 4]))
    return {
        "sum": _seen(api, numbers.scan(zero, lambda s, x: (s + x, s * 10 + x))),
        "tuple_element": _seen(
            api, pairs.scan(np.int32(0), lambda s, x: (s + x[0], (s, x)))
        ),
        "structures": _seen(
            api,
            numbers.scan(
                (zero, {"a": np.float32(1)}),
                lambda s, x: ((s[0] + x, {"a": s[1]["a"] * 2}), {"o": s[1]["a"]}),
            ),
        ),
        "list": _seen(api, numbers.scan(zero, lambda s, x: [s + 1, x])),
        "growing": _seen(
            api,
            numbers.scan(np.zeros(0, np.int64), lambda s, x: (api.ops.append(s, x), s)),
        ),
        "vector": _seen(api, numbers.scan([1, 2], lambda s, x: (s, s))),
        "repeat": _seen(
            api,
            numbers.take(3)
            .scan((zero, zero + 1), lambda s, x: ((s[1], s[0] + s[1]), s[0]))
            .repeat(2),
        ),
        "empty": _seen(api, numbers.take(0).scan(zero, lambda s, x: (s + x, s))),
        "batches": _seen(
            api,
            numbers.batch(2).scan(zero, lambda s, x: (s + api.ops.sum(x), x + s)),
        ),
        "sizes": [
            int(numbers.repeat().scan(zero, lambda s, x: (s, x)).cardinality()),
            int(
                numbers.filter(lambda x: x > 1)
                .scan(zero, lambda s, x: (s, x))
                .cardinality()
            ),
        ],
    }


@scenario("7.1")
def scan_errors(api):
    numbers = api.data.Dataset.range(3)
    zero = np.int64(0)

    def scan(initial, fn):
        return api.attempt(lambda: api.numbers(numbers.scan(initial, fn)))

    return {
        "no_pair": scan(zero, lambda s, x: s + x),
        "three": scan(zero, lambda s, x: (s, x, x)),
        "type": scan(zero, lambda s, x: (api.ops.cast(s, "float32"), x)),
        "arguments": scan(zero, lambda s, x, y: (s, x)),
        "structure": api.fails(
            lambda: api.numbers(numbers.scan(zero, lambda s, x: ((s, s), x)))
        ),
        "no_function": api.fails(lambda: numbers.scan(zero, 3)),
    }


@scenario("7.1")
def take_while(api):
    numbers = api.data.Dataset.range(10)
    pairs = api.data.Dataset.from_tensor_slices(([1, 2, 3], [3, 2, 1]))
    iterator = iter(
        api.data.Dataset.from_tensor_slices([1, 5, 1]).take_while(lambda x: x < 4)
    )
    return {
        "some": _seen(api, numbers.take_while(lambda x: x < 4)),
        "none": _seen(api, numbers.take_while(lambda x: x < 0)),
        "all": _seen(api, numbers.take_while(lambda x: x < 100)),
        "for_ever": _seen(api, numbers.repeat().take_while(lambda x: x < 4)),
        "empty": _seen(api, numbers.take(0).take_while(lambda x: x < 4)),
        "pairs": _seen(api, pairs.take_while(lambda a, b: a < b)),
        "batches": _seen(
            api, numbers.batch(3).take_while(lambda x: api.ops.sum(x) < 20)
        ),
        "ends": [int(next(iterator)), *(api.attempt(lambda: next(iterator)),) * 2],
        "number": api.attempt(lambda: api.numbers(numbers.take_while(lambda x: x))),
        "vector": api.fails(lambda: api.numbers(numbers.take_while(lambda x: [x < 1]))),
        "no_function": api.fails(lambda: numbers.take_while(5)),
    }


@scenario("7.1")
def unique(api):
    Dataset = api.data.Dataset
    slices = Dataset.from_tensor_slices
    return {
        "ints": _seen(api, slices([1, 2, 1, 3, 2]).unique()),
        "int64": _seen(api, Dataset.range(3).repeat(2).unique()),
        "strings": _seen(api, slices(["a", "b", "a", ""]).unique()),
        "vectors": _seen(api, slices([[1, 2], [1, 2], [2, 1]]).unique()),
        "dict": _seen(api, slices({"a": [1, 1]}).unique()),
        "repeat": _seen(api, slices([1, 2, 1]).unique().repeat(2)),
        "lengths": _seen(api, Dataset.range(7).batch(2).map(lambda x: x // 4).unique()),
        "empty": _seen(api, Dataset.range(0).unique()),
        "floats": api.attempt(lambda: slices([1.0, 1.0]).unique()),
        "bools": api.attempt(lambda: slices([True, True]).unique()),
        "int8": api.attempt(lambda: slices(np.int8([1, 1])).unique()),
        "pairs": api.attempt(lambda: api.numbers(slices(([1], [1])).unique())),
    }


@scenario("7.1")
def ignore_errors(api):
    def bad(x):
        return api.ops.refuse(x, x % 3 == 2)

    dataset = api.data.Dataset.range(7).map(bad)
    parallel = api.data.Dataset.range(7).map(bad, num_parallel_calls=2)
    return {
        "map": _seen(api, dataset.ignore_errors()),
        "parallel": api.numbers(parallel.ignore_errors()),
        "prefetch": api.numbers(dataset.prefetch(2).ignore_errors()),
        "batch": api.numbers(dataset.batch(2).ignore_errors()),
        "batch_drop": api.numbers(dataset.batch(2, True).ignore_errors()),
        "filter": api.numbers(dataset.filter(lambda x: x >= 0).take(5).ignore_errors()),
        "repeat": api.numbers(dataset.take(4).ignore_errors().repeat(2)),
        "zip": api.numbers(
            api.data.Dataset.zip((dataset, api.data.Dataset.range(7))).ignore_errors()
        ),
        "enumerate": api.numbers(dataset.enumerate().ignore_errors()),
        "cache": api.numbers(dataset.cache().ignore_errors()),
        "interleave": api.numbers(
            api.data.Dataset.range(7)
            .interleave(
                lambda x: api.data.Dataset.from_tensors(x).map(bad), cycle_length=2
            )
            .ignore_errors()
        ),
        "predicate": api.numbers(
            api.data.Dataset.range(7).filter(lambda x: bad(x) > 3).ignore_errors()
        ),
        "for_ever": int(dataset.repeat().ignore_errors().cardinality()),
    }


@scenario("7.1")
def get_single_element(api):
    Dataset = api.data.Dataset
    return [
        api.brief(Dataset.range(1).get_single_element()),
        api.brief(Dataset.from_tensors((1, {"a": 2.5})).get_single_element()),
        api.brief(Dataset.range(5).batch(5).get_single_element()),
        api.attempt(lambda: Dataset.range(0).get_single_element()),
        api.attempt(lambda: Dataset.range(2).get_single_element()),
    ]


@scenario("7.1")
def fingerprints(api):
    Dataset = api.data.Dataset

    def same(make, other):
        return bool(make().fingerprint() == other().fingerprint())

    def add(n):
        return lambda: Dataset.range(3).map(lambda x: x + n)

    return [
        same(lambda: Dataset.range(3), lambda: Dataset.range(3)),
        same(lambda: Dataset.range(3), lambda: Dataset.range(4)),
        same(add(1), add(1)),
        same(add(1), add(2)),
        same(
            lambda: Dataset.from_tensor_slices([1, 2]),
            lambda: Dataset.from_tensor_slices([1, 2]),
        ),
        same(
            lambda: Dataset.from_tensor_slices([1, 2]),
            lambda: Dataset.from_tensor_slices([1, 3]),
        ),
        same(lambda: Dataset.range(3).shuffle(3), lambda: Dataset.range(3).shuffle(3)),
        same(lambda: Dataset.range(3).batch(2), lambda: Dataset.range(3).batch(1)),
        api.spec(Dataset.range(1).fingerprint()),
    ]


@scenario("7.1")
def cardinalities_in_two_places(api):
    experimental = api.data.experimental
    return [experimental.INFINITE_CARDINALITY, experimental.UNKNOWN_CARDINALITY]


# Files.


def _ragged(api):
    return api.data.Dataset.range(3).map(lambda n: api.ops.fill([n], n))


SAVED = {
    "numbers": lambda api: api.data.Dataset.range(10),
    "structures": lambda api: api.data.Dataset.from_tensor_slices(
        ([1, 2], {"a": [1.5, 2.5], "b": ["x", "é"]})
    ),
    "namedtuple": lambda api: api.data.Dataset.from_tensor_slices(
        Pair([1, 2], [[3, 4], [5, 6]])
    ),
    "empty": lambda api: api.data.Dataset.range(0),
    "lengths": lambda api: api.data.Dataset.range(5).batch(2),
    "matrices": lambda api: api.data.Dataset.from_tensor_slices(
        np.arange(12, dtype="float16").reshape(2, 3, 2)
    ),
    "strings": lambda api: api.data.Dataset.from_tensor_slices([["a", ""], ["b", "c"]]),
    "bools": lambda api: api.data.Dataset.from_tensor_slices([True, False]),
}


@scenario("7.1", cases=[(name,) for name in SAVED])
def saved_datasets_are_loaded(api, kind):
    with api.directory() as folder:
        path = f"{folder}/saved"
        nothing = SAVED[kind](api).save(path)
        loaded = api.data.Dataset.load(path)
        return [
            nothing,
            api.spec(loaded),
            int(loaded.cardinality()),
            api.elements(loaded),
            api.elements(loaded),
            api.class_name(loaded.element_spec),
        ]


@scenario("7.1")
def shards_of_saved_datasets(api):
    numbers = api.data.Dataset.range(10)

    def loaded(shard_func, **kwargs):
        with api.directory() as folder:
            numbers.save(f"{folder}/saved", shard_func=shard_func)
            return _seen(api, api.data.Dataset.load(f"{folder}/saved", **kwargs))

    return {
        "one": loaded(lambda x: x * 0),
        "in_order": loaded(
            lambda x: x % 3, reader_func=lambda shards: shards.flat_map(lambda x: x)
        ),
        "first": loaded(
            lambda x: x % 3,
            reader_func=lambda shards: shards.take(1).flat_map(lambda x: x),
        )[::2],
        "negative": loaded(
            lambda x: x - 5, reader_func=lambda shards: shards.flat_map(lambda x: x)
        ),
    }


@scenario("7.1")
def what_is_saved_again_replaces(api):
    with api.directory() as folder:
        path = f"{folder}/saved"
        api.data.Dataset.range(3).save(path)
        api.data.Dataset.range(10, 14).save(path, compression="GZIP")
        return api.numbers(api.data.Dataset.load(path, compression="GZIP"))


@scenario("7.1")
def load_with_a_spec(api):
    Spec = api.TensorSpec

    def loaded(spec):
        def load():
            with api.directory() as folder:
                api.data.Dataset.range(6).batch(4).save(f"{folder}/saved")
                dataset = api.data.Dataset.load(f"{folder}/saved", element_spec=spec)
                return _seen(api, dataset)

        return api.attempt(load)

    return {
        "same": loaded(Spec([None], "int64")),
        "type": loaded(Spec([None], "float32")),
        "shape": loaded(Spec([4], "int64")),
    }


@scenario("7.1")
def save_and_load_errors(api):
    numbers = api.data.Dataset.range(3)

    def save(**kwargs):
        with api.directory() as folder:
            numbers.save(f"{folder}/saved", **kwargs)

    def load(**kwargs):
        with api.directory() as folder:
            return api.numbers(api.data.Dataset.load(f"{folder}/none", **kwargs))

    return {
        "nothing_there": api.attempt(load),
        "nothing_there_with_a_spec": api.attempt(
            lambda: load(element_spec=api.TensorSpec([], "int64"))
        ),
        "float_shard": api.attempt(lambda: save(shard_func=lambda x: 1.5)),
        "no_function": api.fails(lambda: save(shard_func=5)),
    }


@scenario("7.1")
def snapshots(api):
    def twice(dataset, **kwargs):
        with api.directory() as folder:
            dataset = dataset.snapshot(folder, **kwargs)
            return [
                api.spec(dataset),
                int(dataset.cardinality()),
                api.numbers(dataset),
                api.numbers(dataset),
            ]

    numbers = api.data.Dataset.range(10)
    structures = api.data.Dataset.from_tensor_slices(([1, 2], {"a": [1.5, 2.5]}))
    by_kind = {"shard_func": lambda x: x % 3}
    return {
        "numbers": twice(numbers),
        "structures": twice(structures),
        "batches": twice(numbers.batch(3)),
        "gzip": twice(numbers, compression="GZIP"),
        "none": twice(numbers, compression=None),
        "in_order": twice(
            numbers,
            **by_kind,
            reader_func=lambda shards: shards.flat_map(lambda x: x),
        ),
        "repeat": twice(numbers.take(3))[2:],
        "unknown": twice(numbers.filter(lambda x: x > 7))[1:],
        "empty": twice(numbers.take(0)),
    }


@scenario("7.1")
def snapshots_are_written_by_whole_passes(api):
    calls = []

    def generator():
        calls.append(1)
        yield from range(4)

    with api.directory() as folder:
        dataset = api.data.Dataset.from_generator(
            generator, output_signature=api.TensorSpec([], "int32")
        ).snapshot(folder)
        part = api.numbers(dataset.take(2))
        found = [api.numbers(dataset), api.numbers(dataset), api.numbers(dataset)]
        return [part, found, len(calls)]


@scenario("7.1")
def snapshots_of_several_pipelines(api):
    Dataset = api.data.Dataset
    with api.directory() as folder:
        return [
            api.numbers(Dataset.range(3).snapshot(folder)),
            api.numbers(Dataset.range(5).snapshot(folder)),
            api.numbers(Dataset.range(3).snapshot(folder)),
            api.numbers(Dataset.range(3).map(lambda x: x + 1).snapshot(folder)),
            api.numbers(Dataset.range(3).map(lambda x: x + 2).snapshot(folder)),
            api.numbers(Dataset.range(3).snapshot(folder).repeat(2)),
        ]


@scenario("7.1")
def shuffled_snapshots_keep_their_order(api):
    with api.directory() as folder:
        dataset = api.data.Dataset.range(50).shuffle(50).snapshot(folder)
        first = api.numbers(dataset)
        return [first == api.numbers(dataset), sorted(first) == list(range(50))]


@scenario("7.1")
def snapshot_errors(api):
    numbers = api.data.Dataset.range(3)

    def snapshot(**kwargs):
        def take():
            with api.directory() as folder:
                return api.numbers(numbers.snapshot(folder, **kwargs))

        return take

    return {
        "text": api.attempt(snapshot(shard_func=lambda x: "a")),
        "float": api.attempt(snapshot(shard_func=lambda x: 1.5)),
        "no_function": api.fails(snapshot(shard_func=5)),
    }
