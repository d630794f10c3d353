"""Random pipelines give what Python's lists give: elements, length, specs, random orders."""

from __future__ import annotations

import collections
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mirrax as mx

from .examples import examples
from .pipelines import (
    Dataset,
    assert_all_same,
    assert_same,
    build,
    expected,
    key_of,
    pipelines,
    random_orders,
    stack,
    unordered,
)

INFINITE, UNKNOWN = mx.data.INFINITE_CARDINALITY, mx.data.UNKNOWN_CARDINALITY


@examples(300)
@given(steps=pipelines())
def test_a_pipeline_gives_what_lists_give(steps):
    dataset, wanted = build(steps), expected(steps)
    assert_all_same(list(dataset), wanted)
    assert_all_same(list(dataset.as_numpy_iterator()), wanted)  # a second pass


@examples(150)
@given(steps=pipelines(most_steps=3), size=st.integers(1, 5))
def test_a_batch_holds_what_lists_give_or_says_why_not(steps, size):
    wanted = expected(steps)
    parts = [wanted[i : i + size] for i in range(0, len(wanted), size)]
    found = iter(build(steps).batch(size))
    for part in parts:
        try:
            batch = stack(part)
        except Exception:
            with pytest.raises(ValueError, match="must be alike.*padded_batch"):
                next(found)
            return
        assert_same(next(found), batch)
    with pytest.raises(StopIteration):
        next(found)


@examples(200)
@given(steps=pipelines())
def test_a_known_cardinality_is_the_number_of_elements(steps):
    size = build(steps).cardinality()
    if ends_early(steps):
        return
    assert size in (UNKNOWN, len(expected(steps)))


def ends_early(steps):
    """Whether nothing is repeated for ever: of unknown data, as in TensorFlow, the length
    is then taken for infinite."""
    return any(
        step[0] == "repeat for ever" and not expected(steps[:i])
        for i, step in enumerate(steps)
    )


def test_what_has_no_end_has_an_infinite_cardinality():
    assert Dataset.range(3).repeat().cardinality() == INFINITE
    assert Dataset.range(3).repeat().batch(2).cardinality() == INFINITE
    assert Dataset.range(0).repeat().cardinality() == 0
    zipped = Dataset.zip(Dataset.range(3).repeat(), Dataset.range(5))
    assert zipped.cardinality() == 5


@examples(200)
@given(steps=pipelines())
def test_the_element_spec_describes_every_element(steps):
    # A `map` is described by its first result, so results must not differ in themselves.
    if "of_any_length" in str(steps):
        return
    dataset, elements = build(steps), expected(steps)
    if elements:
        specs, tree = jax.tree.flatten(dataset.element_spec)
    for element in elements:
        leaves, other = jax.tree.flatten(element)
        assert other == tree
        for spec, leaf in zip(specs, leaves):
            assert spec.is_compatible_with(leaf), f"{spec} does not describe {leaf!r}"


# Random orders ------------------------------------------------------------------------------


@examples(100)
@given(steps=random_orders(keep_elements=True))
def test_shuffles_lose_and_invent_nothing(steps):
    wanted = collections.Counter(map(key_of, unordered(steps)))
    dataset = build(steps)
    assert collections.Counter(map(key_of, dataset)) == wanted
    assert collections.Counter(map(key_of, dataset)) == wanted


@pytest.mark.parametrize("source", ["memory", "one by one"])
@examples(60)
@given(
    n=st.integers(0, 60), size=st.integers(1, 70), seed=st.integers(-(2**63), 2**63 - 1)
)
def test_a_shuffle_draws_from_a_buffer(source, n, size, seed):
    for epoch in order(source, n, size, seed, epochs=2):
        assert sorted(epoch) == list(range(n))
        for position, number in enumerate(epoch):
            # At most `size - 1` elements beyond this one had been read.
            assert number < position + size


def order(source, n, size, seed, *, reshuffle=None, epochs=1):
    """The numbers up to n as several passes over one dataset give them."""
    dataset = numbers(source, n).shuffle(
        size, seed=seed, reshuffle_each_iteration=reshuffle
    )
    return [[int(x) for x in dataset] for _ in range(epochs)]


def numbers(source, n):
    if source == "memory":
        return Dataset.range(n)
    return Dataset.from_generator(lambda: iter(np.arange(n)))


@pytest.mark.parametrize("source", ["memory", "one by one"])
@pytest.mark.parametrize("size", [10, 40, None])
def test_a_seed_gives_the_same_orders_again_and_another_seed_others(source, size):
    first = order(source, 40, size, 3, epochs=3)
    assert first == order(source, 40, size, 3, epochs=3)
    assert first != order(source, 40, size, 4, epochs=3)
    assert len({tuple(epoch) for epoch in first}) == 3, "each pass has its own order"


@pytest.mark.parametrize("source", ["memory", "one by one"])
@pytest.mark.parametrize("seed", [None, 3])
def test_without_reshuffling_all_passes_and_epochs_have_one_order(source, seed):
    passes = order(source, 40, 15, seed, reshuffle=False, epochs=3)
    assert passes[0] == passes[1] == passes[2] != list(range(40))
    dataset = numbers(source, 40).shuffle(15, seed, reshuffle_each_iteration=False)
    found = [int(x) for x in dataset.repeat(3)]
    assert found[:40] == found[40:80] == found[80:]


@pytest.mark.parametrize("source", ["memory", "one by one"])
def test_repeat_reshuffles_every_epoch(source):
    found = [int(x) for x in numbers(source, 40).shuffle(40, seed=1).repeat(3)]
    epochs = [found[:40], found[40:80], found[80:]]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)


@pytest.mark.parametrize("source", ["memory", "one by one"])
def test_without_a_seed_two_datasets_have_different_orders(source):
    assert order(source, 40, 40, None) != order(source, 40, 40, None)


@pytest.mark.parametrize("source", ["memory", "one by one"])
def test_every_order_is_about_as_likely(source):
    counts = collections.Counter(
        tuple(order(source, 3, 3, seed)[0]) for seed in range(600)
    )
    assert len(counts) == 6
    # 100 each; the standard deviation is 9.
    assert all(60 < count < 140 for count in counts.values()), counts


@pytest.mark.parametrize("source", ["memory", "one by one"])
def test_a_small_buffer_is_left_with_equal_chances(source):
    first = collections.Counter(order(source, 6, 2, seed)[0][0] for seed in range(400))
    assert set(first) == {0, 1}
    assert all(150 < count < 250 for count in first.values()), first


def test_two_shuffles_with_one_seed_keep_rows_together():
    pair = Dataset.zip(
        Dataset.range(30).shuffle(30, seed=5),
        Dataset.range(100, 130).shuffle(30, seed=5),
    )
    found = [(int(a), int(b)) for a, b in pair]
    assert all(b == a + 100 for a, b in found)
    assert [a for a, _ in found] != list(range(30))


def test_two_shuffles_after_each_other_differ():
    dataset = Dataset.range(30).shuffle(30, seed=5).batch(30).unbatch()
    once = [int(x) for x in dataset]
    twice = [int(x) for x in Dataset.range(30).shuffle(30, seed=5).shuffle(30, seed=6)]
    assert sorted(once) == sorted(twice) and once != twice


# Ways to the same elements ------------------------------------------------------------------


@examples(100)
@given(steps=pipelines(most_steps=3), calls=st.integers(1, 4))
def test_results_that_come_as_they_are_ready_are_all_there(steps, calls):
    def text(*parts: Any) -> str:
        return repr(key_of(parts if len(parts) > 1 else list(parts)))

    wanted = [text(*e) if type(e) is tuple else text(e) for e in expected(steps)]
    dataset = build(steps).map(text, num_parallel_calls=calls, deterministic=False)
    assert sorted(x.decode() for x in dataset) == sorted(wanted)


@examples(60)
@given(steps=pipelines(most_steps=3))
def test_reduce_visits_every_element_in_order(steps):
    wanted = expected(steps)
    seen = []

    def visit(count, *parts):
        seen.append(parts[0] if len(parts) == 1 else parts)
        return count + 1

    assert build(steps).reduce(np.int64(0), visit) == len(wanted)
    assert_all_same(seen, wanted)


def test_the_functions_of_random_pipelines_are_called_with_many_rows():
    """So that the comparison above is one of both ways."""
    for name in (
        "double",
        "third",
        "fold",
        "total",
        "beside_itself",
        "first",
        "listed",
    ):
        steps = [("slices", "pair", 6), ("map", name), ("batch", 3, False)]
        dataset = build(steps)
        assert_all_same(list(dataset), expected(steps))
        batch: Any = dataset.node
        assert batch.input.fn.may_vectorise, name
    dataset = build(
        [("slices", "float", 6), ("filter", "is_large"), ("batch", 3, False)]
    )
    list(dataset)
    batch: Any = dataset.node
    assert batch.input.fn.may_vectorise
