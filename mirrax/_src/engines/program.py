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

from mirrax._src.base import launches
from mirrax._src.base.logical import after_launch, launching
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.values import PyTree
from mirrax._src.engines.signature import SAME, Kind, Signature, Split, placed
from mirrax._src.engines.spmd import layout_in, stored_form
from mirrax._src.state.distributed import DistributedVariable
from mirrax._src.state.variable import Variable, lost, shared


class SignatureChanged(BaseException):
    """JAX wants to trace a program again: it was called with other shapes than before."""


@dataclass(frozen=True)
class Staged:
    """A traced function, ready to be compiled.

    Attributes:
        signature: What it was traced for.
        reads: The variables it reads, with how they lie on the mesh.
        writes: The variables it writes, with how they lie on the mesh afterwards.
        apply: From the arrays of `reads` and of the arguments to those of the result and
            the new ones of `writes`.
        result: From the arrays of the result and of the arguments to what is returned.
        mesh: Where the program runs, if that is known.
        moves_arguments: Whether argument arrays may not be there yet.
        forwarded: The variables whose array somebody else may hold after a call.
        consts: Arrays on the devices of several workers that the function closes over, which
            JAX takes as arguments only; they come after those of `apply`.
    """

    signature: Signature
    reads: Mapping[Variable, Kind]
    writes: Mapping[Variable, Kind]
    apply: Callable[
        [Sequence[jax.Array], Sequence[Any]], tuple[list[jax.Array], list[jax.Array]]
    ]
    result: Callable[[Sequence[jax.Array], Sequence[Any]], PyTree]
    mesh: ReplicaMesh | None
    moves_arguments: bool
    forwarded: frozenset[Variable]
    consts: Sequence[jax.Array] = ()


class Program:
    """A staged function, compiled. Call it with the arrays of its arguments."""

    def __init__(self, staged: Staged, donated: Sequence[bool], label: str) -> None:
        self.signature = staged.signature
        # Only programs that other workers run as well are watched over.
        self._label = label if staged.mesh is not None and staged.mesh.is_shared else ""
        self._staged = staged
        self._donated = tuple(donated)
        # Donated: what is both read and written. Kept: what is only read.
        self._reused = [v for v in staged.reads if v in staged.writes]
        self._kept = [v for v in staged.reads if v not in staged.writes]
        # JAX reuses donated memory for outputs of the same shape in the order of both
        # lists, so that what is updated in place comes first, in the order of the inputs.
        others = [v for v in staged.writes if v not in staged.reads]
        self._written = [*self._reused, *others]
        # What needs more than taking the stored array and storing the new one.
        self._is_plain = all(
            kind is SAME and isinstance(v, DistributedVariable)
            for v, kind in (*staged.reads.items(), *staged.writes.items())
        )
        self._sealed = False
        self._smallest: int | None = None
        # With `jax_debug_nans` JAX runs a failed step again, on the same arguments.
        debug = jax.config.jax_debug_nans  # pyright: ignore[reportAttributeAccessIssue]
        self._jitted = jax.jit(self._pure, donate_argnums=() if debug else (0, 1))

    def layouts_match(self) -> bool:
        """Whether the variables lie on the mesh as they did when this was traced."""
        return all(
            layout_in(v, v.stored)[0] == k for v, k in self._staged.reads.items()
        )

    def __call__(self, arrays: list[Any], given: list[Any]) -> PyTree:
        """The function's result; `arrays` are the leaves `given` as the program takes them."""
        # One at a time: a second thread must not take arrays that are being donated.
        with launching:
            if lost:
                self._check_not_lost()
            if shared:
                self._unshare()
            inputs = self._inputs(arrays)
            if self._label:
                written, results = self._launch_watched(*inputs)
            else:
                written, results = self._launch(*inputs)
        after_launch(written or results)
        return self._staged.result(results, given)

    def _launch_watched(self, *inputs: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        """A launch that other workers take part in."""
        assert self._staged.mesh is not None
        cluster = self._staged.mesh.cluster
        cluster.check()
        launches.last.begin(self._label)
        try:
            with cluster.explaining():
                written, results = self._launch(*inputs)
        except BaseException:
            launches.last.undo()
            raise
        every = [*written, *results]
        if self._smallest is None:
            self._smallest = launches.smallest(every)
        at = self._smallest
        launches.last.end(None if at is None else every[at])
        return written, results

    def compile_and_call(self, arrays: list[Any], given: list[Any]) -> PyTree:
        """As a call, but JAX may trace the program again: for other placements, say."""
        self._sealed = False
        return self(arrays, given)

    def _inputs(self, arrays: Sequence[Any]) -> tuple[list[Any], ...]:
        """The four lists of arrays that the compiled function takes."""
        if self._is_plain:
            reused, kept = (
                [v.stored for v in self._reused],
                [v.stored for v in self._kept],
            )
        else:
            reused, kept = self._arrays_of(self._reused), self._arrays_of(self._kept)
        if self._staged.moves_arguments:
            kinds = self.signature.array_kinds()
            arrays = [
                a if isinstance(k, Split) else placed(a, self._staged.mesh)
                for a, k in zip(arrays, kinds)
            ]
        consts = self._staged.consts
        if True not in self._donated:
            return reused, [], kept, [*arrays, *consts]
        donated = [a for a, d in zip(arrays, self._donated) if d]
        if len({id(a) for a in donated}) < len(donated):
            raise ValueError(
                "An array is donated twice: it stands at two places of the arguments that "
                "`donate_argnums` names. Copy it first, `jnp.copy(x)`."
            )
        return (
            reused,
            donated,
            kept,
            [*(a for a, d in zip(arrays, self._donated) if not d), *consts],
        )

    def _launch(
        self, reused: list[Any], donated: list[Any], kept: list[Any], arrays: list[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs the step and stores what it has written."""
        done: list[Any] = []
        try:
            # One call in C: an interrupt (Ctrl-C) comes before it or after it, never when
            # the old arrays are gone and the new ones are nowhere yet.
            done.extend(map(self._jitted, (reused,), (donated,), (kept,), (arrays,)))
            self._store(done[0][0])
        except SignatureChanged:
            raise
        except BaseException as error:
            if done:
                self._store(done[0][0])
            else:
                self._explain(error, reused)
            raise
        self._sealed = True
        return done[0]

    def _explain(self, error: BaseException, reused: Sequence[Any]) -> None:
        """Says what has been lost, where a step failed after it had begun."""
        gone = [v for v, a in zip(self._reused, reused) if a.is_deleted()]
        if gone:
            lost.update(v.number for v in gone)
            error.add_note(
                "The step failed while it updated variables in place: "
                f"{', '.join(v.name for v in gone)} have lost their values. Assign them "
                "again, or restore a checkpoint."
            )

    def _store(self, written: Sequence[jax.Array]) -> None:
        if self._is_plain:
            for variable, value in zip(self._written, written):
                variable.stored = value
        else:
            for variable, value in zip(self._written, written):
                kind = self._staged.writes[variable]
                variable.stored = stored_form(variable, value, kind)
        if self._staged.forwarded:
            shared.update(v.number for v in self._staged.forwarded)

    def _arrays_of(self, variables: Sequence[Variable]) -> list[jax.Array]:
        # An ordinary variable may have been left on the devices of another strategy.
        return [
            layout_in(v, v.stored)[1]
            if isinstance(v, DistributedVariable)
            else placed(v.stored, self._staged.mesh)
            for v in variables
        ]

    def _check_not_lost(self) -> None:
        for variable in (*self._reused, *self._kept):
            variable.check_not_lost()

    def _unshare(self) -> None:
        """Gives each variable that will be donated an array of its own."""
        for variable in [v for v in self._reused if v.number in shared]:
            kind, array = layout_in(variable, variable.stored)
            variable.stored = stored_form(variable, jnp.copy(array), kind)
            shared.discard(variable.number)

    def _pure(
        self, reused: list[Any], donated: list[Any], kept: list[Any], arrays: list[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        if self._sealed:
            raise SignatureChanged
        values = dict(zip(self._reused + self._kept, reused + kept))
        rest, given = iter(arrays), iter(donated)
        every = [next(given) if d else next(rest) for d in self._donated] + [*rest]
        results, new = self._staged.apply(
            [values[v] for v in self._staged.reads], every
        )
        written = dict(zip(self._staged.writes, new))
        return [written[v] for v in self._written], results

    def lower(self, arrays: Sequence[Any]) -> Any:
        """JAX's lowered form, to look at what was compiled."""
        sealed, self._sealed = self._sealed, False
        try:
            return self._jitted.lower(*self._inputs(arrays))
        finally:
            self._sealed = sealed
