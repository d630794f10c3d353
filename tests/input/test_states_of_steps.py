"""Every step can be saved after any element, and goes on with exactly the next one."""

from __future__ import annotations

import json
import threading

import jax
import numpy as np
import pytest

import mirrax as mx

Dataset = mx.data.Dataset


def numbers(n=20):
    """Elements that come one by one, not rows in memory."""
    return Dataset.from_generator(
        lambda: iter(np.arange(n)), output_signature=mx.TensorSpec((), "int64")
    )


def is_third(x):
    if x % 3 == 2:
        raise ValueError(f"not {x}")
    return x


PIPELINES = {
    "assert_cardinality": lambda d: d.apply(
        mx.data.experimental.assert_cardinality(20)
    ),
    "window": lambda d: d.window(3).flat_map(lambda w: w.batch(3)),
    "window overlapping": lambda d: d.window(4, 1, 2).flat_map(lambda w: w.batch(4)),
    "window with gaps": lambda d: d.window(2, 5).flat_map(lambda w: w),
    "window shuffled": lambda d: d.window(2).shuffle(4).flat_map(lambda w: w.batch(2)),
    "window of windows": lambda d: (
        d.window(2).window(2).flat_map(lambda w: w).flat_map(lambda w: w.batch(2))
    ),
    "window of pairs": lambda d: (
        d.map(lambda x: (x, {"y": x * 2}))
        .window(3)
        .flat_map(lambda x, rest: Dataset.zip((x.batch(2), rest["y"].batch(2))))
    ),
    "rebatch": lambda d: d.batch(4).rebatch([3, 1]),
    "scan": lambda d: d.scan(
        (np.int64(0), {"a": np.zeros(2, "float32"), "b": b""}),
        lambda s, x: ((s[0] + x, {"a": s[1]["a"] + 1, "b": s[1]["b"] + b"."}), s),
    ),
    "take_while": lambda d: d.take_while(lambda x: x < 15),
    "unique": lambda d: d.map(lambda x: x % 7).unique(),
    "unique shuffled": lambda d: d.shuffle(5).map(lambda x: x % 7).unique(),
    "group_by_window": lambda d: d.group_by_window(
        lambda x: x % 3, lambda key, w: w.shuffle(4).batch(2), window_size=4
    ),
    "group_by_window of a shuffle": lambda d: d.shuffle(9).group_by_window(
        lambda x: x % 3, lambda key, w: w.batch(2), window_size=4
    ),
    "bucket": lambda d: d.map(lambda x: np.full(x % 5, x)).bucket_by_sequence_length(
        len, [2, 4], [3, 2, 2]
    ),
    "choose": lambda d: Dataset.choose_from_datasets(
        [d, Dataset.range(100, 104), d.shuffle(5)], Dataset.range(3).repeat(), False
    ),
    "sample": lambda d: Dataset.sample_from_datasets(
        [d, Dataset.range(100, 110)], rerandomize_each_iteration=True
    ),
    "sample by weights": lambda d: Dataset.sample_from_datasets(
        [d, Dataset.range(100, 110)],
        Dataset.from_tensor_slices([[0.5, 0.5], [0.9, 0.1]]).repeat(),
        seed=3,
    ),
    "random": lambda d: Dataset.zip(d, Dataset.random()),
    "counter": lambda d: Dataset.zip(d, Dataset.counter(3, 2)),
    "ignore_errors": lambda d: d.map(is_third).ignore_errors(),
    "ignore_errors ahead": lambda d: d.map(is_third).prefetch(3).ignore_errors(),
    "ignore_errors in turn": lambda d: d.interleave(
        lambda x: Dataset.from_tensors(x).map(is_third),
        cycle_length=2,
        num_parallel_calls=2,
    ).ignore_errors(),
    "rejection_resample": lambda d: d.rejection_resample(
        lambda x: x % 2, [0.8, 0.2], [0.5, 0.5]
    ),
    "rejection_resample estimated": lambda d: d.rejection_resample(
        lambda x: x % 2, [0.8, 0.2]
    ),
}


def saved(iterator):
    return json.loads(json.dumps(iterator.get_state()))


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted):
        jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("is_in_memory", [True, False])
@pytest.mark.parametrize("ending", ["plain", "prefetch", "repeat"])
def test_a_state_goes_on_with_the_next_element(name, is_in_memory, ending):
    def make():
        dataset = PIPELINES[name](Dataset.range(20) if is_in_memory else numbers())
        dataset = dataset.repeat(2) if ending == "repeat" else dataset
        return dataset.prefetch(2) if ending == "prefetch" else dataset

    dataset = make()
    list(dataset)  # another pass than the first
    iterator = iter(dataset)
    states, wanted = [saved(iterator)], []
    for element in iterator:
        wanted.append(element)
        states.append(saved(iterator))
    assert wanted
    for k, state in enumerate(states):
        if k % 3 and k < len(states) - 2:
            continue
        for again in (dataset, make()):
            restored = iter(again)
            restored.set_state(state)
            assert_same(list(restored), wanted[k:])
    assert not [t for t in threading.enumerate() if t.name.startswith("mirrax-pre")]


def test_a_state_among_many_elements_of_many_groups():
    """Restored from notes that are made on the way, not from the start."""
    read = []

    def source():
        for i in range(20_000):
            read.append(i)
            yield np.int64(i)

    dataset = Dataset.from_generator(
        source, output_signature=mx.TensorSpec((), "int64")
    ).group_by_window(lambda x: x % 7, lambda key, w: w.batch(5), window_size=10)
    iterator = iter(dataset)
    wanted = list(iterator)
    iterator = iter(dataset)
    for _ in range(3500):
        next(iterator)
    state = saved(iterator)
    assert len(json.dumps(state)) < 2000
    again = iter(dataset)
    again.set_state(state)
    assert_same(list(again), wanted[3500:])


def test_a_scanned_state_is_in_the_iterators_state():
    dataset = Dataset.range(4).scan(
        np.array([0, 1], "float16"), lambda s, x: (s * 2 + 1, s)
    )
    iterator = iter(dataset)
    next(iterator)
    again = iter(
        Dataset.range(4).scan(np.array([0, 1], "float16"), lambda s, x: (s * 2 + 1, s))
    )
    again.set_state(saved(iterator))
    found = next(again)
    assert found.dtype == np.float16 and found.tolist() == [1, 3]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
    "name", ["window", "rebatch", "group_by_window", "bucket", "choose"]
)
def test_distributed_steps_are_saved_too(name, replicas):
    strategy = mx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])

    def make():
        dataset = PIPELINES[name](numbers())
        dataset = dataset.batch(4) if name == "choose" else dataset
        return strategy.experimental_distribute_dataset(dataset)

    def parts(batch):
        return [np.asarray(p) for p in strategy.experimental_local_results(batch)]

    dataset = make()
    iterator = iter(dataset)
    states, wanted = [saved(iterator)], []
    for batch in iterator:
        wanted.append(parts(batch))
        states.append(saved(iterator))
    for k in (0, 1, len(wanted) // 2, len(wanted)):
        for again in (dataset, make()):
            restored = iter(again)
            restored.set_state(states[k])
            found = [parts(batch) for batch in restored]
            assert len(found) == len(wanted) - k
            for a, b in zip(found, wanted[k:]):
                jax.tree.map(np.testing.assert_array_equal, a, b)
