"""Hugging Face's `datasets.Dataset` and `IterableDataset`."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.engines import parts

import mirrax as mx
from interop import libraries
from interop.comparing import functions_in, take, through_json, union

datasets = libraries.hugging_face()
both = pytest.mark.parametrize("is_iterable", [False, True], ids=["map", "iterable"])


def dataset_of(columns, is_iterable=False, features=None):
    made = datasets.Dataset.from_dict(columns, features=features)
    return made.to_iterable_dataset(num_shards=2) if is_iterable else made


def values(dataset, name="x"):
    return [row[name].tolist() for row in dataset]


# Rows ------------------------------------------------------------------------------------


@both
def test_rows_are_dicts_of_arrays(is_iterable):
    columns = {
        "number": [1, 2, 3],
        "flag": [True, False, True],
        "vector": [[1.5, 2.5], [3.5, 4.5], [5.5, 6.5]],
        "matrix": [[[1, 2], [3, 4]]] * 3,
    }
    found = list(mx.data.as_dataset(dataset_of(columns, is_iterable)))
    for name, column in columns.items():
        assert [np.asarray(row[name]).tolist() for row in found] == column


@both
def test_strings_are_bytes(is_iterable):
    columns = {"s": ["a", "bé", ""], "words": [["x", "yy"], ["z", "w"], ["q", "r"]]}
    found = list(mx.data.as_dataset(dataset_of(columns, is_iterable)))
    assert [row["s"] for row in found] == [b"a", "bé".encode(), b""]
    assert values(found, "words") == [[b"x", b"yy"], [b"z", b"w"], [b"q", b"r"]]


@both
def test_binary_columns_keep_every_byte(is_iterable):
    """NumPy's own byte strings would lose zeros at the end."""
    column = [b"\0a\0", b"b\0\0", b""]
    dataset = mx.data.as_dataset(dataset_of({"raw": column}, is_iterable))
    assert [row["raw"] for row in dataset] == column
    (batch,) = dataset.batch(3)
    assert batch["raw"].tolist() == column


@both
def test_nested_features_are_nested_dicts(is_iterable):
    columns = {"point": [{"x": 1, "y": 2.5}, {"x": 3, "y": 4.5}]}
    dataset = mx.data.as_dataset(dataset_of(columns, is_iterable))
    assert [int(row["point"]["x"]) for row in dataset] == [1, 3]
    (batch,) = dataset.batch(2)
    assert batch["point"]["y"].tolist() == [2.5, 4.5]


@both
def test_batches_are_made_by_mirrax(is_iterable, two_cpus):
    columns = {"x": [[i, i + 0.5] for i in range(5)], "s": list("abcde")}
    dataset = mx.data.as_dataset(dataset_of(columns, is_iterable)).batch(3)
    first, last = two_cpus.experimental_distribute_dataset(dataset)
    assert parts(two_cpus, first["s"]) == [[b"a", b"b"], [b"c"]]
    assert union(two_cpus, last)["x"].tolist() == [[3, 3.5], [4, 4.5]]


@both
def test_a_batch_of_lists_of_strings(is_iterable):
    columns = {"words": [["x", "yy"], ["z", "w"], ["q", "r"]]}
    first, last = mx.data.as_dataset(dataset_of(columns, is_iterable)).batch(2)
    assert first["words"].tolist() == [[b"x", b"yy"], [b"z", b"w"]]
    assert last["words"].tolist() == [[b"q", b"r"]]


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint8", "int16", "int32", "int64", "float16"]
    + ["float32", "float64"],
)
@both
def test_rows_and_batches_have_the_dtype_of_the_feature(dtype, is_iterable):
    features = datasets.Features({"x": datasets.Value(dtype)})
    made = dataset_of({"x": [0, 1, 1]}, is_iterable, features)
    dataset = mx.data.as_dataset(made)
    assert dataset.element_spec["x"] == mx.TensorSpec((), dtype)
    assert [row["x"].dtype for row in dataset] == [dtype] * 3
    assert [batch["x"].dtype for batch in dataset.batch(2)] == [dtype] * 2


def test_doubles_in_a_batch_keep_their_precision():
    third = 1 / 3
    features = datasets.Features({"x": datasets.Value("float64")})
    (batch,) = mx.data.as_dataset(dataset_of({"x": [third]}, features=features)).batch(
        1
    )
    assert batch["x"].tolist() == [third]


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 3)])
def test_array_features_keep_shape_and_dtype(shape):
    kind = {2: datasets.Array2D, 3: datasets.Array3D}[len(shape)]
    features = datasets.Features({"x": kind(shape, "uint8")})
    images = np.arange(3 * np.prod(shape), dtype=np.uint8).reshape(3, *shape)
    dataset = mx.data.as_dataset(dataset_of({"x": images}, features=features))
    assert dataset.element_spec["x"] == mx.TensorSpec(shape, "uint8")
    first, _ = dataset.batch(2)
    assert first["x"].dtype == "uint8"
    np.testing.assert_array_equal(first["x"], images[:2])


def test_lists_of_different_lengths_are_filled_up_or_refused():
    dataset = mx.data.as_dataset(dataset_of({"x": [[1, 2], [3], [4, 5, 6]]}))
    assert values(dataset) == [[1, 2], [3], [4, 5, 6]]
    first, last = dataset.padded_batch(2)
    assert first["x"].tolist() == [[1, 2], [3, 0]]
    assert last["x"].tolist() == [[4, 5, 6]]
    with pytest.raises(ValueError, match="padded_batch"):
        next(iter(dataset.batch(2)))


@pytest.mark.parametrize("form", ["numpy", "torch", "jax"])
def test_a_format_of_the_users_is_taken(form):
    formatted = dataset_of({"x": [1, 2, 3], "y": [4, 5, 6]}).with_format(
        form, columns=["x"]
    )
    found = list(mx.data.as_dataset(formatted).batch(2))
    assert [set(batch) for batch in found] == [{"x"}, {"x"}]
    assert values(found) == [[1, 2], [3]]


def test_a_transform_of_the_users_is_applied():
    transformed = dataset_of({"x": [1, 2, 3]}).with_transform(
        lambda rows: {"z": [10 * x for x in rows["x"]]}
    )
    assert values(mx.data.as_dataset(transformed).batch(2), "z") == [[10, 20], [30]]


def test_the_length_is_the_datasets():
    dataset = dataset_of({"x": list(range(7))})
    assert mx.data.as_dataset(dataset).cardinality() == 7
    assert mx.data.as_dataset(dataset).batch(2).cardinality() == 4
    stream = mx.data.as_dataset(dataset.to_iterable_dataset())
    assert stream.cardinality() == mx.data.UNKNOWN_CARDINALITY


def test_maps_filters_and_selections_of_the_library_are_seen():
    dataset = (
        dataset_of({"x": list(range(10))})
        .filter(lambda row: row["x"] % 2 == 0)
        .map(lambda row: {"x": row["x"] + 1})
        .select([4, 0, 1])
    )
    assert values(mx.data.as_dataset(dataset).batch(2)) == [[9, 1], [3]]


def test_an_empty_dataset_is_empty_and_says_so():
    dataset = mx.data.as_dataset(dataset_of({"x": []}))
    assert list(dataset) == []
    with pytest.raises(ValueError, match="empty"):
        _ = dataset.element_spec


# Order -----------------------------------------------------------------------------------


def shuffled(is_iterable):
    dataset = dataset_of({"x": list(range(22))})
    if is_iterable:
        stream = dataset.to_iterable_dataset(num_shards=4)
        return stream.shuffle(seed=3, buffer_size=5)
    return dataset.shuffle(seed=3)


@both
def test_a_shuffle_of_the_library_is_the_same_through_mirrax(is_iterable, two_cpus):
    expected = [row["x"] for row in shuffled(is_iterable)]
    assert expected != sorted(expected)
    dataset = mx.data.as_dataset(shuffled(is_iterable))
    assert values(dataset) == expected
    steps = two_cpus.experimental_distribute_dataset(dataset.batch(8))
    found = [union(two_cpus, step)["x"].tolist() for step in steps]
    assert sum(found, []) == expected


def test_set_epoch_changes_the_order_as_in_the_library():
    stream = shuffled(True)
    dataset = mx.data.as_dataset(stream)
    orders = []
    for epoch in range(2):
        stream.set_epoch(epoch)
        expected = [row["x"] for row in stream]
        assert values(dataset) == expected
        orders.append(expected)
    assert orders[0] != orders[1]


# Saving ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 9, 22])
@both
def test_a_restored_pass_gives_exactly_the_rest(is_iterable, count):
    iterator = iter(mx.data.as_dataset(shuffled(is_iterable)))
    take(iterator, count)
    state = through_json(iterator.get_state())
    rest = values(iterator)
    assert len(rest) == 22 - count
    again = iter(mx.data.as_dataset(shuffled(is_iterable)))
    again.set_state(state)
    assert values(again) == rest


@both
def test_a_restored_pass_of_the_replicas_gives_exactly_the_rest(is_iterable, two_cpus):
    def start():
        dataset = mx.data.as_dataset(shuffled(is_iterable)).batch(4)
        return iter(two_cpus.experimental_distribute_dataset(dataset))

    iterator = start()
    take(iterator, 2)
    state = through_json(iterator.get_state())
    rest = [union(two_cpus, step)["x"].tolist() for step in iterator]
    assert len(sum(rest, [])) == 14
    again = start()
    again.set_state(state)
    assert [union(two_cpus, step)["x"].tolist() for step in again] == rest


def test_restoring_leaves_the_users_own_dataset_as_it_was():
    stream = dataset_of({"x": list(range(12))}, is_iterable=True)
    dataset = mx.data.as_dataset(stream)
    iterator = iter(dataset)
    take(iterator, 5)
    state = through_json(iterator.get_state())
    iterator.close()
    again = iter(dataset)
    again.set_state(state)
    assert values(again) == list(range(5, 12))
    assert [row["x"] for row in stream] == list(range(12))
    assert values(dataset) == list(range(12))


# Errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["DatasetDict", "IterableDatasetDict"])
def test_a_dict_of_datasets_asks_which_one(kind, two_cpus):
    both = getattr(datasets, kind)(
        train=dataset_of({"x": [1, 2]}, "Iterable" in kind),
        test=dataset_of({"x": [3, 4]}, "Iterable" in kind),
    )
    for give in (mx.data.as_dataset, two_cpus.experimental_distribute_dataset):
        with pytest.raises(TypeError, match=rf"A {kind} .* take one: 'train', 'test'"):
            give(both)


@both
def test_rows_without_batches_cannot_be_distributed(is_iterable, two_cpus):
    rows = dataset_of({"x": [1, 2, 3], "s": ["a", "b", "c"]}, is_iterable)
    steps = iter(two_cpus.experimental_distribute_dataset(rows))
    with pytest.raises(ValueError, match=r"'x': int64\[\].*`dataset.batch\(n\)`"):
        next(steps)


@pytest.mark.parametrize("column", [["a", None], [None, "a"], [[1], None]], ids=str)
def test_missing_values_are_named(column):
    dataset = mx.data.as_dataset(dataset_of({"x": column}))
    for bad in (dataset, dataset.batch(2)):
        with pytest.raises((TypeError, ValueError), match="None"):
            list(bad)


def test_an_error_in_a_generator_arrives_with_its_own_traceback(two_cpus):
    def explode():
        yield {"x": [1, 2]}
        raise KeyError("a bad file")

    stream = datasets.IterableDataset.from_generator(explode)
    for give in (mx.data.as_dataset, two_cpus.experimental_distribute_dataset):
        iterator = iter(give(stream))
        next(iterator)
        with pytest.raises(KeyError, match="a bad file") as caught:
            next(iterator)
        assert functions_in(caught.value)[-1] == "explode"


def test_an_error_in_a_transform_arrives_with_its_own_traceback(two_cpus):
    def explode(rows):
        raise KeyError("a bad row")

    dataset = mx.data.as_dataset(dataset_of({"x": [1, 2]}).with_transform(explode))
    steps = iter(two_cpus.experimental_distribute_dataset(dataset.batch(2)))
    with pytest.raises(KeyError, match="a bad row") as caught:
        next(steps)
    assert functions_in(caught.value)[-1] == "explode"
