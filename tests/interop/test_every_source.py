"""What all libraries' datasets have in common once they are given to mirrax.

21 examples in batches of 8: the last one has 5, which is 3 + 2 for two replicas and
2 + 2 + 1 + 0 for four.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers.engines import mirrored

import mirrax as mx
from interop.comparing import (
    assert_same,
    on_device,
    replica_parts,
    take,
    through_json,
    union,
)
from interop.sources import ONE_PASS, columns, every_source

SHARES = {1: [8, 8, 5], 2: [4, 4, 3], 4: [2, 2, 2]}
replicas = pytest.mark.parametrize("replicas", [1, 2, 4])


def make(source):
    return source.make(columns(21), 8)


@every_source(ONE_PASS)
def test_elements_are_the_librarys_own(source):
    expected = source.elements(make(source))
    found = list(mx.data.as_dataset(make(source)))
    assert [len(batch["y"]) for batch in found] == [8, 8, 5]
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        if not source.has_dtypes:
            a, b = on_device(a), on_device(b)
        assert_same(a, b)


@replicas
@every_source(ONE_PASS)
def test_replicas_together_get_each_batch_in_order(source, replicas):
    strategy = mirrored(replicas)
    expected = source.elements(make(source))
    found = list(strategy.experimental_distribute_dataset(make(source)))
    assert len(found) == len(expected)
    for step, batch in zip(found, expected):
        assert_same(union(strategy, step), on_device(batch))
    first = [len(replica_parts(strategy, step)[0]["y"]) for step in found]
    assert first == SHARES[replicas]


@every_source()
def test_parts_of_an_uneven_batch_are_as_even_as_whole_rows_allow(source):
    strategy = mirrored(4)
    *_, last = strategy.experimental_distribute_dataset(make(source))
    assert [len(part["y"]) for part in replica_parts(strategy, last)] == [2, 2, 1, 0]


@every_source()
def test_every_pass_gives_all_elements(source, two_cpus):
    dataset = make(source)
    expected = np.arange(21).tolist()
    plain = mx.data.as_dataset(dataset)
    distributed = two_cpus.experimental_distribute_dataset(dataset)
    for _ in range(2):
        assert [y for batch in plain for y in batch["y"].tolist()] == expected
        steps = [union(two_cpus, step)["y"].tolist() for step in distributed]
        assert sum(steps, []) == expected


@every_source()
def test_the_number_of_batches_is_told_where_the_library_tells_it(source, two_cpus):
    size = 3 if source.is_sized else mx.data.UNKNOWN_CARDINALITY
    dataset = make(source)
    assert mx.data.as_dataset(dataset).cardinality() == size
    assert two_cpus.experimental_distribute_dataset(dataset).cardinality == size


@every_source()
def test_the_spec_describes_the_elements(source, two_cpus):
    dataset = mx.data.as_dataset(make(source))
    spec = dataset.element_spec
    assert set(spec) == {"x", "y"}
    for name, value in next(iter(dataset)).items():
        assert spec[name].is_compatible_with(value)
        assert spec[name].shape[1:] == value.shape[1:]
    distributed = two_cpus.experimental_distribute_dataset(dataset).element_spec
    assert [len(distributed[name].values) for name in ("x", "y")] == [2, 2]
    assert distributed["x"].values[0].shape in ((4, 3), (None, 3))


@every_source(ONE_PASS)
def test_asking_for_the_spec_takes_nothing_from_the_data(source):
    dataset = mx.data.as_dataset(make(source))
    assert set(dataset.element_spec) == {"x", "y"}
    iterator = iter(dataset)
    found = take(iterator, 2)
    assert set(dataset.element_spec) == {"x", "y"}
    found += list(iterator)
    assert [y for batch in found for y in batch["y"].tolist()] == list(range(21))


# Transformations -----------------------------------------------------------------------


@every_source(ONE_PASS)
def test_further_transformations(source):
    dataset = (
        mx.data.as_dataset(make(source))
        .map(lambda batch: {"z": batch["x"][:, 0] * 2, "y": batch["y"] + 1})
        .unbatch()
        .skip(2)
        .batch(5)
        .take(3)
    )
    found = list(dataset)
    assert [batch["y"].tolist() for batch in found] == [
        [3, 4, 5, 6, 7],
        [8, 9, 10, 11, 12],
        [13, 14, 15, 16, 17],
    ]
    assert found[0]["z"].tolist() == [6.0, 9.0, 12.0, 15.0, 18.0]


@every_source()
def test_a_shuffle_of_ours_after_theirs(source, two_cpus):
    rows = mx.data.as_dataset(make(source)).unbatch().map(lambda row: row["y"])
    shuffled = rows.shuffle(21, seed=3).batch(6)
    plain = [batch.tolist() for batch in shuffled]
    assert sorted(sum(plain, [])) == list(range(21))
    assert sum(plain, []) != list(range(21))
    again = rows.shuffle(21, seed=3).batch(6)
    steps = two_cpus.experimental_distribute_dataset(again)
    assert [union(two_cpus, step).tolist() for step in steps] == plain


@every_source(ONE_PASS)
def test_a_mapped_dataset_is_distributed(source, two_cpus):
    dataset = mx.data.as_dataset(make(source)).map(lambda batch: batch["y"] * 10)
    steps = two_cpus.experimental_distribute_dataset(dataset)
    found = [union(two_cpus, step).tolist() for step in steps]
    assert sum(found, []) == [10 * i for i in range(21)]


@every_source()
def test_repeat_cache_and_prefetch(source):
    dataset = mx.data.as_dataset(make(source)).map(lambda batch: batch["y"])
    expected = 2 * list(range(21))
    for repeated in (
        dataset.repeat(2),
        dataset.cache().repeat(2),
        dataset.prefetch(2).repeat(2),
    ):
        assert [y for batch in repeated for y in batch.tolist()] == expected


@pytest.mark.parametrize(
    ("last_batch", "sizes"), [("drop", [8, 8]), ("pad", [8, 8, 8])]
)
@every_source()
def test_a_last_batch_that_is_dropped_or_filled_up(source, last_batch, sizes, two_cpus):
    options = mx.distribute.InputOptions(last_batch=last_batch)
    steps = two_cpus.experimental_distribute_dataset(make(source), options)
    found = [union(two_cpus, step) for step in steps]
    if last_batch == "drop":
        assert [len(batch["y"]) for batch in found] == sizes
        return
    assert [len(batch["y"]) for batch, _ in found] == sizes
    assert sum((batch["y"][mask].tolist() for batch, mask in found), []) == list(
        range(21)
    )


@every_source()
def test_a_dataset_fn_may_return_it(source, two_cpus):
    """Each replica takes the next batch: 0 and 1, then 2 and an empty one."""
    steps = two_cpus.distribute_datasets_from_function(lambda context: make(source))
    found = [
        [part["y"].tolist() for part in replica_parts(two_cpus, step)] for step in steps
    ]
    assert found == [
        [list(range(8)), list(range(8, 16))],
        [list(range(16, 21)), []],
    ]


# Saving --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@every_source()
def test_a_restored_iterator_gives_the_remaining_elements(source, count):
    iterator = iter(mx.data.as_dataset(make(source)))
    take(iterator, count)
    state = through_json(iterator.get_state())
    rest = list(iterator)
    assert len(rest) == 3 - count

    again = iter(mx.data.as_dataset(make(source)))
    again.set_state(state)
    found = list(again)
    assert len(found) == len(rest)
    for a, b in zip(found, rest):
        assert_same(a, b)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@every_source()
def test_what_was_read_ahead_does_not_count_as_given(source, ahead, two_cpus):
    options = mx.distribute.InputOptions(experimental_per_replica_buffer_size=ahead)

    def start():
        return iter(two_cpus.experimental_distribute_dataset(make(source), options))

    iterator = start()
    take(iterator, 1)
    state = through_json(iterator.get_state())
    rest = [union(two_cpus, step)["y"].tolist() for step in iterator]
    assert rest == [list(range(8, 16)), list(range(16, 21))]

    again = start()
    again.set_state(state)
    assert [union(two_cpus, step)["y"].tolist() for step in again] == rest


@every_source()
def test_a_restored_dataset_starts_its_next_pass_at_the_start(source):
    iterator = iter(mx.data.as_dataset(make(source)))
    take(iterator, 2)
    state = through_json(iterator.get_state())
    iterator.close()

    dataset = mx.data.as_dataset(make(source))
    again = iter(dataset)
    again.set_state(state)
    assert [batch["y"].tolist() for batch in again] == [list(range(16, 21))]
    assert [len(batch["y"]) for batch in dataset] == [8, 8, 5]


@every_source()
def test_a_restored_pipeline_around_a_library(source):
    def start():
        dataset = mx.data.as_dataset(make(source)).unbatch().map(lambda row: row["y"])
        return iter(dataset.shuffle(6, seed=4).batch(2).repeat(2))

    iterator = start()
    before = take(iterator, 13)
    state = through_json(iterator.get_state())
    rest = [batch.tolist() for batch in iterator]
    assert len(before) + len(rest) == 22

    again = start()
    again.set_state(state)
    assert [batch.tolist() for batch in again] == rest
