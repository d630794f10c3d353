"""Hugging Face's `Dataset` and `IterableDataset`.

A `Dataset` lies in Arrow's memory, from which many rows are taken at a time; dtypes are
Arrow's. What Arrow cannot give as arrays (images to decode, formats and transforms that the
user has set) is read row by row, as the library gives it.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import numpy as np

from mirrax._src.input.adapters.external import External, Pass
from mirrax._src.input.blocks import Block, Index
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.node import Cursor, Node, Path, State, node
from mirrax._src.input.structure import (
    PyTree,
    map_leaves,
    spec_of,
    stack_elements,
    to_array,
)


def adapt(source: Any) -> Dataset | None:
    """A Hugging Face dataset of rows as ours; rows are dicts of arrays."""
    import datasets

    if not hasattr(datasets, "DatasetDict"):
        return None  # a module of the user's that has the same name
    if isinstance(source, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise TypeError(
            f"A {type(source).__name__} holds several datasets; take one: "
            f"{', '.join(map(repr, source))}."
        )
    if isinstance(source, datasets.Dataset):
        return Dataset(HuggingFaceRows(_Rows(source), len(source)))
    if isinstance(source, datasets.IterableDataset):
        return _stream(source)
    return None


# Rows in memory -----------------------------------------------------------------------------


@node
class HuggingFaceRows(Node):
    """Rows that are looked up in Arrow's memory, many at a time."""

    rows: _Rows
    length: int

    is_described = False

    def whole(self, path: Path) -> Block:
        return Block(self.rows, range(self.length))

    def open(self, path: Path, state: State = None) -> Cursor:
        raise AssertionError("`whole` is always there")

    def cardinality(self) -> int:
        return self.length

    def spec(self) -> PyTree:
        if not self.length:
            raise ValueError(
                f"{self.describe()}, a Hugging Face dataset, is empty: its rows are described by "
                "the first one, and there is none."
            )
        return spec_of(self.rows.row(0))

    def describe(self) -> str:
        return "datasets.Dataset"


class _Uneven(Exception):
    """Rows of different shape, or that Arrow does not hold as arrays."""


class _Rows:
    """The table of a `datasets.Dataset`."""

    def __init__(self, source: Any) -> None:
        is_plain = source.format["type"] is None
        is_decoded = any(_is_decoded(f) for f in source.features.values())
        self._source = source
        self._arrow = (
            source.with_format("arrow") if is_plain and not is_decoded else None
        )

    def rows(self, index: Index) -> PyTree:
        if self._arrow is not None:
            found = self._arrow[list(map(int, index))]
            try:
                return {
                    name: _column(found.column(name).combine_chunks(), name)
                    for name in found.column_names
                }
            except _Uneven:
                pass
        return stack_elements([self.row(int(i)) for i in index])

    def row(self, i: int) -> PyTree:
        if self._arrow is None:
            return _row(self._source[i], None)
        found = self._arrow[[i]]
        return {
            name: map_leaves(_first, _column(found.column(name).combine_chunks(), name))
            for name in found.column_names
        }


def _first(array: np.ndarray) -> Any:
    return array[0]


def _is_decoded(feature: Any) -> bool:
    return hasattr(feature, "decode_example") or (
        hasattr(feature, "feature") and _is_decoded(feature.feature)
    )


def _column(array: Any, name: str) -> PyTree:
    """An Arrow array with a first axis for the rows."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.null_count:
        raise TypeError(
            f"Column {name!r} of a Hugging Face dataset holds None, which is not an array. Replace "
            "it with `dataset.map`, or leave the column out."
        )
    kind = array.type
    if pa.types.is_struct(kind):
        return {
            field.name: _column(array.field(field.name), f"{name}.{field.name}")
            for field in kind
        }
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = np.diff(np.asarray(array.offsets))
        if len(lengths) and (lengths != lengths[0]).any():
            raise _Uneven
        inner = _column(array.flatten(), name)
        size = int(lengths[0]) if len(lengths) else 0
        return map_leaves(lambda a: a.reshape(len(lengths), size, *a.shape[1:]), inner)
    if pa.types.is_fixed_size_list(kind):
        inner = _column(array.flatten(), name)
        return map_leaves(
            lambda a: a.reshape(len(array), kind.list_size, *a.shape[1:]), inner
        )
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return to_array(_objects(array.to_pylist()))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _objects(array.to_pylist())
    found = array.to_numpy(zero_copy_only=False)
    if found.dtype == object:
        raise TypeError(
            f"Column {name!r} of a Hugging Face dataset ({kind}) has no NumPy dtype. Convert it "
            "with `dataset.map`, or leave the column out."
        )
    return found


def _objects(values: list[Any]) -> np.ndarray:
    out = np.empty(len(values), object)
    out[:] = [v.encode() if isinstance(v, str) else v for v in values]
    return out


# Rows in a stream -----------------------------------------------------------------------------


def _stream(source: Any) -> Dataset:
    def begin(origin: Any) -> Pass:
        epoch = source.epoch if origin is None else origin
        stream = source.with_format(None if source.features else "numpy")
        stream.set_epoch(epoch)
        return Pass(iter(stream), epoch)

    def convert(row: Any) -> PyTree:
        return _row(row, source.features)

    return Dataset(External(begin, "datasets.IterableDataset", convert))


def _row(row: dict[str, Any], features: Any) -> dict[str, Any]:
    found = {}
    for name, value in row.items():
        try:
            found[name] = _leaf(value, features[name] if features else None)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Column {name!r} of a Hugging Face dataset holds {value!r}, which is not an array "
                f"({error})."
            ) from error
    return found


def _leaf(value: Any, feature: Any) -> PyTree:
    if value is None:
        raise TypeError("None has no dtype")
    if isinstance(value, dict):
        inner = feature if isinstance(feature, dict) else {}
        return {key: _leaf(part, inner.get(key)) for key, part in value.items()}
    while hasattr(feature, "feature"):
        feature = feature.feature
    dtype = getattr(feature, "dtype", None)
    if (
        isinstance(value, str | bytes)
        or dtype is None
        or "string" in dtype
        or "binary" in dtype
    ):
        return to_array(value)
    return np.asarray(value, dtype)[()]
