"""Datasets of datasets, and elements in new batches: window, group, bucket, rebatch (7.1)."""

import numpy as np

from . import scenario

WINDOWS = [
    (3, None, 1),
    (3, 1, 1),
    (3, 2, 1),
    (2, 5, 1),
    (3, 1, 2),
    (3, None, 2),
    (2, 1, 3),
    (3, 4, 1),
    (10, None, 1),
    (1, None, 1),
    (7, 7, 7),
]


def _lists(api, windows):
    """The elements of each window, as plain numbers."""
    return [api.numbers(window) for window in windows]


def _seen(api, dataset, limit=30):
    return [api.spec(dataset), int(dataset.cardinality()), api.numbers(dataset, limit)]


@scenario("7.1", cases=[("keep",), ("drop",)])
def windows_have_sizes_shifts_and_strides(api, remainder):
    def windows(n, size, shift, stride):
        dataset = api.data.Dataset.range(n).window(
            size, shift, stride, drop_remainder=remainder == "drop"
        )
        return [_lists(api, dataset), int(dataset.cardinality())]

    return {
        f"{n} by {size} {shift} {stride}": windows(n, size, shift, stride)
        for n in (0, 1, 6, 7)
        for size, shift, stride in WINDOWS
    }


@scenario("7.1")
def windows_of_structures(api):
    dataset = api.data.Dataset.from_tensor_slices(
        ([1, 2, 3], {"a": [1.5, 2.5, 3.5], "b": ["x", "y", "z"]})
    ).window(2)
    seen = [
        [api.elements(x), api.elements(rest["a"]), api.elements(rest["b"])]
        for x, rest in dataset
    ]
    together = dataset.flat_map(
        lambda x, rest: api.data.Dataset.zip((x, rest["a"].batch(2)))
    )
    x, rest = dataset.element_spec
    return [
        seen,
        api.elements(together),
        [api.class_name(x), api.spec(x.element_spec)],
        {key: api.spec(each.element_spec) for key, each in rest.items()},
    ]


@scenario("7.1")
def windows_in_pipelines(api):
    windows = api.data.Dataset.range(7).window(3)
    nested = api.data.Dataset.range(7).window(2).window(2)
    return {
        "flat_map": _seen(api, windows.flat_map(lambda w: w.batch(3))),
        "flat_map_drop": _seen(api, windows.flat_map(lambda w: w.batch(3, True))),
        "interleave": api.numbers(windows.interleave(lambda w: w, cycle_length=2)),
        "map_to_datasets": _lists(api, windows.map(lambda w: w.map(lambda x: x * 2))),
        "map_to_numbers": api.numbers(
            windows.map(lambda w: w.reduce(np.int64(0), lambda a, b: a + b))
        ),
        "take": _lists(api, windows.take(2)),
        "skip": _lists(api, windows.skip(1)),
        "repeat": _lists(api, windows.repeat(2)),
        "prefetch": _lists(api, windows.prefetch(2)),
        "cache": _lists(api, windows.cache()),
        "enumerate": [
            [int(i), api.numbers(window)] for i, window in windows.enumerate()
        ],
        "concatenate": _lists(
            api, windows.concatenate(api.data.Dataset.range(2).window(2))
        ),
        "filter": _lists(api, windows.filter(lambda w: w.cardinality() > 1)),
        "sizes": [int(window.cardinality()) for window in windows],
        "of_windows": [_lists(api, each) for each in nested],
        "single": api.numbers(windows.take(1).get_single_element()),
        "of_nothing": _lists(api, windows.take(0)),
        "of_unknown": int(
            api.data.Dataset.range(7).filter(lambda x: x > 3).window(2).cardinality()
        ),
        "for_ever": int(api.data.Dataset.range(7).repeat().window(2).cardinality()),
        "from_tensors": _lists(
            api, api.data.Dataset.from_tensors(api.data.Dataset.range(3))
        ),
        "from_tensor_slices": _lists(
            api,
            api.data.Dataset.from_tensor_slices(
                [api.data.Dataset.range(3), api.data.Dataset.range(2)]
            ),
        ),
    }


@scenario("7.1")
def window_errors(api):
    dataset = api.data.Dataset.range(5)
    return {
        "size_0": api.attempt(lambda: dataset.window(0)),
        "size_negative": api.attempt(lambda: dataset.window(-1)),
        "shift_0": api.attempt(lambda: dataset.window(2, 0)),
        "stride_0": api.attempt(lambda: dataset.window(2, 1, 0)),
        "text": api.attempt(lambda: dataset.window("a")),
        "float": api.attempt(lambda: dataset.window(1.5)),
        "numpy": api.attempt(lambda: dataset.window(2).as_numpy_iterator()),
        "padded_batch": api.attempt(lambda: list(dataset.window(2).padded_batch(2))),
        "unbatch": api.attempt(lambda: list(dataset.window(2).unbatch())),
    }


# Rebatching.

REBATCHES = {
    "2": lambda ds: ds.rebatch(2),
    "2_drop": lambda ds: ds.rebatch(2, drop_remainder=True),
    "3": lambda ds: ds.rebatch(3),
    "3_drop": lambda ds: ds.rebatch(3, drop_remainder=True),
    "1_2": lambda ds: ds.rebatch([1, 2]),
    "2_1_3": lambda ds: ds.rebatch([2, 1, 3]),
    "2_1_3_drop": lambda ds: ds.rebatch([2, 1, 3], drop_remainder=True),
    "2_0_1": lambda ds: ds.rebatch([2, 0, 1]),
    "2_2_drop": lambda ds: ds.rebatch([2, 2], drop_remainder=True),
    "20": lambda ds: ds.rebatch(20),
    "20_drop": lambda ds: ds.rebatch(20, drop_remainder=True),
    "tuple": lambda ds: ds.rebatch((1, 2)),
    "array": lambda ds: ds.rebatch(np.array([1, 2])),
    "int64": lambda ds: ds.rebatch(np.int64(3)),
}


@scenario("7.1", cases=[(name,) for name in REBATCHES])
def rebatch(api, kind):
    batches = api.data.Dataset.range(10).batch(4)
    static = api.data.Dataset.range(8).batch(4, drop_remainder=True)
    return [
        _seen(api, REBATCHES[kind](batches)),
        _seen(api, REBATCHES[kind](static)),
        _seen(api, REBATCHES[kind](batches.take(0))),
    ]


@scenario("7.1")
def rebatch_of_structures(api):
    pairs = api.data.Dataset.from_tensor_slices(
        (np.arange(6).reshape(3, 2), {"y": np.arange(12.0).reshape(3, 2, 2)})
    )
    return [
        _seen(api, pairs.rebatch(4)),
        _seen(api, pairs.rebatch(3, drop_remainder=True)),
        _seen(api, api.data.Dataset.range(3).batch(2).repeat().rebatch(3), 3),
    ]


@scenario("7.1")
def rebatch_errors(api):
    batches = api.data.Dataset.range(10).batch(4)
    different = api.data.Dataset.from_tensors(([1, 2, 3], [1, 2]))
    return {
        "matrix": api.attempt(lambda: batches.rebatch([[1]])),
        "float": api.attempt(lambda: batches.rebatch(1.5)),
        "text": api.attempt(lambda: batches.rebatch("a")),
        "none": api.fails(lambda: batches.rebatch([])),
        "scalars": api.attempt(lambda: batches.unbatch().rebatch(2)),
        "different": api.attempt(lambda: api.numbers(different.rebatch(2))),
    }


# Groups.


@scenario("7.1")
def group_by_window(api):
    numbers = api.data.Dataset.range(10)

    def groups(key_func, reduce_func, dataset=numbers, **kwargs):
        return _seen(api, dataset.group_by_window(key_func, reduce_func, **kwargs))

    def batch(key, window):
        return window.batch(4)

    pairs = api.data.Dataset.from_tensor_slices((np.int64([1, 2, 3]), [4, 5, 6]))
    return {
        "twos": groups(lambda x: x % 3, batch, window_size=2),
        "rest_by_key": groups(lambda x: (7 * x) % 5 - 2, batch, window_size=100),
        "size_by_key": groups(
            lambda x: x % 3 - 1,
            lambda key, window: window.map(lambda x: (key, x)),
            window_size_func=lambda key: key + 2,
        ),
        "one_key": groups(
            lambda x: api.ops.cast(0, "int64"),
            lambda key, window: window.batch(100),
            window_size=4,
        ),
        "several_elements": groups(
            lambda x: x % 2,
            lambda key, window: window.batch(3).repeat(2),
            window_size=5,
        ),
        "none": groups(
            lambda x: x % 2,
            lambda key, window: window.filter(lambda x: x > 5),
            window_size=2,
        ),
        "pairs": groups(lambda a, b: a % 2, batch, dataset=pairs, window_size=2),
        "empty": groups(lambda x: x % 2, batch, dataset=numbers.take(0), window_size=2),
        "sizes": groups(
            lambda x: x % 2,
            lambda key, window: api.data.Dataset.from_tensors(
                (key, window.cardinality())
            ),
            window_size=3,
        )[2],
        "for_ever": [
            int(each.cardinality())
            for each in [
                numbers.repeat().group_by_window(lambda x: x % 2, batch, window_size=5)
            ]
        ],
    }


@scenario("7.1")
def group_by_window_errors(api):
    numbers = api.data.Dataset.range(10)

    def groups(key=lambda x: x % 2, reduce=lambda k, w: w.batch(2), **kwargs):
        return api.attempt(
            lambda: api.numbers(numbers.group_by_window(key, reduce, **kwargs))
        )

    return {
        "no_size": groups(),
        "two_sizes": groups(window_size=2, window_size_func=lambda key: key + 2),
        "size_0": groups(window_size=0),
        "size_text": groups(window_size="a"),
        "size_float": groups(window_size=1.5),
        "size_negative": groups(window_size_func=lambda key: key - 5),
        "key_text": groups(lambda x: "a", window_size=2),
        "key_float": groups(lambda x: 1.5, window_size=2),
        "key_vector": groups(lambda x: [x], window_size=2),
        "no_dataset": groups(reduce=lambda k, w: k, window_size=2),
    }


@scenario(
    "7.1",
    differs="keys of any integer type are taken: JAX's are int32",
    expect=[[0, 2], [1, 3]],
)
def group_by_window_with_int32_keys(api):
    dataset = api.data.Dataset.range(4).group_by_window(
        lambda x: api.ops.cast(x % 2, "int32"),
        lambda key, window: window.batch(2),
        window_size=2,
    )
    return api.numbers(dataset)


# Buckets.


def _sequences(api):
    lengths = [1, 2, 5, 3, 7, 2, 9]
    return api.data.Dataset.from_generator(
        lambda: ([length] * length for length in lengths),
        output_signature=api.TensorSpec([None], "int64"),
    )


BUCKETS = {
    "plain": lambda: {},
    "drop": lambda: {"drop_remainder": True},
    "value": lambda: {"padding_values": np.int64(-1)},
    "shapes": lambda: {"padded_shapes": [10]},
    "no_shapes": lambda: {"padded_shapes": [None]},
    "to_boundary": lambda: {
        "bucket_boundaries": [3, 6, 12],
        "bucket_batch_sizes": [2, 2, 2, 2],
        "pad_to_bucket_boundary": True,
    },
    "no_padding": lambda: {"bucket_batch_sizes": [1, 1, 1], "no_padding": True},
    "one_bucket": lambda: {"bucket_boundaries": [], "bucket_batch_sizes": [3]},
    "unsorted": lambda: {"bucket_boundaries": [6, 3]},
    "sizes": lambda: {"bucket_batch_sizes": [3, 1, 2]},
}


def _buckets(api, length_func, dataset=None, **kwargs):
    arguments = {"bucket_boundaries": [3, 6], "bucket_batch_sizes": [2, 2, 2]}
    dataset = _sequences(api) if dataset is None else dataset
    return dataset.bucket_by_sequence_length(length_func, **{**arguments, **kwargs})


@scenario("7.1", cases=[(name,) for name in BUCKETS])
def bucket_by_sequence_length(api, kind):
    return _seen(api, _buckets(api, api.ops.length, **BUCKETS[kind]()))


@scenario("7.1")
def buckets_of_structures(api):
    pairs = _sequences(api).map(lambda x: (x, api.ops.sum(x)))
    dicts = _sequences(api).map(lambda x: {"x": x})
    return [
        api.numbers(_buckets(api, lambda x, y: api.ops.length(x), pairs)),
        api.numbers(_buckets(api, lambda x: api.ops.length(x["x"]), dicts)),
    ]


@scenario("7.1")
def bucket_errors(api):
    def buckets(**kwargs):
        return lambda: api.numbers(_buckets(api, api.ops.length, **kwargs))

    return {
        "sizes": api.attempt(buckets(bucket_batch_sizes=[2, 2])),
        "size_0": api.attempt(buckets(bucket_batch_sizes=[0, 2, 2])),
        "past_the_last_boundary": api.fails(buckets(pad_to_bucket_boundary=True)),
        "lengths_differ": api.attempt(buckets(no_padding=True)),
        "shape_too_small": api.fails(buckets(padded_shapes=[3])),
    }
