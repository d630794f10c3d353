"""Grain's `MapDataset`, `IterDataset` and `DataLoader`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from mirrax._src.input.adapters.external import External
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.node import INFINITE, UNKNOWN
from mirrax._src.input.structure import to_element


def adapt(source: Any) -> Dataset | None:
    """A Grain dataset as ours; positions are saved as Grain's own states."""
    import grain.python as grain

    if not isinstance(source, grain.MapDataset | grain.IterDataset | grain.DataLoader):
        return None

    def start(path: Any, state: Any) -> tuple[Iterator[Any], Callable[[], Any]]:
        iterator = iter(source)
        if state is not None:
            iterator.set_state(state.encode() if isinstance(state, str) else state)
        return iterator, lambda: _plain(iterator.get_state())

    length = UNKNOWN
    if isinstance(source, grain.MapDataset):
        length = INFINITE if len(source) >= sys.maxsize else len(source)
    label = f"grain.{type(source).__name__}"
    return Dataset(External(start, label, to_element, length))


def _plain(state: Any) -> Any:
    return state.decode() if isinstance(state, bytes) else state
