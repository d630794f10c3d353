"""A global batch into replica batches: which rows each replica of a worker gets.

TensorFlow has two ways, and so have we. *By batch*: every batch is one step, cut into
ceil(n / replicas) rows for each replica, front ones first. *By rows*: a stream of rows,
across batches, cut into the sizes that a full batch would give. A worker's step is one
part for each of its replicas.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mirrax._src.input.blocks import Block, value_of
from mirrax._src.input.node import Cursor, Node, Path, State, node, open_cursor
from mirrax._src.input.structure import (
    PyTree,
    TensorSpec,
    dtype_of,
    empty,
    leaves_of,
    map_leaves,
    shape_of,
    show,
    spec_of,
)
from mirrax._src.input.transforms.batching import START, Unbatch, as_block
from mirrax._src.input.transforms.elementwise import is_static

Part = Any  # a Block, or an element as it is
Step = list[Part]


@dataclasses.dataclass(frozen=True)
class Share:
    """This worker's replicas among all."""

    num_workers: int = 1
    worker: int = 0
    replicas_per_worker: int = 1

    @property
    def num_replicas(self) -> int:
        return self.num_workers * self.replicas_per_worker


def part_sizes(batch_size: int, share: Share) -> list[int]:
    """The sizes of successive parts by rows, from this worker's first replica on."""
    count = share.num_replicas
    small, rest = divmod(batch_size, count)
    sizes = [small + 1] * rest + [small] * (count - rest)
    first = share.worker * share.replicas_per_worker
    return sizes[first:] + sizes[:first]


def split_batch(rows: int, count: int) -> list[slice]:
    """The parts of a batch that is a step of its own."""
    size = -(-rows // count)
    return [slice(min(i * size, rows), min((i + 1) * size, rows)) for i in range(count)]


@functools.lru_cache(maxsize=64)
def _dealt_rows(lengths: tuple[int, ...], share: Share) -> list[list[int]]:
    """The rows of each leaf of each replica, of a batch with such leaves."""
    sizes = [
        [part.stop - part.start for part in split_batch(n, share.num_replicas)]
        for n in lengths
    ]
    parts = range(share.num_replicas)
    order = [i for w in range(share.num_workers) for i in parts[w :: share.num_workers]]
    return [[of_leaf[i] for of_leaf in sizes] for i in order]


class StepCursor(Cursor):
    """A pass whose elements are steps: one part for each local replica."""

    def is_full(self, step: Step) -> bool:
        """Whether no row is missing in it."""
        raise NotImplementedError

    def most_rows(self, step: list[Block]) -> int:
        """The rows that a replica gets of a full batch, judged by the first step."""
        return max(map(len, step))

    def dealt_rows(self, leaves: int) -> list[list[int]] | None:
        """Where batches are dealt out: the rows of each leaf of each of all replicas.

        None if all replicas have as many.
        """
        return None


@node
class ByBatch(Node):
    """Every batch in equal parts; with `is_divided` they are dealt out to the workers."""

    input: Node
    share: Share
    is_divided: bool
    rows: int | None  # of a full batch

    def open(self, path: Path, state: State = None) -> StepCursor:
        return _ByBatchCursor(self, path, *(state or START))


def split(element: Any, count: int) -> tuple[int, list[Part]]:
    """The rows of a batch, and its parts; arrays of different lengths are cut each."""
    element = element if isinstance(element, Block) else value_of(element)
    if not isinstance(element, Block):
        check_batched(element)
        lengths = {len(leaf) for leaf in leaves_of(element)}
        if len(lengths) > 1:
            return max(lengths), [
                map_leaves(lambda a, i=i: a[split_batch(len(a), count)[i]], element)
                for i in range(count)
            ]
    block = as_block(element)
    return len(block), [block[part] for part in split_batch(len(block), count)]


class _ByBatchCursor(StepCursor):
    """The state: that of the input before the current batch, and the steps made of it.

    With parts dealt out every batch is one step on each worker, so the state holds for
    any number of workers.
    """

    def __init__(self, owner: ByBatch, path: Path, state: State, given: int) -> None:
        self._owner = owner
        self._inner = open_cursor(owner.input, path, state)
        self._before = self._inner.state()
        self._steps: list[Step] = []
        self._given = 0
        self._rows = owner.rows
        self._is_full = True
        if given:
            self._advance()
            self._steps, self._given = self._steps[given:], given

    def _advance(self) -> None:
        self._before, self._given = self._inner.state(), 0
        share = self._owner.share
        element = next(self._inner)
        rows, parts = split(element, share.num_replicas)
        self._element = element
        self._rows = self._rows or rows
        self._is_full = rows >= self._rows
        if self._owner.is_divided:
            parts = parts[share.worker :: share.num_workers]
        count = share.replicas_per_worker
        self._steps = [parts[i : i + count] for i in range(0, len(parts), count)]

    def __next__(self) -> Step:
        if not self._steps:
            self._advance()
        self._given += 1
        return self._steps.pop(0)

    def dealt_rows(self, leaves: int) -> list[list[int]]:
        share, element = self._owner.share, self._element
        lengths = (
            [len(element)] * leaves
            if isinstance(element, Block)
            else [len(leaf) for leaf in leaves_of(value_of(element))]
        )
        return _dealt_rows(tuple(lengths), share)

    def is_full(self, step: Step) -> bool:
        return self._is_full

    def most_rows(self, step: list[Block]) -> int:
        # Of the batch, not of this worker's part of it, which may be smaller.
        return -(-(self._rows or 0) // self._owner.share.num_replicas)

    def state(self) -> State:
        if not self._steps:
            return [self._inner.state(), 0]
        return [self._before, self._given]

    def close(self) -> None:
        self._inner.close()


_START_OF_ROWS: Any = (None, 0, 0)


@node
class ByRows(Node):
    """A stream of rows in parts of fixed sizes."""

    input: Node
    share: Share
    sizes: tuple[int, ...]

    def open(self, path: Path, state: State = None) -> StepCursor:
        return _ByRowsCursor(self, path, *(state or _START_OF_ROWS))


class _ByRowsCursor(StepCursor):
    """The state: the rows', the number of the part in the cycle of sizes, its length."""

    def __init__(
        self, owner: ByRows, path: Path, state: State, number: int, cycle: int
    ) -> None:
        self._sizes, self._count = owner.sizes, owner.share.replicas_per_worker
        self._rows = Unbatch(owner.input).open(path, state)
        self._number = number if cycle == len(owner.sizes) else 0

    def _wanted(self, i: int) -> int:
        return self._sizes[(self._number + i) % len(self._sizes)]

    def __next__(self) -> Step:
        if not self._rows.has_more():
            raise StopIteration
        nothing = self._rows.current[:0]
        wanted = [self._wanted(i) for i in range(self._count)]
        found = [self._rows.next_block(size) if size else None for size in wanted]
        step = [nothing if block is None else block for block in found]
        self._full = [len(part) for part in step] == wanted
        self._number = (self._number + self._count) % len(self._sizes)
        return step

    def is_full(self, step: Step) -> bool:
        return self._full

    def state(self) -> State:
        return [self._rows.state(), self._number, len(self._sizes)]

    def close(self) -> None:
        self._rows.close()


def num_rows(part: Part) -> int | None:
    """The rows of a part; None for what has none."""
    if isinstance(part, Block):
        return len(part)
    shapes = [shape_of(leaf) for leaf in leaves_of(value_of(part))]
    return max(shape[0] for shape in shapes) if shapes and all(shapes) else None


def check_batched(element: PyTree) -> None:
    """Raises if the elements are not batched."""
    if not all(shape_of(leaf) for leaf in leaves_of(element)):
        raise ValueError(
            f"An element {show(element)} cannot be split over replicas: it holds a scalar. Batch "
            "the dataset by the global batch size, `dataset.batch(n)`, before it is distributed."
        )


@node
class InTurn(Node):
    """One element of a `dataset_fn`'s dataset after the other, one for each replica.

    If the data ends within a step the replicas without an element get an empty one; where
    all shapes are fixed, which leaves no room for that, the step is dropped.
    """

    inputs_: tuple[Node, ...]  # one for all local replicas, or one for each
    count: int
    rows: int | None
    may_drop: bool  # where other workers do not wait for this one
    must_drop: bool

    def open(self, path: Path, state: State = None) -> StepCursor:
        return _InTurnCursor(self, path, state)


class _InTurnCursor(StepCursor):
    def __init__(self, owner: InTurn, path: Path, state: State) -> None:
        self._owner = owner
        states = state or [None] * len(owner.inputs_)
        self._inner = [open_cursor(n, path, s) for n, s in zip(owner.inputs_, states)]
        self._rows = owner.rows
        self._full = True

    def __next__(self) -> Step:
        count = self._owner.count
        cursors = self._inner * count if len(self._inner) == 1 else self._inner
        step: list[Any] = []
        for cursor in cursors:
            try:
                step.append(next(cursor))
            except StopIteration:
                step.append(None)
        missing = sum(part is None for part in step)
        if missing == count:
            raise StopIteration
        self._full = not missing and self._have_all_rows(step)
        if missing:
            spec = self._spec(step)
            if spec is None:
                raise StopIteration
            step = [_empty_like(spec) if part is None else part for part in step]
        return step

    def _spec(self, step: Step) -> PyTree | None:
        """What an element without rows looks like; None if there is no room for one."""
        root = self._owner.inputs_[0]
        found = spec_of(value_of(next(part for part in step if part is not None)))
        if self._owner.must_drop:
            return None
        if root.outline() is None:
            # Inner lengths as they are, so that models accept it.
            return map_leaves(
                lambda s: TensorSpec((None, *s.shape[1:]) if s.shape else (), s.dtype),
                found,
            )
        is_full = is_static(root.spec()) and self._owner.may_drop
        return None if is_full else root.spec()

    def _have_all_rows(self, step: Step) -> bool:
        found = [num_rows(part) for part in step]
        self._rows = self._rows or found[0]
        return all(n is None or n == self._rows for n in found)

    def is_full(self, step: Step) -> bool:
        return self._full

    def state(self) -> State:
        return [cursor.state() for cursor in self._inner]

    def close(self) -> None:
        for cursor in self._inner:
            cursor.close()


def _empty_like(spec: PyTree) -> PyTree:
    """An element without rows."""

    def make(s: TensorSpec) -> Any:
        shape = [n or 0 for n in s.shape or ()]
        if shape and None not in (s.shape or ()):
            shape[0] = 0
        zeros = np.zeros(shape, s.dtype)
        return zeros if shape else zeros[()]

    return map_leaves(make, spec)


class Whole(StepCursor):
    """One replica in all: elements are steps as they are.

    Its states are those that the splitting cursors have between two batches.
    """

    def __init__(
        self, root: Node, path: Path, state: State, rows: int | None, by_rows: bool
    ) -> None:
        self._by_rows, self._rows = by_rows, rows
        (inner, given), *_ = [START] if state is None else state if by_rows else [state]
        if given:
            raise ValueError(
                f"The state is in the middle of a batch, after {given} of its parts, where one "
                "replica alone cannot go on. Restore it with the number of replicas it was saved "
                "with."
            )
        self._inner = open_cursor(root, path, inner)

    def __next__(self) -> Step:
        return [next(self._inner)]

    def is_full(self, step: Step) -> bool:
        found = num_rows(step[0])
        self._rows = self._rows or found
        return found is None or self._rows is None or found >= self._rows

    def state(self) -> State:
        state = [self._inner.state(), 0]
        return [state, 0, 1] if self._by_rows else state

    def close(self) -> None:
        self._inner.close()


class Dropping(StepCursor):
    """Only full steps."""

    def __init__(self, inner: StepCursor) -> None:
        self._inner = inner
        self.state, self.close = inner.state, inner.close  # type: ignore[method-assign]
        self.dealt_rows = inner.dealt_rows  # type: ignore[method-assign]

    def __next__(self) -> Step:
        while True:
            step = next(self._inner)
            if self._inner.is_full(step):
                return step


class Padding(StepCursor):
    """Steps of one shape: pairs of a part, filled up with zeros, and its mask."""

    def __init__(self, inner: StepCursor, rows: int | None) -> None:
        self._inner, self._rows = inner, rows
        self.state, self.close = inner.state, inner.close  # type: ignore[method-assign]

    def __next__(self) -> Step:
        parts = []
        for part in next(self._inner):
            if not isinstance(part, Block):
                check_batched(part := value_of(part))
            parts.append(as_block(part))
        if self._rows is None:
            self._rows = self._inner.most_rows(parts)
        return [_fill_up(part, self._rows) for part in parts]


def _fill_up(part: Block, rows: int) -> PyTree:
    found = len(part)
    if found > rows:
        raise ValueError(
            f'A replica\'s batch has {found} rows, but `last_batch="pad"` fills up to {rows}, '
            "the rows of the first one. Make batches of one size."
        )
    mask = np.arange(rows) < found

    def fill(array: np.ndarray) -> np.ndarray:
        out = empty((rows, *array.shape[1:]), dtype_of(array))
        out[:found] = array
        out[found:] = b"" if out.dtype.hasobject else 0
        return out

    return map_leaves(fill, part.value()), mask


StepsOf = Callable[[Path, State], StepCursor]
