"""Steps that all workers take together, though each reads its own data.

Every worker has to know the shapes of all replicas' batches, because a step of unequal
shapes is another program, and that the data of all has ended. Where batches are dealt out
(the policy DATA) each worker sees all of that itself. Where each reads data of its own, and
the lengths are known, they tell each other once in a pass; else before each step, on the
thread that reads ahead. A worker whose data ends early goes on with empty batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.input.blocks import Arrays, Block, value_of
from mirrax._src.input.node import INFINITE, Cursor, Node, State
from mirrax._src.input.splitting import Padding, Share, Step, StepCursor
from mirrax._src.input.structure import (
    PyTree,
    TensorSpec,
    dtype_name,
    dtype_of,
    leaves_of,
    map_leaves,
    shape_of,
)
from mirrax._src.input.transforms.batching import Batch
from mirrax._src.input.transforms.buffering import Prefetch

# The shape and dtype of each leaf of a replica's part; the parts of one worker.
Shapes = list[Any]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A worker's steps, where they are known beforehand.

    Attributes:
        full: The rows of each local replica in a full step.
        count: How many full steps there are; negative if they never end.
        last: The rows in the step after them; empty if there is none.
    """

    full: list[int]
    count: int
    last: list[int]

    def rows(self, step: int) -> list[int] | None:
        """The rows of each replica in a step; None past the end."""
        if step < self.count or self.count < 0:
            return self.full
        return self.last if step == self.count and self.last else None


def schedule_of(root: Node, local: int, part_rows: int | None) -> Schedule | None:
    """The steps of `local` parts of `part_rows` rows each, if that is how they are."""
    while isinstance(root, Prefetch):
        root = root.input
    if type(root) is not Batch or not part_rows or not _has_fixed_rows(root.spec()):
        return None
    rows = root.input.cardinality()
    full = [part_rows] * local
    if rows == INFINITE:
        return Schedule(full, -1, [])
    if rows < 0:
        return None
    if root.drop_remainder:
        rows -= rows % root.size
    count, rest = divmod(rows, part_rows * local)
    last = [min(part_rows, max(0, rest - i * part_rows)) for i in range(local)]
    return Schedule(full, count, last if rest else [])


def _has_fixed_rows(spec: PyTree) -> bool:
    """Whether all rows have the same shape."""
    leaves: list[TensorSpec] = leaves_of(spec)
    return all(leaf.shape and None not in leaf.shape[1:] for leaf in leaves)


@dataclasses.dataclass(frozen=True)
class SharedStep:
    """A worker's parts, and for each of all replicas the shapes of its leaves."""

    parts: Step
    shapes: Shapes


class Together(Cursor):
    """A pass over this worker's steps, in step with the other workers'.

    Args:
        steps: This worker's own.
        mesh: The replicas of all workers.
        share: Which are this worker's.
        spec: What elements look like.
        is_dealt: Whether all workers read the same data, and deal it out.
        schedule: The steps of the pass, if they are known.
    """

    def __init__(
        self,
        steps: StepCursor,
        mesh: ReplicaMesh,
        share: Share,
        spec: PyTree,
        is_dealt: bool,
        schedule: Schedule | None,
    ) -> None:
        self._steps, self._share, self._spec = steps, share, spec
        self._cluster = mesh.cluster
        self._is_dealt = is_dealt
        self._number = 0
        self._has_ended = self._is_closed = False
        own = [_outline(spec), schedule and vars(schedule)]
        found, number = self._cluster.agree_numbered("a pass over data", own)
        for k, (theirs, _) in enumerate(found):
            if theirs != found[0][0]:
                raise ValueError(
                    f"The workers read different elements: {found[0][0]} on "
                    f"{self._cluster.names[0]}, {theirs} on {self._cluster.names[k]}. All "
                    "workers need elements of one structure, with the same dtypes."
                )
        self._name = f"the data of pass {number}"
        known = [each and Schedule(**each) for _, each in found]
        self._schedules = None if None in known else known

    def __next__(self) -> SharedStep:
        step: Step | None = None
        if not self._has_ended:
            try:
                step = list(map(_looked_up, next(self._steps)))
            except StopIteration:
                self._has_ended = True
        shapes = self._all_shapes(step)
        self._number += 1
        if shapes is None:
            raise StopIteration
        return SharedStep(step or self._nothing(shapes), shapes)

    def _all_shapes(self, step: Step | None) -> Shapes | None:
        """For each of all replicas its leaves' shapes; None when all data has ended."""
        own = None if step is None else [_shapes_of(part) for part in step]
        if self._is_dealt:
            if own is None:
                self._agree("ended")  # also if another worker has read more, or less
                return None
            return self._dealt(own)
        if self._schedules is not None:
            rows = [each.rows(self._number) for each in self._schedules]
            if not any(rows):
                return None
            like = own[0] if own is not None else _of_spec(self._spec)
            none = [0] * self._share.replicas_per_worker
            return [_with_rows(like, n) for each in rows for n in each or none]
        found: list[Any] = self._agree(own)
        like = next((each for each in found if each is not None), None)
        if like is None:
            return None
        if isinstance(self._steps, Padding):
            nothing = like[0]
        else:
            nothing = _with_rows(like[0], 0)
        missing = [nothing] * self._share.replicas_per_worker
        return [part for each in found for part in (each or missing)]

    def _agree(self, value: Any) -> list[Any]:
        name = f"{self._name}, step {self._number}"
        return self._cluster.agree_ahead(
            name, value, lambda: None if self._is_closed else self.is_awaited
        )

    def _dealt(self, own: Shapes) -> Shapes:
        """The shapes of a batch that all workers have read, in the order of replicas."""
        sizes = self._steps.dealt_rows(len(own[0]))
        if sizes is None:  # filled up, all alike
            return own[:1] * self._share.num_replicas
        return [
            [[[n, *shape[1:]], dtype] for n, (shape, dtype) in zip(rows, own[0])]
            for rows in sizes
        ]

    def _nothing(self, shapes: Shapes) -> Step:
        """Parts for a worker whose data has ended."""
        local = self._share.replicas_per_worker
        first = self._share.worker * local

        def zeros(leaves: Iterator[Any]) -> PyTree:
            def make(spec: TensorSpec) -> np.ndarray:
                shape, _ = next(leaves)
                fill = b"" if spec.dtype.hasobject else 0
                return np.full(shape, fill, spec.dtype)

            spec = self._spec
            if isinstance(self._steps, Padding):
                spec = (spec, TensorSpec((None,), "bool"))
            return map_leaves(make, spec)

        return [zeros(iter(shapes[first + i])) for i in range(local)]

    def state(self) -> State:
        return self._steps.state()

    def interrupt(self) -> None:
        self._is_closed = True

    def close(self) -> None:
        self._is_closed = True
        self._steps.close()


def _outline(spec: PyTree) -> str:
    """What elements look like, but for their number of rows."""

    def show(leaf: TensorSpec) -> str:
        shape = leaf.shape and (None, *leaf.shape[1:])
        return f"{dtype_name(leaf.dtype)}{list(shape) if shape is not None else ''}"

    return str(map_leaves(show, spec))


def _looked_up(part: Any) -> Any:
    """A part whose shapes are known, so that what gives its rows runs once."""
    if not isinstance(part, Block) or isinstance(part.table, Arrays):
        return part
    return Block(Arrays(part.value(), part.is_fresh), range(len(part)))


def _shapes_of(part: Any) -> list[Any]:
    if isinstance(part, Block) and isinstance(part.table, Arrays):
        rows, leaves = len(part), leaves_of(part.table.arrays)
        return [[[rows, *a.shape[1:]], dtype_name(a.dtype)] for a in leaves]
    leaves = leaves_of(value_of(part))
    return [[list(shape_of(a)), dtype_name(dtype_of(a))] for a in leaves]


def _of_spec(spec: PyTree) -> list[Any]:
    leaves: list[TensorSpec] = leaves_of(spec)
    return [[[0, *(s.shape or ())[1:]], dtype_name(s.dtype)] for s in leaves]


def _with_rows(leaves: list[Any], rows: int) -> list[Any]:
    return [[[rows, *shape[1:]] if shape else [], dtype] for shape, dtype in leaves]
