"""A call's arguments, sorted: what a program takes as arrays, and what it is built for."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.base.structures import PLAIN, opened
from mirrax._src.base.values import (
    Fn,
    Mirrored,
    PerReplica,
    PyTree,
    ReplicaValues,
    Sharded,
    abstract,
    check_alive,
    is_array,
    is_leaf,
    is_number,
    join,
)
from mirrax._src.state import foreign


@dataclass(frozen=True, slots=True, eq=False)
class Static:
    """A leaf that is no array: the program is built for this very value."""

    value: Any

    @classmethod
    def of(cls, leaf: Any) -> Static:
        """A leaf of arguments, which may be frozen."""
        return leaf if isinstance(leaf, Static) else cls(leaf)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self) is not type(other):
            return False
        mine, theirs = self.value, other.value
        return mine is theirs or (hash(self) == hash(other) and are_equal(mine, theirs))

    def __hash__(self) -> int:
        # A variable's `==` gives an array; what has no hash is told apart by identity.
        try:
            return id(self.value) if is_leaf(self.value) else hash(self.value)
        except Exception:
            return id(self.value)


class Frozen(Static):
    """An argument that the user wants as a Python value."""

    __slots__ = ()


def are_equal(mine: Any, theirs: Any) -> bool:
    """Whether two Python values are of one type and equal; arrays and their like never are."""
    if type(mine) is not type(theirs) or is_leaf(mine):
        return False
    try:
        equal = mine == theirs
        return isinstance(equal, bool | np.bool_) and bool(equal)
    except Exception:
        return False


PLAIN.update({Static, Frozen})


def freeze(name: str, value: Any) -> Static:
    """The argument `name`, which the user wants static."""
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"Argument {name!r} is static (`static_argnames`), so it must be hashable, to be "
            f"compared with that of other calls; got {value!r}."
        ) from None
    return Frozen.of(value)


def thawing(fn: Fn) -> Fn:
    """`fn`, taking frozen arguments."""

    def thaw(argument: Any) -> Any:
        return argument.value if isinstance(argument, Frozen) else argument

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> PyTree:
        return fn(*map(thaw, args), **{k: thaw(x) for k, x in kwargs.items()})

    return call


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

    def check_modules(self) -> None:
        """Raises if the program would keep the arrays of a module of another library."""
        for kind in self.kinds:
            if isinstance(kind, Static) and is_leaf(kind.value):
                module_kind = foreign.module_kind(kind.value)
                if module_kind is not None:
                    module_kind.check(kind.value)

    def paths(self) -> list[str]:
        """Where each leaf stands in the arguments, for messages."""
        marks = jax.tree.unflatten(self.tree, range(len(self.kinds)))
        flat = jax.tree_util.tree_flatten_with_path(opened(marks))[0]
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
        given: Those that are not static.
        arrays: The same, placed for programs on `mesh`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mesh: ReplicaMesh | None
    signature: Signature
    leaves: list[Any]
    given: list[Any]
    arrays: list[Any]

    def arguments(self) -> Iterator[tuple[tuple[Any, list[Any], Sequence[Kind]], Any]]:
        """Each argument by position, all by name as one: it, its leaves and kinds; its tree."""
        start = 0
        every = (*self.args, self.kwargs) if self.kwargs else self.args
        by_position, by_name = self.signature.tree.children()
        for argument, tree in zip(every, (*by_position.children(), by_name)):
            own = slice(start, start + tree.num_leaves)
            yield (argument, self.leaves[own], self.signature.kinds[own]), tree
            start = own.stop

    def key(self, place: Any) -> tuple[Any, Signature, tuple[Any, ...]]:
        """What tells apart the calls at `place` that need programs of their own."""
        return place, self.signature, tuple(map(abstract, self.arrays))

    def avals_of_part(self, mesh: ReplicaMesh) -> list[jax.ShapeDtypeStruct]:
        """One replica's part of each array, without its values."""
        return [
            abstract(array, mesh.part_shape(layout, jax.typeof(array).shape))
            for layout, array in zip(self.signature.layouts(), self.arrays)
        ]


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
    whole = opened((args, kwargs), "argument")
    if in_cross_replica:
        values = jax.tree.leaves(whole, is_leaf=is_leaf)
        found = (v.mesh for v in values if isinstance(v, ReplicaValues) and v.mesh)
        mesh = next(found, mesh)
    is_argument = is_leaf if mesh is not None else _is_whole_leaf
    leaves, tree = jax.tree.flatten(whole, is_leaf=is_argument)
    kinds: list[Kind] = []
    given: list[Any] = []
    arrays: list[Any] = []
    wrapped = Layout.MIRRORED if in_cross_replica else Layout.PLAIN
    for leaf in leaves:
        kind, array = _sort(leaf, mesh, wrapped)
        kinds.append(kind)
        if isinstance(kind, Layout):
            check_alive(array)
            given.append(leaf)
            arrays.append(array)
    signature = Signature(tree, tuple(kinds))
    return Call(args, kwargs, mesh, signature, leaves, given, arrays)


def _sort(leaf: Any, mesh: ReplicaMesh | None, wrapped: Layout) -> tuple[Kind, Any]:
    if isinstance(leaf, Sharded) and (mesh is None or leaf.mesh == mesh):
        return Layout.SHARDED, leaf.array
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


def explain_change(old: Any, new: Any) -> str:
    """What is different in the key of a call (place, signature, shapes), in words."""
    if old is None or old[0] != new[0]:
        tokens = [key[0][-1] for key in (old, new) if key and isinstance(key[0], tuple)]
        is_known = len(tokens) == 2 and all(isinstance(t, frozenset) for t in tokens)
        attributes = foreign.settings.explain(*tokens) if is_known else ""
        return (
            attributes
            or "it runs under another strategy, or with other settings of JAX"
        )
    signature, avals = new[1:]
    if old[1].tree != signature.tree:
        return f"the structure of the arguments changed from {old[1].tree} to {signature.tree}"
    paths = signature.paths()
    for path, before, now in zip(paths, old[1].kinds, signature.kinds):
        if before != now:
            return f"{path} changed from {_show_kind(before)} to {_show_kind(now)}"
    dynamic = [p for p, k in zip(paths, signature.kinds) if not isinstance(k, Static)]
    mesh = new[0][1] if isinstance(new[0], tuple) else None
    for path, layout, before, now in zip(dynamic, signature.layouts(), old[2], avals):
        if before != now:
            shown = [_show_shape(aval, layout, mesh) for aval in (before, now)]
            return f"{path} changed from {shown[0]} to {shown[1]}"
    return "the copies of a variable are now different on each replica, or no longer so"


def _show_shape(aval: Any, layout: Layout, mesh: ReplicaMesh | None) -> str:
    """An argument's dtype and shape, as one replica sees it."""
    shape = mesh.part_shape(layout, aval.shape) if mesh is not None else aval.shape
    weak = ", weakly typed" if aval.weak_type else ""
    return f"{aval.dtype.name}[{','.join(map(str, shape))}]{weak}"


def _show_kind(kind: Layout | Static) -> str:
    if isinstance(kind, Static):
        return repr(kind.value)
    return "a per-replica value" if kind.is_split else "an array or number"
