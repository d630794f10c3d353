"""One value of all replicas: what `Strategy.reduce` and `gather` do with each leaf."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.mesh import AXIS_NAME, Layout, ReplicaMesh
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.reduce_op import ReduceOp
from mirrax._src.base.sparse import IndexedSlices
from mirrax._src.base.values import (
    Mirrored,
    PerReplica,
    ReplicaValues,
    UnevenError,
    first_copy,
    is_distributed,
    is_numeric,
    join,
    only_part,
)
from mirrax._src.collectives.launch import launch
from mirrax._src.collectives.programs import gather_parts, run_on_parts
from mirrax._src.engines.replica_context import check_gather_axis
from mirrax._src.state.distributed import DistributedVariable
from mirrax._src.state.variable import Variable

Axes = int | tuple[int, ...]


@dataclass(frozen=True)
class SumAlong:
    """A replica's part of a reduction over an axis: its sum and the number of elements."""

    op: ReduceOp
    axes: Axes

    def __call__(self, arrays: list[jax.Array]) -> list[jax.Array]:
        total = lax.psum(jnp.sum(arrays[0], self.axes), AXIS_NAME)
        if self.op is ReduceOp.SUM:
            return [total]
        return [total / lax.psum(_count(arrays[0], self.axes), AXIS_NAME)]


@dataclass(frozen=True)
class Combine:
    """Sums that replicas have made already, and their numbers of elements, into one."""

    op: ReduceOp

    def __call__(self, arrays: list[jax.Array]) -> list[jax.Array]:
        total, count = (lax.psum(array, AXIS_NAME) for array in arrays)
        if self.op is ReduceOp.SUM:
            return [total]
        is_float = jnp.issubdtype(total.dtype, jnp.inexact)
        return [total / count.astype(total.dtype if is_float else jnp.float32)]


def checked_axis(axis: Any) -> Axes | None:
    """`axis` as Python's numbers."""
    try:
        if isinstance(axis, tuple | list):
            return tuple(map(operator.index, axis))
        return None if axis is None else operator.index(axis)
    except TypeError:
        raise TypeError(
            f"`axis` must be None, a number or several, got {axis!r}. Where the result is to "
            "go is an argument of `extended.reduce_to`."
        ) from None


def is_reducible(value: Any) -> bool:
    """What is a leaf to a reduction."""
    return isinstance(value, ReplicaValues | IndexedSlices | Variable)


def reduce_leaf(
    strategy: StrategyLike, op: ReduceOp, value: Any, axes: Axes | None, path: str
) -> Any:
    """One leaf of `strategy.reduce`; `path` names it in messages."""
    if isinstance(value, DistributedVariable):
        value = value.copies()
    elif isinstance(value, Variable):
        value = value.read_value()
    is_sparse = isinstance(value, IndexedSlices)
    if is_sparse and axes is not None:
        raise ValueError(
            "`reduce` of IndexedSlices needs `axis=None`: their rows are joined, not "
            "summed along an axis."
        )
    if axes is not None:
        return _reduce_along(strategy, op, value, axes, path)
    mesh = strategy.replica_mesh
    if not is_sparse and not isinstance(value, ReplicaValues):
        return _reduce_plain(strategy, op, value, path)
    if mesh is not None and isinstance(value, PerReplica):
        _check_equal_shapes(strategy, value, path)
    if mesh is None or mesh.size == 1:
        return only_part(value)
    reduced = strategy.extended.reduce_to(op, value, mesh.local_devices)
    return jax.tree.map(_plain, reduced, is_leaf=is_distributed)


def _plain(value: Any) -> Any:
    if not isinstance(value, Mirrored):
        return value
    return first_copy(value.array) if value.array is not None else value.values[0]


def _reduce_plain(strategy: StrategyLike, op: ReduceOp, value: Any, path: str) -> Any:
    mesh = strategy.replica_mesh
    if mesh is not None and mesh.spans_workers:
        return reduce_over_workers(mesh, op, value, (), path)
    if op is ReduceOp.MEAN or strategy.num_replicas_in_sync == 1:
        return value
    raise ValueError(
        f"`reduce` with SUM got value{path} = {value!r}, which is not distributed: whether "
        "it is meant once or once per replica is ambiguous. Pass what `run` returned, or "
        "multiply by `strategy.num_replicas_in_sync` yourself."
    )


def reduce_over_workers(
    mesh: ReplicaMesh, op: ReduceOp, value: Any, axes: Axes, path: str
) -> Any:
    """A plain value of each worker, which counts once for it."""
    array = jnp.asarray(value)
    _check_axis(array, axes, path)
    total = jnp.sum(array, axes) if axes != () else array
    others = len(mesh.local_ids) - 1
    totals = [total] + [jnp.zeros_like(total)] * others
    return _combine(mesh, op, totals, [_count(array, axes)] + [0] * others)


def _combine(mesh: ReplicaMesh, op: ReduceOp, totals: list[Any], counts: Any) -> Any:
    counts = PerReplica(map(jnp.float32, counts))
    return first_copy(run_on_parts(Combine(op), mesh, [PerReplica(totals), counts])[0])


def _reduce_along(
    strategy: StrategyLike, op: ReduceOp, value: Any, axes: Axes, path: str
) -> Any:
    mesh = strategy.replica_mesh
    if mesh is None or mesh.size == 1:
        return _reduce_copies(op, jnp.asarray(only_part(value)), 1, axes, path)
    if not isinstance(value, ReplicaValues):
        is_traced = isinstance(value, Tracer)
        if mesh.spans_workers and not is_traced:
            return reduce_over_workers(mesh, op, value, axes, path)
        array = value if is_traced else mesh.mirror(jnp.asarray(value))
        value = Mirrored.of(array, mesh)
    if value.layout is Layout.MIRRORED:
        return _reduce_copies(op, first_copy(value.array), mesh.size, axes, path)
    if value.layout is Layout.OWN:
        _check_axis(value.array, axes, path)
        return SumAlong(op, axes)([value.array])[0]
    try:
        array, layout = join(value, mesh)
        shape = mesh.part_shape(layout, array.shape)
        _check_axis(jax.ShapeDtypeStruct(shape, array.dtype), axes, path)
        return first_copy(launch(SumAlong(op, axes), mesh, [(array, layout)])[0])
    except UnevenError:
        parts = [jnp.asarray(part) for part in value.values]
        for part in parts:
            _check_axis(part, axes, path)
        totals = [jnp.sum(part, axes) for part in parts]
        _check_equal_shapes(strategy, PerReplica(totals), path, axes)
        return _combine(mesh, op, totals, [_count(part, axes) for part in parts])


def _reduce_copies(op: ReduceOp, array: Any, copies: int, axes: Axes, path: str) -> Any:
    """A reduction of an array that each of several replicas has."""
    _check_axis(array, axes, path)
    total = jnp.sum(array, axes)
    return total * copies if op is ReduceOp.SUM else total / _count(array, axes)


def _each(axes: Axes) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else axes


def _count(array: Any, axes: Axes) -> int:
    return math.prod(array.shape[axis] for axis in _each(axes))


def _check_axis(array: Any, axes: Axes, path: str) -> None:
    ndim = len(array.shape)
    for axis in _each(axes):
        if not -ndim <= axis < ndim:
            raise ValueError(
                f"`reduce(axis={axes})`: value{path} has shape {array.shape} on a replica, "
                f"so there is no axis {axis}. Pass `axis=None` to combine replicas only."
            )


def _check_equal_shapes(
    strategy: StrategyLike, value: PerReplica, path: str, axis: Any = None
) -> None:
    if value.array is not None:
        return
    parts = value.values
    if not all(map(is_numeric, parts)):
        if any(isinstance(part, IndexedSlices) for part in parts):
            return
        raise TypeError(
            f"`reduce` needs arrays or numbers, but value{path} holds "
            f"{type(parts[0]).__name__} objects."
        )
    shapes = [jnp.shape(part) for part in parts]
    describe, mesh = strategy.describe_replica, strategy.replica_mesh
    if mesh is not None and mesh.spans_workers:  # all workers have to find the same
        arrays = [jnp.asarray(part) for part in parts]
        value.shapes = agreed = value.shapes or mesh.agreed_shapes(arrays)
        shapes, describe = [shape for shape, _ in agreed], mesh.describe
    if len(set(shapes)) > 1:
        rows = "\n".join(f"  {describe(i)}: {shape}" for i, shape in enumerate(shapes))
        if axis is not None:
            raise ValueError(
                f"`reduce(axis={axis})`: what is left of value{path} after reducing along the "
                f"axis must have the same shape on all replicas, but has\n{rows}"
            )
        raise ValueError(
            f"`reduce(axis=None)` needs equal shapes on all replicas, but value{path} has\n"
            f"{rows}\nThis is usually a partial last batch. Pass `axis=0` to reduce over the "
            "examples too."
        )


def gather_leaf(mesh: ReplicaMesh | None, value: Any, axis: int) -> Any:
    """One leaf of `strategy.gather`."""
    if isinstance(value, IndexedSlices):
        raise NotImplementedError(
            "`gather` takes arrays; gather the values and indices of IndexedSlices "
            "one by one."
        )
    if isinstance(value, DistributedVariable):
        value = value.copies()
    if not isinstance(value, ReplicaValues):
        if mesh is None or not mesh.spans_workers:
            return value
        # The part of this worker's first replica; the others have no rows.
        value = jnp.asarray(value)
        check_gather_axis(value, axis)
        nothing = lax.slice_in_dim(value, 0, 0, axis=axis % value.ndim)
        value = PerReplica([value] + [nothing] * (len(mesh.local_ids) - 1))
    return first_copy(gather_everywhere(mesh, value, axis))


def gather_everywhere(mesh: ReplicaMesh | None, value: Any, axis: int) -> jax.Array:
    """The parts of `value` joined along `axis`, on all replicas."""
    if not isinstance(value, ReplicaValues):
        value = PerReplica([value] * (mesh.size if mesh else 1))
    first = value.array if value.layout is Layout.OWN else value.values[0]
    first = first if hasattr(first, "ndim") else jnp.asarray(first)
    check_gather_axis(first, axis)
    if mesh is None or mesh.size == 1:
        return jnp.asarray(first)
    return gather_parts(value, mesh, axis % first.ndim)
