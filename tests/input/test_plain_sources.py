"""Iterables, generators and arrays wherever a dataset is asked for."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import mirrored

import mirrax as mx

Dataset = mx.data.Dataset
BATCHES = [np.arange(4), np.arange(4) + 4, np.arange(3) + 8]


def rows_of(strategy, distributed):
    return [
        int(x)
        for batch in distributed
        for part in strategy.experimental_local_results(batch)
        for x in part
    ]


@pytest.fixture(params=[1, 2])
def strategy(request):
    return mirrored(request.param)


@pytest.mark.parametrize(
    "source",
    [
        BATCHES,
        lambda: iter(BATCHES),
        Dataset.range(11).batch(4),
        np.arange(12).reshape(3, 4)[:, :],
    ],
)
def test_what_can_be_iterated_over_again(source, strategy):
    distributed = strategy.experimental_distribute_dataset(source)
    first = rows_of(strategy, distributed)
    assert first == list(range(len(first))) and len(first) in (11, 12)
    assert rows_of(strategy, distributed) == first


def test_an_iterator_has_one_pass(strategy):
    distributed = strategy.experimental_distribute_dataset(iter(BATCHES))
    assert rows_of(strategy, distributed) == list(range(11))
    with pytest.raises(ValueError, match="used up by the first pass.*from_generator"):
        list(distributed)


def test_asking_for_the_spec_does_not_take_from_an_iterator(strategy):
    dataset = mx.data.as_dataset(iter(BATCHES))
    assert dataset.element_spec.dtype == "int64"
    mapped = dataset.map(lambda x: x if x.sum() > 0 else x)
    assert mapped.element_spec.dtype == "int64"
    distributed = strategy.experimental_distribute_dataset(mapped)
    distributed.element_spec  # noqa: B018
    assert rows_of(strategy, distributed) == list(range(11))


def test_an_iterator_from_a_dataset_fn(strategy):
    distributed = strategy.distribute_datasets_from_function(lambda _: iter(BATCHES))
    found = rows_of(strategy, distributed)
    assert found in (list(range(11)), list(range(8))), (
        "an incomplete step may be left out"
    )


def test_dicts_and_tuples_of_arrays_stand_for_their_rows():
    for source in ({"x": np.arange(3)}, (np.arange(3),), np.arange(3), jnp.arange(3)):
        assert len(list(mx.data.as_dataset(source))) == 3


def test_the_state_of_a_pass_over_an_iterable():
    iterator = iter(mx.data.as_dataset(BATCHES))
    next(iterator)
    again = iter(mx.data.as_dataset(BATCHES))
    again.set_state(iterator.get_state())
    assert [x.tolist() for x in again] == [x.tolist() for x in BATCHES[1:]]


def test_elements_of_sources():
    slices = Dataset.from_tensor_slices
    assert list(slices([1, 2])) == [1, 2]
    assert next(iter(slices([1, 2]))).dtype == "int32"
    assert next(iter(slices([1.5]))).dtype == "float32"
    assert next(iter(slices(np.array([1.5])))).dtype == "float64"
    assert next(iter(slices([2**40]))).dtype == "int64"
    assert list(slices(["a", "b\u00fc"])) == [b"a", "b\u00fc".encode()]
    assert list(slices(jnp.array([1, 2]))) == [1, 2]
    assert list(slices([True, False])) == [True, False]
    tensors = list(Dataset.from_tensors({"a": [1, 2], "b": "x"}))
    assert tensors[0]["a"].tolist() == [1, 2] and tensors[0]["b"] == b"x"


def test_bytes_keep_their_zeros():
    rows = [b"a\x00", b"\x00", b"", b"\x00b"]
    assert list(Dataset.from_tensor_slices(rows)) == rows
    assert list(Dataset.from_tensor_slices(["a\x00"])) == [b"a\x00"]
    assert [x.tolist() for x in Dataset.from_tensors(rows)] == [rows]
    assert [x.tolist() for x in Dataset.from_generator(lambda: [rows])] == [rows]
    nested = list(Dataset.from_tensor_slices([rows[:2], rows[2:]]))
    assert [row.tolist() for row in nested] == [rows[:2], rows[2:]]
    assert [x.tolist() for x in Dataset.from_tensor_slices(rows).batch(4)] == [rows]
    assert list(Dataset.range(1).map(lambda x: b"a\x00")) == [b"a\x00"]
    assert list(Dataset.from_tensor_slices(rows).cache().repeat(2)) == rows * 2


def test_generators_with_types_shapes_and_arguments():
    def generator(n, start=0):
        yield from range(start, start + n)

    old = Dataset.from_generator(generator, "float32", (), args=(3, 5))
    assert list(old) == [5, 6, 7]
    assert old.element_spec == mx.TensorSpec((), "float32")
    assert next(iter(old)).dtype == "float32"
    text = Dataset.from_generator(lambda: ["a", b"b"], str)
    assert list(text) == [b"a", b"b"]
