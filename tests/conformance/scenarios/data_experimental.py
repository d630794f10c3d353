"""`data.experimental`, options of datasets and optionals (7.1, 7.5)."""

import numpy as np

from . import scenario


@scenario("7.1")
def older_forms_of_transformations(api):
    experimental, base = api.data.experimental, api.data.Dataset.range(10)
    made = {
        "assert_cardinality": base.apply(experimental.assert_cardinality(10)),
        "enumerate": base.take(2).apply(experimental.enumerate_dataset(start=5)),
        "ignore_errors": base.apply(experimental.ignore_errors()),
        "map_and_batch": base.apply(
            experimental.map_and_batch(lambda x: x + 1, 4, drop_remainder=True)
        ),
        "interleave": api.data.Dataset.range(3).apply(
            experimental.parallel_interleave(
                lambda x: api.data.Dataset.from_tensors(x).repeat(2), cycle_length=2
            )
        ),
        "scan": base.apply(
            experimental.scan(np.int64(0), lambda state, x: (state + x, state + x))
        ),
        "take_while": base.apply(experimental.take_while(lambda x: x < 3)),
        "unbatch": base.batch(4).apply(experimental.unbatch()),
        "unique": base.map(lambda x: x % 3).apply(experimental.unique()),
        "Counter": experimental.Counter(5, 2).take(3),
        "group_by_window": base.apply(
            experimental.group_by_window(lambda x: x % 2, lambda _, d: d.batch(5), 5)
        ),
        "choose": experimental.choose_from_datasets(
            [base.take(1), base.skip(5)],
            api.data.Dataset.from_tensor_slices(np.array([0, 0, 1, 0, 1])),
        ),
    }
    return {name: api.numbers(dataset) for name, dataset in made.items()}


@scenario("7.1")
def shuffled_and_repeated(api):
    transform = api.data.experimental.shuffle_and_repeat(4, count=2, seed=1)
    dataset = api.data.Dataset.range(5).apply(transform)
    found = api.numbers(dataset)
    return [sorted(found[:5]), sorted(found[5:]), int(dataset.cardinality())]


@scenario("7.1")
def asserted_cardinalities(api):
    some = api.data.Dataset.range(9).filter(lambda x: x % 2 == 1)

    def says(count):
        dataset = some.apply(api.data.experimental.assert_cardinality(count))
        return [
            int(api.data.experimental.cardinality(dataset)),
            api.fails(lambda: api.numbers(dataset)),
        ]

    return [says(4), says(3), says(5), says(-1), says(-2)]


@scenario(
    "7.1",
    differs="a RuntimeError, Python's own, with the words of TensorFlow's error",
    expect=[[RuntimeError, ["expected to contain"]]] * 2,
)
def the_error_of_a_wrong_cardinality(api):
    def read(count):
        transform = api.data.experimental.assert_cardinality(count)
        return api.numbers(api.data.Dataset.range(5).apply(transform))

    words = ("expected to contain",)
    return [api.complaint(lambda n=n: read(n), *words) for n in (3, 7)]


@scenario("7.1")
def functions_of_datasets(api):
    experimental, dataset = api.data.experimental, api.data.Dataset.range(3)
    iterator = iter(dataset)
    optional = experimental.get_next_as_optional(iterator)
    return [
        api.spec(experimental.get_structure(dataset)),
        experimental.get_single_element(dataset.take(1)),
        [bool(optional.has_value()), optional.get_value(), api.spec(optional)],
    ]


@scenario("7.5")
def optionals(api):
    kind = api.data.experimental.Optional
    full = kind.from_value({"a": np.int32(3), "b": np.float32([1.0, 2.0])})
    empty = kind.empty(api.TensorSpec([2], api.float32))
    return [
        [bool(full.has_value()), full.get_value(), api.spec(full)],
        [bool(empty.has_value()), api.attempt(empty.get_value), api.spec(empty)],
    ]


@scenario("7.5")
def optionals_of_a_distributed_dataset(api):
    strategy = api.mirrored(2)
    dataset = api.data.Dataset.range(2).batch(2, drop_remainder=True)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    found = [iterator.get_next_as_optional() for _ in range(2)]
    return [[bool(each.has_value()), api.spec(each)] for each in found]


def _options(api, **chosen):
    options = api.data.Options()
    if "deterministic" in chosen:
        options.deterministic = chosen["deterministic"]
    if "policy" in chosen:
        policy = getattr(api.data.experimental.AutoShardPolicy, chosen["policy"])
        options.experimental_distribute.auto_shard_policy = policy
    return options


def _facts(options):
    return [options.deterministic, options.experimental_distribute.auto_shard_policy]


@scenario("7.1")
def options_that_were_not_set_stay_as_they_are(api):
    first = _options(api, deterministic=False)
    second = _options(api, policy="OFF")
    third = _options(api, policy="AUTO")
    dataset = api.data.Dataset.range(4).with_options(first).with_options(second)
    first.deterministic = True  # too late
    return [
        _facts(dataset.options()),
        _facts(dataset.with_options(third).options()),
        _facts(second.merge(first).merge(third)),
        _facts(second),
    ]


@scenario("7.1")
def options_of_datasets_that_become_one(api):
    base = api.data.Dataset.range(4)
    first = base.with_options(_options(api, deterministic=False, policy="OFF"))
    second = base.with_options(_options(api, policy="DATA"))
    joined = [
        api.data.Dataset.zip((first, second)),
        api.data.Dataset.zip((second, first)),
        first.concatenate(second),
        base.concatenate(first),
        api.data.Dataset.sample_from_datasets([first, second]),
    ]
    return [_facts(each.options()) for each in joined]


@scenario("7.1")
def options_that_cannot_be_set(api):
    def put(name, value):
        options = api.data.Options()
        owner = options if name != "auto_shard_policy" else None
        return api.attempt(
            lambda: setattr(owner or options.experimental_distribute, name, value)
        )

    return [
        put("deterministic", "yes"),
        put("auto_shard_policy", "OFF"),
        put("experimental_distribute", 3),
        put("no_such_option", True),
    ]


@scenario("7.1")
def arguments_of_range(api):
    return [
        api.attempt(lambda: api.data.Dataset.range()),
        api.attempt(lambda: api.data.Dataset.range(1, 2, 3, 4)),
    ]


@scenario("7.1")
def padding_of_another_dtype(api):
    dataset = api.data.Dataset.range(1, 4).map(lambda x: api.ops.fill([x], x))
    return [
        api.attempt(lambda: api.numbers(dataset.padded_batch(2, padding_values=0.5))),
        api.attempt(lambda: api.numbers(dataset.padded_batch(2, padding_values="x"))),
    ]
