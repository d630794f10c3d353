"""What every step of a pipeline is (`Node`) and what runs it (`Cursor`).

A `Node` describes: it holds its inputs and arguments and never changes. A `Cursor` is one
pass over a node: it gives elements, one at a time or many in a block, and can tell its
state at any moment, from which the node opens a cursor that goes on with the next element.

Random orders depend on the seed and the *path* of a pass alone: the number of the pass,
then the epoch of each `repeat` around, the number of the element in each `flat_map`. So
nothing has to be counted in nodes, two passes at a time do not disturb each other, and a
path in a saved state brings an order back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, dataclass_transform

import numpy as np

from mirrax._src.input.blocks import Block, block_of, value_of
from mirrax._src.input.structure import (
    STRING,
    DatasetSpec,
    PyTree,
    TensorSpec,
    map_leaves,
)

INFINITE = -1
UNKNOWN = -2

Path = tuple[int, ...]
State = Any
_T = TypeVar("_T")


class Cursor:
    """One pass over a node."""

    def __next__(self) -> Any:
        """The next element, which may not be looked up yet (`value_of`)."""
        raise NotImplementedError

    _late: BaseException | None = None  # an error that follows a block

    def next_block(self, count: int) -> Block | None:
        """Up to `count` elements in a block; None at the end."""
        late, self._late = self._late, None
        if late is not None:
            raise late
        elements = []
        while len(elements) < count:
            try:
                elements.append(next(self))
            except StopIteration:
                break
            except BaseException as error:
                if not elements:
                    raise
                self._late = error
                break
        return block_of(elements) if elements else None

    def skip(self, count: int) -> None:
        """Passes over `count` elements, or to the end."""
        for _ in range(count):
            try:
                next(self)
            except StopIteration:
                return

    def state(self) -> State:
        """What `Node.open` goes on from, as plain numbers, strings, lists and dicts."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends threads and files of this pass."""

    def interrupt(self) -> None:
        """Called on another thread: has a pass that waits for somebody give up."""

    is_awaited = True  # whether somebody waits for the next element

    def __iter__(self) -> Cursor:
        return self


class Node:
    """A step of a pipeline."""

    def open(self, path: Path, state: State = None) -> Cursor:
        """A pass, from the start or from where a cursor's `state` was."""
        raise NotImplementedError

    def whole(self, path: Path) -> Block | None:
        """All elements of a pass as rows in memory, if that is what they are."""
        return None

    def cardinality(self) -> int:
        """The number of elements, `INFINITE` or `UNKNOWN`."""
        raise NotImplementedError

    def spec(self) -> PyTree:
        """The specs of an element."""
        raise NotImplementedError

    def outline(self) -> PyTree | None:
        """The structure and dtypes of an element, if they are known without looking at one."""
        is_known = all(getattr(step, "is_described", True) for step in walk(self))
        return self.spec() if is_known else None

    def batch_size(self) -> int | None:
        """The rows of a full element, if this step keeps or makes batches of one size."""
        return None

    def inputs(self) -> tuple[Node, ...]:
        """The steps before this one."""
        found = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            found += [value] if isinstance(value, Node) else []
            found += (
                [v for v in value if isinstance(v, Node)]
                if isinstance(value, tuple)
                else []
            )
        return tuple(found)

    def looking(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which a look at the first elements leaves no traces."""
        return contextlib.nullcontext()

    def forget(self) -> None:
        """Drops what was kept of earlier passes, because the order has changed."""

    def describe(self) -> str:
        """This step for messages: `batch(8)`."""
        return type(self).__name__.lower()


@dataclass_transform(eq_default=False)
def node(cls: type[_T]) -> type[_T]:
    """The decorator of nodes: a dataclass that is compared by identity."""
    return dataclasses.dataclass(eq=False)(cls)


def walk(start: Node) -> Iterator[Node]:
    """The steps of a pipeline, inputs first."""
    for each in start.inputs():
        yield from walk(each)
    yield start


def rebuild(start: Node, change: Callable[[Node], Node | None]) -> Node:
    """The pipeline with the steps replaced for which `change` gives another."""
    changed = change(start)
    if changed is not None:
        return changed
    new: dict[str, Any] = {}
    for field in dataclasses.fields(start):  # type: ignore[arg-type]
        value = getattr(start, field.name)
        if isinstance(value, Node):
            other: Any = rebuild(value, change)
        elif isinstance(value, tuple) and any(isinstance(v, Node) for v in value):
            other = tuple(rebuild(v, change) for v in value)
            other = value if all(map(operator.is_, other, value)) else other
        else:
            continue
        if other is not value:
            new[field.name] = other
    return dataclasses.replace(start, **new) if new else start  # type: ignore[type-var]


class BlockCursor(Cursor):
    """A pass over rows in memory; its state is the number of rows passed."""

    def __init__(self, block: Block, position: int = 0) -> None:
        self._block = block
        self._position = position

    def __next__(self) -> Any:
        if self._position >= len(self._block):
            raise StopIteration
        self._position += 1
        return self._block.row(self._position - 1)

    def next_block(self, count: int) -> Block | None:
        start = self._position
        if start >= len(self._block):
            return None
        self._position = min(start + count, len(self._block))
        return self._block[start : self._position]

    def skip(self, count: int) -> None:
        self._position = min(self._position + count, len(self._block))

    def state(self) -> int:
        return self._position


def open_cursor(of: Node, path: Path, state: State = None) -> Cursor:
    """A pass over `of`: on indices where its elements lie in memory."""
    block = of.whole(path)
    return of.open(path, state) if block is None else BlockCursor(block, state or 0)


def first_elements(of: Node, count: int = 2) -> list[PyTree]:
    """The first elements, in a pass of its own; one of zeros if there are none."""
    found = []
    with contextlib.ExitStack() as stack:
        for step in walk(of):
            stack.enter_context(step.looking())
        cursor = open_cursor(of, (0,))
        stack.callback(cursor.close)
        for element in itertools.islice(cursor, count):
            found.append(value_of(element))
    return found or [zeros_like(of.spec())]


def zeros_like(spec: PyTree) -> PyTree:
    """An element as the spec describes it, lengths that vary being 1."""

    def zeros(s: Any) -> Any:
        if isinstance(s, DatasetSpec) and s.example is not None:
            return s.example()
        if s.dtype == STRING and not s.shape:
            return b""
        return np.zeros([1 if n is None else n for n in s.shape or ()], s.dtype)[()]

    return map_leaves(zeros, spec)


def merge_specs(specs: list[PyTree]) -> PyTree:
    """Specs that describe elements of several datasets."""

    def merge(*leaves: Any) -> Any:
        shapes = {leaf.shape for leaf in leaves}
        first = leaves[0]
        if isinstance(first, DatasetSpec):
            inner = [leaf.element_spec for leaf in leaves]
            return DatasetSpec(merge_specs(inner), first.example)
        if len(shapes) == 1:
            return first
        if (
            None in shapes
            or len({len(shape) for shape in shapes if shape is not None}) > 1
        ):
            return TensorSpec(None, first.dtype)
        lengths = zip(*(shape for shape in shapes if shape is not None))
        return TensorSpec(
            [axis[0] if len(set(axis)) == 1 else None for axis in lengths], first.dtype
        )

    return map_leaves(merge, *specs)
