"""A traced function as a program of arrays, and what it takes to run that.

The program's inputs are the arrays of the variables that are read and of the arguments; its
outputs those of the result and of the variables that are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from mirrax._src.base.jax_compat import ClosedJaxpr, Tracer, eval_jaxpr
from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.base.values import Mirrored, PerReplica, PyTree, first_copy
from mirrax._src.engines.arguments import Signature
from mirrax._src.engines.jaxprs import handed_on
from mirrax._src.state.variable import Variable

# From the arrays of variables and arguments to those of the result and what was written.
Apply = Callable[
    [Sequence[jax.Array], Sequence[Any]], tuple[list[jax.Array], list[jax.Array]]
]


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
        handed_on: The variables whose array somebody else may hold after a call.
        bare_tree: The structure of the result, if nothing but arrays is in it that are
            returned as they come; None else.
        gives_back: Whether an argument may be in the result as it was given.
        consts: Arrays on the devices of several workers that the function closes over, which
            JAX takes as arguments only; they come after those of `apply`.
    """

    signature: Signature
    reads: Mapping[Variable, Layout]
    writes: Mapping[Variable, Layout]
    apply: Apply
    result: Callable[[Sequence[jax.Array], Sequence[Any]], PyTree]
    mesh: ReplicaMesh | None
    moves_arguments: bool
    handed_on: frozenset[Variable]
    bare_tree: Any = None
    gives_back: bool = True
    consts: Sequence[jax.Array] = ()


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

    @property
    def num_results(self) -> int:
        return sum(out.is_array for out in self.outs)

    def apply(
        self, values: Sequence[jax.Array], arrays: Sequence[Any], consts: Sequence[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The arrays of the result, and what was written."""
        run = self._on_all_devices if self.is_replicas else self._as_it_is
        outs = run([*values, *arrays], consts)
        return outs[: self.num_results], outs[self.num_results :]

    def _as_it_is(self, inputs: Sequence[Any], consts: Sequence[Any]) -> list[Any]:
        return eval_jaxpr(self.closed.jaxpr, consts, *inputs)

    def _on_all_devices(
        self, inputs: Sequence[Any], consts: Sequence[Any]
    ) -> list[jax.Array]:
        mesh = self.mesh
        assert mesh is not None
        ins = [*self.reads.values(), *self.signature.layouts()]
        outs = [o.layout for o in self.outs if o.layout] + list(self.writes.values())

        def body(consts: Sequence[Any], inputs: Sequence[Any]) -> list[jax.Array]:
            own = [x[0] if mesh.has_row(k) else x for x, k in zip(inputs, ins)]
            results = eval_jaxpr(self.closed.jaxpr, consts, *own)
            return [x[None] if mesh.has_row(k) else x for x, k in zip(results, outs)]

        return jax.shard_map(
            body,
            mesh=mesh.mesh,
            in_specs=(PartitionSpec(), [mesh.spec(k) for k in ins]),
            out_specs=[mesh.spec(k) for k in outs],
            check_vma=False,
        )(list(consts), list(inputs))

    def result(self, arrays: Sequence[Any], given: Sequence[Any]) -> PyTree:
        """What the function returns, from the program's results and the given arguments."""
        it = iter(arrays)
        mirrored, mirror = Layout.MIRRORED, Mirrored.of
        leaves = [
            mirror(next(it), out.mesh)
            if out.layout is mirrored
            else out.known(given)
            if out.layout is None
            else wrapped(next(it), out.layout, out.mesh)
            for out in self.outs
        ]
        return self.out_tree.unflatten(leaves)

    def staged(self, given_mesh: ReplicaMesh | None) -> Staged:
        """The program of a call whose arguments lie on `given_mesh`."""
        consts = self.closed.consts
        if self.is_replicas and self.mesh is not None:
            mirror = self.mesh.mirror
            consts = [mirror(c) if isinstance(c, jax.Array) else c for c in consts]
        count = len(self.signature.layouts())
        layouts = [out.layout for out in self.outs if out.layout]

        def apply(values: Sequence[jax.Array], arrays: Sequence[Any]) -> Any:
            return self.apply(values, arrays[:count], filled(consts, arrays[count:]))

        is_alone = self.mesh is None or self.mesh.size == 1
        is_bare = is_alone and all(out.layout is Layout.PLAIN for out in self.outs)
        return Staged(
            signature=self.signature,
            reads=self.reads,
            writes=self.writes,
            apply=on_every_worker(apply, layouts, self.mesh),
            result=self.result,
            bare_tree=self.out_tree if is_bare else None,
            gives_back=any(out.argument is not None for out in self.outs),
            mesh=self.mesh,
            moves_arguments=self.mesh is not None and self.mesh != given_mesh,
            handed_on=self.handed_on(),
            consts=[c for c in consts if _spans_workers(c)],
        )

    def handed_on(self) -> frozenset[Variable]:
        """The variables whose array somebody else may hold after a call."""
        return handed_on(self.closed.jaxpr, self.reads, self.writes, self.num_results)


def wrapped(array: Any, layout: Layout, mesh: ReplicaMesh | None) -> Any:
    """An array of a program as the value that users see."""
    if layout is Layout.MIRRORED:
        return Mirrored.of(array, mesh)
    if layout is Layout.PLAIN:
        return array if mesh is not None and mesh.size == 1 else first_copy(array)
    return PerReplica.of(array, mesh, layout)


def _spans_workers(const: Any) -> bool:
    is_real = isinstance(const, jax.Array) and not isinstance(const, Tracer)
    return is_real and not const.is_fully_addressable


def filled(consts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """All constants, with `given` in the places of those that span workers."""
    it = iter(given)
    return [next(it) if _spans_workers(c) else c for c in consts]


def on_every_worker(
    apply: Apply, layouts: Sequence[Layout], mesh: ReplicaMesh | None
) -> Apply:
    """The program of a call, with plain results on every device if workers share it."""
    if mesh is None or not mesh.is_shared:
        return apply

    def spread(
        values: Sequence[jax.Array], arrays: Sequence[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        results, written = apply(values, arrays)
        constrain = jax.lax.with_sharding_constraint
        return [
            r if layout.is_split else constrain(r, mesh.mirrored)
            for r, layout in zip(results, layouts)
        ], written

    return spread
