"""A call's arguments, sorted: what a program takes as arrays, and what it is built for."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mirrax._src.base.jax_compat import ConcreteArray, Tracer
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.values import (
    Mirrored,
    PerReplica,
    PyTree,
    Stacked,
    check_alive,
    is_array,
    is_leaf,
    is_number,
    stack,
)


@dataclass(frozen=True, slots=True)
class Split:
    """A leaf with a part for each replica."""

    is_scalar: bool


@dataclass(frozen=True, slots=True)
class Same:
    """An array or number that all replicas get; `wrapped` if it came as a `Mirrored`."""

    wrapped: bool


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


SAME = Same(wrapped=False)
SAME_WRAPPED = Same(wrapped=True)
SPLIT = Split(is_scalar=False)
SPLIT_SCALAR = Split(is_scalar=True)
Kind = Split | Same | Static


@dataclass(frozen=True, slots=True)
class Signature:
    """What a program is built for: the structure of the arguments and the kind of each leaf."""

    tree: Any
    kinds: tuple[Kind, ...]

    def arrays_of(self, leaves: Iterable[Any]) -> list[Any]:
        """The leaves that are not static."""
        return [x for x, k in zip(leaves, self.kinds) if not isinstance(k, Static)]

    def array_kinds(self) -> list[Kind]:
        """The kinds of the leaves that are not static."""
        return [kind for kind in self.kinds if not isinstance(kind, Static)]

    def rebuild(self, arrays: Iterable[Any]) -> PyTree:
        """The arguments, with `arrays` in the places of those that are not static."""
        it = iter(arrays)
        leaves = [k.value if isinstance(k, Static) else next(it) for k in self.kinds]
        return jax.tree.unflatten(self.tree, leaves)

    def paths(self) -> list[str]:
        """Where each leaf that is not static stands in the arguments, for messages."""
        marks = jax.tree.unflatten(self.tree, range(len(self.kinds)))
        flat = jax.tree_util.tree_flatten_with_path(marks)[0]
        return [argument_path(path) for path, _ in flat]


def argument_path(path: tuple[Any, ...]) -> str:
    """The path of a leaf in `(args, kwargs)` as a person would name it."""
    which, rest = path[0], path[1:]
    if which.idx == 0:
        return f"argument {rest[0].idx}" + jax.tree_util.keystr(rest[1:])
    return f"argument {rest[0].key!r}" + jax.tree_util.keystr(rest[1:])


def sort_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: ReplicaMesh | None,
    tell_mirrored: bool = False,
) -> tuple[Signature, list[Any], list[Any]]:
    """The signature of a call, its arrays placed for programs on `mesh`, and as given.

    A replica gets the same from a `Mirrored` as from an array; `tell_mirrored` is for
    cross-replica code, which does not.

    Raises:
        UnevenError: If a per-replica argument does not fit in one array.
    """
    is_argument = is_leaf if mesh is not None else _is_leaf_without_mesh
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_argument)
    kinds: list[Kind] = []
    arrays: list[Any] = []
    wrapped = SAME_WRAPPED if tell_mirrored else SAME
    mirrored = None if mesh is None else mesh.mirrored
    for leaf in leaves:
        if type(leaf) is Mirrored and leaf.piece is not None:
            kinds.append(wrapped)
            array = leaf.piece
        elif type(leaf) is ConcreteArray or isinstance(leaf, jax.Array):
            kinds.append(SAME)
            array = leaf
        else:
            array = None
        if array is not None:
            # The state of a step lies there already: the shortest way for it.
            is_here = type(array) is ConcreteArray and array.sharding is mirrored
            arrays.append(array if is_here else placed(array, mesh))
        elif isinstance(leaf, PerReplica) and is_one_number(leaf, mesh):
            kinds.append(SAME)
            arrays.append(leaf.values[0])
        elif isinstance(leaf, PerReplica):
            piece = _piece(leaf, mesh)
            kinds.append(SPLIT_SCALAR if piece.is_scalar else SPLIT)
            arrays.append(piece.array)
        elif isinstance(leaf, Mirrored):
            kinds.append(wrapped)
            arrays.append(placed(leaf.values[0], mesh))
        elif is_number(leaf) or is_array(leaf):
            if isinstance(leaf, np.ndarray) and leaf.dtype == object:
                kinds.append(Static(leaf))
                continue
            kinds.append(SAME)
            arrays.append(leaf)
        else:
            kinds.append(Static(leaf))
    for array in arrays:
        if type(array) is ConcreteArray and array.is_deleted():
            check_alive(array)
    signature = Signature(tree, tuple(kinds))
    return signature, arrays, signature.arrays_of(leaves)


def mesh_of_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ReplicaMesh | None:
    """The mesh that distributed arguments bring along, if any does."""
    for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_leaf):
        if isinstance(leaf, PerReplica) and isinstance(leaf.piece, Stacked):
            return leaf.piece.mesh
    return None


def is_one_number(value: PerReplica, mesh: ReplicaMesh | None) -> bool:
    """Whether all parts are the same Python number, which need not travel as an array."""
    is_known = value.piece is None and not (mesh is not None and mesh.is_shared)
    parts = value.values if is_known else ()
    return (
        bool(parts) and is_number(parts[0]) and all(part is parts[0] for part in parts)
    )


def _is_leaf_without_mesh(value: Any) -> bool:
    # Parts that have not been joined travel one by one, until a `run` says where.
    is_apart = isinstance(value, PerReplica) and not isinstance(value.piece, Stacked)
    return is_leaf(value) and not is_apart


def placed(array: Any, mesh: ReplicaMesh | None) -> Any:
    """`array` where a program on `mesh` can use it."""
    if mesh is None or not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return array
    return mesh.mirror(array) if array.committed else array


def _piece(value: PerReplica, mesh: ReplicaMesh | None) -> Stacked:
    if mesh is None:
        assert isinstance(value.piece, Stacked)
        return value.piece
    return stack(value, mesh)
