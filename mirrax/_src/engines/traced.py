"""A traced function as a program of arrays, and what it takes to run that.

The program's inputs are the arrays of the variables that are read and of the arguments; its
outputs those of the result and of the variables that are written.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from mirrax._src.base.jax_compat import ClosedJaxpr, eval_jaxpr
from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.base.values import Mirrored, PerReplica, PyTree, Sharded, first_copy
from mirrax._src.engines.arguments import Signature
from mirrax._src.engines.global_view import StagedProgram, is_marked
from mirrax._src.engines.jaxprs import handed_on
from mirrax._src.engines.merging import eval_call, eval_replica
from mirrax._src.state.variable import Variable


@dataclass(frozen=True, slots=True)
class Out:
    """A place in a result.

    It is an array of the program, which lies so on `mesh`; or an argument that comes back as
    it was given; or a value that is known since the trace.
    """

    layout: Layout | None = None
    mesh: ReplicaMesh | None = None
    argument: int | None = None
    static: Any = None

    @property
    def is_array(self) -> bool:
        return self.layout is not None

    def known(self, given: Sequence[Any]) -> Any:
        """What stands here if it is no array of the program."""
        if self.argument is not None:
            return given[self.argument]
        # A NumPy array can be changed by whoever gets it, so each call gives a new one.
        is_mutable = isinstance(self.static, np.ndarray)
        return self.static.copy() if is_mutable else self.static


@dataclass(frozen=True)
class Trace:
    """A traced function as a program of arrays.

    The jaxpr takes the variables in `reads` and then the arrays of the arguments, and
    gives the arrays of the result and then the new values of `writes`.

    Attributes:
        mesh: Where the program runs, if that is known.
        is_replicas: Whether the jaxpr is one replica's, which all devices run.
        runs: How many calls of `run` are in it.
    """

    closed: ClosedJaxpr
    signature: Signature
    reads: Mapping[Variable, Layout]
    writes: Mapping[Variable, Layout]
    created: tuple[Variable, ...]
    out_tree: Any
    outs: tuple[Out, ...]
    mesh: ReplicaMesh | None
    is_replicas: bool
    runs: int

    @functools.cached_property
    def out_layouts(self) -> list[Layout]:
        """How the arrays of the result lie."""
        return [out.layout for out in self.outs if out.layout]

    @property
    def num_results(self) -> int:
        return len(self.out_layouts)

    def apply(
        self,
        values: Sequence[jax.Array],
        arrays: Sequence[Any],
        consts: Sequence[Any],
        is_part: bool = False,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """From the arrays of what is read and of the arguments to those of the result, and
        the new ones of what is written.

        If it `is_part` of a larger program, its sums wait for that one's.
        """
        given = list(consts), [*values, *arrays], not is_part
        run = self._on_all_devices if self.is_replicas else self._evaluate
        outs = run(*given)
        return outs[: self.num_results], outs[self.num_results :]

    def _evaluate(
        self, consts: list[Any], inputs: Sequence[Any], is_merged: bool
    ) -> list[jax.Array]:
        if not is_merged or self.mesh is None or self.mesh.size == 1:
            return eval_jaxpr(self.closed.jaxpr, consts, *inputs)
        evaluate = eval_replica if self.is_replicas else eval_call
        return evaluate(self.closed.jaxpr, consts, inputs, self.mesh)

    def _on_all_devices(
        self, consts: list[Any], inputs: list[Any], is_merged: bool
    ) -> list[jax.Array]:
        mesh = self.mesh
        assert mesh is not None
        ins = [*self.reads.values(), *self.signature.layouts()]
        outs = [*self.out_layouts, *self.writes.values()]
        if mesh.size > 1 and is_marked(self.closed.jaxpr):
            program = StagedProgram(self.closed.jaxpr, ins, mesh, is_merged)
            staged = program.run(consts, inputs)
            # XLA would also leave in parts what nobody has asked to be.
            return [settled(v.array, k, mesh) for v, k in zip(staged, outs)]

        def body(consts: list[Any], inputs: list[Any]) -> list[jax.Array]:
            own = [x[0] if mesh.has_row(k) else x for x, k in zip(inputs, ins)]
            results = self._evaluate(consts, own, is_merged)
            return [x[None] if mesh.has_row(k) else x for x, k in zip(results, outs)]

        results = jax.shard_map(
            body,
            mesh=mesh.mesh,
            in_specs=(PartitionSpec(), [mesh.spec(k) for k in ins]),
            out_specs=[mesh.spec(k) for k in outs],
            check_vma=False,
        )(consts, inputs)
        sharded = Layout.SHARDED
        return [
            settled(x, k, mesh) if k is sharded else x for x, k in zip(results, outs)
        ]

    def result(self, arrays: Sequence[Any], given: Sequence[Any]) -> PyTree:
        """What the function returns, from the program's results and the given arguments."""
        if self._is_mirrored:
            return self.out_tree.unflatten(Mirrored.of_each(arrays, self.mesh))
        it = iter(arrays)
        leaves = [
            out.known(given)
            if out.layout is None
            else wrapped(next(it), out.layout, out.mesh)
            for out in self.outs
        ]
        return self.out_tree.unflatten(leaves)

    @functools.cached_property
    def _is_mirrored(self) -> bool:
        """Whether all of the result is the same on all replicas, as a state and a loss are."""
        layout, mesh = Layout.MIRRORED, self.mesh
        return all(out.layout is layout and out.mesh is mesh for out in self.outs)

    def handed_on(self) -> frozenset[Variable]:
        """The variables whose array somebody else may hold after a call."""
        return handed_on(self.closed.jaxpr, self.reads, self.writes, self.num_results)


def settled(array: jax.Array, layout: Layout, mesh: ReplicaMesh) -> jax.Array:
    """An array of a program, which lies as `layout` says."""
    is_sharded = layout is Layout.SHARDED
    place = mesh.sharded(array.shape) if is_sharded else mesh.mirrored
    place = mesh.split if layout.is_split else place
    return jax.lax.with_sharding_constraint(array, place)


def wrapped(array: Any, layout: Layout, mesh: ReplicaMesh | None) -> Any:
    """An array of a program as the value that users see."""
    if layout is Layout.MIRRORED:
        return Mirrored.of(array, mesh)
    if layout is Layout.SHARDED:
        return Sharded.of(array, mesh)
    if layout is Layout.PLAIN:
        return array if mesh is not None and mesh.size == 1 else first_copy(array)
    return PerReplica.of(array, mesh, layout)
