"""Parts of a batch to the devices of their replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mirrax._src.base.jax_compat import put_parts, put_uncommitted
from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.base.values import PerReplica
from mirrax._src.input.blocks import Arrays, Block, Index, Singles, Table, value_of
from mirrax._src.input.splitting import Step
from mirrax._src.input.structure import (
    PyTree,
    StructureError,
    check_leaves,
    map_leaves,
    own,
    show,
)
from mirrax._src.input.together import SharedStep


class Delivery:
    """Brings steps to the devices of a mesh; without a mesh they stay NumPy arrays."""

    def __init__(self, mesh: ReplicaMesh | None, fetch_to_device: bool) -> None:
        self._mesh = mesh
        self._fetch = fetch_to_device and mesh is not None
        self._like: PyTree = None  # the first element, for its structure
        self._checked: Table | None = None  # whose rows are all of that structure
        self._number = 0

    def __call__(self, step: Step | SharedStep) -> PyTree:
        """A step's parts as one value for each replica."""
        shapes: Any = None
        if isinstance(step, SharedStep):
            step, shapes = step.parts, zip(*step.shapes)
        deliver = self._put if self._fetch else self._regrouped
        block = _in_one_block(step)
        whole = None if block is None else _rows_alike(block)
        if block is not None and whole is not None:
            if block.table is self._checked:
                self._number += 1
            else:
                self._check_structure(whole)
                self._checked = block.table if isinstance(block.table, Arrays) else None
            count, is_fresh = len(step), block.is_fresh

            def deliver_rows(leaf: Any) -> Any:
                parts = _cut(leaf if is_fresh else own(leaf), count)
                return deliver(parts, shapes and next(shapes), are_alike=True)

            return map_leaves(deliver_rows, whole)
        values = [_own(part) for part in step]
        self._check_structure(values[0])
        try:
            return map_leaves(
                lambda *parts: deliver(parts, shapes and next(shapes)), *values
            )
        except StructureError as error:
            i = error.index + 1
            raise ValueError(
                "The replicas of one step got elements of different structure: replica 0 "
                f"{show(values[0])}, replica {i} {show(values[i])}. The dataset must yield one "
                "structure."
            ) from None

    def _check_structure(self, value: PyTree) -> None:
        """Raises if the dataset does not go on as it began."""
        if self._number == 0:
            self._like = map_leaves(lambda leaf: np.empty(0, bool), value)
        try:
            map_leaves(lambda _, leaf: check_leaves((leaf,)), self._like, value)
        except StructureError:
            raise ValueError(
                f"Element {self._number} of the dataset is {show(value)}, which differs in "
                "structure from the elements before it. The dataset must yield one structure."
            ) from None
        self._number += 1

    def _put(self, parts: tuple[Any, ...], shapes: Any, are_alike: bool = False) -> Any:
        """One leaf's parts on the devices; text stays where it is.

        If they `are_alike`, they are not looked at one by one.
        """
        if not are_alike:
            check_leaves(parts)
        mesh, first = self._mesh, parts[0]
        assert mesh is not None
        if _is_text(first):
            return self._regrouped(parts, shapes)
        every = shapes
        if every is None and not are_alike:
            every = [(list(p.shape), p.dtype) for p in parts]
        is_even = not every or every.count(every[0]) == len(every)
        is_even = is_even and mesh.size > 1 and first.ndim
        if not is_even:
            put = [
                put_uncommitted(p, device)
                for p, device in zip(parts, mesh.local_devices)
            ]
            return self._regrouped(put, shapes)
        shape = (len(first) * mesh.size, *first.shape[1:])
        array = put_parts(parts, shape, mesh.split, mesh.local_devices)
        return PerReplica.of(array, mesh, Layout.SPLIT)

    def _regrouped(
        self, parts: Sequence[Any], shapes: Any, are_alike: bool = False
    ) -> Any:
        if not are_alike:
            check_leaves(parts)
        if shapes is not None:
            return PerReplica(parts, tuple(map(_canonical, shapes)), self._mesh)
        return parts[0] if len(parts) == 1 else PerReplica(parts, mesh=self._mesh)


def _in_one_block(step: Step) -> Block | None:
    """All parts together, if these are equally many rows of one table."""
    first = step[0]
    if not isinstance(first, Block) or isinstance(first.table, Singles):
        return None
    table, rows = first.table, len(first.index)
    for part in step:
        if not isinstance(part, Block) or part.table is not table:
            return None
        if len(part.index) != rows:
            return None
    if not rows:
        return None
    if len(step) == 1:
        return first
    return Block(table, _joined([part.index for part in step]))


def _rows_alike(block: Block) -> PyTree | None:
    """The rows; None where one differs from the others, or has an error."""
    try:
        return block.value()
    except (ValueError, StructureError):
        return None


def _joined(parts: list[Index]) -> Index:
    """One index after the other; ranges that follow each other are one again."""
    ranges = [part for part in parts if isinstance(part, range)]
    if len(ranges) == len(parts):
        first, last = ranges[0], ranges[-1]
        whole = range(first.start, last.stop, first.step)
        # Its length first: ranges may lie far apart.
        if (
            len(whole) == len(first) * len(ranges)
            and list(whole[:: len(first)]) == [part.start for part in ranges]
            and all(part.step == first.step for part in ranges)
        ):
            return whole
    return np.concatenate([np.asarray(part) for part in parts])


def _cut(leaf: Any, count: int) -> tuple[Any, ...]:
    if count == 1:
        return (leaf,)
    rows = len(leaf) // count
    return tuple(leaf[i * rows : (i + 1) * rows] for i in range(count))


def _own(part: Any) -> PyTree:
    """A part's arrays in memory that nobody else holds, which a device may take over."""
    value = value_of(part)
    is_fresh = isinstance(part, Block) and part.is_fresh
    return value if is_fresh else map_leaves(own, value)


def _canonical(kind: Any) -> tuple[tuple[int, ...], str]:
    """A shape and dtype as JAX has them."""
    shape, name = kind
    if name == "string":
        return tuple(shape), name
    return tuple(shape), jax.dtypes.canonicalize_dtype(np.dtype(name)).name


def _is_text(leaf: Any) -> bool:
    return isinstance(leaf, bytes) or leaf.dtype.hasobject
