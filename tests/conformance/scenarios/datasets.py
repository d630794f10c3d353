"""Datasets: sources, transformations, types, sizes and errors (7.1)."""

from collections import namedtuple

import numpy as np

from . import scenario

Pair = namedtuple("Pair", ["a", "b"])


def _look(api, dataset, limit=30):
    """All that can be seen of a dataset."""
    return {
        "spec": api.spec(dataset),
        "cardinality": int(dataset.cardinality()),
        "elements": api.elements(dataset, limit),
    }


def _attempts(api, fns):
    return {name: api.attempt(fn) for name, fn in fns.items()}


# Sources.

SLICES = {
    "ints": lambda: [1, 2, 3],
    "floats": lambda: [1.0, 2.5],
    "bools": lambda: [True, False],
    "strings": lambda: ["a", "bé", ""],
    "bytes": lambda: [b"a", b"\x00\x01"],
    "ints_and_floats": lambda: [1, 2.5],
    "nested_lists": lambda: [[1, 2], [3, 4], [5, 6]],
    "three_dimensions": lambda: np.arange(8).reshape(2, 2, 2),
    "int8": lambda: np.int8([1, 2]),
    "uint8": lambda: np.uint8([1, 255]),
    "int16": lambda: np.int16([-1, 2]),
    "int64": lambda: np.int64([1, 2**40]),
    "float16": lambda: np.float16([1.5, 2]),
    "float64": lambda: np.array([1.5, 2.5]),
    "empty_list": lambda: [],
    "unicode_array": lambda: np.array(["ab", "c"]),
    "object_array": lambda: np.array([b"ab", b"c"], dtype=object),
    "tuple": lambda: ([1, 2], [3.0, 4.0]),
    "dict": lambda: {"b": [1, 2], "a": [3.0, 4.0]},
    "dict_in_tuple": lambda: ({"x": [1, 2]}, [[3], [4]]),
    "namedtuple": lambda: Pair([1, 2], [3, 4]),
    "tuple_in_dict": lambda: {"x": ([1, 2], [3, 4])},
    "list_of_tuples": lambda: [(1, 2), (3, 4)],
    "empty": lambda: np.zeros((0, 3), "float32"),
    "one": lambda: [7],
    "large_ints": lambda: np.array([2**62, -1]),
    "range": lambda: list(range(3)),
    "mixed_shapes": lambda: ([1, 2], [[1.0, 2.0], [3.0, 4.0]]),
}


@scenario("7.1", cases=[(name,) for name in SLICES])
def from_tensor_slices(api, kind):
    return _look(api, api.data.Dataset.from_tensor_slices(SLICES[kind]()))


@scenario("7.1")
def from_tensor_slices_errors(api):
    slices = api.data.Dataset.from_tensor_slices
    return [
        api.attempt(lambda: slices(([1, 2], [3]))),
        api.attempt(lambda: slices({"a": [1, 2, 3], "b": [3, 4]})),
        api.fails(lambda: slices(5)),
        api.fails(lambda: slices([[1, 2], [3]])),
        api.fails(lambda: slices(([1, 2], 3))),
        api.fails(lambda: slices(["a", 1])),
    ]


TENSORS = {
    "int": lambda: 5,
    "float": lambda: 2.5,
    "bool": lambda: True,
    "string": lambda: "abc",
    "list": lambda: [1, 2, 3],
    "matrix": lambda: [[1.0, 2.0], [3.0, 4.0]],
    "tuple": lambda: ([1, 2, 3], 4),
    "dict": lambda: {"x": [1, 2], "y": "s"},
    "namedtuple": lambda: Pair(1, [2.0]),
    "nested": lambda: (1, (2, {"c": 3.0})),
    "float64": lambda: np.float64(1.5),
    "int64": lambda: np.arange(3),
    "list_in_tuple": lambda: ([1, 2], [3.0]),
    "large_int": lambda: np.int64(2**40),
    "empty_list": lambda: [],
}


@scenario("7.1", cases=[(name,) for name in TENSORS])
def from_tensors(api, kind):
    return _look(api, api.data.Dataset.from_tensors(TENSORS[kind]()))


@scenario("7.1")
def python_ints_that_need_64_bits(api):
    Dataset = api.data.Dataset
    return [
        _look(api, Dataset.from_tensors(2**40)),
        _look(api, Dataset.from_tensor_slices([1, 2**40])),
        _look(api, Dataset.from_tensor_slices([1, -(2**31)])),
        api.fails(lambda: Dataset.from_tensors(2**70)),
    ]


RANGES = ["5", "0", "-3", "2,7", "2,10,3", "5,0,-2", "5,1", "1,5,-1", "0,10,4", "-3,3"]


@scenario("7.1", cases=[(arguments,) for arguments in RANGES])
def ranges(api, arguments):
    arguments = [int(number) for number in arguments.split(",")]
    return _look(api, api.data.Dataset.range(*arguments))


@scenario("7.1")
def range_of_a_type(api):
    Dataset = api.data.Dataset
    return [
        _look(api, Dataset.range(3, output_type=np.int32)),
        _look(api, Dataset.range(1, 4, output_type="float32")),
        api.fails(lambda: Dataset.range()),
        api.fails(lambda: api.elements(Dataset.range(1, 2, 0))),
    ]


GENERATORS = {
    "signature": (lambda: iter([1, 2, 3]), lambda api: _signature(api, ([], "int32"))),
    "vectors": (
        lambda: iter([[1, 2], [3, 4]]),
        lambda api: _signature(api, ([2], "int64")),
    ),
    "varying": (
        lambda: iter([[1], [2, 3], []]),
        lambda api: _signature(api, ([None], "float32")),
    ),
    "unknown_rank": (
        lambda: iter([[1], [[2, 3]], 5]),
        lambda api: _signature(api, (None, "int32")),
    ),
    "tuple": (
        lambda: iter([(1, [1.0]), (2, [2.0])]),
        lambda api: {
            "output_signature": (
                api.TensorSpec([], "int32"),
                api.TensorSpec([1], "float32"),
            )
        },
    ),
    "dict": (
        lambda: iter([{"a": 1, "b": "x"}, {"b": "y", "a": 2}]),
        lambda api: {
            "output_signature": {
                "a": api.TensorSpec([], "int32"),
                "b": api.TensorSpec([], "string"),
            }
        },
    ),
    "types": (lambda: iter([1, 2]), lambda api: {"output_types": "int32"}),
    "types_of_a_tuple": (
        lambda: iter([(1, 2.0), (3, 4.0)]),
        lambda api: {"output_types": ("int64", "float32")},
    ),
    "types_and_shapes": (
        lambda: iter([[1, 2], [3, 4]]),
        lambda api: {"output_types": "int64", "output_shapes": [2]},
    ),
    "types_and_part_of_shapes": (
        lambda: iter([[1, 2], [3]]),
        lambda api: {"output_types": "int64", "output_shapes": [None]},
    ),
    "int_as_float": (
        lambda: iter([1, 2]),
        lambda api: _signature(api, ([], "float32")),
    ),
    "arrays": (
        lambda: iter([np.float64([1, 2])]),
        lambda api: _signature(api, ([2], "float32")),
    ),
    "empty": (lambda: iter([]), lambda api: _signature(api, ([], "int32"))),
    "strings": (lambda: iter(["a", b"b"]), lambda api: _signature(api, ([], "string"))),
    "list_for_a_tuple": (
        lambda: iter([[1, 2.0]]),
        lambda api: {
            "output_signature": (
                api.TensorSpec([], "int32"),
                api.TensorSpec([], "float32"),
            )
        },
    ),
}


def _signature(api, shape_and_dtype):
    return {"output_signature": api.TensorSpec(*shape_and_dtype)}


@scenario("7.1", cases=[(name,) for name in GENERATORS])
def from_generator(api, kind):
    generator, arguments = GENERATORS[kind]
    return _look(api, api.data.Dataset.from_generator(generator, **arguments(api)))


@scenario("7.1")
def generator_starts_again_for_each_iterator(api):
    started = []

    def generator():
        started.append(1)
        yield from (1, 2)

    dataset = api.data.Dataset.from_generator(
        generator, output_signature=api.TensorSpec([], "int32")
    )
    before = len(started)
    elements = [api.numbers(dataset), api.numbers(dataset.repeat(2))]
    return [before, elements, len(started)]


@scenario("7.1")
def generator_gets_arguments(api):
    dataset = api.data.Dataset.from_generator(
        lambda n, step: iter(range(0, int(n), int(step))),
        args=(7, 3),
        output_signature=api.TensorSpec([], "int64"),
    )
    return _look(api, dataset)


@scenario(
    "7.1",
    differs="elements are looked at where they are not described",
    expect=[{"int32[]": 1}],
)
def generator_without_types(api):
    return api.elements(api.data.Dataset.from_generator(lambda: iter([1])))


@scenario("7.1")
def from_generator_errors(api):
    def dataset(values, **kwargs):
        return lambda: api.elements(
            api.data.Dataset.from_generator(lambda: iter(values), **kwargs)
        )

    scalar = _signature(api, ([], "int32"))
    pair = {"output_signature": (api.TensorSpec([], "int32"),) * 2}

    def broken():
        yield 1
        raise KeyError("as raised")

    return {
        "shape": api.attempt(dataset([[1, 2]], **scalar)),
        "length": api.attempt(dataset([[1, 2]], **_signature(api, ([3], "int32")))),
        "type": api.fails(dataset(["a"], **scalar)),
        "float_for_int": api.fails(dataset([1.5], **scalar)),
        "structure": api.fails(dataset([(1, 2, 3)], **pair)),
        "scalar_for_a_tuple": api.fails(dataset([1], **pair)),
        "dict_for_a_tuple": api.fails(dataset([{"a": 1}], **pair)),
        "both": api.attempt(dataset([1], output_types="int32", **scalar)),
        "not_callable": api.attempt(
            lambda: api.data.Dataset.from_generator([1, 2], **scalar)
        ),
        "raises": api.fails(
            lambda: api.elements(api.data.Dataset.from_generator(broken, **scalar))
        ),
    }


# Transformations: values, sizes and specs.

TRANSFORMATIONS = {
    "batch": lambda ds, api: ds.batch(4),
    "batch_drop": lambda ds, api: ds.batch(4, drop_remainder=True),
    "batch_exact": lambda ds, api: ds.batch(5),
    "batch_one": lambda ds, api: ds.batch(1),
    "batch_large": lambda ds, api: ds.batch(20),
    "batch_large_drop": lambda ds, api: ds.batch(20, drop_remainder=True),
    "batch_parallel": lambda ds, api: ds.batch(4, num_parallel_calls=2),
    "batch_of_batch": lambda ds, api: ds.batch(2).batch(3),
    "batch_of_batch_drop": lambda ds, api: ds.batch(2, drop_remainder=True).batch(3),
    "batch_of_batches_drop": lambda ds, api: ds.batch(2, True).batch(3, True),
    "unbatch": lambda ds, api: ds.batch(4).unbatch(),
    "unbatch_static": lambda ds, api: ds.batch(5, drop_remainder=True).unbatch(),
    "unbatch_batch": lambda ds, api: ds.batch(3).unbatch().batch(4),
    "map": lambda ds, api: ds.map(lambda x: x * 2),
    "map_parallel": lambda ds, api: ds.map(lambda x: x * 2, num_parallel_calls=3),
    "map_autotune": lambda ds, api: ds.map(
        lambda x: x * 2, num_parallel_calls=api.data.AUTOTUNE
    ),
    "map_deterministic": lambda ds, api: ds.map(
        lambda x: x * 2, num_parallel_calls=4, deterministic=True
    ),
    "map_batch": lambda ds, api: ds.map(lambda x: x + 1).batch(4),
    "batch_map": lambda ds, api: ds.batch(4).map(lambda x: x + 1),
    "filter": lambda ds, api: ds.filter(lambda x: x % 3 == 0),
    "filter_all": lambda ds, api: ds.filter(lambda x: x > 100),
    "filter_batch": lambda ds, api: ds.filter(lambda x: x % 2 == 0).batch(3),
    "take": lambda ds, api: ds.take(3),
    "take_none": lambda ds, api: ds.take(0),
    "take_all": lambda ds, api: ds.take(-1),
    "take_more": lambda ds, api: ds.take(50),
    "skip": lambda ds, api: ds.skip(7),
    "skip_none": lambda ds, api: ds.skip(0),
    "skip_all": lambda ds, api: ds.skip(-1),
    "skip_more": lambda ds, api: ds.skip(50),
    "skip_other_negative": lambda ds, api: ds.skip(-2),
    "skip_take": lambda ds, api: ds.skip(2).take(3),
    "take_skip": lambda ds, api: ds.take(5).skip(2),
    "repeat_twice": lambda ds, api: ds.repeat(2),
    "repeat_zero": lambda ds, api: ds.repeat(0),
    "repeat_one": lambda ds, api: ds.repeat(1),
    "repeat_none": lambda ds, api: ds.repeat(),
    "repeat_minus_one": lambda ds, api: ds.repeat(-1),
    "repeat_take": lambda ds, api: ds.repeat().take(13),
    "repeat_skip": lambda ds, api: ds.repeat().skip(13),
    "repeat_batch": lambda ds, api: ds.repeat(2).batch(8),
    "batch_repeat": lambda ds, api: ds.batch(8).repeat(2),
    "batch_repeat_for_ever": lambda ds, api: ds.batch(8).repeat(),
    "repeat_repeat": lambda ds, api: ds.take(3).repeat(2).repeat(2),
    "repeat_filter": lambda ds, api: ds.repeat().filter(lambda x: x < 2).take(5),
    "repeat_for_ever_filter": lambda ds, api: ds.repeat().filter(lambda x: x < 2),
    "repeat_of_nothing": lambda ds, api: ds.take(0).repeat(),
    "repeat_for_ever_unbatch": lambda ds, api: ds.batch(4).repeat().unbatch(),
    "shard": lambda ds, api: ds.shard(3, 0),
    "shard_middle": lambda ds, api: ds.shard(3, 1),
    "shard_last": lambda ds, api: ds.shard(4, 3),
    "shard_one": lambda ds, api: ds.shard(1, 0),
    "shard_more_than_elements": lambda ds, api: ds.shard(20, 15),
    "shard_for_ever": lambda ds, api: ds.repeat().shard(3, 2),
    "cache": lambda ds, api: ds.cache(),
    "cache_repeat": lambda ds, api: ds.take(3).cache().repeat(2),
    "concatenate": lambda ds, api: ds.concatenate(api.data.Dataset.range(3)),
    "concatenate_for_ever": lambda ds, api: ds.concatenate(ds.repeat()),
    "for_ever_concatenate": lambda ds, api: ds.repeat().concatenate(ds),
    "concatenate_unknown": lambda ds, api: ds.concatenate(ds.filter(lambda x: x > 7)),
    "concatenate_empty": lambda ds, api: ds.concatenate(ds.take(0)),
    "concatenate_batches": lambda ds, api: ds.batch(4, True).concatenate(
        ds.batch(3, True)
    ),
    "concatenate_equal_batches": lambda ds, api: ds.batch(4, True).concatenate(
        ds.batch(4, True)
    ),
    "enumerate": lambda ds, api: ds.enumerate(),
    "enumerate_from": lambda ds, api: ds.enumerate(start=5),
    "enumerate_negative": lambda ds, api: ds.enumerate(-2),
    "enumerate_for_ever": lambda ds, api: ds.repeat().enumerate(),
    "prefetch": lambda ds, api: ds.prefetch(3),
    "prefetch_autotune": lambda ds, api: ds.prefetch(api.data.AUTOTUNE),
    "prefetch_zero": lambda ds, api: ds.prefetch(0),
    "flat_map": lambda ds, api: ds.take(4).flat_map(
        lambda x: api.data.Dataset.range(x)
    ),
    "flat_map_slices": lambda ds, api: ds.batch(4).flat_map(
        api.data.Dataset.from_tensor_slices
    ),
    "flat_map_empty": lambda ds, api: ds.flat_map(lambda x: api.data.Dataset.range(0)),
    "flat_map_for_ever": lambda ds, api: ds.repeat().flat_map(
        lambda x: api.data.Dataset.range(2)
    ),
    "interleave_for_ever": lambda ds, api: ds.repeat().interleave(
        lambda x: api.data.Dataset.range(2), cycle_length=2
    ),
    "zip": lambda ds, api: api.data.Dataset.zip((ds, ds.map(lambda x: x * 10))),
    "zip_arguments": lambda ds, api: api.data.Dataset.zip(ds, ds.skip(1)),
    "zip_dict": lambda ds, api: api.data.Dataset.zip({"a": ds, "b": ds.skip(7)}),
    "zip_nested": lambda ds, api: api.data.Dataset.zip((ds, (ds, {"c": ds.take(2)}))),
    "zip_of_different_length": lambda ds, api: api.data.Dataset.zip(
        (ds, api.data.Dataset.range(3))
    ),
    "zip_for_ever": lambda ds, api: api.data.Dataset.zip((ds.repeat(), ds)),
    "zip_both_for_ever": lambda ds, api: api.data.Dataset.zip(
        (ds.repeat(), ds.repeat())
    ),
    "zip_unknown": lambda ds, api: api.data.Dataset.zip(
        (ds, ds.filter(lambda x: x > 3))
    ),
    "zip_empty": lambda ds, api: api.data.Dataset.zip((ds, ds.take(0))),
    "zip_one": lambda ds, api: api.data.Dataset.zip((ds,)),
    "zip_batch": lambda ds, api: api.data.Dataset.zip((ds, ds)).batch(4),
    "apply": lambda ds, api: ds.apply(lambda d: d.map(lambda x: x + 1).take(2)),
    "map_structure": lambda ds, api: ds.map(lambda x: (x, {"y": x + 1})),
    "map_structure_batch": lambda ds, api: ds.map(lambda x: (x, {"y": x})).batch(4),
    "map_structure_unbatch": lambda ds, api: (
        ds.map(lambda x: (x, {"y": x})).batch(4).unbatch()
    ),
    "shuffle_take_none": lambda ds, api: ds.shuffle(3).take(0),
    "shuffle_batch_size": lambda ds, api: ds.shuffle(1),
    "padded_scalars": lambda ds, api: ds.padded_batch(4),
    "with_options": lambda ds, api: ds.with_options(api.data.Options()),
    "batch_filter": lambda ds, api: ds.batch(3).filter(lambda x: x[0] > 2),
    "batch_skip_unbatch": lambda ds, api: ds.batch(3).skip(1).unbatch(),
    "take_repeat_batch_drop": lambda ds, api: ds.take(3).repeat(3).batch(2, True),
    "empty_batch": lambda ds, api: ds.take(0).batch(3),
    "empty_unbatch": lambda ds, api: ds.take(0).batch(3).unbatch(),
}


@scenario("7.1", cases=[(name,) for name in TRANSFORMATIONS])
def transformations(api, name):
    return _look(api, TRANSFORMATIONS[name](api.data.Dataset.range(10), api))


STRUCTURED = {
    "batch": lambda ds, api: ds.batch(2),
    "batch_drop": lambda ds, api: ds.batch(2, drop_remainder=True),
    "unbatch": lambda ds, api: ds.batch(2).unbatch(),
    "map_unpacked": lambda ds, api: ds.map(lambda x, y: (y["n"], x)),
    "map_one_argument": lambda ds, api: ds.map(lambda *args: args[0]),
    "filter_unpacked": lambda ds, api: ds.filter(lambda x, y: y["n"] > 1),
    "enumerate": lambda ds, api: ds.enumerate(),
    "concatenate": lambda ds, api: ds.concatenate(ds.take(1)),
    "zip": lambda ds, api: api.data.Dataset.zip((ds, api.data.Dataset.range(2))),
    "cache": lambda ds, api: ds.cache(),
    "repeat": lambda ds, api: ds.repeat(2).skip(2),
    "flat_map": lambda ds, api: ds.flat_map(
        lambda x, y: api.data.Dataset.from_tensors((y["n"], x))
    ),
    "interleave": lambda ds, api: ds.interleave(
        lambda x, y: api.data.Dataset.from_tensor_slices(x), cycle_length=2
    ),
    "padded_batch": lambda ds, api: ds.padded_batch(2),
}


@scenario("7.1", cases=[(name,) for name in STRUCTURED])
def structured_elements(api, name):
    dataset = api.data.Dataset.from_tensor_slices(
        (np.float32([[1, 2], [3, 4], [5, 6]]), {"n": [1, 2, 3], "s": ["a", "b", "c"]})
    )
    return _look(api, STRUCTURED[name](dataset, api))


MAPS = {
    "identity": lambda api: lambda x: x,
    "tuple": lambda api: lambda x: (x, x + 1),
    "list": lambda api: lambda x: [x, x + 1],
    "list_in_tuple": lambda api: lambda x: ([x, x], x),
    "dict": lambda api: lambda x: {"b": x, "a": x + 1},
    "namedtuple": lambda api: lambda x: Pair(x, x + 1),
    "nested": lambda api: lambda x: (x, (x + 1, {"z": (x,)})),
    "python_int": lambda api: lambda x: 7,
    "python_float": lambda api: lambda x: 7.5,
    "python_string": lambda api: lambda x: "abc",
    "constant_tuple": lambda api: lambda x: (1, 2.0, "s", True),
    "numpy": lambda api: lambda x: np.float64([1, 2]),
    "one_tuple": lambda api: lambda x: (x,),
    "comparison": lambda api: lambda x: x > 1,
    "float_math": lambda api: lambda x: api.ops.cast(x, "float32") / 2.0,
    "division": lambda api: lambda x: x // 2,
    "power": lambda api: lambda x: x**2,
    "fill": lambda api: lambda x: api.ops.fill([3], x),
    "vector_of_unknown_size": lambda api: lambda x: api.ops.fill([x], x),
}


@scenario("7.1", cases=[(name,) for name in MAPS])
def map_results(api, kind):
    return _look(api, api.data.Dataset.range(3).map(MAPS[kind](api)))


@scenario("7.1")
def map_with_none(api):
    dataset = api.data.Dataset.range(3)
    return [
        api.elements(dataset.map(lambda x: (x, None))),
        api.elements(dataset.map(lambda x: (x, None)).map(lambda x, none: x)),
        api.elements(dataset.map(lambda x: {"x": x, "none": None}).batch(2)),
    ]


@scenario("7.1")
def negative_take(api):
    return api.numbers(api.data.Dataset.range(3).take(-5))


@scenario("7.1")
def map_over_a_dict_gets_the_dict(api):
    dataset = api.data.Dataset.from_tensor_slices({"a": [1, 2], "b": [3, 4]})
    return [
        _look(api, dataset.map(lambda d: d["a"] + d["b"])),
        _look(api, dataset.map(lambda d: {**d, "c": d["a"] * 10})),
        api.fails(lambda: api.elements(dataset.map(lambda a, b: a))),
    ]


@scenario("7.1")
def map_over_a_tuple_gets_arguments(api):
    dataset = api.data.Dataset.from_tensor_slices(([1, 2], [3, 4]))
    named = api.data.Dataset.from_tensor_slices(Pair([1, 2], [3, 4]))
    nested = api.data.Dataset.from_tensor_slices((([1, 2], [3, 4]), [5, 6]))
    return [
        _look(api, dataset.map(lambda a, b: a + b)),
        _look(api, named.map(lambda pair: pair.a * pair.b)),
        api.attempt(lambda: api.elements(named.map(lambda a, b: a * b))),
        _look(api, nested.map(lambda pair, c: pair[0] + pair[1] + c)),
        api.attempt(lambda: api.elements(dataset.map(lambda pair: pair))),
        _look(api, dataset.map(lambda *args: args[1])),
    ]


@scenario("7.1")
def errors_in_user_functions(api):
    def broken(x):
        raise KeyError("as raised")

    dataset = api.data.Dataset.range(3)
    return {
        "map": api.attempt(lambda: api.elements(dataset.map(broken))),
        "filter": api.attempt(lambda: api.elements(dataset.filter(broken))),
        "flat_map": api.attempt(lambda: api.elements(dataset.flat_map(broken))),
        "reduce": api.attempt(lambda: dataset.reduce(0, lambda s, x: broken(x))),
        "not_callable": api.fails(lambda: dataset.map(5)),
        "filter_of_no_bool": api.attempt(
            lambda: api.elements(dataset.filter(lambda x: x))
        ),
        "filter_of_a_vector": api.attempt(
            lambda: api.elements(dataset.batch(2).filter(lambda x: x > 0))
        ),
        "flat_map_of_no_dataset": api.fails(
            lambda: api.elements(dataset.flat_map(lambda x: x))
        ),
        "interleave_of_no_dataset": api.fails(
            lambda: api.elements(dataset.interleave(lambda x: x))
        ),
        "apply_of_no_dataset": api.attempt(lambda: dataset.apply(lambda d: 5)),
        "deterministic_without_parallel": api.elements(
            dataset.map(lambda x: x, deterministic=True)
        ),
    }


@scenario("7.1")
def errors_in_arguments(api):
    dataset = api.data.Dataset.range(10)
    elements = api.elements
    return {
        "batch_0": api.attempt(lambda: elements(dataset.batch(0))),
        "batch_negative": api.attempt(lambda: elements(dataset.batch(-1))),
        "batch_float": api.fails(lambda: elements(dataset.batch(2.5))),
        "shard_index": api.attempt(lambda: elements(dataset.shard(3, 3))),
        "shard_negative_index": api.attempt(lambda: elements(dataset.shard(3, -2))),
        "shard_zero": api.attempt(lambda: elements(dataset.shard(0, 0))),
        "shard_negative": api.attempt(lambda: elements(dataset.shard(-2, 0))),
        "shuffle_0": api.attempt(lambda: elements(dataset.shuffle(0))),
        "shuffle_negative": api.attempt(lambda: elements(dataset.shuffle(-3))),
        "prefetch_negative": api.attempt(lambda: elements(dataset.prefetch(-2))),
        "interleave_cycle_0": api.attempt(
            lambda: elements(
                dataset.interleave(lambda x: dataset.take(1), cycle_length=0)
            )
        ),
        "interleave_block_0": api.attempt(
            lambda: elements(
                dataset.interleave(
                    lambda x: dataset.take(1), cycle_length=1, block_length=0
                )
            )
        ),
        "unbatch_scalars": api.attempt(lambda: elements(dataset.unbatch())),
        "zip_no_dataset": api.attempt(
            lambda: elements(api.data.Dataset.zip((dataset, 5)))
        ),
        "zip_list": api.attempt(
            lambda: elements(api.data.Dataset.zip([dataset, dataset]))
        ),
        "zip_nothing": api.attempt(lambda: elements(api.data.Dataset.zip())),
        "concatenate_type": api.attempt(
            lambda: elements(dataset.concatenate(api.data.Dataset.from_tensors(1.0)))
        ),
        "concatenate_structure": api.attempt(
            lambda: elements(dataset.concatenate(dataset.map(lambda x: (x, x))))
        ),
        "concatenate_names": api.attempt(
            lambda: elements(
                dataset.map(lambda x: {"a": x}).concatenate(
                    dataset.map(lambda x: {"b": x})
                )
            )
        ),
        "unknown_option": api.fails(lambda: elements(dataset.with_options(5))),
        "interleave_more_calls_than_cycle": api.attempt(
            lambda: elements(
                dataset.interleave(
                    lambda x: dataset.take(1), cycle_length=2, num_parallel_calls=3
                )
            )
        ),
        "negative_parallel": api.attempt(
            lambda: elements(dataset.map(lambda x: x, num_parallel_calls=-3))
        ),
    }


@scenario("7.1")
def concatenate_of_different_shapes(api):
    Dataset = api.data.Dataset
    vectors = Dataset.from_tensor_slices([[1, 2], [3, 4]])
    return {
        "sizes": _look(api, vectors.concatenate(Dataset.from_tensors([5, 6, 7]))),
        "ranks": api.attempt(
            lambda: _look(api, vectors.concatenate(Dataset.from_tensors(5)))
        ),
        "partial": _look(
            api, vectors.batch(2).concatenate(Dataset.from_tensors([[1, 2, 3]]))
        ),
    }


@scenario("7.1")
def batch_of_unequal_shapes(api):
    dataset = api.data.Dataset.range(3).map(lambda x: api.ops.fill([x], x))
    return [
        api.attempt(lambda: api.elements(dataset.batch(2))),
        api.elements(dataset.batch(1)),
        api.spec(dataset.batch(2)),
    ]


@scenario("7.1")
def unbatch_of_unequal_components(api):
    dataset = api.data.Dataset.from_tensors(([1, 2], [3, 4, 5]))
    dynamic = api.data.Dataset.from_generator(
        lambda: iter([([1, 2], [3, 4, 5])]),
        output_signature=(api.TensorSpec([None], "int32"),) * 2,
    )
    return [
        api.attempt(lambda: api.elements(dataset.unbatch())),
        api.attempt(lambda: api.elements(dynamic.unbatch())),
    ]


@scenario("7.1")
def unbatch_of_different_sizes(api):
    dataset = api.data.Dataset.from_generator(
        lambda: iter([[1, 2], [], [3]]),
        output_signature=api.TensorSpec([None], "int32"),
    )
    matrix = api.data.Dataset.from_tensors(np.arange(6).reshape(3, 2))
    return [_look(api, dataset.unbatch()), _look(api, matrix.unbatch().unbatch())]


# Padded batches.


def _ragged(api, sizes=(1, 3, 2)):
    return api.data.Dataset.from_generator(
        lambda: ([10 * size + i for i in range(size)] for size in sizes),
        output_signature=api.TensorSpec([None], "int32"),
    )


PADDED = {
    "default": lambda api: _ragged(api).padded_batch(2),
    "one_batch": lambda api: _ragged(api).padded_batch(3),
    "drop": lambda api: _ragged(api).padded_batch(2, drop_remainder=True),
    "none_shape": lambda api: _ragged(api).padded_batch(2, padded_shapes=[None]),
    "fixed_shape": lambda api: _ragged(api).padded_batch(2, padded_shapes=[5]),
    "exact_shape": lambda api: _ragged(api).padded_batch(3, padded_shapes=(3,)),
    "minus_one": lambda api: _ragged(api).padded_batch(2, padded_shapes=[-1]),
    "value": lambda api: _ragged(api).padded_batch(2, padding_values=-1),
    "value_and_shape": lambda api: _ragged(api).padded_batch(
        2, padded_shapes=[4], padding_values=9
    ),
    "empty_rows": lambda api: _ragged(api, (0, 0, 2)).padded_batch(2),
    "no_elements": lambda api: _ragged(api, ()).padded_batch(2),
    "large_batch": lambda api: _ragged(api).padded_batch(10),
    "scalars": lambda api: api.data.Dataset.range(3).padded_batch(2, padded_shapes=[]),
    "strings": lambda api: api.data.Dataset.from_generator(
        lambda: iter([["a"], ["b", "c"]]),
        output_signature=api.TensorSpec([None], "string"),
    ).padded_batch(2),
    "strings_value": lambda api: api.data.Dataset.from_generator(
        lambda: iter([["a"], ["b", "c"]]),
        output_signature=api.TensorSpec([None], "string"),
    ).padded_batch(2, padding_values="-"),
    "bools": lambda api: api.data.Dataset.from_generator(
        lambda: iter([[True], [True, True]]),
        output_signature=api.TensorSpec([None], "bool"),
    ).padded_batch(2),
    "matrices": lambda api: api.data.Dataset.from_generator(
        lambda: iter([[[1, 2]], [[3], [4]]]),
        output_signature=api.TensorSpec([None, None], "int32"),
    ).padded_batch(2),
    "matrices_partly_fixed": lambda api: api.data.Dataset.from_generator(
        lambda: iter([[[1, 2]], [[3], [4]]]),
        output_signature=api.TensorSpec([None, None], "int32"),
    ).padded_batch(2, padded_shapes=[3, None]),
    "tuple": lambda api: (
        _ragged(api).map(lambda x: (x, api.ops.sum(x))).padded_batch(2)
    ),
    "tuple_shapes": lambda api: (
        _ragged(api)
        .map(lambda x: (x, api.ops.sum(x)))
        .padded_batch(2, padded_shapes=([4], []))
    ),
    "tuple_values": lambda api: (
        _ragged(api).map(lambda x: (x, x * 2)).padded_batch(2, padding_values=(-1, -2))
    ),
    "tuple_one_value": lambda api: (
        _ragged(api).map(lambda x: (x, x * 2)).padded_batch(2, padding_values=-1)
    ),
    "tuple_value_and_none": lambda api: (
        _ragged(api)
        .map(lambda x: (x, x * 2))
        .padded_batch(2, padding_values=(-1, None))
    ),
    "dict": lambda api: (
        _ragged(api)
        .map(lambda x: {"x": x, "f": api.ops.cast(x, "float32")})
        .padded_batch(2, padded_shapes={"x": [None], "f": [4]})
    ),
    "floats": lambda api: (
        _ragged(api)
        .map(lambda x: api.ops.cast(x, "float32"))
        .padded_batch(2, padding_values=0.5)
    ),
    "static_vectors": lambda api: api.data.Dataset.from_tensor_slices(
        [[1, 2], [3, 4], [5, 6]]
    ).padded_batch(2),
    "static_vectors_padded": lambda api: api.data.Dataset.from_tensor_slices(
        [[1, 2], [3, 4], [5, 6]]
    ).padded_batch(2, padded_shapes=[4]),
    "repeat": lambda api: _ragged(api).padded_batch(2).repeat(2),
}


@scenario("7.1", cases=[(name,) for name in PADDED])
def padded_batches(api, kind):
    return _look(api, PADDED[kind](api))


@scenario(
    "7.1",
    differs="the rank is seen in the elements",
    expect=[{"int32[1,1]": [[1]]}],
)
def padded_batch_of_unknown_rank(api):
    dataset = api.data.Dataset.from_generator(lambda: iter([[1]]), output_types="int32")
    return api.elements(dataset.padded_batch(2))


@scenario("7.1")
def padded_batch_errors(api):
    def batched(dataset, *args, **kwargs):
        return lambda: api.elements(dataset.padded_batch(*args, **kwargs))

    ragged = _ragged(api)
    return {
        "too_small": api.fails(batched(ragged, 3, padded_shapes=[2])),
        "rank": api.attempt(batched(ragged, 2, padded_shapes=[None, None])),
        "rank_of_scalars": api.attempt(batched(ragged, 2, padded_shapes=[])),
        "structure": api.attempt(batched(ragged, 2, padded_shapes=([None], [None]))),
        "value_type": api.fails(batched(ragged, 2, padding_values="a")),
        "float_value": api.fails(batched(ragged, 2, padding_values=1.5)),
        "value_vector": api.attempt(batched(ragged, 2, padding_values=[1, 2])),
        "size_0": api.attempt(batched(ragged, 0)),
        "static_too_small": api.attempt(
            batched(api.data.Dataset.from_tensors([1, 2, 3]), 1, padded_shapes=[2])
        ),
    }


# Interleaving.

INTERLEAVES = [
    (cycle, block, calls)
    for cycle in (1, 2, 3, 4, 6)
    for block in (1, 2, 3)
    for calls in (None, 2)
]


@scenario(
    "7.1",
    cases=[(f"{c}", f"{b}", f"{n}") for c, b, n in INTERLEAVES if n is None or c >= n],
)
def interleave_order(api, cycle, block, calls):
    """Inner datasets of very different length, some of them empty."""
    sizes = (3, 0, 5, 1, 2, 0, 4, 6, 1)

    def inner(size, index):
        return api.data.Dataset.range(index * 10, index * 10 + size)

    def order(sizes):
        dataset = api.data.Dataset.from_tensor_slices(
            (np.int64(sizes), np.arange(len(sizes), dtype="int64"))
        )
        parallel = calls != "None"
        return api.numbers(
            dataset.interleave(
                inner,
                cycle_length=int(cycle),
                block_length=int(block),
                num_parallel_calls=int(calls) if parallel else None,
                deterministic=True if parallel else None,
            )
        )

    return [order(sizes), order((2, 2, 2, 2, 2)), order((1, 5, 1, 5)), order((0, 0, 3))]


@scenario("7.1")
def interleave_defaults(api):
    outer = api.data.Dataset.range(20)

    def order(**kwargs):
        dataset = outer.interleave(
            lambda i: api.data.Dataset.range(10 * i, 10 * i + 3), **kwargs
        )
        return _look(api, dataset, limit=60)

    return {
        "parallel_1": order(num_parallel_calls=1, deterministic=True, cycle_length=3),
        "cycle_above_outer": order(cycle_length=50),
        "block": order(cycle_length=4, block_length=2),
    }


@scenario("7.1")
def interleave_structures(api):
    dataset = api.data.Dataset.range(3).interleave(
        lambda i: api.data.Dataset.range(2).map(lambda j: {"i": i, "pair": (i, j)}),
        cycle_length=2,
    )
    return _look(api, dataset)


@scenario("7.1")
def interleave_of_endless_datasets(api):
    dataset = api.data.Dataset.range(4).interleave(
        lambda i: api.data.Dataset.from_tensors(i).repeat(), cycle_length=3
    )
    return [api.numbers(dataset, 9), int(dataset.cardinality())]


@scenario("7.1")
def interleave_of_an_empty_dataset(api):
    dataset = api.data.Dataset.range(0).interleave(
        lambda i: api.data.Dataset.range(3), cycle_length=2
    )
    return _look(api, dataset)


@scenario("7.1")
def flat_map_keeps_the_order(api):
    dataset = api.data.Dataset.from_tensor_slices([3, 0, 2]).flat_map(
        lambda n: api.data.Dataset.from_tensors(n).repeat(api.ops.cast(n, "int64"))
    )
    return _look(api, dataset)


# Shuffling: only what does not depend on the random numbers.


@scenario("7.1", cases=[("1",), ("3",), ("10",), ("100",)])
def shuffle_keeps_all_elements_and_its_buffer(api, size):
    """An element comes at most `size - 1` places too early."""
    order = api.numbers(api.data.Dataset.range(50).shuffle(int(size), seed=7))
    too_early = max(value - place for place, value in enumerate(order))
    return [
        sorted(order) == list(range(50)),
        too_early <= int(size) - 1,
        order == list(range(50)),
    ]


@scenario("7.1")
def shuffle_again_each_time(api):
    def orders(**kwargs):
        dataset = api.data.Dataset.range(50).shuffle(50, **kwargs)
        return [api.numbers(dataset) for _ in range(3)]

    def different(orders):
        return len({tuple(order) for order in orders})

    again = orders(seed=1, reshuffle_each_iteration=True)
    return [
        different(orders()),
        different(orders(seed=1)),
        different(again),
        different(orders(seed=1, reshuffle_each_iteration=False)),
        different(orders(reshuffle_each_iteration=False)),
        orders(seed=1, reshuffle_each_iteration=True) == again,
        orders(seed=2, reshuffle_each_iteration=True) == again,
    ]


@scenario("7.1")
def shuffle_and_repeat(api):
    dataset = api.data.Dataset.range(20)
    order = api.numbers(dataset.shuffle(20, seed=3).repeat(2))
    fixed = api.numbers(
        dataset.shuffle(20, seed=3, reshuffle_each_iteration=False).repeat(2)
    )
    mixed = api.numbers(dataset.repeat(2).shuffle(40, seed=3))
    return [
        sorted(order[:20]) == list(range(20)),
        order[:20] == order[20:],
        fixed[:20] == fixed[20:],
        sorted(mixed) == sorted([*range(20), *range(20)]),
        sorted(mixed[:20]) == list(range(20)),
    ]


@scenario("7.1")
def shuffle_after_cache_and_cache_after_shuffle(api):
    dataset = api.data.Dataset.range(30)
    before = dataset.cache().shuffle(30, seed=5)
    after = dataset.shuffle(30, seed=5).cache()
    return [
        api.numbers(before) == api.numbers(before),
        api.numbers(after) == api.numbers(after),
    ]


@scenario("7.1")
def shuffle_of_everything(api):
    """A buffer of unknown size holds all elements."""
    order = api.numbers(
        api.data.Dataset.range(50).shuffle(api.data.UNKNOWN_CARDINALITY, seed=1)
    )
    return [sorted(order) == list(range(50)), order == list(range(50))]


@scenario("7.1")
def shuffle_of_structures_keeps_pairs(api):
    dataset = api.data.Dataset.range(20).map(lambda x: (x, {"y": x * 2}))
    elements = api.numbers(dataset.shuffle(20))
    return all(2 * x == rest["y"] for x, rest in elements)


# Sizes.


@scenario("7.1")
def len_of_a_dataset(api):
    dataset = api.data.Dataset.range(10)
    return [
        len(dataset),
        len(dataset.batch(3)),
        len(dataset.take(0)),
        api.attempt(lambda: len(dataset.repeat())),
        api.attempt(lambda: len(dataset.filter(lambda x: x > 3))),
        bool(dataset),
        bool(dataset.take(0)),
    ]


@scenario("7.1")
def constants(api):
    return [
        api.data.AUTOTUNE,
        api.data.INFINITE_CARDINALITY,
        api.data.UNKNOWN_CARDINALITY,
        api.data.experimental.SHARD_HINT,
        [
            [policy.name, policy.value]
            for policy in api.data.experimental.AutoShardPolicy
        ],
    ]


@scenario("7.1")
def options_and_their_defaults(api):
    options = api.data.Options()
    dataset = api.data.Dataset.range(3)
    other = api.data.Options()
    other.experimental_distribute.auto_shard_policy = (
        api.data.experimental.AutoShardPolicy.OFF
    )
    with_options = dataset.with_options(other)
    return [
        options.experimental_distribute.auto_shard_policy.name,
        with_options.options().experimental_distribute.auto_shard_policy.name,
        dataset.options().experimental_distribute.auto_shard_policy.name,
        with_options.batch(2).options().experimental_distribute.auto_shard_policy.name,
        api.fails(lambda: setattr(options, "no_such_option", 1)),
        api.elements(with_options),
    ]


# Iterating.


@scenario("7.1")
def iterators(api):
    dataset = api.data.Dataset.range(3)
    iterator = iter(dataset)
    first = [int(next(iterator)), int(next(iterator))]
    other = iter(dataset)
    return [
        first,
        int(next(other)),
        int(next(iterator)),
        api.attempt(lambda: next(iterator)),
        api.attempt(lambda: next(iterator)),
        iter(iterator) is iterator,
        [int(x) for x in dataset],
        [int(x) for x in dataset],
    ]


@scenario("7.1")
def optionals_of_an_iterator(api):
    iterator = iter(api.data.Dataset.range(1))
    one = iterator.get_next_as_optional()
    none = iterator.get_next_as_optional()
    return [
        bool(one.has_value()),
        int(one.get_value()),
        bool(none.has_value()),
        api.attempt(none.get_value),
        api.attempt(iterator.get_next),
    ]


@scenario("7.1")
def classes_of_structures(api):
    def kind(dataset):
        element = next(iter(dataset.as_numpy_iterator()))
        return [api.class_name(element), api.class_name(dataset.element_spec)]

    Dataset = api.data.Dataset
    tuples = Dataset.from_tensors((1, 2))
    names = Dataset.from_tensors(Pair(1, 2))
    return [
        kind(tuples),
        kind(names),
        kind(names.batch(2)),
        kind(names.map(lambda pair: Pair(pair.b, pair.a))),
        kind(Dataset.range(1).map(lambda x: [x, x])),
        kind(Dataset.from_tensors({"a": 1})),
        kind(Dataset.zip((tuples, names)).map(lambda x, y: y)),
        kind(Dataset.range(1).map(lambda x: (x, x))),
        kind(names.repeat(2).shuffle(1).take(1).cache().prefetch(1)),
    ]


@scenario("7.1")
def scalars_of_numpy_iterators(api):
    def kind(value):
        element = next(api.data.Dataset.from_tensors(value).as_numpy_iterator())
        return api.class_name(element)

    return [kind(value) for value in (1, 1.5, True, "a", [1], np.uint8(3))]


@scenario("7.1")
def dict_keys_keep_their_order(api):
    dataset = api.data.Dataset.from_tensors({"b": 1, "a": 2})
    element = next(dataset.as_numpy_iterator())
    return [
        list(element),
        list(dataset.element_spec),
        list(dataset.batch(1).element_spec),
    ]


# Reducing.


@scenario("7.1")
def reduce(api):
    dataset = api.data.Dataset.range(5)
    zero = np.int64(0)
    return [
        dataset.reduce(zero, lambda state, x: state + x),
        dataset.take(0).reduce(np.int64(3), lambda state, x: state + x),
        dataset.batch(2).reduce(zero, lambda state, x: state + api.ops.sum(x)),
        dataset.reduce(
            (zero, np.int64(1)), lambda state, x: (state[0] + x, state[1] * 2)
        ),
        dataset.reduce({"n": zero}, lambda state, x: {"n": state["n"] + 1}),
        dataset.enumerate().reduce(zero, lambda state, pair: state + pair[0] * pair[1]),
        api.fails(lambda: dataset.reduce(zero, lambda state, x: (state, x))),
    ]


@scenario("7.1")
def cache_runs_the_pipeline_once(api):
    calls = []

    def generator():
        calls.append(1)
        yield from range(3)

    dataset = api.data.Dataset.from_generator(
        generator, output_signature=api.TensorSpec([], "int32")
    ).cache()
    return [api.numbers(dataset), api.numbers(dataset), len(calls)]


@scenario("7.1")
def cache_left_early_is_no_cache(api):
    calls = []

    def generator():
        calls.append(1)
        yield from range(3)

    dataset = api.data.Dataset.from_generator(
        generator, output_signature=api.TensorSpec([], "int32")
    ).cache()
    next(iter(dataset))
    return [api.numbers(dataset), api.numbers(dataset), len(calls)]


@scenario("7.1")
def transformations_leave_the_dataset_alone(api):
    dataset = api.data.Dataset.range(4)
    dataset.map(lambda x: x * 2)
    dataset.batch(2)
    return api.numbers(dataset)


@scenario(
    "7.1",
    differs="arrays are not copied, which would take their memory twice",
    expect=[100, 1, 2],
)
def arrays_are_not_changed_by_the_user(api):
    array = np.arange(3)
    dataset = api.data.Dataset.from_tensor_slices(array)
    array[0] = 100
    return api.numbers(dataset)


@scenario("7.1")
def tensor_specs(api):
    Spec = api.TensorSpec
    spec = Spec([None, 3], "float32")
    return [
        api.spec(spec),
        api.spec(Spec([], "string")),
        api.spec(Spec(None, "int32")),
        api.spec(Spec((2,))),
        spec == Spec([None, 3], "float32"),
        spec == Spec([2, 3], "float32"),
        spec == Spec([None, 3], "float64"),
        Spec([2], "int32", name="x").name,
        len({spec, Spec([None, 3], "float32")}),
    ]


@scenario("7.1")
def map_with_parallel_calls_keeps_the_order(api):
    dataset = api.data.Dataset.range(40).map(lambda x: x * x, num_parallel_calls=8)
    return api.numbers(dataset) == [x * x for x in range(40)]


@scenario("7.1")
def a_long_pipeline(api):
    dataset = (
        api.data.Dataset.range(20)
        .filter(lambda x: x % 3 != 0)
        .map(lambda x: {"x": x, "square": x * x})
        .batch(4)
        .map(lambda batch: (batch["x"], batch["square"] + batch["x"]))
        .enumerate(start=10)
        .skip(1)
        .repeat(2)
        .take(5)
        .prefetch(2)
    )
    return _look(api, dataset)
