"""Keras' `PyDataset`: batches by number."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from mirrax._src.input.adapters.external import with_tuples
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.node import (
    INFINITE,
    Cursor,
    Node,
    Path,
    State,
    node,
    open_cursor,
)
from mirrax._src.input.structure import PyTree
from mirrax._src.input.transforms.selecting import Through

_FOR_EVER = 2**62


def adapt(source: Any) -> Dataset | None:
    """A `PyDataset` as ours; `on_epoch_end` is called after every whole pass."""
    import keras

    if not isinstance(source, keras.utils.PyDataset):
        return None
    count = source.num_batches
    numbers = Dataset.range(_FOR_EVER if count is None else count)
    calls = source.workers if source.workers > 1 else None

    def batch(i: Any) -> PyTree:
        return with_tuples(source[int(i)])

    batch.__qualname__ = type(source).__name__
    return Dataset(_Epochs(numbers.map(batch, num_parallel_calls=calls).node, source))


@node
class _Epochs(Through):
    """The batches, and a call at the end of the pass."""

    input: Node
    source: Any

    def open(self, path: Path, state: State = None) -> Cursor:
        return _EpochCursor(open_cursor(self.input, path, state), self.source)

    def cardinality(self) -> int:
        size = self.input.cardinality()
        return INFINITE if size == _FOR_EVER else size

    def describe(self) -> str:
        return "keras.PyDataset"


class _EpochCursor(Cursor):
    def __init__(self, inner: Cursor, source: Any) -> None:
        self._inner, self._source = inner, source

    def __next__(self) -> Any:
        try:
            return next(self._inner)
        except StopIteration:
            source, self._source = self._source, None
            if source is not None:
                source.on_epoch_end()
            raise

    def state(self) -> State:
        return self._inner.state()

    def close(self) -> None:
        self._inner.close()
