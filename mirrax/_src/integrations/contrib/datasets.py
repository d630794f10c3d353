"""What `distribute_dataset` gives: a dataset of which each tower takes one element in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mirrax._src.input.distributed import DistributedDataset
from mirrax._src.input.feeding import distribute_from_function
from mirrax._src.input.options import InputOptions
from mirrax._src.integrations.compat_v1 import InputIterator


class TowerDataset:
    """The elements of a dataset, for all towers at once; iterate over it."""

    __module__ = "mirrax.contrib.distribute"

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset

    def make_one_shot_iterator(self) -> InputIterator:
        """An iterator over the data: `get_next` until it ends."""
        return InputIterator(self._dataset)

    def make_initializable_iterator(self) -> InputIterator:
        """An iterator over the data, of which `initialize` goes back to the start."""
        return InputIterator(self._dataset)

    def __iter__(self) -> InputIterator:
        return InputIterator(self._dataset)


def distribute(
    core: Any, dataset_fn: Callable[[], Any], prefetch: bool | None
) -> TowerDataset:
    """The dataset that `dataset_fn()` makes, for the towers of `core`."""
    if not callable(dataset_fn):
        raise TypeError(
            "`distribute_dataset` takes a function without arguments that makes a dataset, "
            f"got {dataset_fn!r}."
        )
    options = InputOptions(
        experimental_per_replica_buffer_size=0 if prefetch is False else 1
    )
    dataset = distribute_from_function(
        lambda _: dataset_fn(),
        core.input_share,
        core.replica_mesh,
        options,
        drop_incomplete=True,
    )
    return TowerDataset(dataset)
