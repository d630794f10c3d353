"""NumPy arrays, lists of batches, generators and iterators; these need no library."""

from __future__ import annotations

import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import parts

import mirrax as mx
from interop.comparing import assert_same, functions_in, take, through_json, union

# Arrays ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "float64", "complex64"])
def test_an_array_stands_for_its_rows(dtype):
    array = np.array([[0, 1], [1, 0], [1, 1]], dtype)
    dataset = mx.data.as_dataset(array)
    assert dataset.element_spec == mx.TensorSpec((2,), dtype)
    assert dataset.cardinality() == 3
    for a, b in zip(dataset, array, strict=True):
        assert_same(a, b)


def test_structures_of_arrays_stand_for_structures_of_rows(two_cpus):
    arrays = np.arange(5), {"s": np.array(list("abcde")), "x": np.eye(5, 2)}
    dataset = mx.data.as_dataset(arrays)
    number, row = next(iter(dataset))
    assert (int(number), row["s"], row["x"].tolist()) == (0, b"a", [1, 0])
    first, last = two_cpus.experimental_distribute_dataset(dataset.batch(3))
    assert parts(two_cpus, first[1]["s"]) == [[b"a", b"b"], [b"c"]]
    assert parts(two_cpus, last[0]) == [[3], [4]]


def test_rows_of_an_array_have_to_be_batched_before_they_are_distributed(two_cpus):
    steps = iter(two_cpus.experimental_distribute_dataset(np.arange(4)))
    with pytest.raises(ValueError, match=r"int64\[\] cannot be split.*dataset.batch"):
        next(steps)


def test_an_array_of_jax_stands_for_its_rows():
    dataset = mx.data.as_dataset(jnp.arange(3))
    assert [int(x) for x in dataset] == [0, 1, 2]
    assert dataset.cardinality() == 3


# Iterables -------------------------------------------------------------------------------


def test_batches_of_many_lengths(two_cpus):
    batches = [np.arange(n) for n in (5, 1, 4, 0, 3)]
    steps = two_cpus.experimental_distribute_dataset(batches)
    assert [parts(two_cpus, step) for step in steps] == [
        [[0, 1, 2], [3, 4]],
        [[0], []],
        [[0, 1], [2, 3]],
        [[], []],
        [[0, 1], [2]],
    ]


def test_a_dataset_fn_may_return_batches_of_single_arrays(two_cpus):
    batches = [np.arange(n) for n in (2, 3, 1)]
    steps = two_cpus.distribute_datasets_from_function(lambda context: batches)
    assert [parts(two_cpus, step) for step in steps] == [
        [[0, 1], [0, 1, 2]],
        [[0], []],
    ]


def test_any_iterable_with_a_length_tells_it():
    class Batches:
        def __len__(self):
            return 2

        def __iter__(self):
            return iter([np.arange(3), np.arange(2)])

    dataset = mx.data.as_dataset(Batches())
    assert dataset.cardinality() == 2
    assert [x.tolist() for x in dataset] == [[0, 1, 2], [0, 1]]


def test_a_class_from_a_users_own_module_with_a_librarys_name(monkeypatch):
    """Many projects have a `datasets.py` of their own."""
    module = types.ModuleType("datasets")
    code = (
        "class Batches:\n    def __iter__(self):\n        return iter([[1, 2], [3]])\n"
    )
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, "datasets", module)
    dataset = mx.data.as_dataset(module.Batches())
    assert [x.tolist() for x in dataset] == [[1, 2], [3]]


def test_a_generator_function_is_called_for_each_pass(two_cpus):
    calls = []

    def generate():
        calls.append(1)
        yield {"x": np.arange(4), "s": np.array(["a", "b", "c", "d"])}
        yield {"x": np.arange(2), "s": np.array(["e", "f"])}

    distributed = two_cpus.experimental_distribute_dataset(generate)
    for _ in range(2):
        first, last = distributed
        assert parts(two_cpus, first["x"]) == [[0, 1], [2, 3]]
        assert parts(two_cpus, last["s"]) == [[b"e"], [b"f"]]
    assert len(calls) == 2


def test_an_iterator_gives_one_pass_and_then_says_why_no_more(two_cpus):
    for give in (mx.data.as_dataset, two_cpus.experimental_distribute_dataset):
        given = give(iter([np.arange(4), np.arange(2)]))
        assert len(list(given)) == 2
        with pytest.raises(
            ValueError, match=r"was an iterator.*used up.*from_generator"
        ):
            list(given)


def test_an_iterator_that_was_not_read_yet_can_be_restored():
    def generate():
        return (np.full(2, i) for i in range(4))

    iterator = iter(mx.data.as_dataset(generate()))
    take(iterator, 1)
    state = through_json(iterator.get_state())
    rest = [x.tolist() for x in iterator]
    again = iter(mx.data.as_dataset(generate()))
    again.set_state(state)
    assert [x.tolist() for x in again] == rest == [[1, 1], [2, 2], [3, 3]]


def test_python_numbers_and_lists_are_taken(two_cpus):
    dataset = mx.data.as_dataset([[1, 2, 3], [4, 5]])
    assert dataset.element_spec.dtype == "int32"
    steps = two_cpus.experimental_distribute_dataset(dataset)
    assert [union(two_cpus, step).tolist() for step in steps] == [[1, 2, 3], [4, 5]]


# Errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [5, "a file", b"bytes", None], ids=repr)
def test_what_is_no_dataset_is_refused_with_advice(bad, two_cpus):
    for give in (mx.data.as_dataset, two_cpus.experimental_distribute_dataset):
        with pytest.raises(
            TypeError, match="is not a dataset.*tf.data, Grain, PyTorch"
        ):
            give(bad)


def test_an_error_in_a_generator_arrives_with_its_own_traceback(two_cpus):
    def explode():
        yield np.arange(4)
        raise KeyError("a bad file")

    for give in (mx.data.as_dataset, two_cpus.experimental_distribute_dataset):
        iterator = iter(give(explode))
        next(iterator)
        with pytest.raises(KeyError, match="a bad file") as caught:
            next(iterator)
        assert functions_in(caught.value)[-1] == "explode"
