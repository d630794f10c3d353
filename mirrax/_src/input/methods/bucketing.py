"""The functions by which `bucket_by_sequence_length` is a `group_by_window`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mirrax._src.input.node import Node
from mirrax._src.input.structure import PyTree, map_leaves
from mirrax._src.input.transforms.batching import (
    Batch,
    PaddedBatch,
    lengths,
    spread,
)
from mirrax._src.input.transforms.grouping import whole_number

Fn = Callable[..., Any]


def bucket_fns(
    length_fn: Fn,
    boundaries: list[int],
    batch_sizes: list[int],
    padding: tuple[PyTree, PyTree],  # shapes and values
    to_boundary: bool,
    no_padding: bool,
    drop_remainder: bool,
) -> tuple[Fn, Fn, Fn, Fn]:
    """An element's key, a group's batches, a group's size, and what batches look like."""
    if len(batch_sizes) != len(boundaries) + 1:
        raise ValueError(
            f"`bucket_batch_sizes` needs {len(boundaries) + 1} numbers, one more than the "
            f"{len(boundaries)} in `bucket_boundaries`; got {len(batch_sizes)}."
        )
    shapes, values = padding
    least = [float("-inf"), *boundaries]
    most = [*boundaries, float("inf")]

    def bucket(*element: Any) -> int:
        length = whole_number(length_fn(*element), "element_length_func")
        buckets = range(len(batch_sizes))
        return next(i for i in buckets if least[i] <= length < most[i])

    def batches(number: Any, group: Any) -> Any:
        size = batch_sizes[number]
        if no_padding:
            return group.batch(size, drop_remainder)
        target = shapes
        if to_boundary:
            if number == len(boundaries):
                raise ValueError(
                    "`pad_to_bucket_boundary=True` needs elements shorter than the last of "
                    f"`bucket_boundaries`, {boundaries}, and one is not. Add a boundary."
                )
            target = _filled(group.element_spec, shapes, boundaries[number] - 1)
        return group.padded_batch(size, target, values, drop_remainder)

    def spec(source: Node) -> PyTree:  # the sizes differ
        if no_padding:
            return Batch(source, 1, False).spec()
        return PaddedBatch(source, 1, shapes, None, False).spec()

    bucket.__qualname__ = getattr(length_fn, "__qualname__", "bucket")
    return bucket, batches, lambda number: batch_sizes[number], spec


def _filled(spec: PyTree, shapes: PyTree, length: int) -> PyTree:
    """The shapes to fill up to, with `length` where they vary."""

    def fill(leaf: Any, shape: Any) -> list[int]:
        known = lengths(leaf.shape if shape is None else shape)
        return [length if n is None else n for n in known]

    return map_leaves(fill, spec, spread(shapes, spec))
