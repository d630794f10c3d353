"""Keras' `PyDataset`."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from helpers.engines import parts

import mirrax as mx
from interop import libraries
from interop.comparing import assert_same, functions_in, take, through_json, union

keras = libraries.keras()
workers = pytest.mark.parametrize("workers", [1, 2])


class Numbers(keras.utils.PyDataset):
    """0, 1, ... up to `count` in batches of 4, in an order that every epoch reverses."""

    def __init__(self, count=10, form=lambda x: x, **kwargs):
        super().__init__(**kwargs)
        self.count, self.form = count, form
        self.numbers = list(range(-(-count // 4)))
        self.epochs, self.threads = 0, set()

    def __len__(self):
        return -(-self.count // 4)

    def __getitem__(self, index):
        self.threads.add(threading.current_thread().name)
        start = 4 * self.numbers[index]
        return self.form(np.arange(start, min(start + 4, self.count)))

    def on_epoch_end(self):
        self.epochs += 1
        self.numbers.reverse()


# Elements --------------------------------------------------------------------------------


@workers
@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: (x, x.astype("float16")),
        lambda x: ({"a": x, "b": x > 3}, x, np.ones(len(x))),
    ],
    ids=["array", "tuple", "dict"],
)
def test_values_structures_and_dtypes_are_the_librarys(form, workers):
    source = Numbers(form=form, workers=workers)
    expected = [source[i] for i in range(3)]
    for a, b in zip(mx.data.as_dataset(source), expected, strict=True):
        assert_same(a, b)


def test_a_list_is_structure_as_in_keras(two_cpus):
    """`[x, z], y` are two inputs of a model and its targets."""
    source = Numbers(4, lambda x: ([x, 10 * x], x + 0.5))
    (step,) = two_cpus.experimental_distribute_dataset(source)
    (x, z), y = step
    assert parts(two_cpus, x) == [[0, 1], [2, 3]]
    assert parts(two_cpus, z) == [[0, 10], [20, 30]]
    assert parts(two_cpus, y) == [[0.5, 1.5], [2.5, 3.5]]


def test_strings_are_arrays_of_bytes(two_cpus):
    source = Numbers(3, lambda x: np.array([f"é{i}" for i in x]))
    (step,) = two_cpus.experimental_distribute_dataset(source)
    assert parts(two_cpus, step) == [["é0".encode(), "é1".encode()], ["é2".encode()]]


def test_several_workers_read_at_a_time():
    source = Numbers(80, workers=3)
    assert [batch[0] for batch in mx.data.as_dataset(source)] == list(range(0, 80, 4))
    assert threading.current_thread().name not in source.threads


def test_a_dataset_without_an_end(two_cpus):
    class Endless(Numbers):
        @property
        def num_batches(self):
            return None

        def __getitem__(self, index):
            return np.array([index, index])

    dataset = mx.data.as_dataset(Endless())
    assert dataset.cardinality() == mx.data.INFINITE_CARDINALITY
    assert [x.tolist() for x in dataset.take(2)] == [[0, 0], [1, 1]]
    iterator = iter(two_cpus.experimental_distribute_dataset(Endless()))
    assert parts(two_cpus, take(iterator, 3)[-1]) == [[2], [2]]
    iterator.close()


# Epochs ----------------------------------------------------------------------------------


@workers
def test_on_epoch_end_is_called_after_each_whole_pass(workers):
    source = Numbers(workers=workers)
    dataset = mx.data.as_dataset(source)
    for epoch in range(3):
        assert source.epochs == epoch
        first = [batch[0] for batch in dataset]
        assert first == ([0, 4, 8] if epoch % 2 == 0 else [8, 4, 0])
    assert source.epochs == 3


@workers
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_on_epoch_end_is_called_once_a_pass_of_the_replicas(workers, ahead, two_cpus):
    source = Numbers(workers=workers)
    options = mx.distribute.InputOptions(experimental_per_replica_buffer_size=ahead)
    distributed = two_cpus.experimental_distribute_dataset(source, options)
    for epoch in range(2):
        steps = [union(two_cpus, step).tolist() for step in distributed]
        assert sorted(sum(steps, [])) == list(range(10))
        assert (steps[0][0] == 0) is (epoch == 0)
        assert source.epochs == epoch + 1


def test_repeat_ends_epochs_and_a_part_of_a_pass_does_not():
    source = Numbers()
    dataset = mx.data.as_dataset(source)
    assert [batch[0] for batch in dataset.repeat(2)] == [0, 4, 8, 8, 4, 0]
    assert source.epochs == 2
    list(dataset.take(2))
    iterator = iter(dataset)
    next(iterator)
    iterator.close()
    assert dataset.element_spec.shape == (4,)
    assert source.epochs == 2


# Saving ----------------------------------------------------------------------------------


@workers
def test_a_restored_pass_reads_only_the_rest(workers, two_cpus):
    iterator = iter(two_cpus.experimental_distribute_dataset(Numbers(workers=workers)))
    take(iterator, 1)
    state = through_json(iterator.get_state())
    rest = [union(two_cpus, step).tolist() for step in iterator]
    assert rest == [[4, 5, 6, 7], [8, 9]]
    source = Numbers(workers=workers)
    again = iter(two_cpus.experimental_distribute_dataset(source))
    again.set_state(state)
    assert [union(two_cpus, step).tolist() for step in again] == rest


# Errors ----------------------------------------------------------------------------------


@workers
def test_an_error_in_getitem_arrives_with_its_own_traceback(workers, two_cpus):
    def explode(x):
        if 4 in x:
            raise KeyError("a bad file")
        return x

    for give in (mx.data.as_dataset, two_cpus.experimental_distribute_dataset):
        iterator = iter(give(Numbers(form=explode, workers=workers)))
        next(iterator)
        with pytest.raises(KeyError, match="a bad file") as caught:
            next(iterator)
        assert functions_in(caught.value)[-1] == "explode"
        iterator.close()
