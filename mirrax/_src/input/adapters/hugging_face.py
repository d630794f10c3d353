"""Hugging Face's `Dataset` and `IterableDataset`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mirrax._src.input.adapters.external import External
from mirrax._src.input.blocks import Block, Index
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.node import Cursor, Node, Path, State, node
from mirrax._src.input.structure import PyTree, spec_of, stack_elements, to_array


def adapt(source: Any) -> Dataset | None:
    """A Hugging Face dataset of rows as ours; rows are dicts of arrays."""
    import datasets

    if isinstance(source, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise TypeError(
            f"A {type(source).__name__} holds several datasets; take one: "
            f"{', '.join(map(repr, source))}."
        )
    if isinstance(source, datasets.Dataset):
        if source.format["type"] is None:
            source = source.with_format("numpy")
        return Dataset(HuggingFaceRows(_Rows(source), len(source)))
    if isinstance(source, datasets.IterableDataset):
        return Dataset(External(_start(source), "datasets.IterableDataset", _row))
    return None


@node
class HuggingFaceRows(Node):
    """Rows that are looked up in Arrow's memory, many at a time."""

    rows: _Rows
    length: int

    def whole(self, path: Path) -> Block:
        return Block(self.rows, range(self.length))

    def open(self, path: Path, state: State = None) -> Cursor:
        raise AssertionError("`whole` is always there")

    def cardinality(self) -> int:
        return self.length

    def spec(self) -> PyTree:
        return spec_of(self.rows.row(0))

    def describe(self) -> str:
        return "datasets.Dataset"


class _Rows:
    """The table of a `datasets.Dataset`."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def rows(self, index: Index) -> PyTree:
        found = _row(self._source[list(map(int, index))])
        if any(isinstance(c, np.ndarray) and _is_uneven(c) for c in found.values()):
            return stack_elements([self.row(int(i)) for i in index])
        return found

    def row(self, i: int) -> PyTree:
        return _row(self._source[i])


def _row(found: dict[str, Any]) -> dict[str, Any]:
    return {name: _array(value) for name, value in found.items()}


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == object and value.size:
        if isinstance(value.flat[0], str):
            out = np.empty(value.shape, object)
            out[...] = [text.encode() for text in value.flat]
            return out
        return value
    return to_array(value)


def _is_uneven(column: np.ndarray) -> bool:
    is_object = column.dtype == object and column.size > 0
    return is_object and not isinstance(column.flat[0], bytes)


def _start(source: Any) -> Callable[[Path, State], tuple[Iterator[Any], Any]]:
    def start(path: Path, state: State) -> tuple[Iterator[Any], Any]:
        if state is not None:
            source.load_state_dict(state)
        return iter(source.with_format("numpy")), source.state_dict

    return start
