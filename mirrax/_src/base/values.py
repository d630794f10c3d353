"""`PerReplica` and `Mirrored`: one value for each replica.

A distributed value is kept as its parts (one array on each device) or as one array that
holds all of them, with its layout on a mesh. Each view is made from the other when it is
asked for, without copying.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirrax._src.base import context
from mirrax._src.base.arraylike import ArrayLike, NotOneArray
from mirrax._src.base.errors import RunEagerly
from mirrax._src.base.hiding import hides
from mirrax._src.base.jax_compat import ConcreteArray, Device, Tracer, uncommitted
from mirrax._src.base.launching import check_caller
from mirrax._src.base.mesh import (
    AXIS_NAME,
    Layout,
    ReplicaMesh,
    gathered,
    shards_of,
)
from mirrax._src.base.structures import Atom as Atom
from mirrax._src.base.structures import is_leaf, opened

PyTree = Any
# A user's function, and what it is called with.
Fn = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class UnevenError(Exception):
    """The parts of a value do not fit in one array; never reaches users."""


class DistributedValues(abc.ABC):
    """Whatever has a value for each replica: `PerReplica`, `Mirrored`, distributed variables."""

    __module__ = "mirrax.distribute"

    @property
    @abc.abstractmethod
    def values(self) -> tuple[Any, ...]:
        """This worker's parts, each on its own device."""


@hides("array", "copy_for", "has_values", "layout", "mesh", "of", "of_each", "shapes")
class ReplicaValues(Atom):
    """What `PerReplica` and `Mirrored` share."""

    __slots__ = ("_parts", "array", "layout", "mesh", "shapes")
    has_values = True
    array: Any  # all parts in one, if they are
    layout: Layout | None  # how they lie in it
    mesh: ReplicaMesh | None  # where they lie, if that is known
    # The shape and dtype of all workers' parts, where known and not in one array.
    shapes: tuple[Any, ...] | None
    _take_apart: Callable[[], tuple[Any, ...]]  # each kind's own

    def __init__(
        self, values: Iterable[Any], shapes: Any = None, mesh: ReplicaMesh | None = None
    ) -> None:
        self._parts: tuple[Any, ...] | None = tuple(values)
        self.array = self.layout = None
        self.mesh, self.shapes = mesh, shapes

    @classmethod
    def of(
        cls, array: Any, mesh: ReplicaMesh | None, layout: Layout = Layout.MIRRORED
    ) -> Self:
        """The value whose parts, or copies, `array` holds."""
        self = cls.__new__(cls)
        self._parts = self.shapes = None
        self.array, self.mesh, self.layout = array, mesh, layout
        return self

    @property
    def values(self) -> tuple[Any, ...]:
        """This worker's parts, each on its own device."""
        parts = self._parts
        if parts is None:
            check_alive(self.array, type(self).__name__)
            parts = self._take_apart()
            if not isinstance(self.array, Tracer):
                self._parts = parts
        return parts

    def __repr__(self) -> str:
        try:
            values = self.values
        except RuntimeError:
            return f"<{type(self).__name__} value that was donated>"
        rows = ",\n".join(f"  {i}: {value!r}" for i, value in enumerate(values))
        return f"{type(self).__name__}:{{\n{rows}\n}}"


class PerReplica(ReplicaValues, NotOneArray):
    """A different value for each replica.

    >>> mx.distribute.PerReplica([1, 2])
    PerReplica:{
      0: 1,
      1: 2
    }
    """

    __slots__ = ()
    __module__ = "mirrax.distribute"

    def _take_apart(self) -> tuple[jax.Array, ...]:
        array, mesh, layout = self.array, self.mesh, self.layout
        assert layout is not None
        if layout is Layout.OWN:
            return _all_own_parts(array, len(mesh.local_ids) if mesh else 1)
        assert mesh is not None
        if isinstance(array, Tracer):
            if mesh.spans_workers:
                raise RunEagerly("parts of one worker, in code for all workers")
            shape = mesh.part_shape(layout, array.shape)
            rows = array.reshape(mesh.size, *shape)
            return tuple(rows[i] for i in mesh.local_ids)
        parts = [shard.data for shard in shards_of(array)]
        if mesh.has_row(layout):
            parts = map(_drop_axis, parts)
        return tuple(map(uncommitted, parts))


def _all_own_parts(array: jax.Array, num_local: int) -> tuple[jax.Array, ...]:
    # Only a `merge_fn` that looks at single replicas pays for this gather.
    gathered = lax.all_gather(array, AXIS_NAME)
    first = 0
    if num_local < len(gathered):  # those of the worker that this replica is on
        here = lax.axis_index(AXIS_NAME)
        first = here - here % num_local
    return tuple(gathered[first + i] for i in range(num_local))


class Mirrored(ReplicaValues, ArrayLike):
    """The same value on every replica's device; works wherever one array does."""

    __slots__ = ()
    __module__ = "mirrax.distribute"

    def __init__(self, values: Iterable[Any], mesh: ReplicaMesh | None = None) -> None:
        super().__init__(values, mesh=mesh)

    @classmethod
    def of_each(cls, arrays: Iterable[Any], mesh: ReplicaMesh | None) -> list[Self]:
        """As `of` for each array, in half the time: a state is wrapped at every step."""
        every, layout = [], Layout.MIRRORED
        for array in arrays:
            self = cls.__new__(cls)
            self._parts = self.shapes = None
            self.array, self.mesh, self.layout = array, mesh, layout
            every.append(self)
        return every

    def _take_apart(self) -> tuple[Any, ...]:
        if isinstance(self.array, Tracer):
            return (self.array,) * (len(self.mesh.local_ids) if self.mesh else 1)
        return copies_of(self.array)

    def __jax_array__(self) -> jax.Array:
        here = context.current()
        if self.array is not None and (
            isinstance(self.array, Tracer) or context.in_program(here)
        ):
            return self.array
        return self.copy_for(context.local_index(here))

    def copy_for(self, local_index: int) -> Any:
        """The copy of a replica, or another one where it has none: all are equal."""
        return self.values[local_index if local_index < len(self.values) else 0]


class Sharded(Mirrored):
    """One value for all replicas, each of which keeps a part; works wherever an array does.

    What `mx.train.Optimizer(..., shard_state=True)` has in its state. Whoever looks at it gets the whole value, gathered.
    """

    __slots__ = ()
    __module__ = "mirrax.distribute"

    @classmethod
    def of(
        cls, array: Any, mesh: ReplicaMesh | None, layout: Layout = Layout.SHARDED
    ) -> Self:
        return super().of(array, mesh, layout)

    @property
    def values(self) -> tuple[Any, ...]:
        """A copy of the whole on each device of this worker; gathered, and not kept."""
        check_alive(self.array, type(self).__name__)
        if isinstance(self.array, Tracer):
            return self._take_apart()
        return copies_of(gathered(self.array, self.mesh))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def _flatten_mirrored(value: Mirrored) -> tuple[tuple[Any, ...], Any]:
    here = context.current()
    is_in_replica = here.replica is not None and not context.is_default()
    if is_in_replica and not context.in_program(here):
        return (value.__jax_array__(),), "own"
    if value.array is not None:
        return (value.array,), value.mesh
    return value.values, "copies"


def _unflatten_sharded(form: Any, children: Sequence[Any]) -> Any:
    return children[0] if form == "own" else Sharded.of(children[0], form)


def _unflatten_mirrored(form: Any, children: Sequence[Any]) -> Any:
    if form == "own":  # an eager replica works with its own copy
        return children[0]
    return Mirrored(children) if form == "copies" else Mirrored.of(children[0], form)


jax.tree_util.register_pytree_node(
    PerReplica,
    lambda v: (v.values, None),
    lambda _, children: PerReplica(children),
)
jax.tree_util.register_pytree_node(Mirrored, _flatten_mirrored, _unflatten_mirrored)
jax.tree_util.register_pytree_node(Sharded, _flatten_mirrored, _unflatten_sharded)


DistributedValues.register(ReplicaValues)


# What values are -----------------------------------------------------------------------


# Whether a value has a part for each replica.
is_distributed: Callable[[Any], bool] = ReplicaValues.__instancecheck__


def is_array(value: Any) -> bool:
    """Whether `value` can be an argument of a compiled program."""
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def is_number(value: Any) -> bool:
    """Whether `value` is a Python number; booleans steer Python and are not."""
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def is_numeric(value: Any) -> bool:
    """Whether `value` can become an array without a word: an array, a number, a boolean."""
    return is_array(value) or isinstance(value, int | float | complex)


def abstract(value: Any, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """An array without its values; `shape` in place of its own."""
    aval = jax.typeof(value)
    shape = aval.shape if shape is None else shape
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)


def check_alive(array: Any, kind: str = "array") -> None:
    """Raises if `array` was donated: JAX 0.10 crashes on such arguments on several CPUs."""
    is_concrete = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    if is_concrete and array.is_deleted():
        raise RuntimeError(
            f"This {kind} ({array.dtype}{list(array.shape)}) was donated to a compiled "
            "function (`donate_argnums`), whose results took over its memory. Use what that "
            "call returned."
        )


# From parts to one array, and back --------------------------------------------------------


def copies_of(array: jax.Array) -> tuple[jax.Array, ...]:
    """A global array's buffers on this worker, in the order of the mesh; no copies."""
    # Not `addressable_data(i)`, which gives device 0's buffer of a replicated array always.
    return tuple(uncommitted(shard.data) for shard in shards_of(array))


def one_copy(array: jax.Array) -> jax.Array:
    """The first of `copies_of` a replicated array, without making the others."""
    return uncommitted(array.addressable_data(0))


def first_copy(array: Any) -> Any:
    """A replicated array as one array on the first device; anything else as it is."""
    is_known = type(array) is ConcreteArray  # which is fast to ask
    if not is_known and (not isinstance(array, jax.Array) or isinstance(array, Tracer)):
        return array
    is_spread = len(array.sharding.device_set) > 1 and array.is_fully_replicated
    return one_copy(array) if is_spread else array


_add_axis = jax.jit(lambda x: x[None])
_drop_axis = jax.jit(lambda x: x[0])


def _expand(x: jax.Array, device: Device) -> jax.Array:
    with jax.default_device(device):  # where an uncommitted array is computed
        return _add_axis(x)


def join(value: ReplicaValues, mesh: ReplicaMesh) -> tuple[jax.Array, Layout]:
    """The parts of `value` in one array for programs on `mesh`, and how they lie in it.

    Raises `UnevenError` if they differ in shape or dtype or are no arrays.
    """
    layout = value.layout
    if layout is not None and layout.is_split and value.mesh == mesh:
        return value.array, layout
    check_parts(value, len(mesh.local_ids))
    if not all(map(is_numeric, value.values)):
        raise UnevenError
    if any(isinstance(part, Tracer) for part in value.values):
        return _join_traced(value.values, mesh)
    check_caller()
    with jax.ensure_compile_time_eval():
        return _join_arrays(value, mesh)


def check_parts(value: ReplicaValues, count: int) -> None:
    """Raises if `value` was not made for a strategy with `count` replicas here."""
    if len(value.values) != count:
        raise ValueError(
            f"A {type(value).__name__} value with {len(value.values)} parts cannot be used "
            f"with a strategy that has {count} replica{'s' * (count != 1)} here. Use the "
            "strategy that made it, make it with "
            "`strategy.experimental_distribute_values_from_function`, or give it one part "
            "for each replica."
        )


def _join_arrays(value: ReplicaValues, mesh: ReplicaMesh) -> tuple[jax.Array, Layout]:
    arrays = list(map(to_device, value.values, mesh.local_devices))
    shapes = [(a.shape, a.dtype) for a in arrays]
    if isinstance(value, PerReplica) and mesh.spans_workers:
        if value.shapes is None:
            value.shapes = mesh.agreed_shapes(arrays)
        shapes = value.shapes
    if any(shape != shapes[0] for shape in shapes):
        raise UnevenError
    layout = mesh.split_layout(arrays[0].ndim)
    if mesh.has_row(layout):
        arrays = list(map(_expand, arrays, mesh.local_devices))
    array = mesh.join(arrays, mirrored=False)
    if isinstance(value, PerReplica):
        value.array, value.mesh, value.layout = array, mesh, layout
    return array, layout


def _join_traced(parts: Sequence[Any], mesh: ReplicaMesh) -> tuple[jax.Array, Layout]:
    if mesh.spans_workers:
        raise RunEagerly("parts of one worker, in code for all workers")
    arrays = [jnp.asarray(part) for part in parts]
    if any(a.shape != arrays[0].shape or a.dtype != arrays[0].dtype for a in arrays):
        raise UnevenError
    layout = mesh.split_layout(arrays[0].ndim)
    if mesh.size == 1:
        return arrays[0], layout
    whole = jnp.concatenate(arrays) if arrays[0].ndim else jnp.stack(arrays)
    return lax.with_sharding_constraint(whole, mesh.split), layout


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


def part_of(leaf: Any, mesh: ReplicaMesh | None, local_index: int | None) -> Any:
    """What one replica sees of `leaf`: its own part or copy, where it can use it.

    `mesh` is None where there is one replica, on no device in particular; `local_index` is
    None in the replicas' program, which works for all of them at once.
    """
    if local_index is None:
        return _part_in_program(leaf)
    if isinstance(leaf, Sharded):
        return leaf
    if not isinstance(leaf, ReplicaValues):
        return leaf if mesh is None else mesh.local_view(leaf, local_index)
    if isinstance(leaf, Mirrored):
        part = leaf.copy_for(local_index)
    else:
        if mesh is not None:
            check_parts(leaf, len(mesh.local_ids))
        part = leaf.values[local_index]
    return part if mesh is None else on_device(part, mesh.local_devices[local_index])


def _part_in_program(leaf: Any) -> Any:
    if not isinstance(leaf, ReplicaValues):
        return leaf
    if leaf.layout in (Layout.OWN, Layout.MIRRORED, Layout.SHARDED):
        return leaf.array
    if isinstance(leaf, Mirrored):
        return leaf.values[0]
    if not all(map(is_numeric, leaf.values)):
        raise RunEagerly("parts that are no arrays, in the replicas' one program")
    parts = jnp.stack([jnp.asarray(part) for part in leaf.values])
    return parts[lax.axis_index(AXIS_NAME) % len(leaf.values)]


def only_part(value: Any) -> Any:
    """`value` where there is one replica: the one part, or a copy."""
    if not isinstance(value, ReplicaValues):
        return value
    if isinstance(value, PerReplica):
        check_parts(value, 1)
    return value.values[0]


def parts_of(tree: PyTree, mesh: ReplicaMesh | None, local_index: int | None) -> PyTree:
    """`tree` as one replica sees it."""
    own = functools.partial(part_of, mesh=mesh, local_index=local_index)
    return jax.tree.map(own, opened(tree), is_leaf=is_leaf)


def regroup(
    results: Sequence[PyTree],
    describe: Callable[[int], str],
    merge_leaves: Callable[[tuple[Any, ...]], Any],
    may_stay_one: Callable[[Any], bool] = lambda _: True,
    what: str = "",
) -> PyTree:
    """Replicas' results of one structure as one result whose leaves are distributed.

    An object that all replicas share comes back as itself, if `may_stay_one` says so. `what`
    the results are in messages about objects in them that hold arrays out of sight.
    """
    flat = [jax.tree.flatten(opened(r, what), is_leaf=is_leaf) for r in results]
    tree = flat[0][1]
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
        if all(p is parts[0] for p in parts) and may_stay_one(parts[0])
        else merge_leaves(parts)
        for parts in zip(*(f[0] for f in flat))
    ]
    return jax.tree.unflatten(tree, merged)
