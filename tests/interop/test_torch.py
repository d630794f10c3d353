"""PyTorch's `DataLoader`."""

from __future__ import annotations

import collections
import multiprocessing

import numpy as np
import pytest
from helpers.engines import parts

import mirrax as mx
from interop import libraries
from interop.comparing import (
    assert_same,
    functions_in,
    take,
    through_json,
    to_numpy,
    union,
)

torch = libraries.torch()
data = torch.utils.data
DataLoader = data.DataLoader
Pair = collections.namedtuple("Pair", ["a", "b"])
workers = pytest.mark.parametrize("num_workers", [0, 2])


def numbers(count=22, **kwargs):
    return DataLoader(list(range(count)), batch_size=4, **kwargs)


def as_lists(batches):
    return [batch.tolist() for batch in batches]


# Elements --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        [1, 2, 3],
        [1.5, 2.5, 3.5],
        [torch.ones(2, dtype=torch.int16), torch.zeros(2, dtype=torch.int16)],
        [np.ones((2, 2), "float16")] * 3,
        [True, False],
        [{"x": i, "y": {"z": torch.tensor([i, i])}} for i in range(3)],
        [Pair(i, {"c": 2.0 * i}) for i in range(3)],
    ],
    ids=["int", "float", "tensor", "array", "bool", "dict", "namedtuple"],
)
def test_values_structures_and_dtypes_are_the_librarys(rows):
    loader = DataLoader(rows, batch_size=2)
    expected = [to_numpy(batch) for batch in loader]
    for a, b in zip(mx.data.as_dataset(loader), expected, strict=True):
        assert_same(a, b)


def test_the_lists_of_collate_are_tuples():
    loader = DataLoader([(i, (i + 0.5, i * 10)) for i in range(3)], batch_size=2)
    first, _ = mx.data.as_dataset(loader)
    assert_same(first, (np.array([0, 1]), (np.array([0.5, 1.5]), np.array([0, 10]))))


def test_strings_are_arrays_of_bytes(two_cpus):
    loader = DataLoader([(i, f"é{i}") for i in range(3)], batch_size=2)
    first, last = mx.data.as_dataset(loader)
    assert first[1].tolist() == ["é0".encode(), "é1".encode()]
    assert last[1].tolist() == ["é2".encode()]
    step, _ = two_cpus.experimental_distribute_dataset(loader)
    assert parts(two_cpus, step[1]) == [["é0".encode()], ["é1".encode()]]


def test_bfloat16_arrives_as_bfloat16():
    rows = [torch.tensor([1.5, 2.5], dtype=torch.bfloat16)] * 2
    (batch,) = mx.data.as_dataset(DataLoader(rows, batch_size=2))
    assert batch.dtype.name == "bfloat16"
    assert batch.astype("float32").tolist() == [[1.5, 2.5]] * 2


def test_rows_without_batches_are_batched_by_mirrax(two_cpus):
    loader = DataLoader(list(range(5)), batch_size=None)
    dataset = mx.data.as_dataset(loader)
    assert [int(x) for x in dataset] == [0, 1, 2, 3, 4]
    steps = two_cpus.experimental_distribute_dataset(dataset.batch(3))
    assert [union(two_cpus, step).tolist() for step in steps] == [[0, 1, 2], [3, 4]]
    with pytest.raises(ValueError, match=r"cannot be split.*dataset.batch"):
        next(iter(two_cpus.experimental_distribute_dataset(loader)))


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_length_is_the_loaders(drop_last):
    loader = numbers(drop_last=drop_last)
    dataset = mx.data.as_dataset(loader)
    assert dataset.cardinality() == len(dataset) == len(loader) == (6 - drop_last)
    assert as_lists(dataset) == as_lists(loader)


def test_a_collate_fn_may_give_anything_that_numpy_takes():
    loader = numbers(collate_fn=lambda rows: {"x": rows, "n": len(rows)})
    first = next(iter(mx.data.as_dataset(loader)))
    assert int(first["n"]) == 4


def test_a_dataset_fn_may_return_a_loader(two_cpus):
    steps = two_cpus.distribute_datasets_from_function(lambda context: numbers(10))
    assert [parts(two_cpus, step) for step in steps] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9], []],
    ]


# Shuffling ---------------------------------------------------------------------------------


def shuffled(kind, num_workers=0, seed=7):
    """A loader that shuffles, with the generator's own or PyTorch's own random numbers."""
    generator = None
    if kind == "global":
        torch.manual_seed(seed)
    else:
        generator = torch.Generator().manual_seed(seed)
    if kind == "sampler":
        sampler = data.RandomSampler(range(22), generator=generator)
        return numbers(sampler=sampler, num_workers=num_workers)
    if kind == "batch sampler":
        sampler = data.RandomSampler(range(22), generator=generator)
        batches = data.BatchSampler(sampler, 4, False)
        return DataLoader(
            list(range(22)), batch_sampler=batches, num_workers=num_workers
        )
    if kind == "sampler beside a generator":
        sampler = data.RandomSampler(range(22), generator=generator)
        other = torch.Generator().manual_seed(seed + 1)
        return numbers(sampler=sampler, generator=other, num_workers=num_workers)
    return numbers(shuffle=True, generator=generator, num_workers=num_workers)


KINDS = [
    "global",
    "generator",
    "sampler",
    "batch sampler",
    "sampler beside a generator",
]
kinds = pytest.mark.parametrize("kind", KINDS)


@workers
@kinds
def test_every_epoch_has_the_order_that_the_loader_draws(kind, num_workers):
    loader = shuffled(kind, num_workers)
    expected = [as_lists(loader) for _ in range(2)]
    dataset = mx.data.as_dataset(shuffled(kind, num_workers))
    assert [as_lists(dataset) for _ in range(2)] == expected
    assert expected[0] != expected[1]
    assert sorted(sum(expected[0], [])) == list(range(22))


@workers
@pytest.mark.parametrize("kind", ["global", "generator"])
def test_replicas_together_meet_the_order_that_the_loader_draws(
    kind, num_workers, two_cpus
):
    expected = as_lists(shuffled(kind, num_workers))
    steps = two_cpus.experimental_distribute_dataset(shuffled(kind, num_workers))
    assert [union(two_cpus, step).tolist() for step in steps] == expected


@kinds
def test_asking_for_the_spec_draws_no_random_number(kind):
    expected = as_lists(shuffled(kind))
    dataset = mx.data.as_dataset(shuffled(kind))
    assert dataset.element_spec.dtype == "int64"
    assert as_lists(dataset) == expected


def test_mapping_before_distribution_keeps_the_order_that_the_loader_draws(two_cpus):
    expected = as_lists(shuffled("generator"))
    dataset = mx.data.as_dataset(shuffled("generator")).map(lambda x: x * 1)
    steps = two_cpus.experimental_distribute_dataset(dataset)
    assert [union(two_cpus, step).tolist() for step in steps] == expected


# Saving ------------------------------------------------------------------------------------


@kinds
def test_a_restored_pass_goes_on_in_the_same_order(kind):
    iterator = iter(mx.data.as_dataset(shuffled(kind)))
    take(iterator, 2)
    state = through_json(iterator.get_state())
    rest = as_lists(iterator)
    assert len(rest) == 4

    again = iter(mx.data.as_dataset(shuffled(kind, seed=99)))
    again.set_state(state)
    assert as_lists(again) == rest


@workers
@pytest.mark.parametrize("kind", ["global", "generator"])
def test_a_restored_run_has_the_same_later_epochs(kind, num_workers, two_cpus):
    def start(seed):
        loader = shuffled(kind, num_workers, seed)
        return two_cpus.experimental_distribute_dataset(loader)

    def rest_of(iterator, distributed):
        steps = [*iterator, *distributed]
        return [union(two_cpus, step).tolist() for step in steps]

    distributed = start(7)
    iterator = iter(distributed)
    take(iterator, 4)
    state = through_json(iterator.get_state())
    rest = rest_of(iterator, distributed)
    assert len(rest) == 2 + 6

    distributed = start(99)
    again = iter(distributed)
    again.set_state(state)
    assert rest_of(again, distributed) == rest


def test_a_state_in_the_second_epoch_of_a_repeat():
    def start(seed):
        return iter(mx.data.as_dataset(shuffled("generator", seed=seed)).repeat(2))

    iterator = start(7)
    take(iterator, 8)
    state = through_json(iterator.get_state())
    rest = as_lists(iterator)
    assert len(rest) == 4
    again = start(99)
    again.set_state(state)
    assert as_lists(again) == rest


@pytest.mark.parametrize(
    "change",
    [
        lambda dataset: dataset.unbatch().batch(3),
        lambda dataset: dataset.unbatch().shuffle(9, seed=1).batch(3),
        lambda dataset: dataset.map(lambda x: x + 1, num_parallel_calls=2),
        lambda dataset: dataset.prefetch(3),
        lambda dataset: dataset.cache(),
    ],
    ids=["unbatch", "shuffle", "parallel map", "prefetch", "cache"],
)
@pytest.mark.parametrize("count", [1, 4])
def test_a_restored_pipeline_keeps_the_order_that_the_loader_drew(change, count):
    def start(seed):
        return iter(change(mx.data.as_dataset(shuffled("generator", seed=seed))))

    iterator = start(7)
    take(iterator, count)
    state = through_json(iterator.get_state())
    rest = [to_numpy(element) for element in iterator]
    again = start(99)
    again.set_state(state)
    found = list(again)
    assert len(found) == len(rest)
    for a, b in zip(found, rest):
        assert_same(a, b)


# Workers -----------------------------------------------------------------------------------


def children():
    return {process.pid for process in multiprocessing.active_children()}


@pytest.mark.parametrize("is_distributed", [False, True])
def test_closing_an_iterator_ends_the_loaders_workers(is_distributed, two_cpus):
    loader, before = numbers(num_workers=2), children()
    give = two_cpus.experimental_distribute_dataset if is_distributed else None
    iterator = iter((give or mx.data.as_dataset)(loader))
    next(iterator)
    assert len(children() - before) == 2
    iterator.close()
    assert children() <= before


def test_asking_for_the_spec_leaves_a_pass_of_persistent_workers_alone():
    dataset = mx.data.as_dataset(numbers(num_workers=2, persistent_workers=True))
    iterator = iter(dataset)
    found = take(iterator, 3)
    assert dataset.element_spec.dtype == "int64"
    assert as_lists([*found, *iterator]) == as_lists(numbers())


# Errors ------------------------------------------------------------------------------------


class Exploding:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.load(index)

    def load(self, index):
        if index == 5:
            raise KeyError("a bad file")
        return index


def test_an_error_in_the_users_dataset_arrives_with_its_own_traceback(two_cpus):
    for give in (mx.data.as_dataset, two_cpus.experimental_distribute_dataset):
        iterator = iter(give(DataLoader(Exploding(), batch_size=4)))
        next(iterator)
        with pytest.raises(KeyError, match="a bad file") as caught:
            next(iterator)
        assert functions_in(caught.value)[-1] == "load"


def test_an_error_in_a_worker_arrives_with_the_workers_traceback(two_cpus):
    loader = DataLoader(Exploding(), batch_size=4, num_workers=2)
    iterator = iter(two_cpus.experimental_distribute_dataset(loader))
    next(iterator)
    with pytest.raises(KeyError, match="a bad file") as caught:
        next(iterator)
    assert "in load" in str(caught.value)


def test_a_dataset_without_a_loader_is_refused_with_advice():
    rows = data.TensorDataset(torch.arange(3))
    with pytest.raises(TypeError, match=r"TensorDataset.*PyTorch"):
        mx.data.as_dataset(rows)
