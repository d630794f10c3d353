"""How a program takes an argument from a call that is like an earlier one.

Most arguments of a single replica go to JAX as they come, which finds out by itself what has
changed in them. The others are looked through here: values of replicas are replaced by their
arrays, what is static is compared, and nothing that was donated may reach JAX 0.10, which
crashes on it where there are several CPUs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mirrax._src.base.mesh import Layout
from mirrax._src.base.structures import is_open, opened
from mirrax._src.base.values import Mirrored, PerReplica, ReplicaValues, is_leaf
from mirrax._src.engines.arguments import Kind, Static

_array_of = operator.attrgetter("array")

# Gives the arrays in an argument; raises SignatureChanged if it is another kind of thing.
Take = Callable[[Any], list[Any]]


class SignatureChanged(BaseException):
    """A program was called with other arguments than it was compiled for."""


def choose_input(
    argument: Any, leaves: Sequence[Any], kinds: Sequence[Kind], must_look: bool
) -> Take | None:
    """How to take arguments like `argument`; None if JAX takes them as they come."""
    # A boolean is static, but JAX takes it for the array that it was called with before.
    whole = opened(argument)
    if is_open(jax.tree.structure(whole, is_leaf=is_leaf)):
        take = _Tree(whole, kinds).take
        return lambda argument: take(opened(argument))
    needs_a_look = any(is_leaf(x) or getattr(x, "dtype", 0) == np.bool_ for x in leaves)
    if all(k is Layout.PLAIN for k in kinds) and not must_look and not needs_a_look:
        return None
    is_whole = isinstance(argument, ReplicaValues) and argument.array is not None
    return (_Value(argument) if is_whole else _Tree(argument, kinds)).take


class _Value:
    """A value of replicas that is an argument by itself."""

    def __init__(self, value: ReplicaValues) -> None:
        self._type, self._mesh, self._layout = type(value), value.mesh, value.layout

    def take(self, argument: Any) -> list[Any]:
        if (
            type(argument) is not self._type
            or argument.layout is not self._layout
            or argument.mesh is not self._mesh
            or argument.array is None
            or argument.array.is_deleted()
        ):
            raise SignatureChanged  # the long way puts it together, or says what is wrong
        return [argument.array]


class _Tree:
    """Any structure, with values of replicas, arrays and what is static in it."""

    def __init__(self, argument: Any, kinds: Sequence[Kind]) -> None:
        leaves, self._tree = jax.tree.flatten(argument, is_leaf)
        self._types = tuple(map(type, leaves))
        numbered = list(enumerate(leaves))
        split = [(i, leaf) for i, leaf in numbered if type(leaf) is PerReplica]
        self._split = [(i, _Value(leaf).take) for i, leaf in split]
        self._mirrored = [i for i, leaf in numbered if isinstance(leaf, Mirrored)]
        arrays = jax.Array | Mirrored
        self._arrays = [i for i, leaf in numbered if isinstance(leaf, arrays)]
        self._is_mirrored = len(self._mirrored) == len(leaves)
        types = {type(getattr(leaves[i], "array", leaves[i])) for i in self._arrays}
        kind = types.pop() if len(types) == 1 else None
        look = operator.methodcaller("is_deleted")
        self._is_deleted: Any = getattr(kind, "is_deleted", look)
        self._static = [(i, k) for i, k in enumerate(kinds) if isinstance(k, Static)]
        self._dynamic = [i for i, k in enumerate(kinds) if isinstance(k, Layout)]
        # What has to be put together first takes the long way, and so do parts one by one.
        if len(kinds) != len(leaves) or any(x.layout is not kinds[i] for i, x in split):
            self._types = None

    def take(self, argument: Any) -> list[Any]:
        # What is done to each leaf of a state at every step is done in C.
        try:
            leaves = self._tree.flatten_up_to(argument)
        except ValueError:
            raise SignatureChanged from None
        if tuple(map(type, leaves)) != self._types:
            raise SignatureChanged
        for i, take in self._split:
            leaves[i] = take(leaves[i])[0]
        if self._is_mirrored:
            arrays = leaves = list(map(_array_of, leaves))
        else:
            for i in self._mirrored:
                leaves[i] = leaves[i].array
            arrays = [leaves[i] for i in self._arrays]
        try:
            if any(map(self._is_deleted, arrays)):
                raise SignatureChanged
        except (AttributeError, TypeError):  # None: the copies of a value are apart
            raise SignatureChanged from None
        for i, kind in self._static:
            if kind != Static.of(leaves[i]):
                raise SignatureChanged
        return [leaves[i] for i in self._dynamic] if self._static else leaves
