"""A call's arguments, sorted: what a program takes as arrays, and what it is built for."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.base.values import (
    Mirrored,
    PerReplica,
    PyTree,
    ReplicaValues,
    abstract,
    check_alive,
    is_array,
    is_leaf,
    is_number,
    join,
)


@dataclass(frozen=True, slots=True)
class Frozen:
    """An argument that the user wants as a Python value; compared by value and type."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Frozen)
            and type(self.value) is type(other.value)
            and self.value == other.value
        )

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


def freeze(name: str, value: Any) -> Frozen:
    """The argument `name`, which the user wants static."""
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"Argument {name!r} is static (`static_argnames`), so it must be hashable, to be "
            f"compared with that of other calls; got {value!r}."
        ) from None
    return Frozen(value)


_COMPARED = (str, bytes, bool, frozenset, type, enum.Enum, Frozen)


@dataclass(frozen=True, slots=True)
class Static:
    """A leaf that is no array: the program is built for this very value."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return False
        mine, theirs = self.value, other.value
        if mine is theirs:
            return True
        # Only plain values are compared; `==` of anything else may be an array.
        return (
            type(mine) is type(theirs)
            and isinstance(mine, _COMPARED)
            and mine == theirs
        )

    def __hash__(self) -> int:
        if isinstance(self.value, _COMPARED):
            return hash(self.value)
        return id(self.value)


# What a leaf of arguments or results is: an array that lies so, or no array.
Kind = Layout | Static


@dataclass(frozen=True, slots=True)
class Signature:
    """What a program is built for: the structure of the arguments and the kind of each leaf."""

    tree: Any
    kinds: tuple[Kind, ...]

    def arrays_of(self, leaves: Iterable[Any]) -> list[Any]:
        """The leaves that are not static."""
        return [x for x, k in zip(leaves, self.kinds) if not isinstance(k, Static)]

    def layouts(self) -> list[Layout]:
        """How the leaves lie that are not static."""
        return [kind for kind in self.kinds if isinstance(kind, Layout)]

    def rebuild(self, arrays: Iterable[Any]) -> PyTree:
        """The arguments, with `arrays` in the places of those that are not static."""
        it = iter(arrays)
        leaves = [k.value if isinstance(k, Static) else next(it) for k in self.kinds]
        return jax.tree.unflatten(self.tree, leaves)

    def argument_trees(self) -> list[Any]:
        """The structure of each argument by position, and of all by name."""
        by_position, by_name = self.tree.children()
        return [*by_position.children(), by_name]

    def avals_of_part(
        self, arrays: Iterable[Any], mesh: ReplicaMesh
    ) -> list[jax.ShapeDtypeStruct]:
        """One replica's part of each of `arrays`, without its values."""
        return [
            abstract(array, mesh.part_shape(layout, jax.typeof(array).shape))
            for layout, array in zip(self.layouts(), arrays)
        ]

    def paths(self) -> list[str]:
        """Where each leaf stands in the arguments, for messages."""
        marks = jax.tree.unflatten(self.tree, range(len(self.kinds)))
        flat = jax.tree_util.tree_flatten_with_path(marks)[0]
        return [argument_path(path) for path, _ in flat]


def argument_path(path: tuple[Any, ...]) -> str:
    """The path of a leaf in `(args, kwargs)` as a person would name it."""
    which, rest = path[0], path[1:]
    if which.idx == 0:
        return f"argument {rest[0].idx}" + jax.tree_util.keystr(rest[1:])
    return f"argument {rest[0].key!r}" + jax.tree_util.keystr(rest[1:])


@dataclass(frozen=True, slots=True)
class Call:
    """A call's arguments, ready for a program.

    Attributes:
        args: The arguments by position.
        kwargs: The arguments by name.
        signature: What the program has to be built for.
        leaves: All leaves as they were given.
        arrays: Those that are not static, placed for programs on the call's mesh.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    signature: Signature
    leaves: list[Any]
    arrays: list[Any]

    def arguments(self) -> Iterator[tuple[Any, list[Any], Sequence[Kind]]]:
        """Each argument by position, and all by name as one, with its leaves and kinds."""
        start = 0
        every = (*self.args, self.kwargs) if self.kwargs else self.args
        for argument, tree in zip(every, self.signature.argument_trees()):
            end = start + tree.num_leaves
            yield argument, self.leaves[start:end], self.signature.kinds[start:end]
            start = end

    @property
    def given(self) -> list[Any]:
        """The leaves that are not static, as they were given."""
        return self.signature.arrays_of(self.leaves)


def sort_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: ReplicaMesh | None,
    tell_mirrored: bool = False,
) -> Call:
    """The arguments of a call, for programs on `mesh`.

    A replica gets the same from a `Mirrored` as from an array; `tell_mirrored` is for
    cross-replica code, which does not.

    Raises:
        UnevenError: If a per-replica argument does not fit in one array.
    """
    is_argument = is_leaf if mesh is not None else is_whole_leaf
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_argument)
    kinds: list[Kind] = []
    arrays: list[Any] = []
    wrapped = Layout.MIRRORED if tell_mirrored else Layout.PLAIN
    for leaf in leaves:
        kind, array = _sort(leaf, mesh, wrapped)
        kinds.append(kind)
        if isinstance(kind, Layout):
            check_alive(array)
            arrays.append(array)
    return Call(args, kwargs, Signature(tree, tuple(kinds)), leaves, arrays)


def _sort(leaf: Any, mesh: ReplicaMesh | None, wrapped: Layout) -> tuple[Kind, Any]:
    if isinstance(leaf, Mirrored):
        array = leaf.array if leaf.array is not None else leaf.values[0]
        return wrapped, placed(array, mesh)
    if isinstance(leaf, PerReplica):
        if is_one_number(leaf, mesh):
            return Layout.PLAIN, leaf.values[0]
        array, layout = join(leaf, mesh) if mesh else (leaf.array, leaf.layout)
        assert layout is not None
        return layout, array
    is_object = isinstance(leaf, np.ndarray) and leaf.dtype == object
    if is_array(leaf) and not is_object:
        return Layout.PLAIN, placed(leaf, mesh)
    return (Layout.PLAIN, leaf) if is_number(leaf) else (Static(leaf), None)


def mesh_of_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ReplicaMesh | None:
    """The mesh that distributed arguments bring along, if any does."""
    for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_leaf):
        if isinstance(leaf, ReplicaValues) and leaf.mesh is not None:
            return leaf.mesh
    return None


def is_one_number(value: PerReplica, mesh: ReplicaMesh | None) -> bool:
    """Whether all parts are the same Python number, which need not travel as an array."""
    is_known = value.array is None and not (mesh is not None and mesh.spans_workers)
    parts = value.values if is_known else ()
    return (
        bool(parts) and is_number(parts[0]) and all(part is parts[0] for part in parts)
    )


def is_whole_leaf(value: Any) -> bool:
    """What is a leaf where no mesh is known on which parts could be joined.

    Parts that are apart travel one by one, until a `run` says where.
    """
    return is_leaf(value) and not is_apart(value)


def is_apart(value: Any) -> bool:
    """Whether `value` is a per-replica value whose parts are not in one array."""
    return isinstance(value, PerReplica) and value.array is None


def placed(array: Any, mesh: ReplicaMesh | None) -> Any:
    """`array` where a program on `mesh` can use it."""
    if mesh is None or not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return array
    return mesh.mirror(array) if array.committed else array
