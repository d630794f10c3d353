"""Datasets as elements: `window`, and the elements in memory that windows are made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from mirrax._src.input.blocks import Arrays, Block, Numbers, Row, Singles, block_of
from mirrax._src.input.blocks import value_of as look_up
from mirrax._src.input.node import (
    Cursor,
    Node,
    Path,
    State,
    node,
    open_cursor,
    zeros_like,
)
from mirrax._src.input.structure import (
    DatasetSpec,
    Nested,
    PyTree,
    StructureError,
    leaves_of,
    map_leaves,
    show,
    spec_of,
)

Wrap = Callable[[Node], Nested]  # a dataset of a step; steps do not know datasets


_START: Any = (None, 0)  # the input's state, the elements before the next window


@node
class Kept(Node):
    """Elements that are in memory already, equal in structure but maybe not in shape."""

    block: Block
    describes: Callable[[], PyTree]  # gives their specs
    label: str

    def whole(self, path: Path) -> Block:
        return self.block

    def cardinality(self) -> int:
        return len(self.block)

    def spec(self) -> PyTree:
        return self.describes()

    def describe(self) -> str:
        return self.label


def kept(elements: list[Any], describes: Callable[[], PyTree], label: str) -> Kept:
    """The step of these elements."""
    return Kept(Block(Singles(elements), range(len(elements))), describes, label)


def kept_datasets(datasets: list[PyTree], spec: PyTree, label: str) -> Kept:
    """The step whose elements are, or hold, these datasets."""
    return kept(datasets, lambda: spec, label)


@node
class Window(Node):
    """Datasets of `size` elements, `stride` apart, each `shift` after the one before."""

    input: Node
    size: int
    shift: int
    stride: int
    drop_remainder: bool
    wrap: Wrap

    @property
    def extent(self) -> int:
        """The elements of the input from the first to the last of a window."""
        return (self.size - 1) * self.stride + 1

    def open(self, path: Path, state: State = None) -> Cursor:
        return _WindowCursor(self, path, *(state or _START))

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if size < 0:
            return size
        if self.drop_remainder:
            size -= self.extent - 1
        return max(0, -(-size // self.shift))

    def spec(self) -> PyTree:
        return self._specs(self.input.spec())

    def outline(self) -> PyTree | None:
        outline = self.input.outline()
        return None if outline is None else self._specs(outline)

    def _specs(self, spec: PyTree) -> PyTree:
        def describe(leaf: Any) -> DatasetSpec:
            def example() -> Nested:
                return self.wrap(kept([zeros_like(leaf)], lambda: leaf, "window"))

            return DatasetSpec(leaf, example)

        return map_leaves(describe, spec)

    def datasets(self, rows: list[Any]) -> PyTree:
        """The rows of a window as datasets, one for each leaf of an element."""
        block = block_of(rows)
        first = block.row(0).value()
        leaves = leaves_of(first)
        if len(leaves) == 1 and leaves[0] is first:
            return self.wrap(Kept(block, self.input.spec, "window"))
        elements = [first, *block[1:].elements()]
        numbers = iter(range(len(leaves)))

        def dataset(*values: Any) -> Nested:
            number = next(numbers)
            return self.wrap(
                kept(
                    list(values),
                    lambda: leaves_of(self.input.spec())[number],
                    "window",
                )
            )

        try:
            return map_leaves(dataset, *elements)
        except StructureError as error:
            raise ValueError(
                f"The elements of a window must be alike, but one is {show(first)} and "
                f"another {show(elements[error.index + 1])}. Make their structure alike with "
                "`map`."
            ) from None

    def describe(self) -> str:
        return f"window({self.size}, {self.shift}, {self.stride})"


class _WindowCursor(Cursor):
    """The state: the input's before the next window, or before `gap` elements ahead of it."""

    def __init__(self, window: Window, path: Path, inner: State, gap: int) -> None:
        self._window, self._gap = window, gap
        self._inner = open_cursor(window.input, path, inner)
        self._rows: list[Any] = []  # from the next window's first element on
        self._starts: deque[State] = deque()  # of the input, before windows among them

    def __next__(self) -> PyTree:
        window = self._window
        self._inner.skip(self._gap)
        self._gap = 0
        try:
            while len(self._rows) < window.extent:
                before = None
                if len(self._rows) % window.shift == 0:
                    before = self._inner.state()
                self._rows.append(_cheap(next(self._inner)))
                if before is not None:
                    self._starts.append(before)
        except StopIteration:
            if not self._rows or window.drop_remainder:
                raise
        picked = self._rows[: window.extent : window.stride]
        self._gap = max(0, window.shift - len(self._rows))
        del self._rows[: window.shift]
        self._starts.popleft()
        return window.datasets(picked)

    def state(self) -> State:
        return [self._starts[0] if self._rows else self._inner.state(), self._gap]

    def close(self) -> None:
        self._inner.close()


def _cheap(element: Any) -> Any:
    """The element, looked up unless that is cheap enough for several windows to do it."""
    is_cheap = isinstance(element, Row) and isinstance(element.table, Arrays | Numbers)
    return element if is_cheap else look_up(element)


def datasets_in(tensors: PyTree, wrap_list: bool) -> Kept | None:
    """The source of datasets that users give to `from_tensors` or `from_tensor_slices`."""
    if wrap_list:
        parts = list(tensors) if isinstance(tensors, list | tuple) else []
        if not parts or not all(isinstance(part, Nested) for part in parts):
            return None
        return kept_datasets(parts, spec_of(parts[0]), "from_tensor_slices")
    if not any(isinstance(leaf, Nested) for leaf in leaves_of(tensors)):
        return None
    return kept_datasets([tensors], spec_of(tensors), "from_tensors")
