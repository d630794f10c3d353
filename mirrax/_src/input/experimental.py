"""Functions of `mx.data.experimental`, most of them the older forms of methods of datasets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mirrax._src.base.errors import warn_renamed
from mirrax._src.input.arguments import integer
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.iterators import Iterator, Optional
from mirrax._src.input.structure import PyTree
from mirrax._src.input.transforms.screening import AssertCardinality

Transformation = Callable[[Dataset], Dataset]


def assert_cardinality(expected_cardinality: int) -> Transformation:
    """For `dataset.apply`: says how many elements there are, which passes then check.

    >>> odd = mx.data.Dataset.range(9).filter(lambda x: x % 2 == 1)
    >>> len(odd.apply(mx.data.experimental.assert_cardinality(4)))
    4
    """
    expected = integer(expected_cardinality, "expected_cardinality")
    return lambda dataset: dataset._then(AssertCardinality(dataset.node, expected))


def cardinality(dataset: Dataset) -> int:
    """The number of elements, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""
    return dataset.cardinality()


def get_structure(dataset_or_iterator: Any) -> PyTree:
    """The `element_spec` of a dataset or an iterator."""
    return dataset_or_iterator.element_spec


def get_next_as_optional(iterator: Iterator) -> Optional:
    """The iterator's next element, or an `Optional` without a value at its end."""
    return iterator.get_next_as_optional()


def map_and_batch(
    map_func: Callable[..., Any],
    batch_size: int,
    num_parallel_batches: int | None = None,
    drop_remainder: bool = False,
    num_parallel_calls: int | None = None,
) -> Transformation:
    """For `dataset.apply`: the older form of `map(...).batch(...)`."""
    if num_parallel_batches is not None:
        if num_parallel_calls is not None:
            raise ValueError(
                f"`num_parallel_batches` ({num_parallel_batches}) and `num_parallel_calls` "
                f"({num_parallel_calls}) exclude each other."
            )
        num_parallel_calls = batch_size * num_parallel_batches
    _warn("map_and_batch", "dataset.map(...).batch(...)")
    return lambda dataset: dataset.map(map_func, num_parallel_calls).batch(
        batch_size, drop_remainder
    )


def parallel_interleave(
    map_func: Callable[..., Any],
    cycle_length: int,
    block_length: int = 1,
    sloppy: bool | None = False,
    buffer_output_elements: int | None = None,
    prefetch_input_elements: int | None = None,
) -> Transformation:
    """For `dataset.apply`: the older form of `interleave(..., num_parallel_calls=...)`.

    The order is always that of the turns, also with `sloppy`, and the buffers are chosen here.
    """
    _warn("parallel_interleave", "dataset.interleave(..., num_parallel_calls=...)")
    return lambda dataset: dataset.interleave(
        map_func, cycle_length, block_length, num_parallel_calls=cycle_length
    )


def shuffle_and_repeat(
    buffer_size: int, count: int | None = None, seed: int | None = None
) -> Transformation:
    """For `dataset.apply`: the older form of `shuffle(...).repeat(...)`."""
    _warn("shuffle_and_repeat", "dataset.shuffle(...).repeat(...)")
    return lambda dataset: dataset.shuffle(buffer_size, seed).repeat(count)


def choose_from_datasets(
    datasets: Any, choice_dataset: Dataset, stop_on_empty_dataset: bool = False
) -> Dataset:
    """The older form of `Dataset.choose_from_datasets`, which stops at the first empty one."""
    _warn("choose_from_datasets", "Dataset.choose_from_datasets")
    return Dataset.choose_from_datasets(datasets, choice_dataset, stop_on_empty_dataset)


def _warn(old: str, new: str) -> None:
    warn_renamed(f"mx.data.experimental.{old}", new)


def _applied(
    name: str, method_name: str | None = None
) -> Callable[..., Transformation]:
    """The older form of a method: a function that makes a transformation for `apply`."""
    method = getattr(Dataset, method_name or name)
    parameters = list(inspect.signature(method).parameters.values())
    signature = inspect.Signature([p for p in parameters if p.name not in _NOT_THERE])

    def make(*args: Any, **kwargs: Any) -> Transformation:
        bound = signature.bind(*args, **kwargs)
        _warn(name, f"dataset.{method.__name__}")
        return lambda dataset: method(dataset, *bound.args, **bound.kwargs)

    make.__doc__ = (
        f"For `dataset.apply`: the older form of `dataset.{method.__name__}(...)`."
    )
    return _named(make, name, signature)


def _called(name: str, method_name: str | None = None) -> Callable[..., Any]:
    """The older form of a method that is called with, or makes, a dataset."""
    method = getattr(Dataset, method_name or name)

    def call(*args: Any, **kwargs: Any) -> Any:
        _warn(name, f"Dataset.{method.__name__}")
        return method(*args, **kwargs)

    call.__doc__ = f"The older form of `Dataset.{method.__name__}`."
    return _named(call, name, inspect.signature(method))


def _named(fn: Any, name: str, signature: inspect.Signature) -> Any:
    fn.__name__ = fn.__qualname__ = name
    fn.__signature__ = signature
    return fn


_NOT_THERE = ("self", "name")
bucket_by_sequence_length = _applied("bucket_by_sequence_length")
enumerate_dataset = _applied("enumerate_dataset", "enumerate")
group_by_window = _applied("group_by_window")
ignore_errors = _applied("ignore_errors")
rejection_resample = _applied("rejection_resample")
scan = _applied("scan")
snapshot = _applied("snapshot")
take_while = _applied("take_while")
unbatch = _applied("unbatch")
unique = _applied("unique")
Counter = _called("Counter", "counter")
RandomDataset = _called("RandomDataset", "random")
get_single_element = _called("get_single_element")
load = _called("load")
sample_from_datasets = _called("sample_from_datasets")
save = _called("save")

for _each in [value for value in list(globals().values()) if inspect.isfunction(value)]:
    if not _each.__name__.startswith("_"):
        _each.__module__ = "mirrax.data.experimental"
