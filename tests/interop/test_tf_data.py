"""`tf.data.Dataset`, beside TensorFlow and its own `MirroredStrategy`."""

from __future__ import annotations

import collections
import functools

import numpy as np
import pytest
from helpers.engines import mirrored, parts

import mirrax as mx
from interop import libraries
from interop.comparing import assert_same, take, through_json, union

tf = libraries.tensorflow()
Dataset = tf.data.Dataset
Pair = collections.namedtuple("Pair", ["a", "b"])
POLICIES = ["AUTO", "DATA", "OFF", "FILE", "HINT"]


@functools.cache
def theirs(num_replicas):
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])


def with_policy(dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy[policy]
    )
    return dataset.with_options(options)


# Distribution ----------------------------------------------------------------------------


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("count", "size", "replicas"), [(14, 8, 2), (11, 8, 2), (7, 6, 4), (10, 4, 4)]
)
def test_replicas_get_what_tensorflows_replicas_get(
    count, size, replicas, policy, drop_remainder
):
    batches = Dataset.range(count).batch(size, drop_remainder=drop_remainder)
    dataset = with_policy(batches, policy)
    tensorflow, ours = theirs(replicas), mirrored(replicas)
    expected = [
        [part.numpy().tolist() for part in tensorflow.experimental_local_results(step)]
        for step in tensorflow.experimental_distribute_dataset(dataset)
    ]
    steps = ours.experimental_distribute_dataset(dataset)
    assert [parts(ours, step) for step in steps] == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_the_sharding_policy_comes_along(policy, two_cpus, capsys):
    dataset = with_policy(Dataset.range(8).batch(4), policy)
    ours = mx.data.as_dataset(dataset)
    found = ours.options().experimental_distribute.auto_shard_policy
    assert found is mx.data.experimental.AutoShardPolicy[policy]
    mapped = ours.map(lambda x: x + 1).prefetch(1)
    assert (
        f"policy:     {policy}"
        in two_cpus.experimental_distribute_dataset(mapped).explain()
    )
    assert policy in capsys.readouterr().out


def test_a_dataset_fn_may_return_batches_of_single_arrays(two_cpus):
    steps = two_cpus.distribute_datasets_from_function(
        lambda context: Dataset.range(5).batch(2)
    )
    assert [parts(two_cpus, step) for step in steps] == [[[0, 1], [2, 3]], [[4], []]]


# Elements --------------------------------------------------------------------------------


def elements(structure):
    dataset = Dataset.from_tensor_slices(structure)
    return list(mx.data.as_dataset(dataset)), list(dataset.as_numpy_iterator())


@pytest.mark.parametrize(
    "structure",
    [
        [1, 2, 3],
        ([1, 2], [[0.5, 1.5], [2.5, 3.5]]),
        {"b": [1, 2], "a": ([True, False], {"c": [3, 4]})},
        Pair([1, 2], {"x": [3, 4]}),
        (["a", "bé"], [b"\0a\0", b""]),
    ],
    ids=["array", "tuple", "nested", "namedtuple", "strings"],
)
def test_structures_are_kept(structure):
    found, expected = elements(structure)
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int8", "int16", "uint32", "int64", "uint64"]
    + ["float16", "bfloat16", "float32", "float64", "complex64"],
)
def test_dtypes_are_kept(dtype):
    dataset = Dataset.from_tensor_slices(tf.cast([[0, 1], [1, 0]], dtype))
    ours = mx.data.as_dataset(dataset)
    assert ours.element_spec == mx.TensorSpec((2,), dtype)
    for a, b in zip(ours, dataset.as_numpy_iterator(), strict=True):
        assert_same(a, b)


def test_strings_reach_the_replicas_as_bytes(two_cpus):
    dataset = Dataset.from_tensor_slices(["a", "bé", "", "\0d\0", "e"]).batch(3)
    first, second = two_cpus.experimental_distribute_dataset(dataset)
    assert parts(two_cpus, first) == [[b"a", "bé".encode()], [b""]]
    assert parts(two_cpus, second) == [[b"\0d\0"], [b"e"]]


def test_the_spec_is_tensorflows():
    def generate():
        yield [1, 2], {"s": "a"}

    signature = (tf.TensorSpec([None], tf.int32), {"s": tf.TensorSpec(None, tf.string)})
    dataset = Dataset.from_generator(generate, output_signature=signature)
    assert mx.data.as_dataset(dataset).element_spec == (
        mx.TensorSpec((None,), "int32"),
        {"s": mx.TensorSpec(None, "string")},
    )
    batched = Dataset.range(5).batch(2)
    assert mx.data.as_dataset(batched).element_spec == mx.TensorSpec((None,), "int64")


@pytest.mark.parametrize(
    ("dataset", "size"),
    [
        (Dataset.range(7), 7),
        (Dataset.range(7).batch(2), 4),
        (Dataset.range(7).repeat(), mx.data.INFINITE_CARDINALITY),
        (Dataset.range(7).filter(lambda x: x > 2), mx.data.UNKNOWN_CARDINALITY),
    ],
    ids=["finite", "batched", "infinite", "unknown"],
)
def test_the_cardinality_is_tensorflows(dataset, size):
    assert mx.data.as_dataset(dataset).cardinality() == size


def test_an_endless_dataset_is_read_as_far_as_asked(two_cpus):
    dataset = Dataset.range(3).repeat().batch(4)
    iterator = iter(two_cpus.experimental_distribute_dataset(dataset))
    assert [union(two_cpus, step).tolist() for step in take(iterator, 2)] == [
        [0, 1, 2, 0],
        [1, 2, 0, 1],
    ]
    iterator.close()


# Order and saving --------------------------------------------------------------------------


def test_a_seeded_shuffle_is_tensorflows():
    def shuffled():
        return Dataset.range(12).shuffle(12, seed=5).batch(4)

    tf.random.set_seed(1)
    expected = [[b.tolist() for b in d.as_numpy_iterator()] for d in [shuffled()] * 2]
    tf.random.set_seed(1)
    ours = mx.data.as_dataset(shuffled())
    assert [[b.tolist() for b in ours] for _ in range(2)] == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("reshuffle", [False, True])
def test_a_restored_pass_over_a_shuffle_gives_exactly_the_rest(reshuffle, two_cpus):
    dataset = Dataset.range(40).shuffle(40, seed=5, reshuffle_each_iteration=reshuffle)
    distributed = two_cpus.experimental_distribute_dataset(dataset.batch(4))
    iterator = iter(distributed)
    take(iterator, 3)
    state = through_json(iterator.get_state())
    rest = [union(two_cpus, step).tolist() for step in iterator]

    again = iter(distributed)
    again.set_state(state)
    assert [union(two_cpus, step).tolist() for step in again] == rest


# Errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [
        (Dataset.from_tensors({"r": tf.ragged.constant([[1], [2, 3]])}), "Ragged"),
        (Dataset.from_tensors(tf.sparse.from_dense([[1, 0]])), "Sparse"),
        (Dataset.range(4).window(2), "Dataset"),
    ],
    ids=["ragged", "sparse", "nested"],
)
def test_what_is_no_array_is_refused_at_once(dataset, kind, two_cpus):
    for give in (mx.data.as_dataset, two_cpus.experimental_distribute_dataset):
        with pytest.raises(TypeError, match=rf"{kind}\w*Spec cannot be read as arrays"):
            give(dataset)


def test_unbatched_scalars_cannot_be_distributed(two_cpus):
    steps = iter(two_cpus.experimental_distribute_dataset(Dataset.range(3)))
    with pytest.raises(ValueError, match=r"int64\[\] cannot be split.*dataset.batch"):
        next(steps)


def test_an_error_of_tensorflow_arrives_as_itself(two_cpus):
    dataset = Dataset.range(4).map(
        lambda x: tf.debugging.check_numerics(1 / (x - 2), "two is not allowed")
    )
    for give in (mx.data.as_dataset, two_cpus.experimental_distribute_dataset):
        iterator = iter(give(dataset.batch(1)))
        take(iterator, 2)
        with pytest.raises(tf.errors.InvalidArgumentError, match="two is not allowed"):
            next(iterator)


def test_an_error_in_a_generator_arrives_with_its_traceback(two_cpus):
    def explode():
        yield [1, 2]
        raise KeyError("a bad file")

    dataset = Dataset.from_generator(
        explode, output_signature=tf.TensorSpec([None], tf.int32)
    )
    for give in (mx.data.as_dataset, two_cpus.experimental_distribute_dataset):
        iterator = iter(give(dataset))
        next(iterator)
        with pytest.raises(tf.errors.UnknownError) as caught:
            next(iterator)
        assert "KeyError: 'a bad file'" in str(caught.value)
        assert "in explode" in str(caught.value)


def test_batches_may_be_changed_in_place():
    (batch,) = mx.data.as_dataset(Dataset.range(3).batch(3)).map(np.copy)
    batch += 1
    assert batch.tolist() == [1, 2, 3]
