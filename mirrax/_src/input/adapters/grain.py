"""Grain's `MapDataset`, `IterDataset` and `DataLoader`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys
from typing import Any

from mirrax._src.input.adapters.external import External, Pass, with_tuples
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.node import INFINITE, UNKNOWN


def adapt(source: Any) -> Dataset | None:
    """A Grain dataset as ours; positions are saved as Grain's own states."""
    import grain.python as grain

    if not isinstance(source, grain.MapDataset | grain.IterDataset | grain.DataLoader):
        return None

    def begin(state: Any) -> Pass:
        iterator = iter(source)
        if state is not None:
            iterator.set_state(state.encode() if isinstance(state, str) else state)
        return Pass(iterator, None, lambda: _plain(iterator.get_state()))

    length = UNKNOWN
    if isinstance(source, grain.MapDataset):
        length = INFINITE if len(source) >= sys.maxsize else len(source)
    label = f"grain.{type(source).__name__}"
    return Dataset(External(begin, label, with_tuples, length))


def _plain(state: Any) -> Any:
    return state.decode() if isinstance(state, bytes) else state
