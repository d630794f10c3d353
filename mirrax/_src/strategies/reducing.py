"""One value of all replicas: what `Strategy.reduce` and `gather` do with each leaf."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base import context
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.mesh import AXIS_NAME, Layout
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.reduce_op import ReduceOp
from mirrax._src.base.sparse import IndexedSlices
from mirrax._src.base.structures import opened
from mirrax._src.base.values import (
    Mirrored,
    PerReplica,
    ReplicaValues,
    UnevenError,
    abstract,
    check_parts,
    first_copy,
    is_distributed,
    is_number,
    is_numeric,
    join,
    on_device,
    only_part,
)
from mirrax._src.collectives.destinations import Destinations, copy_to
from mirrax._src.collectives.ops import CrossDeviceOps, check_destinations
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.collectives.programs import gather_parts, launch, run_on_parts
from mirrax._src.engines.replica_context import check_gather_axis
from mirrax._src.state.distributed import DistributedVariable
from mirrax._src.state.variable import Variable

Axes = int | tuple[int, ...]


@dataclass(frozen=True)
class SumAlong:
    """A replica's part of a reduction over `axes`: its sum and the number of elements.

    Without axes it is given both.
    """

    op: ReduceOp
    axes: Axes | None

    def __call__(self, arrays: list[jax.Array]) -> list[jax.Array]:
        if self.axes is None:
            total, count = arrays
        else:
            total, count = jnp.sum(arrays[0], self.axes), _count(arrays[0], self.axes)
        total = lax.psum(total, AXIS_NAME)
        is_sum = self.op is ReduceOp.SUM
        return [total if is_sum else total / lax.psum(count, AXIS_NAME)]


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


@dataclass(frozen=True)
class LeafReduction:
    """`strategy.reduce` of one leaf, which is called `value{path}` in messages."""

    strategy: StrategyLike
    op: ReduceOp
    axes: Axes | None
    path: str = ""

    def __call__(self, value: Any) -> Any:
        if isinstance(value, DistributedVariable):
            value = value.copies()
        elif isinstance(value, Variable):
            value = value.read_value()
        is_sparse, mesh = isinstance(value, IndexedSlices), self.strategy.replica_mesh
        if self.axes is not None:
            if is_sparse:
                raise ValueError(
                    f"`reduce` of IndexedSlices needs `axis=None`, got {self.axes}: their rows are "
                    "joined, not summed along an axis."
                )
            return self._along_axes(value)
        if not is_sparse and not isinstance(value, ReplicaValues):
            return self._plain(value)
        if mesh is not None and isinstance(value, PerReplica):
            self._check_equal_shapes(value)
        if mesh is None or mesh.size == 1:
            return only_part(value)
        reduced = self.strategy.extended.reduce_to(self.op, value, mesh.local_devices)
        return jax.tree.map(_first_if_mirrored, reduced, is_leaf=is_distributed)

    def _plain(self, value: Any) -> Any:
        mesh = self.strategy.replica_mesh
        if mesh is not None and mesh.spans_workers:
            return self.over_workers(value)
        if self.op is ReduceOp.MEAN or self.strategy.num_replicas_in_sync == 1:
            return value
        raise ValueError(
            f"`reduce` got value{self.path} = {value!r}, which is not distributed and cannot be "
            "reduced with ReduceOp.SUM: whether it is meant once or once per replica is "
            "ambiguous. Pass what `run` returned, or multiply by "
            "`strategy.num_replicas_in_sync` yourself."
        )

    def over_workers(self, value: Any) -> Any:
        """A plain value of each worker, which counts once for it."""
        total, count = self._local_sum(jnp.asarray(value))
        others = len(self.strategy.replica_mesh.local_ids) - 1
        totals = [total] + [jnp.zeros_like(total)] * others
        return self._combine(PerReplica(totals), [count] + [0] * others)

    def _combine(self, totals: PerReplica, counts: Sequence[int]) -> Any:
        values = [totals, PerReplica(map(jnp.int32, counts))]
        program = SumAlong(self.op, None)
        return first_copy(run_on_parts(program, self.strategy.replica_mesh, values)[0])

    def _along_axes(self, value: Any) -> Any:
        mesh, copies = self.strategy.replica_mesh, self.strategy.num_replicas_in_sync
        if copies == 1:
            value = only_part(value)
        elif isinstance(value, ReplicaValues):
            if value.layout is not Layout.MIRRORED:
                return self._parts_along_axes(value)
            value = first_copy(value.array)
        elif mesh.spans_workers and not isinstance(value, Tracer):
            return self.over_workers(value)
        else:
            value = on_device(jnp.asarray(value), mesh.local_devices[0])
        total, count = self._local_sum(jnp.asarray(value))
        return total * copies if self.op is ReduceOp.SUM else total / count

    def _parts_along_axes(self, value: ReplicaValues) -> Any:
        mesh, program = self.strategy.replica_mesh, SumAlong(self.op, self.axes)
        if value.layout is Layout.OWN:
            self._check_axes(value.array.shape)
            return program([value.array])[0]
        try:
            array, layout = join(value, mesh)
        except UnevenError:
            sums = [self._local_sum(jnp.asarray(part)) for part in value.values]
            totals = PerReplica(total for total, _ in sums)
            self._check_equal_shapes(totals)
            return self._combine(totals, [count for _, count in sums])
        self._check_axes(mesh.part_shape(layout, array.shape))
        return first_copy(launch(program, mesh, [(array, layout)])[0])

    def _local_sum(self, array: jax.Array) -> tuple[jax.Array, int]:
        """The sum of one array along the axes, and of how many elements."""
        self._check_axes(array.shape)
        total = array if self.axes is None else jnp.sum(array, self.axes)
        return total, _count(array, self.axes)

    def _check_axes(self, shape: tuple[int, ...]) -> None:
        for axis in _each(self.axes):
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"`reduce(axis={self.axes})`: value{self.path} has shape {shape} on a "
                    f"replica, so there is no axis {axis}. Pass `axis=None` to combine "
                    "replicas only."
                )

    def _check_equal_shapes(self, value: PerReplica) -> None:
        if value.array is not None:
            return
        parts, mesh = value.values, self.strategy.replica_mesh
        if not all(map(is_numeric, parts)):
            if any(isinstance(part, IndexedSlices) for part in parts):
                return
            raise TypeError(
                f"`reduce` needs arrays or numbers, but value{self.path} holds "
                f"{type(parts[0]).__name__} objects."
            )
        # All workers have to find the same.
        value.shapes = value.shapes or mesh.agreed_shapes([abstract(p) for p in parts])
        shapes = [shape for shape, _ in value.shapes]
        if len(set(shapes)) == 1:
            return
        rows = "\n".join(f"  {mesh.describe(i)}: {s}" for i, s in enumerate(shapes))
        if self.axes is not None:
            raise ValueError(
                f"`reduce(axis={self.axes})`: what is left of value{self.path} after reducing "
                f"along the axis must have the same shape on all replicas, but has\n{rows}"
            )
        raise ValueError(
            f"`reduce(axis=None)` needs equal shapes on all replicas, but value{self.path} "
            f"has\n{rows}\nThis is usually a partial last batch. Pass `axis=0` to reduce over "
            "the examples too."
        )


def _first_if_mirrored(value: Any) -> Any:
    return value.values[0] if isinstance(value, Mirrored) else value


def _each(axes: Axes | None) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else axes or ()


def _count(array: Any, axes: Axes | None) -> int:
    return math.prod(array.shape[axis] for axis in _each(axes))


def reduce_pairs(
    strategy: StrategyLike,
    ops: CrossDeviceOps,
    op: ReduceOp,
    pairs: Sequence[tuple[Any, Destinations]],
    options: CommunicationOptions | None,
) -> list[Any]:
    """Each value reduced to its destinations: together, where replicas have parts of them."""
    trees = [opened(v, "value") for v, _ in pairs]
    leaves, tree = jax.tree.flatten(trees, is_leaf=is_reducible)
    leaves = [v.copies() if isinstance(v, DistributedVariable) else v for v in leaves]
    sizes = [len(jax.tree.leaves(tree, is_leaf=is_reducible)) for tree in trees]
    places = [d for (_, d), size in zip(pairs, sizes) for _ in range(size)]
    is_alone = strategy.num_replicas_in_sync == 1
    is_spread = [not is_alone and _has_parts(leaf) for leaf in leaves]
    mesh = strategy.replica_mesh

    def at_home(part: Any) -> Any:
        if not isinstance(part, PerReplica) or part.mesh is not None:
            return part
        check_parts(part, len(mesh.local_ids))  # it was put together by hand
        return PerReplica(part.values, part.shapes, mesh)

    spread = [
        (jax.tree.map(at_home, leaf, is_leaf=is_distributed), destinations)
        for leaf, destinations in itertools.compress(zip(leaves, places), is_spread)
    ]
    reduced = iter(ops.batch_reduce(op, spread, options) if spread else ())
    results = [
        next(reduced) if together else _reduce_alone(strategy, op, leaf, destinations)
        for leaf, destinations, together in zip(leaves, places, is_spread)
    ]
    return jax.tree.unflatten(tree, results)


def _has_parts(value: Any) -> bool:
    value = value.values if isinstance(value, IndexedSlices) else value
    return isinstance(value, PerReplica)


def _reduce_alone(
    strategy: StrategyLike, op: ReduceOp, value: Any, destinations: Destinations
) -> Any:
    """A reduction of a value that is the same on all replicas."""
    count, mesh = strategy.num_replicas_in_sync, strategy.replica_mesh
    is_traced = isinstance(value, Tracer) or context.current().frame is not None
    if isinstance(value, IndexedSlices):
        return value
    if isinstance(value, ReplicaValues):
        if count == 1:
            value = only_part(value)
        elif op is ReduceOp.SUM:
            value = (value.values[0] if value.array is None else value.array) * count
    elif mesh is not None and mesh.spans_workers and not is_traced:
        value = LeafReduction(strategy, op, None).over_workers(value)
    elif op is ReduceOp.SUM and count > 1:
        if is_number(value) and value == 0:
            return value
        raise ValueError(
            f"{value!r} is not distributed and cannot be reduced with ReduceOp.SUM: whether it "
            "is meant once or once per replica is ambiguous. Pass a per-replica value."
        )
    return copy_to(value, check_destinations(destinations))


def gather_leaf(strategy: StrategyLike, value: Any, axis: int) -> Any:
    """One leaf of `strategy.gather`."""
    mesh = strategy.replica_mesh
    if isinstance(value, IndexedSlices):
        raise NotImplementedError(
            f"`gather` does not support IndexedSlices, got {value!r}; gather their values "
            "and indices."
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
    return first_copy(gather_everywhere(strategy, value, axis))


def gather_everywhere(strategy: StrategyLike, value: Any, axis: int) -> jax.Array:
    """The parts of `value` joined along `axis`, on all replicas."""
    mesh = strategy.replica_mesh
    if not isinstance(value, ReplicaValues):
        value = PerReplica([value] * (mesh.size if mesh else 1))
    first = value.array if value.layout is Layout.OWN else value.values[0]
    first = first if hasattr(first, "ndim") else jnp.asarray(first)
    check_gather_axis(first, axis)
    if mesh is None or mesh.size == 1:
        return jnp.asarray(first)
    return gather_parts(value, mesh, axis % first.ndim)
