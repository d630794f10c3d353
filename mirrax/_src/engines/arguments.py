"""A call's arguments, sorted: what a program takes as arrays, and what it is built for."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr

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

_COMPARED = (str, bytes, bool, frozenset, type, enum.Enum)


@dataclass(frozen=True, slots=True, eq=False)
class Static:
    """A leaf that is no array: the program is built for this very value."""

    value: Any

    @classmethod
    def of(cls, leaf: Any) -> Static:
        """A leaf of arguments, which may be frozen."""
        return leaf if isinstance(leaf, Static) else cls(leaf)

    def _is_compared(self) -> bool:
        # Only plain values are; `==` of anything else may be an array.
        return isinstance(self.value, _COMPARED)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self) is not type(other):
            return False
        mine, theirs = self.value, other.value
        is_alike = type(mine) is type(theirs) and self._is_compared()
        return mine is theirs or (is_alike and mine == theirs)

    def __hash__(self) -> int:
        return hash(self.value) if self._is_compared() else id(self.value)


class Frozen(Static):
    """An argument that the user wants as a Python value; compared by value and type."""

    __slots__ = ()

    def _is_compared(self) -> bool:
        return True


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


def thaw(argument: Any) -> Any:
    """An argument as the user gave it."""
    return argument.value if isinstance(argument, Frozen) else argument


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
        return [
            f"argument {repr(path[1].key) if path[0].idx else path[1].idx}{keystr(path[2:])}"
            for path, _ in flat
        ]


@dataclass(frozen=True, slots=True)
class Call:
    """A call's arguments, ready for a program.

    Attributes:
        args: The arguments by position.
        kwargs: The arguments by name.
        mesh: Where programs for it run, if that is known.
        signature: What the program has to be built for.
        leaves: All leaves as they were given.
        arrays: Those that are not static, placed for programs on `mesh`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mesh: ReplicaMesh | None
    signature: Signature
    leaves: list[Any]
    arrays: list[Any]

    def arguments(self) -> Iterator[tuple[Any, Any, list[Any], Sequence[Kind]]]:
        """Each argument by position, and all by name as one: also its tree, leaves, kinds."""
        start = 0
        every = (*self.args, self.kwargs) if self.kwargs else self.args
        by_position, by_name = self.signature.tree.children()
        for argument, tree in zip(every, (*by_position.children(), by_name)):
            own = slice(start, start + tree.num_leaves)
            yield argument, tree, self.leaves[own], self.signature.kinds[own]
            start = own.stop

    def key(self, place: Any) -> tuple[Any, Signature, tuple[Any, ...]]:
        """What tells apart the calls at `place` that need programs of their own."""
        return place, self.signature, tuple(map(abstract, self.arrays))

    @property
    def given(self) -> list[Any]:
        """The leaves that are not static, as they were given."""
        return self.signature.arrays_of(self.leaves)


def sort_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: ReplicaMesh | None,
    in_cross_replica: bool = False,
) -> Call:
    """The arguments of a call, for programs on `mesh`.

    A replica gets the same from a `Mirrored` as from an array; code `in_cross_replica`
    context does not, and runs where distributed arguments lie.

    Raises:
        UnevenError: If a per-replica argument does not fit in one array.
    """
    if in_cross_replica:
        values = jax.tree.leaves((args, kwargs), is_leaf=is_leaf)
        found = (v.mesh for v in values if isinstance(v, ReplicaValues) and v.mesh)
        mesh = next(found, mesh)
    is_argument = is_leaf if mesh is not None else _is_whole_leaf
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_argument)
    kinds: list[Kind] = []
    arrays: list[Any] = []
    wrapped = Layout.MIRRORED if in_cross_replica else Layout.PLAIN
    for leaf in leaves:
        kind, array = _sort(leaf, mesh, wrapped)
        kinds.append(kind)
        if isinstance(kind, Layout):
            check_alive(array)
            arrays.append(array)
    return Call(args, kwargs, mesh, Signature(tree, tuple(kinds)), leaves, arrays)


def _sort(leaf: Any, mesh: ReplicaMesh | None, wrapped: Layout) -> tuple[Kind, Any]:
    if isinstance(leaf, Mirrored):
        array = leaf.array if leaf.array is not None else leaf.values[0]
        return wrapped, placed(array, mesh)
    if isinstance(leaf, PerReplica):
        if _is_one_number(leaf, mesh):
            return Layout.PLAIN, leaf.values[0]
        array, layout = join(leaf, mesh) if mesh else (leaf.array, leaf.layout)
        assert layout is not None
        return layout, array
    if is_number(leaf) or (is_array(leaf) and leaf.dtype != object):
        return Layout.PLAIN, placed(leaf, mesh)
    return Static.of(leaf), None


def _is_one_number(value: PerReplica, mesh: ReplicaMesh | None) -> bool:
    """Whether all parts are the same Python number, which need not travel as an array."""
    if not is_apart(value) or (mesh is not None and mesh.spans_workers):
        return False
    parts = value.values
    return all(is_number(part) and part is parts[0] for part in parts) and bool(parts)


def _is_whole_leaf(value: Any) -> bool:
    # Where no mesh is known parts that are apart travel one by one, until a `run` says where.
    return is_leaf(value) and not is_apart(value)


def is_apart(value: Any) -> bool:
    """Whether `value` is a per-replica value whose parts are not in one array."""
    return isinstance(value, PerReplica) and value.array is None


def placed(array: Any, mesh: ReplicaMesh | None) -> Any:
    """`array` where a program on `mesh` can use it."""
    if mesh is None or not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return array
    return mesh.mirror(array) if array.committed else array
