"""What replicas do together to share their arrays, and how it is started.

The same programs serve both engines: inside a compiled step they are a part of it, from
cross-replica code they are launched on the parts of a value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mirrax._src.base import context
from mirrax._src.base.errors import RunEagerly
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.launching import launching
from mirrax._src.base.logical import after_launch
from mirrax._src.base.mesh import AXIS_NAME, Layout, ReplicaMesh
from mirrax._src.base.reduce_op import ReduceOp
from mirrax._src.base.sparse import IndexedSlices
from mirrax._src.base.values import (
    PerReplica,
    ReplicaValues,
    UnevenError,
    join,
    on_device,
    one_copy,
)
from mirrax._src.cluster import launches
from mirrax._src.collectives.destinations import Destinations, mesh_of, place

# From one replica's parts to one replica's results.
ReplicaProgram = Callable[[list[jax.Array]], Any]
_EQUAL = PartitionSpec()


def launch(
    program: ReplicaProgram,
    mesh: ReplicaMesh,
    joined: Sequence[tuple[jax.Array, Layout]],
    specs: Any = _EQUAL,
) -> list[jax.Array]:
    """The results of `program`, run by every replica on its own parts.

    `program` must be hashable by value: equal ones share one compilation. `specs` says how
    its results lie on the mesh, which by default are equal on all replicas.
    """
    arrays = [array for array, _ in joined]
    layouts = tuple(layout for _, layout in joined)
    # Inside a function that is being traced it is a part of that one's program.
    is_part = any(isinstance(a, Tracer) for a in arrays)
    frame = context.current().frame
    if is_part and frame is not None and frame.mode.is_traced:
        # Not as a call, which would have to be inlined (engines/merging.py).
        return _mapped(program, mesh, layouts, specs)(arrays)
    is_own = mesh.spans_workers and not is_part
    with launching():
        compiled = _compiled(program, mesh, layouts, specs)
        if is_own:
            label = describe_program(program, arrays)
            _compare_once(mesh, label)
            results = launches.last.watch(label, compiled, arrays)
        else:
            results = compiled(arrays)
    after_launch(results)
    return results


def describe_program(program: Any, arrays: Sequence[Any]) -> str:
    """A program for messages and comparisons: what it is, and of which arrays."""
    name = getattr(program, "__name__", None) or type(program).__name__
    kinds = ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in arrays)
    return f"{name}({kinds})"


def _equal_on_all_replicas(array: jax.Array) -> jax.Array:
    """`array`, a mark in traced code that does not show that all replicas have the same."""
    return array


EQUALITY_MARK = _equal_on_all_replicas.__name__
declare_equal = jax.jit(_equal_on_all_replicas)


@functools.lru_cache(maxsize=4096)
def _compare_once(mesh: ReplicaMesh, label: str) -> None:
    mesh.cluster.compare(label)


@functools.lru_cache(maxsize=4096)
def _compiled(
    program: ReplicaProgram, mesh: ReplicaMesh, layouts: tuple[Layout, ...], specs: Any
) -> ReplicaProgram:
    return jax.jit(_mapped(program, mesh, layouts, specs))


def _mapped(
    program: ReplicaProgram, mesh: ReplicaMesh, layouts: tuple[Layout, ...], specs: Any
) -> ReplicaProgram:
    def body(arrays: list[jax.Array]) -> list[jax.Array]:
        return program(
            [a[0] if mesh.has_row(k) else a for a, k in zip(arrays, layouts)]
        )

    ins = ([mesh.spec(layout) for layout in layouts],)
    return jax.shard_map(
        body, mesh=mesh.mesh, in_specs=ins, out_specs=specs, check_vma=False
    )


def first_of_all(arrays: list[jax.Array]) -> list[jax.Array]:
    """What one replica does to give every replica the first one's arrays."""
    return [_first(array) for array in arrays]


def _first(local: jax.Array) -> jax.Array:
    if jnp.issubdtype(local.dtype, jax.dtypes.prng_key):
        data = _first(jax.random.key_data(local))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(local))
    is_first = lax.axis_index(AXIS_NAME) == 0
    numeric = local.astype(jnp.int32) if local.dtype == jnp.bool_ else local
    total = lax.psum(jnp.where(is_first, numeric, 0), AXIS_NAME)
    return total.astype(local.dtype)


@dataclass(frozen=True)
class GatherProgram:
    """What one replica does to give every replica all replicas' parts, joined on `axis`."""

    axis: int

    def __call__(self, arrays: list[jax.Array]) -> list[jax.Array]:
        [array] = arrays
        if array.size:
            return [lax.all_gather(array, AXIS_NAME, axis=self.axis, tiled=True)]
        shape = list(array.shape)  # XLA does not gather nothing
        shape[self.axis] *= lax.axis_size(AXIS_NAME)
        return [jnp.zeros(shape, array.dtype)]


def reduce_sparse(
    op: ReduceOp, value: IndexedSlices, destinations: Destinations
) -> IndexedSlices:
    """All replicas' rows and indices, joined; the rows stay as few as they are."""
    mesh = mesh_of(value.values, destinations)
    rows = gather_parts(value.values, mesh, axis=0)
    indices = gather_parts(value.indices, mesh, axis=0)
    if op is ReduceOp.MEAN:
        rows = rows / mesh.size
    placed = (place(part, mesh, destinations) for part in (rows, indices))
    shape = value.dense_shape
    if isinstance(shape, ReplicaValues):  # a shape that is being traced
        shape = shape.array
    return IndexedSlices(*placed, dense_shape=shape)


def run_on_parts(
    program: Any, mesh: ReplicaMesh, values: Sequence[ReplicaValues]
) -> list[Any]:
    """The results of `program` on all replicas' parts, wherever those are."""
    if values[0].layout is Layout.OWN:
        return program([v.array for v in values])
    joined = []
    for value in values:
        try:
            joined.append(join(value, mesh))
        except UnevenError:
            raise ValueError(_explain_uneven(value, mesh)) from None
    return launch(program, mesh, joined)


def gather_parts(value: ReplicaValues, mesh: ReplicaMesh, axis: int) -> jax.Array:
    """All replicas' parts joined along `axis`; they may differ in length there."""
    program = GatherProgram(axis)
    if value.layout is Layout.OWN:
        if context.is_uneven(context.current()):
            reason = "a gather, whose result depends on the other replicas' shapes"
            raise RunEagerly(reason)
        return program([value.array])[0]
    try:
        return launch(program, mesh, [join(value, mesh)])[0]
    except UnevenError:
        return _gather_uneven(value, mesh, program)


def _gather_uneven(
    value: ReplicaValues, mesh: ReplicaMesh, program: GatherProgram
) -> jax.Array:
    """Parts of unequal length, joined on one device and copied to all."""
    axis = program.axis
    parts = [jnp.asarray(part) for part in value.values]
    shapes = value.shapes or mesh.agreed_shapes(parts)
    # On one worker parts of other dtypes are converted.
    rest = {(s[:axis], s[axis + 1 :], mesh.spans_workers and t) for s, t in shapes}
    if len(rest) > 1:
        raise ValueError(_explain_uneven(value, mesh, axis))
    if mesh.spans_workers:  # filled up, gathered, and cut to size
        lengths = [shape[axis] for shape, _ in shapes]
        longest = max(lengths)
        gaps = [(0, 0)] * parts[0].ndim
        for i, device in enumerate(mesh.local_devices):
            gaps[axis] = (0, longest - parts[i].shape[axis])
            with jax.default_device(device):
                parts[i] = jnp.pad(parts[i], gaps)
        filled = PerReplica(parts, mesh.equal_shapes(parts[0]))
        whole = one_copy(launch(program, mesh, [join(filled, mesh)])[0])
        parts = [
            lax.slice_in_dim(whole, i * longest, i * longest + n, axis=axis)
            for i, n in enumerate(lengths)
        ]
    first = mesh.local_devices[0]
    joined = jnp.concatenate([on_device(part, first) for part in parts], axis=axis)
    return joined if isinstance(joined, Tracer) else mesh.mirror(joined)


def _explain_uneven(
    value: ReplicaValues, mesh: ReplicaMesh, axis: int | None = None
) -> str:
    ids = range(mesh.size) if value.shapes else mesh.local_ids
    shapes = value.shapes or [
        (getattr(part, "shape", ()), getattr(part, "dtype", type(part).__name__))
        for part in value.values
    ]
    rows = "\n".join(
        f"  {mesh.describe(i)}: {shape} {dtype}"
        for i, (shape, dtype) in zip(ids, shapes)
    )
    if axis is not None:
        return (
            f"Gathering along axis {axis} needs parts that agree on all other axes, but "
            f"found\n{rows}"
        )
    return (
        f"A reduction needs equal shapes and dtypes on all replicas, but found\n{rows}\n"
        "This is usually a partial last batch: reduce each replica's examples first, or "
        "use `strategy.reduce(op, value, axis=0)`."
    )
