"""Other libraries' datasets as ours: one file each, imported only when one is met."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np

from mirrax._src.input.dataset import Dataset
from mirrax._src.input.node import UNKNOWN
from mirrax._src.input.sources import Generator

# By the package that a class comes from; classes of users are found by what they inherit.
_ADAPTERS = {
    "tensorflow": "tf_data",
    "grain": "grain",
    "torch": "torch",
    "datasets": "hugging_face",
    "keras": "keras",
}


def as_dataset(source: Any, what: str = "The argument") -> Dataset:
    """Any dataset as an `mx.data.Dataset`.

    Takes `tf.data.Dataset`, Grain's `MapDataset`, `IterDataset` and `DataLoader`, PyTorch's
    `DataLoader`, Hugging Face datasets, Keras' `PyDataset`, iterables of elements, functions
    that return one (generators), and arrays: an array, or a tuple or dict of arrays, stands
    for its rows. The lists in which PyTorch collates become tuples.

    >>> batches = [np.arange(3), np.arange(2)]
    >>> list(mx.data.as_dataset(batches))
    [array([0, 1, 2]), array([0, 1])]
    """
    if isinstance(source, Dataset):
        return source
    for cls in type(source).__mro__:
        name = _ADAPTERS.get(cls.__module__.partition(".")[0])
        if name is not None:
            module = importlib.import_module(f"{__name__}.{name}")
            adapted = module.adapt(source)
            if adapted is not None:
                return adapted
    if isinstance(source, np.ndarray | tuple | dict):
        return Dataset.from_tensor_slices(source)
    if isinstance(source, Iterator):
        return _one_pass(source, what)
    if isinstance(source, Iterable) and not isinstance(source, str | bytes):
        length = len(source) if isinstance(source, Sized) else UNKNOWN
        return Dataset(Generator(lambda: source, None, type(source).__name__, length))
    if callable(source):
        return Dataset.from_generator(source)
    raise TypeError(
        f"{what} is no dataset: {source!r}. Give an `mx.data.Dataset`, a dataset of tf.data, "
        "Grain, PyTorch, Hugging Face or Keras, an iterable of NumPy batches, or a generator function."
    )


def _one_pass(iterator: Iterator[Any], what: str) -> Dataset:
    taken = False

    def take() -> Iterator[Any]:
        nonlocal taken
        if taken:
            raise ValueError(
                f"{what} was an iterator, which has been used up by the first pass. Give "
                "something that can be iterated over again, or `Dataset.from_generator(fn)`."
            )
        taken = True
        return iterator

    return Dataset(Generator(take, None, type(iterator).__name__))
