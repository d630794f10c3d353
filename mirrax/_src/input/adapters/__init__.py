"""Other libraries' datasets as ours: one file each, imported only when one is met."""

from __future__ import annotations

import importlib
import itertools
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
        once = _OnePass(source, what)
        return Dataset(Generator(lambda: once, None, type(source).__name__))
    if isinstance(source, Iterable) and not isinstance(source, str | bytes):
        length = len(source) if isinstance(source, Sized) else UNKNOWN
        return Dataset(Generator(lambda: source, None, type(source).__name__, length))
    if callable(source):
        return Dataset.from_generator(source)
    raise TypeError(
        f"{what} is not a dataset: {source!r}. Give an `mx.data.Dataset`, a dataset of tf.data, "
        "Grain, PyTorch, Hugging Face or Keras, an iterable of NumPy batches, or a generator function."
    )


class _OnePass:
    """An iterator as something to iterate over, once; a look at its start does not count."""

    _PEEKED = 2  # elements that a look takes, at most

    def __init__(self, iterator: Iterator[Any], what: str) -> None:
        self._iterator, self._what = iterator, what
        self._given: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._given is not None and len(self._given) > self._PEEKED:
            raise ValueError(
                f"{self._what} was an iterator, which has been used up by the first pass. Give "
                "something that can be iterated over again, or `Dataset.from_generator(fn)`."
            )
        return self._elements()

    def _elements(self) -> Iterator[Any]:
        before, self._given = self._given or [], []
        for element in itertools.chain(before, self._iterator):
            if len(self._given) <= self._PEEKED:
                self._given.append(element)
            yield element
        self._given = [None] * (self._PEEKED + 1)
