"""Odd data and odd places: empty datasets, elements that differ, batches in functions."""

from __future__ import annotations

import gc
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import mirrored
from helpers.recovery import fails

import mirrax as mx

Dataset = mx.data.Dataset
InputOptions = mx.distribute.InputOptions


@pytest.fixture(scope="module")
def strategy():
    """One for all tests here: whatever fails, the next one still works with it."""
    return mirrored(2)


def parts(strategy, value):
    return [
        np.asarray(part).tolist() for part in strategy.experimental_local_results(value)
    ]


# Nothing at all -----------------------------------------------------------------------------

EMPTY = {
    "range": lambda: Dataset.range(0),
    "slices": lambda: Dataset.from_tensor_slices(np.zeros((0, 3))),
    "generator": lambda: Dataset.from_generator(lambda: iter(())),
    "signature": lambda: Dataset.from_generator(
        lambda: iter(()), output_signature=mx.TensorSpec((None,), "float32")
    ),
    "filter": lambda: Dataset.range(5).filter(lambda x: x > 9),
    "take": lambda: Dataset.range(5).take(0),
    "skip": lambda: Dataset.range(5).skip(9),
    "map": lambda: Dataset.from_tensor_slices(np.zeros((0, 3))).map(lambda x: x + 1),
    "if": lambda: Dataset.range(0).map(lambda x: x if x > 1 else -x),
    "drop": lambda: Dataset.range(3).batch(4, drop_remainder=True),
    "batches": lambda: Dataset.range(0).batch(3),
    "repeat": lambda: Dataset.range(0).repeat(),
    "shuffle": lambda: Dataset.range(0).shuffle(3).repeat(2),
    "cache": lambda: Dataset.range(0).cache(),
    "flat_map": lambda: Dataset.range(3).flat_map(lambda x: Dataset.range(0)),
    "no flat_map": lambda: Dataset.range(0).flat_map(Dataset.range),
    "interleave": lambda: Dataset.range(0).interleave(Dataset.range, cycle_length=2),
    "zip": lambda: Dataset.zip(Dataset.range(0), Dataset.range(3)),
    "enumerate": lambda: Dataset.range(0).enumerate(),
    "padded": lambda: Dataset.range(0).padded_batch(3),
    "unbatch": lambda: Dataset.from_tensors(np.zeros((0, 2))).unbatch(),
    "files": lambda: mx.data.TFRecordDataset([]),
    "parallel": lambda: Dataset.range(0).map(str, num_parallel_calls=2),
    "prefetch": lambda: Dataset.from_generator(lambda: iter(())).prefetch(2),
    "list": lambda: mx.data.as_dataset([]),
    "concatenate": lambda: Dataset.range(0).concatenate(Dataset.range(0)),
}
UNKNOWN = {"generator", "prefetch", "list"}  # nothing says what would be in them


@pytest.mark.parametrize("name", EMPTY)
def test_empty_datasets(name):
    dataset = EMPTY[name]()
    assert list(dataset) == []
    assert list(dataset.batch(2)) == []
    assert list(dataset.repeat(3)) == []
    assert dataset.cardinality() in (0, mx.data.UNKNOWN_CARDINALITY)
    assert isinstance(repr(dataset), str)
    iterator = iter(dataset)
    state = iterator.get_state()
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(mx.errors.OutOfRangeError, match="data has ended"):
        iterator.get_next()
    iterator.set_state(state)
    assert list(iterator) == []


@pytest.mark.parametrize("name", sorted(EMPTY.keys() - UNKNOWN))
def test_the_element_spec_of_empty_datasets(name):
    spec = EMPTY[name]().element_spec
    assert all(isinstance(leaf, mx.TensorSpec) for leaf in jax.tree.leaves(spec))


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_what_cannot_be_described_without_an_element_says_so(name):
    with pytest.raises(ValueError, match="looking at the first one, and there is none"):
        EMPTY[name]().element_spec  # noqa: B018


@pytest.mark.parametrize("last_batch", ["exact", "drop", "pad"])
@pytest.mark.parametrize("name", EMPTY)
def test_empty_datasets_are_distributed(name, last_batch, strategy, capsys):
    options = InputOptions(last_batch=last_batch)
    for given in (strategy, mirrored(1)):
        distributed = given.experimental_distribute_dataset(EMPTY[name](), options)
        assert list(distributed) == []
        assert f"{given.num_replicas_in_sync} in all" in distributed.explain()
        from_function = given.distribute_datasets_from_function(
            lambda context: EMPTY[name](), options
        )
        assert list(from_function) == []
        assert "dataset_fn" in from_function.explain()
        assert isinstance(repr(distributed), str)
    capsys.readouterr()


@pytest.mark.parametrize("n", [0, 1])
def test_a_replica_without_rows_gets_an_empty_batch(n, strategy):
    batches = Dataset.from_tensor_slices(np.ones((n + 2, 3), "float32")).batch(2)
    found = list(strategy.experimental_distribute_dataset(batches))
    shapes = [[p.shape for p in strategy.experimental_local_results(x)] for x in found]
    assert shapes == [[(1, 3), (1, 3)], [(1, 3), (0, 3)]][: n + 1]


# Elements that differ -----------------------------------------------------------------------


def test_elements_of_different_shapes_cannot_be_batched_but_say_how():
    ragged = Dataset.from_generator(lambda: iter([np.ones(2), np.ones(3)]))
    with pytest.raises(
        ValueError,
        match=r"2 elements element 0 is float64\[2\] and element 1 is float64\[3\]"
        ".*padded_batch",
    ):
        list(ragged.batch(2))
    assert [x.shape for x in ragged.batch(1)] == [(1, 2), (1, 3)]
    assert [x.shape for x in ragged.padded_batch(2)] == [(2, 3)]


@pytest.mark.parametrize(
    "elements",
    [
        [np.ones(2), (np.ones(2),)],
        [{"a": 1}, {"b": 1}],
        [{"a": 1}, {"a": 1, "b": 1}],
        [(1, 2), (1, 2, 3)],
        [1, 1.5],
        [1, "text"],
        [1, None],
        [(1, {"a": 2}), (1, {"a": (2,)})],
    ],
)
def test_elements_of_different_structure_cannot_be_batched(elements):
    dataset = Dataset.from_generator(lambda: iter(elements))
    assert len(list(dataset)) == 2
    with pytest.raises(ValueError, match="(?s)must be alike.*element 0.*element 1"):
        list(dataset.batch(2))
    with pytest.raises((ValueError, TypeError), match="(?s)alike|lengths, not"):
        list(dataset.padded_batch(2))


def test_replicas_that_get_different_structures(strategy):
    elements = [np.ones(2), (np.ones(2),)]
    distributed = strategy.distribute_datasets_from_function(lambda context: elements)
    with fails(
        strategy, ValueError, "(?s)replica 0 .*float64.*replica 1 .*one structure"
    ):
        list(distributed)


def test_batches_of_different_shapes_go_to_the_replicas_as_they_are(strategy):
    elements = [np.ones((2, 3)), np.ones((4, 2)), np.ones((3, 1))]
    distributed = strategy.experimental_distribute_dataset(elements)
    found = list(distributed)
    shapes = [[p.shape for p in strategy.experimental_local_results(x)] for x in found]
    assert shapes == [[(1, 3), (1, 3)], [(2, 2), (2, 2)], [(2, 1), (1, 1)]]


def test_padding_to_one_shape_needs_batches_of_one_size(strategy):
    elements = [np.ones(2), np.ones(6)]
    options = InputOptions(last_batch="pad")
    distributed = strategy.experimental_distribute_dataset(elements, options)
    with fails(strategy, ValueError, r"3 rows.*fills up to 1.*batches of one size"):
        list(distributed)


def test_errors_in_a_function_tell_which_function_and_element():
    def normalise(x, y):
        return x / y["missing"]

    dataset = Dataset.from_tensor_slices(
        (np.ones((4, 2), "float32"), {"a": np.ones(4)})
    )
    for mapped in (dataset.map(normalise), dataset.map(normalise).batch(2)):
        with pytest.raises(KeyError) as caught:
            list(mapped)
        note = "".join(caught.value.__notes__)
        assert "normalise" in note and "float32[2]" in note


# Batches in functions -----------------------------------------------------------------------


@pytest.fixture
def numbers(strategy):
    dataset = Dataset.range(12).map(lambda x: x * 1.0).batch(4)
    return strategy.experimental_distribute_dataset(dataset)


def sums(strategy, batch):
    result = strategy.run(lambda x: x.sum(), (batch,))
    return strategy.reduce("SUM", result, axis=None)


def test_a_function_takes_a_new_batch_each_time_by_argument(strategy, numbers):
    @mx.function
    def step(iterator):
        return sums(strategy, next(iterator))

    iterator = iter(numbers)
    assert [float(step(iterator)) for _ in range(3)] == [6, 22, 38]
    with pytest.raises(StopIteration):
        step(iterator)


def test_a_function_takes_a_new_batch_each_time_by_closure(strategy, numbers):
    iterator = iter(numbers)

    @mx.function
    def step():
        return sums(strategy, next(iterator))

    assert [float(step()) for _ in range(3)] == [6, 22, 38]
    with pytest.raises(StopIteration):
        step()


@pytest.mark.parametrize("way", ["argument", "closure"])
def test_an_epoch_in_a_function(way, strategy, numbers):
    seen = []

    @mx.function
    def epoch(batches):
        for batch in batches if way == "argument" else numbers:
            seen.append(float(sums(strategy, batch)))

    epoch(numbers)
    epoch(numbers)
    assert seen == [6, 22, 38] * 2


@pytest.mark.parametrize("way", ["argument", "closure"])
def test_a_function_that_takes_from_a_plain_dataset(way):
    iterator = iter(Dataset.range(3))

    @mx.function
    def step(*given):
        return jnp.asarray(next(given[0] if given else iterator)) * 2

    found = [int(step(iterator) if way == "argument" else step()) for _ in range(3)]
    assert found == [0, 2, 4]


def test_a_function_with_get_next_and_optionals(strategy, numbers):
    iterator = iter(numbers)

    @mx.function
    def step():
        optional = iterator.get_next_as_optional()
        if not optional.has_value():
            return None
        return sums(strategy, optional.get_value())

    assert [step() for _ in range(4)] == [6, 22, 38, None]
    with pytest.raises(mx.errors.OutOfRangeError, match="data has ended"):
        mx.function(lambda: iterator.get_next())()
    with pytest.raises(ValueError, match=r"no value.*has_value\(\)"):
        iterator.get_next_as_optional().get_value()


def test_jit_would_use_one_batch_for_ever(strategy, numbers):
    iterator = iter(numbers)

    @jax.jit
    def step(scale):
        return next(iterator).values[0].sum() * scale

    with fails(
        strategy, RuntimeError, "JAX transformation.*same batch every time.*mx.function"
    ):
        step(2.0)
    with fails(strategy, RuntimeError, "JAX transformation"):
        jax.grad(lambda x: x * next(iterator).values[0].sum())(1.0)
    with fails(strategy, RuntimeError, "JAX transformation"):
        jax.jit(lambda: [batch for batch in numbers][0])()
    assert parts(strategy, next(iterator)) == [[0, 1], [2, 3]], "no batch was lost"


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_a_replica_cannot_take_batches(engine, strategy, numbers):
    iterator = iter(numbers)

    def replica_fn():
        return next(iterator)

    fn = mx.function(replica_fn) if engine == "compiled" else replica_fn
    with fails(
        strategy, (RuntimeError, ValueError), "inside a replica function.*outside"
    ):
        strategy.run(fn)

    def loop():
        for batch in numbers:
            return batch

    with fails(
        strategy, (RuntimeError, ValueError), "inside a replica function.*outside"
    ):
        strategy.run(mx.function(loop) if engine == "compiled" else loop)

    def distribute():
        strategy.experimental_distribute_dataset(Dataset.range(3).batch(2))

    with fails(strategy, (RuntimeError, ValueError), "inside a replica function"):
        strategy.run(distribute)
    assert parts(strategy, next(iterator)) == [[0, 1], [2, 3]], "no batch was lost"


# Whose memory -------------------------------------------------------------------------------


def aligned(shape, dtype="float32"):
    """Memory that JAX would take over without a copy."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    array = raw[start : start + size].view(dtype).reshape(shape)
    array[...] = np.arange(array.size).reshape(shape)
    return array


def from_slices(array):
    return Dataset.from_tensor_slices(array).batch(64)


def from_generator(array):
    return Dataset.from_generator(lambda: iter([array]))


WAYS = {
    "slices": from_slices,
    "identity": lambda a: from_slices(a).map(lambda x: x),
    "twice": lambda a: Dataset.from_tensor_slices(a).map(lambda x: (x, x)).batch(64),
    "shuffled": lambda a: Dataset.from_tensor_slices(a).shuffle(1).batch(64),
    "tensors": Dataset.from_tensors,
    "generator": from_generator,
    "list": lambda a: mx.data.as_dataset([a]),
    "cached": lambda a: from_generator(a).cache(),
    "prefetched": lambda a: from_generator(a).prefetch(2),
    "zipped": lambda a: Dataset.zip(from_slices(a), Dataset.from_tensors(a)),
    "sharded": lambda a: Dataset.from_tensor_slices(a).shard(1, 0).batch(64),
    "mapped": lambda a: from_generator(a).map(lambda x: x),
    "in a dict": lambda a: Dataset.from_tensor_slices({"a": a}).batch(64),
}


@pytest.mark.parametrize("last_batch", ["exact", "pad", "drop"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_delivered_batch_does_not_change_with_the_users_array(way, count, last_batch):
    array = aligned((64, 16))
    options = InputOptions(last_batch=last_batch)
    distributed = mirrored(count).experimental_distribute_dataset(
        WAYS[way](array), options
    )
    iterator = iter(distributed)
    batch = next(iterator)
    before = [np.array(leaf) for leaf in jax.tree.leaves(batch)]
    array[...] = -1
    for leaf, copy in zip(jax.tree.leaves(batch), before):
        np.testing.assert_array_equal(leaf, copy)
    assert any(copy.size and copy.max() > 500 for copy in before)
    iterator.close()


@pytest.mark.parametrize("way", WAYS)
def test_the_same_for_batches_of_a_dataset_fn(way, strategy):
    array = aligned((64, 16))
    distributed = strategy.distribute_datasets_from_function(
        lambda context: WAYS[way](array).repeat(2)
    )
    iterator = iter(distributed)
    batch = next(iterator)
    before = [np.array(leaf) for leaf in jax.tree.leaves(batch)]
    array[...] = -1
    for leaf, copy in zip(jax.tree.leaves(batch), before):
        np.testing.assert_array_equal(leaf, copy)
    iterator.close()


def test_a_generator_may_use_one_buffer_again_and_again(strategy):
    buffer = aligned((8, 16))

    def generator():
        for i in range(6):
            buffer[...] = i
            yield buffer

    for given in (strategy, mirrored(1)):
        distributed = given.experimental_distribute_dataset(
            Dataset.from_generator(generator)
        )
        kept = list(distributed)
        for i, batch in enumerate(kept):
            for part in given.experimental_local_results(batch):
                np.testing.assert_array_equal(part, np.full(part.shape, i))


KEEPERS = {
    "batch": lambda d: d.batch(2),
    "batch of batches": lambda d: d.batch(2).batch(3).unbatch(),
    "padded_batch": lambda d: d.padded_batch(2),
    "shuffle": lambda d: d.shuffle(3, seed=1),
    "prefetch": lambda d: d.prefetch(3),
    "cache": lambda d: d.cache(),
    "parallel map": lambda d: d.map(lambda x: [x], num_parallel_calls=2),
    "interleave": lambda d: Dataset.range(1).interleave(
        lambda _: d, cycle_length=1, num_parallel_calls=1
    ),
}


@pytest.mark.parametrize("name", KEEPERS)
def test_elements_that_wait_do_not_change_with_the_generators_buffer(name):
    def generator():
        buffer = np.zeros((1, 2))
        for i in range(6):
            buffer[...] = i
            yield buffer

    dataset = KEEPERS[name](Dataset.from_generator(generator))
    for _ in range(2):
        found = np.concatenate([np.ravel(x) for x in dataset])
        assert sorted(found.tolist()) == sorted([*range(6)] * 2)


def change(element):
    """Overwrites an element in place, as far as it lets itself be overwritten."""
    for leaf in jax.tree.leaves(element):
        if isinstance(leaf, np.ndarray) and leaf.flags.writeable:
            leaf[...] = -7


@pytest.mark.parametrize("way", WAYS)
def test_who_changes_an_element_does_not_change_the_data(way):
    if way in ("generator", "list", "mapped", "prefetched"):
        return  # what a generator gives is the user's own
    array = aligned((64, 16))
    dataset = WAYS[way](array)
    first = [jax.tree.map(np.array, element) for element in dataset]
    for element in dataset:
        change(element)
    for element, wanted in zip(dataset, first):
        jax.tree.map(np.testing.assert_array_equal, element, wanted)
    if way != "cached":
        np.testing.assert_array_equal(array, np.arange(1024).reshape(64, 16))


# Memory over time ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "one by one", "cached", "files"])
def test_memory_does_not_grow_from_epoch_to_epoch(kind, strategy, tmp_path):
    rows = np.ones((128, 512), "float32")  # a quarter of a megabyte
    if kind == "files":
        with mx.io.TFRecordWriter(tmp_path / "a") as writer:
            for row in rows:
                writer.write(row.tobytes())
        dataset = mx.data.TFRecordDataset(tmp_path / "a")
        dataset = dataset.map(
            lambda b: np.frombuffer(b, "float32"), num_parallel_calls=2
        )
    elif kind == "memory":
        dataset = Dataset.from_tensor_slices(rows).map(lambda x: x * 2)
    else:
        dataset = Dataset.from_generator(lambda: iter(rows))
        dataset = dataset.cache() if kind == "cached" else dataset
    dataset = dataset.shuffle(32).batch(16).prefetch(2)
    distributed = strategy.experimental_distribute_dataset(dataset)

    def epoch():
        count = 0
        for batch in distributed:
            count += sum(len(p) for p in strategy.experimental_local_results(batch))
        assert count == 128
        gc.collect()

    epoch()
    tracemalloc.start()
    try:
        epoch()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(4):
            epoch()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000, f"{after - before} bytes more after four epochs"
    assert peak - before < 2_000_000, "a few batches at a time"


def test_a_state_does_not_grow_with_the_number_of_elements():
    import json

    dataset = Dataset.from_generator(lambda: iter(range(3000))).shuffle(10).batch(2)
    iterator = iter(dataset.repeat())
    for _ in range(20):
        next(iterator)
    early = len(json.dumps(iterator.get_state()))
    for _ in range(4000):
        next(iterator)
    assert len(json.dumps(iterator.get_state())) < early + 300
