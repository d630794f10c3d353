"""A compiled function and the variables it reads and writes.

Variables' arrays go in and come out as flat lists; those that are written are donated, so
that a step updates them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base.logical import after_launch, launching
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.values import PerReplica, PyTree
from mirrax._src.engines.signature import SAME, Kind, Signature, placed
from mirrax._src.engines.spmd import layout_in, stored_form
from mirrax._src.state.variable import Variable, shared


class SignatureChanged(BaseException):
    """JAX wants to trace a program again: it was called with other shapes than before."""


@dataclass(frozen=True)
class Staged:
    """A traced function, ready to be compiled.

    Attributes:
        signature: What it was traced for.
        reads: The variables it reads, with how they lie on the mesh.
        writes: The variables it writes, with how they lie on the mesh afterwards.
        apply: From variables' arrays and argument arrays to result arrays and the new
            arrays of `writes`.
        result: From result arrays to what the function returns.
        mesh: Where argument arrays have to be, if the call could not tell.
        forwarded: The variables that may share an array with the caller after a call.
    """

    signature: Signature
    reads: Mapping[Variable, Kind]
    writes: Mapping[Variable, Kind]
    apply: Callable[
        [Mapping[Variable, jax.Array], Sequence[Any]],
        tuple[list[jax.Array], list[jax.Array]],
    ]
    result: Callable[[Sequence[jax.Array]], PyTree]
    forwarded: frozenset[Variable]
    mesh: ReplicaMesh | None = None


class Program:
    """A staged function, compiled. Call it with the arrays of its arguments."""

    def __init__(self, staged: Staged, donated: Sequence[bool]) -> None:
        self.signature = staged.signature
        self._staged = staged
        self._donated = tuple(donated)
        # Donated: what is both read and written. Kept: what is only read.
        self._reused = [v for v in staged.reads if v in staged.writes]
        self._kept = [v for v in staged.reads if v not in staged.writes]
        self._written = list(staged.writes)
        self._split = [
            (v, kind) for v, kind in staged.writes.items() if kind is not SAME
        ]
        self._reads_split = any(kind is not SAME for kind in staged.reads.values())
        self._sealed = False
        self._jitted = jax.jit(self._pure, donate_argnums=(0, 1))

    def layouts_match(self) -> bool:
        """Whether the variables lie on the mesh as they did when this was traced."""
        return all(
            layout_in(v, v.stored)[0] == k for v, k in self._staged.reads.items()
        )

    def __call__(self, arrays: list[Any]) -> PyTree:
        if shared:
            self._unshare()
        if self._staged.mesh is not None:
            arrays = [placed(array, self._staged.mesh) for array in arrays]
        reused = [v.stored for v in self._reused]
        kept = [v.stored for v in self._kept]
        if self._reads_split:
            reused, kept = self._arrays_of(self._reused), self._arrays_of(self._kept)
        donated: list[Any] = []
        if True in self._donated:
            donated = [a for a, d in zip(arrays, self._donated) if d]
            arrays = [a for a, d in zip(arrays, self._donated) if not d]
        with launching:
            results, written = self._jitted(reused, donated, kept, arrays)
        after_launch(written or results)
        self._sealed = True
        for variable, value in zip(self._written, written):
            variable.stored = value
        for variable, kind in self._split:
            variable.stored = stored_form(variable, variable.stored, kind)
        if self._staged.forwarded:
            shared.update(v.number for v in self._staged.forwarded)
        return self._staged.result(results)

    def _arrays_of(self, variables: Sequence[Variable]) -> list[jax.Array]:
        return [layout_in(v, v.stored)[1] for v in variables]

    def _unshare(self) -> None:
        """Gives each variable that will be donated an array of its own."""
        for variable in [v for v in self._reused if v.number in shared]:
            if isinstance(variable.stored, PerReplica):
                variable.stored = PerReplica(
                    [jnp.copy(x) for x in variable.stored.values]
                )
            else:
                variable.stored = jnp.copy(variable.stored)
            shared.discard(variable.number)

    def _pure(
        self, reused: list[Any], donated: list[Any], kept: list[Any], arrays: list[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        if self._sealed:
            raise SignatureChanged
        values = dict(zip(self._reused + self._kept, reused + kept))
        # In the order of `reads`, which is the order the program was traced in.
        values = {v: values[v] for v in self._staged.reads}
        rest, given = iter(arrays), iter(donated)
        every = [next(given) if d else next(rest) for d in self._donated]
        return self._staged.apply(values, every)

    def lower(self, arrays: Sequence[Any]) -> Any:
        """JAX's lowered form, to look at what was compiled."""
        reused, kept = self._arrays_of(self._reused), self._arrays_of(self._kept)
        donated = [a for a, d in zip(arrays, self._donated) if d]
        rest = [a for a, d in zip(arrays, self._donated) if not d]
        sealed, self._sealed = self._sealed, False
        try:
            return self._jitted.lower(reused, donated, kept, rest)
        finally:
            self._sealed = sealed
