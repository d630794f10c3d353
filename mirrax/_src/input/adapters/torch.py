"""PyTorch's `DataLoader`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mirrax._src.input.adapters.external import External, with_tuples
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.node import UNKNOWN


def adapt(source: Any) -> Dataset | None:
    """A `DataLoader` as ours.

    PyTorch draws the order of a pass from a random generator. The generator's state at
    the start is kept in the state of the pass, so a restored pass meets the same order.
    """
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    if not isinstance(source, DataLoader):
        return None
    sampler = getattr(source, "sampler", None)
    own = source.generator or getattr(sampler, "generator", None)
    generator = own or torch.default_generator

    def start(path: Any, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
        count, drawn = state or (0, None)
        if drawn is not None:
            generator.set_state(
                torch.tensor(list(bytes.fromhex(drawn)), dtype=torch.uint8)
            )
        before = bytes(generator.get_state().tolist()).hex()
        given = _Counting(iter(source))
        for _ in range(count):
            next(given, None)
        return given, lambda: [given.count, before]

    is_sized = not isinstance(source.dataset, IterableDataset)
    length = len(source) if is_sized else UNKNOWN
    return Dataset(External(start, "torch.DataLoader", with_tuples, length))


class _Counting:
    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator, self.count = iterator, 0

    def __iter__(self) -> _Counting:
        return self

    def __next__(self) -> Any:
        element = next(self._iterator)
        self.count += 1
        return element
