"""A saved iterator goes on with exactly the next element, wherever it was saved."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers.waiting import SECONDS_TO_HANG
from hypothesis import given
from hypothesis import strategies as st

from .examples import examples
from .pipelines import (
    Dataset,
    assert_all_same,
    build,
    expected,
    pipelines,
    random_orders,
    unordered,
)


def saved(iterator):
    """The state as a checkpoint would bring it back."""
    return json.loads(json.dumps(iterator.get_state()))


def restored(dataset, state):
    iterator = iter(dataset)
    iterator.set_state(state)
    return iterator


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


@examples(150)
@given(steps=pipelines(), place=st.floats(0, 1), passes=st.integers(0, 1))
def test_a_saved_pass_goes_on_with_the_next_element(steps, place, passes):
    wanted = expected(steps)
    k = round(place * len(wanted))
    dataset = build(steps)
    for _ in range(passes):
        list(dataset)
    iterator = iter(dataset)
    head = take(iterator, k)
    state = saved(iterator)
    assert_all_same(head + list(iterator), wanted)  # saving has disturbed nothing
    for again in (dataset, build(steps)):
        assert_all_same(list(restored(again, state)), wanted[k:])


@examples(150)
@given(steps=random_orders(), place=st.floats(0, 1), passes=st.integers(0, 1))
def test_a_random_order_goes_on_as_it_was(steps, place, passes):
    k = round(place * len(unordered(steps)))
    dataset = build(steps)
    # Another order may have fewer elements, or some that do not fit into one batch.
    try:
        for _ in range(passes):
            list(dataset)
        iterator = iter(dataset)
        take(iterator, k)
        state = saved(iterator)
        tail = list(iterator)
    except (StopIteration, ValueError):
        return
    for again in (dataset, build(steps)):
        assert_all_same(list(restored(again, state)), tail)


@examples(40)
@given(steps=random_orders())
def test_saving_after_every_element_and_going_on_in_a_new_dataset_each_time(steps):
    first = iter(build(steps))
    state = saved(first)
    try:
        wanted, found = list(first), []
    except ValueError:  # elements that do not fit into one batch
        return
    while True:
        iterator = restored(build(steps), state)
        found += [element for element in [next(iterator, None)] if element is not None]
        state = saved(iterator)
        iterator.close()
        if len(found) >= len(wanted):
            break
    assert_all_same(found, wanted)
    assert list(restored(build(steps), state)) == [], "the end is a place, too"


@examples(60)
@given(
    n=st.integers(1, 30),
    size=st.sampled_from([2, 7, 100, None]),
    seed=st.sampled_from([None, 7]),
    place=st.floats(0, 1),
    ahead=st.integers(0, 3),
    source=st.sampled_from(["memory", "one by one"]),
    is_cached=st.booleans(),
)
def test_later_epochs_are_the_same_too(n, size, seed, place, ahead, source, is_cached):
    def make():
        if source == "memory":
            dataset = Dataset.range(n)
        else:
            dataset = Dataset.from_generator(lambda: iter(np.arange(n)))
        dataset = dataset.cache() if is_cached else dataset
        shuffled = dataset.shuffle(size, seed=seed).map(str, num_parallel_calls=2)
        return shuffled.repeat(3).batch(4).prefetch(ahead)

    dataset = make()
    iterator = iter(dataset)
    take(iterator, round(place * -(-3 * n // 4)))
    state = saved(iterator)
    tail = list(iterator)
    assert_all_same(list(restored(make(), state)), tail)
    assert_all_same(list(restored(dataset, state)), tail)


def test_a_dataset_without_end_goes_on_in_a_later_epoch():
    def make():
        return Dataset.range(5).shuffle(5).repeat().map(lambda x: x + 1).batch(3)

    iterator = iter(make())
    take(iterator, 100)
    state = saved(iterator)
    wanted = take(iterator, 20)
    assert_all_same(take(restored(make(), state), 20), wanted)


def test_two_iterators_of_one_dataset_do_not_disturb_each_other():
    dataset = Dataset.from_generator(lambda: iter(range(20))).shuffle(6, seed=3)
    alone = [list(dataset), list(dataset)]
    dataset = Dataset.from_generator(lambda: iter(range(20))).shuffle(6, seed=3)
    both = list(zip(iter(dataset), iter(dataset)))
    assert [a for a, _ in both] == alone[0]
    assert [b for _, b in both] == alone[1]


def test_results_that_were_delivered_out_of_order_are_not_delivered_again():
    import threading

    for stop in range(1, 12):
        gate = threading.Event()

        def slow(x, gate=gate):
            if x == 0:
                gate.wait(SECONDS_TO_HANG)
            return str(x)

        def make(fn=slow):
            numbers = Dataset.from_generator(lambda: iter(range(12)))
            return numbers.map(fn, num_parallel_calls=3, deterministic=False)

        iterator = iter(make())
        if stop > 3:
            gate.set()
        head = take(iterator, stop)
        state = saved(iterator)
        gate.set()
        iterator.close()
        tail = list(restored(make(), state))
        assert sorted(map(int, head + tail)) == list(range(12)), (head, tail)


@pytest.mark.parametrize("state", [None, 3, {}, {"kind": "something else"}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(
        ValueError, match=r"not the state of such an iterator.*get_state\(\)"
    ):
        iter(Dataset.range(3)).set_state(state)


def test_the_state_of_another_pipeline_is_refused_and_both_are_shown():
    state = iter(Dataset.range(9).batch(2)).get_state()
    with pytest.raises(
        ValueError, match=r"(?s)another pipeline.*batch\(2\).*batch\(3\)"
    ):
        iter(Dataset.range(9).batch(3)).set_state(state)


@examples(60)
@given(steps=random_orders())
def test_the_state_after_the_end_is_the_end(steps):
    dataset = build(steps)
    iterator = iter(dataset)
    try:
        list(iterator)
    except ValueError:  # elements that do not fit into one batch
        return
    state = saved(iterator)
    for again in (dataset, build(steps)):
        assert list(restored(again, state)) == []
    assert next(iterator, None) is None


def test_an_iterator_can_go_back():
    iterator = iter(Dataset.range(6).shuffle(6).batch(2))
    state = saved(iterator)
    first = list(iterator)
    iterator.set_state(state)
    assert_all_same(list(iterator), first)
