"""`PerReplica` and `Mirrored`: one value for each replica.

A distributed value is kept as its parts (one array on each device) or as one piece that
holds all of them (`Stacked`, `InProgram`), and each view is made from the other when it is
asked for, without copying.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.base import context
from mirrax._src.base.arraylike import ArrayLike
from mirrax._src.base.errors import RunEagerly
from mirrax._src.base.jax_compat import Device, Tracer, uncommitted
from mirrax._src.base.mesh import AXIS_NAME, ReplicaMesh

PyTree = Any


class UnevenError(Exception):
    """The parts of a value do not fit in one array; never reaches users."""


class Piece(Protocol):
    """All replicas' parts in one."""

    def parts(self) -> tuple[Any, ...]: ...


@dataclass(frozen=True, slots=True)
class Stacked:
    """A global array with replica i's part at position i of its first axis.

    `is_scalar` says that the parts have no axis of their own: their shape is ().
    """

    array: jax.Array
    mesh: ReplicaMesh
    is_scalar: bool

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.mesh.size == 1:
            return self.array.shape
        if self.is_scalar:
            return ()
        return (self.array.shape[0] // self.mesh.size, *self.array.shape[1:])

    def parts(self) -> tuple[jax.Array, ...]:
        ids = self.mesh.local_ids
        if isinstance(self.array, Tracer):
            if self.mesh.is_shared:
                raise RunEagerly(
                    "one worker's part of a value, in code for all workers"
                )
            rows = self.array.reshape(self.mesh.size, *self.local_shape)
            return tuple(rows[i] for i in ids)
        parts = tuple(shard.data for shard in self.array.addressable_shards)
        if self.is_scalar and self.mesh.size > 1:
            parts = tuple(_drop_axis(part) for part in parts)
        return tuple(map(uncommitted, parts))


@dataclass(frozen=True, slots=True)
class InProgram:
    """This replica's part, inside the one program that all replicas run."""

    array: jax.Array
    num_local: int

    def parts(self) -> tuple[jax.Array, ...]:
        # Only a `merge_fn` that looks at single replicas pays for this gather.
        gathered = jax.lax.all_gather(self.array, AXIS_NAME)
        first = 0
        if self.num_local < len(
            gathered
        ):  # those of the worker that this replica is on
            here = jax.lax.axis_index(AXIS_NAME)
            first = here - here % self.num_local
        return tuple(gathered[first + i] for i in range(self.num_local))


def copies_of(array: jax.Array) -> tuple[jax.Array, ...]:
    """A global array's buffers on this worker, in the order of the mesh; no copies."""
    # Not `addressable_data(i)`, which gives device 0's buffer of a replicated array always.
    return tuple(uncommitted(shard.data) for shard in array.addressable_shards)


_add_axis = jax.jit(lambda x: x[None])
_drop_axis = jax.jit(lambda x: x[0])


def _expand(x: jax.Array, device: Device) -> jax.Array:
    with jax.default_device(device):  # where an uncommitted array is computed
        return _add_axis(x)


def check_alive(array: Any, kind: str = "array") -> None:
    """Raises if `array` was donated: JAX 0.10 crashes on such arguments on several CPUs."""
    if (
        isinstance(array, jax.Array)
        and not isinstance(array, Tracer)
        and array.is_deleted()
    ):
        raise RuntimeError(
            f"This {kind} ({array.dtype}{list(array.shape)}) was donated to a compiled "
            "function (`donate_argnums`), whose results took over its memory. Use what that "
            "call returned."
        )


class DistributedValues(abc.ABC):
    """Whatever has a value for each replica: `PerReplica`, `Mirrored`, distributed variables."""

    __module__ = "mirrax.distribute"

    @property
    @abc.abstractmethod
    def values(self) -> tuple[Any, ...]:
        """This worker's parts, each on its own device."""


class ReplicaValues:
    """What `PerReplica` and `Mirrored` share.

    Attributes:
        piece: All parts in one, if they are.
        shapes: The shape and dtype of all workers' parts, where they are known and unequal
            or not in one piece.
    """

    __slots__ = ("_values", "piece", "shapes")

    def __init__(self, values: Iterable[Any], shapes: Any = None) -> None:
        self._values: tuple[Any, ...] | None = tuple(values)
        self.piece: Any = None
        self.shapes: tuple[Any, ...] | None = shapes

    @property
    def values(self) -> tuple[Any, ...]:
        """This worker's parts, each on its own device."""
        values = self._values
        if values is None:
            self._check_alive()
            values = self._values = self.piece.parts()
        return values

    def _check_alive(self) -> None:
        check_alive(getattr(self.piece, "array", self.piece), type(self).__name__)

    def __repr__(self) -> str:
        try:
            values = self.values
        except RuntimeError:
            return f"<{type(self).__name__} value that was donated>"
        rows = ",\n".join(f"  {i}: {value!r}" for i, value in enumerate(values))
        return f"{type(self).__name__}:{{\n{rows}\n}}"


class PerReplica(ReplicaValues):
    """A different value for each replica.

    >>> mx.distribute.PerReplica([1, 2])
    PerReplica:{
      0: 1,
      1: 2
    }
    """

    __slots__ = ()
    __module__ = "mirrax.distribute"

    @classmethod
    def of(cls, piece: Piece) -> PerReplica:
        """The value whose parts `piece` holds."""
        self = cls.__new__(cls)
        self._values, self.piece, self.shapes = None, piece, None
        return self


class Mirrored(ReplicaValues, ArrayLike):
    """The same value on every replica's device; works wherever one array does."""

    __slots__ = ()
    __module__ = "mirrax.distribute"

    @classmethod
    def of(cls, array: jax.Array) -> Mirrored:
        """The value whose copies are those of a replicated global array."""
        self = cls.__new__(cls)
        self._values, self.piece, self.shapes = None, array, None
        return self

    @property
    def values(self) -> tuple[Any, ...]:
        if self._values is None:
            array = self.piece
            self._check_alive()
            if isinstance(array, Tracer):
                mesh = context.current().strategy.replica_mesh
                return (array,) * (len(mesh.local_ids) if mesh is not None else 1)
            self._values = copies_of(array)
        return self._values

    def __jax_array__(self) -> jax.Array:
        here = context.current()
        if self.piece is not None and (
            isinstance(self.piece, Tracer) or context.in_program(here)
        ):
            return self.piece
        index = context.local_index(here)
        return self.values[index if index < len(self.values) else 0]

    def __repr__(self) -> str:
        return ReplicaValues.__repr__(self)


def _flatten_mirrored(value: Mirrored) -> tuple[tuple[Any, ...], str]:
    here = context.current()
    if (
        here.replica is not None
        and not context.in_program(here)
        and not context.is_default()
    ):
        return (value.__jax_array__(),), "own"
    if value.piece is not None:
        return (value.piece,), "whole"
    return value.values, "copies"


def _unflatten_mirrored(form: str, children: Sequence[Any]) -> Any:
    if form == "own":  # an eager replica works with its own copy
        return children[0]
    return Mirrored.of(children[0]) if form == "whole" else Mirrored(children)


jax.tree_util.register_pytree_node(
    PerReplica, lambda v: (v.values, None), lambda _, children: PerReplica(children)
)
jax.tree_util.register_pytree_node(Mirrored, _flatten_mirrored, _unflatten_mirrored)


DistributedValues.register(ReplicaValues)


def is_distributed(value: Any) -> bool:
    """Whether `value` has a part for each replica."""
    return isinstance(value, ReplicaValues)


def is_leaf(value: Any) -> bool:
    """What is not taken apart in arguments and results: distributed values and variables."""
    return isinstance(value, ReplicaValues) or getattr(value, "is_variable", False)


def is_array(value: Any) -> bool:
    """Whether `value` can be an argument of a compiled program."""
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def is_number(value: Any) -> bool:
    """Whether `value` is a Python number; booleans steer Python and are not."""
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def stack(value: ReplicaValues, mesh: ReplicaMesh) -> Stacked:
    """`value` in one piece for programs on `mesh`.

    Raises:
        UnevenError: If the parts differ in shape or dtype or are no arrays.
    """
    if isinstance(value.piece, Stacked) and value.piece.mesh == mesh:
        return value.piece
    parts = value.values
    check_parts(value, mesh)
    if not all(is_array(p) or is_number(p) or isinstance(p, bool) for p in parts):
        raise UnevenError
    if any(isinstance(part, Tracer) for part in parts):
        return _stack_traced(parts, mesh)
    with jax.ensure_compile_time_eval():
        return _stack_concrete(value, parts, mesh)


def check_parts(value: ReplicaValues, mesh: ReplicaMesh) -> None:
    """Raises if `value` was not made for as many replicas as `mesh` has here."""
    found, needed = len(value.values), len(mesh.local_ids)
    if found != needed:
        raise ValueError(
            f"A {type(value).__name__} value with {found} parts cannot be used with a "
            f"strategy that has {needed} replicas here. Make it with "
            "`strategy.experimental_distribute_values_from_function`, or give it one part "
            "for each replica."
        )


def _stack_concrete(
    value: ReplicaValues, parts: Sequence[Any], mesh: ReplicaMesh
) -> Stacked:
    arrays = [to_device(p, device) for p, device in zip(parts, mesh.local_devices)]
    first = arrays[0]
    shapes = [(a.shape, a.dtype) for a in arrays]
    if isinstance(value, PerReplica) and mesh.is_shared:
        if value.shapes is None:
            value.shapes = mesh.agreed_shapes(arrays)
        shapes = value.shapes
    if any(shape != shapes[0] for shape in shapes):
        raise UnevenError
    is_scalar = first.ndim == 0
    if is_scalar and mesh.size > 1:
        arrays = [_expand(a, d) for a, d in zip(arrays, mesh.local_devices)]
    piece = Stacked(mesh.join(arrays, mirrored=False), mesh, is_scalar)
    value.piece = piece if isinstance(value, PerReplica) else value.piece
    return piece


def _stack_traced(parts: Sequence[Any], mesh: ReplicaMesh) -> Stacked:
    if mesh.is_shared:
        raise RunEagerly("parts of one worker, in code for all workers")
    arrays = [jnp.asarray(part) for part in parts]
    if any(a.shape != arrays[0].shape or a.dtype != arrays[0].dtype for a in arrays):
        raise UnevenError
    if mesh.size == 1:
        return Stacked(arrays[0], mesh, arrays[0].ndim == 0)
    is_scalar = arrays[0].ndim == 0
    whole = jnp.stack(arrays) if is_scalar else jnp.concatenate(arrays)
    whole = jax.lax.with_sharding_constraint(whole, mesh.split)
    return Stacked(whole, mesh, is_scalar)


def to_device(value: Any, device: Device) -> jax.Array:
    """`value` as an array on `device` alone."""
    if isinstance(value, jax.Array) and value.sharding.device_set == {device}:
        return value
    if not isinstance(value, jax.Array):
        value = jnp.asarray(value) if is_number(value) else np.asarray(value)
    return uncommitted(jax.device_put(value, device))


def on_device(value: Any, device: Device) -> Any:
    """`value`, moved to `device` if it is a JAX array."""
    is_movable = isinstance(value, jax.Array) and not isinstance(value, Tracer)
    return to_device(value, device) if is_movable else value


def part_of(value: PyTree, local_index: int) -> PyTree:
    """`value` as local replica `local_index` sees it: its own parts of what is distributed."""
    return jax.tree.map(
        lambda leaf: leaf.values[local_index] if is_distributed(leaf) else leaf,
        value,
        is_leaf=is_leaf,
    )


def regroup(
    results: Sequence[PyTree],
    describe: Callable[[int], str],
    merge_leaves: Callable[[tuple[Any, ...]], Any],
    share: Callable[[Any], bool] | bool = True,
) -> PyTree:
    """Replicas' results of one structure as one result whose leaves are distributed.

    An object that all replicas share comes back as itself, if `share` (or what it says of
    the object) is true.
    """
    may_share = share if callable(share) else lambda _: share
    flat = [jax.tree.flatten(r, is_leaf=is_leaf) for r in results]
    leaves, tree = flat[0]
    for i, (_, other) in enumerate(flat):
        if other != tree:
            raise ValueError(
                "Replicas returned different structures:\n"
                f"  {describe(0)}: {tree}\n  {describe(i)}: {other}\n"
                "Every replica has to return the same structure; look for an `if` that "
                "depends on the replica id."
            )
    merged = [
        parts[0]
        if all(p is parts[0] for p in parts) and may_share(parts[0])
        else merge_leaves(parts)
        for parts in zip(*(f[0] for f in flat))
    ]
    return jax.tree.unflatten(tree, merged)
