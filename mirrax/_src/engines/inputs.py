"""How a program takes an argument from a call that is like an earlier one.

Most arguments of a single replica go to JAX as they come, which finds out by itself what has
changed in them. The others are looked through here: values of replicas are replaced by their
arrays, what is static is compared, and nothing that was donated may reach JAX 0.10, which
crashes on it where there are several CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.base.values import Mirrored, PerReplica, is_leaf
from mirrax._src.engines.arguments import Kind, Static

_flatten = jax.tree_util.tree_flatten


class SignatureChanged(BaseException):
    """A program was called with other arguments than it was compiled for."""


class Input(Protocol):
    """One argument, as a program takes it."""

    num_arrays: int

    def take(self, argument: Any) -> Any:
        """The arrays in `argument`; raises SignatureChanged if it is another kind of thing."""
        ...

    def packed(self, arrays: list[Any]) -> Any:
        """The same from arrays that have been found already."""
        ...


def choose_input(
    argument: Any, leaves: Sequence[Any], kinds: Sequence[Kind], must_look: bool
) -> Input | None:
    """How to take arguments like `argument`; None if JAX takes them as they come."""
    # A boolean is static, but JAX takes it for the array that it was called with before.
    needs_a_look = any(is_leaf(x) or getattr(x, "dtype", 0) == np.bool_ for x in leaves)
    if all(k is Layout.PLAIN for k in kinds) and not must_look and not needs_a_look:
        return None
    is_whole = (
        isinstance(argument, PerReplica | Mirrored) and argument.array is not None
    )
    return _Value(argument) if is_whole else _Tree(argument, kinds)


class _Value:
    """A value of replicas that is an argument by itself."""

    num_arrays = 1

    def __init__(self, value: PerReplica | Mirrored) -> None:
        self._type, self._mesh, self._layout = type(value), value.mesh, value.layout

    def take(self, argument: Any) -> Any:
        if (
            type(argument) is not self._type
            or argument.layout is not self._layout
            or argument.mesh is not self._mesh
            or argument.array is None
            or argument.array.is_deleted()
        ):
            raise SignatureChanged
        return argument.array

    def packed(self, arrays: list[Any]) -> Any:
        return arrays[0]


class _Tree:
    """Any structure, with values of replicas, arrays and what is static in it."""

    def __init__(self, argument: Any, kinds: Sequence[Kind]) -> None:
        leaves, self._tree = _flatten(argument, is_leaf)
        self._types = tuple(map(type, leaves))
        numbered = list(enumerate(leaves))
        self._mirrored = [i for i, leaf in numbered if type(leaf) is Mirrored]
        self._split: list[tuple[int, ReplicaMesh | None, Layout | None]] = [
            (i, leaf.mesh, leaf.layout)
            for i, leaf in numbered
            if type(leaf) is PerReplica
        ]
        arrays = jax.Array | Mirrored | PerReplica
        self._arrays = [i for i, leaf in numbered if isinstance(leaf, arrays)]
        self._static = [(i, k) for i, k in enumerate(kinds) if isinstance(k, Static)]
        self._dynamic = [i for i, k in enumerate(kinds) if isinstance(k, Layout)]
        self.num_arrays = len(self._dynamic)
        # What has to be put together first takes the long way, and so do parts one by one.
        self._is_usable = len(kinds) == len(leaves) and all(
            leaf.layout is kinds[i] for i, leaf in numbered if type(leaf) is PerReplica
        )

    def take(self, argument: Any) -> list[Any]:
        leaves, tree = _flatten(argument, is_leaf)
        if (
            not self._is_usable
            or tree != self._tree
            or tuple(map(type, leaves)) != self._types
        ):
            raise SignatureChanged
        for i in self._mirrored:
            leaves[i] = leaves[i].array
        for i, mesh, layout in self._split:
            value = leaves[i]
            if value.layout is not layout or value.mesh is not mesh:
                raise SignatureChanged
            leaves[i] = value.array
        for i in self._arrays:
            if leaves[i] is None or leaves[i].is_deleted():
                raise SignatureChanged  # the long way puts it together, or says what is wrong
        for i, kind in self._static:
            if kind != Static(leaves[i]):
                raise SignatureChanged
        return [leaves[i] for i in self._dynamic] if self._static else leaves

    def packed(self, arrays: list[Any]) -> Any:
        return arrays
