"""One program for all replicas: a replica function is traced once, then run by `shard_map`.

`trace_replica` turns the function into a `ReplicaTrace`: a jaxpr of one replica's arrays,
with the variables it reads as inputs and those it writes as outputs. `ReplicaTrace.bind`
runs that jaxpr on every device of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mirrax._src.base import context
from mirrax._src.base.jax_compat import ClosedJaxpr, Tracer, eval_jaxpr, make_jaxpr
from mirrax._src.base.mesh import AXIS_NAME, ReplicaMesh
from mirrax._src.base.values import (
    InProgram,
    Mirrored,
    PerReplica,
    PyTree,
    ReplicaValues,
    Stacked,
    copies_of,
    is_leaf,
    stack,
)
from mirrax._src.engines.invariance import invariant_outputs
from mirrax._src.engines.signature import (
    SAME,
    SPLIT,
    SPLIT_SCALAR,
    Kind,
    Signature,
    Split,
    Static,
)
from mirrax._src.state.frame import Frame
from mirrax._src.state.variable import Variable


@dataclass(frozen=True)
class Slot:
    """A place in a result: an array of the program, or a value known while tracing."""

    is_array: bool
    static: Any = None


@dataclass(frozen=True)
class ReplicaTrace:
    """A replica function as a program of one replica's arrays.

    The jaxpr takes all `variables` and then the arrays of the arguments, and gives the
    arrays of the result and then the new values of `written`.
    """

    mesh: ReplicaMesh
    closed: ClosedJaxpr
    signature: Signature
    variables: Mapping[Variable, Kind]
    reads: tuple[Variable, ...]
    written: tuple[Variable, ...]
    created: tuple[Variable, ...]
    out_tree: Any
    slots: tuple[Slot, ...]
    is_same: tuple[bool, ...]

    @property
    def num_results(self) -> int:
        return sum(slot.is_array for slot in self.slots)

    def out_kind(self, i: int) -> Kind:
        """How output `i` of the program lies on the mesh."""
        if self.is_same[i] or self.mesh.size == 1:
            return SAME
        return SPLIT_SCALAR if self.closed.out_avals[i].ndim == 0 else SPLIT

    def bind(
        self,
        values: Mapping[Variable, jax.Array],
        arrays: Sequence[Any],
        consts: Sequence[Any],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs the program on all devices: the arrays of the result, and what was written."""
        in_kinds = [self.variables[v] for v in values] + [
            kind for kind in self.signature.kinds if not isinstance(kind, Static)
        ]
        out_kinds = [self.out_kind(i) for i in range(len(self.is_same))]
        positions = {v: i for i, v in enumerate(self.variables)}

        def body(consts: Sequence[Any], inputs: Sequence[Any]) -> list[jax.Array]:
            local = [_from_row(x, k, self.mesh) for x, k in zip(inputs, in_kinds)]
            bound: list[Any] = [None] * len(self.variables)
            for variable, value in zip(values, local):
                bound[positions[variable]] = value
            outs = eval_jaxpr(self.closed.jaxpr, consts, *bound, *local[len(values) :])
            return [
                x[None] if k == SPLIT_SCALAR else x for x, k in zip(outs, out_kinds)
            ]

        outs = jax.shard_map(
            body,
            mesh=self.mesh.mesh,
            in_specs=(PartitionSpec(), [_spec(k, self.mesh) for k in in_kinds]),
            out_specs=[_spec(k, self.mesh) for k in out_kinds],
            check_vma=False,
        )(list(consts), [*values.values(), *arrays])
        return outs[: self.num_results], outs[self.num_results :]

    def result(self, arrays: Sequence[jax.Array]) -> PyTree:
        """The function's result, from the arrays that the program returned."""
        it = iter(range(len(arrays)))
        leaves = [
            self._wrap(arrays[i := next(it)], i) if slot.is_array else slot.static
            for slot in self.slots
        ]
        return jax.tree.unflatten(self.out_tree, leaves)

    def _wrap(self, array: jax.Array, i: int) -> Any:
        return wrap_result(array, self.out_kind(i), self.mesh)


def wrap_result(array: jax.Array, kind: Kind, mesh: ReplicaMesh) -> Any:
    """An array of a program as what `run` returns."""
    if mesh.size == 1:
        return array if isinstance(array, Tracer) else copies_of(array)[0]
    if isinstance(kind, Split):
        return PerReplica.of(Stacked(array, mesh, kind.is_scalar))
    return Mirrored.of(array)


def stored_form(variable: Variable, array: jax.Array, kind: Kind) -> Any:
    """An array of a program as what `variable` stores."""
    if isinstance(kind, Split):
        return PerReplica.of(
            Stacked(array, variable.strategy.replica_mesh, kind.is_scalar)
        )
    return array


def layout_in(variable: Variable, value: Any) -> tuple[Kind, Any]:
    """How `value` of `variable` lies on its mesh, and its array."""
    if not isinstance(value, PerReplica):
        return SAME, value
    piece = stack(value, variable.strategy.replica_mesh)
    if piece.mesh.size == 1:
        return SAME, piece.array
    return (SPLIT_SCALAR if piece.is_scalar else SPLIT), piece.array


def trace_replica(
    strategy: Any,
    fn: Callable[..., Any],
    signature: Signature,
    avals: Sequence[jax.ShapeDtypeStruct],
    variables: Mapping[Variable, Kind],
    make_context: Callable[[Frame], context.Context],
    parent: Frame | None = None,
    is_uneven: bool = False,
) -> ReplicaTrace:
    """Traces `fn` once, as every replica will run it.

    Args:
        strategy: Whose replicas run `fn`.
        fn: The replica function.
        signature: The structure and kinds of its arguments.
        avals: One replica's part of each argument array.
        variables: All variables that `fn` might use, with how they lie on the mesh.
        make_context: The context that `fn` runs in, for the frame it is traced with.
        parent: The frame of the traced code that calls `run`, if any.
        is_uneven: Whether other replicas' arguments have other shapes.
    """
    frames: list[Frame] = []
    outcome: list[Any] = []

    def body(values: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
        frame = Frame(
            dict(zip(variables, values)),
            is_local=True,
            is_spmd=True,
            is_uneven=is_uneven,
            parent=parent,
        )
        frames.append(frame)
        args, kwargs = signature.rebuild(arrays)
        with context.enter(make_context(frame)):
            result = fn(*args, **kwargs)
            leaves, tree = jax.tree.flatten(result, is_leaf=is_leaf)
            leaves = [_own_part(leaf) for leaf in leaves]
        slots = tuple(_slot(leaf) for leaf in leaves)
        outcome.append((tree, slots))
        return [x for x, slot in zip(leaves, slots) if slot.is_array] + list(
            frame.writes.values()
        )

    values = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
    closed = make_jaxpr(
        body, (AXIS_NAME, strategy.replica_mesh.size), (values, list(avals))
    )
    frame, (out_tree, slots) = frames[-1], outcome[-1]
    dynamic = [k for k in signature.kinds if not isinstance(k, Static)]
    inputs = [not isinstance(k, Split) for k in [*variables.values(), *dynamic]]
    return ReplicaTrace(
        mesh=strategy.replica_mesh,
        closed=closed,
        signature=signature,
        variables=dict(variables),
        reads=tuple(frame.reads),
        written=tuple(frame.writes),
        created=tuple(frame.created),
        out_tree=out_tree,
        slots=slots,
        is_same=tuple(invariant_outputs(closed.jaxpr, inputs)),
    )


def local_avals(
    signature: Signature, arrays: Sequence[Any], mesh: ReplicaMesh
) -> list[jax.ShapeDtypeStruct]:
    """One replica's part of each argument array, without its values."""
    kinds = [kind for kind in signature.kinds if not isinstance(kind, Static)]
    avals = []
    for kind, array in zip(kinds, arrays):
        aval = jax.typeof(array)
        shape = aval.shape
        if isinstance(kind, Split):
            shape = Stacked(aval, mesh, kind.is_scalar).local_shape  # type: ignore[arg-type]
        avals.append(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type))
    return avals


def _own_part(leaf: Any) -> Any:
    """A leaf that a replica function returns, as this replica's own."""
    if isinstance(leaf, Mirrored) and leaf.piece is not None:
        return leaf.piece
    if isinstance(leaf, PerReplica) and isinstance(leaf.piece, InProgram):
        return leaf.piece.array
    if isinstance(leaf, ReplicaValues):
        raise ValueError(
            "A replica function returned a per-replica value, which has parts of all "
            "replicas; return this replica's part only."
        )
    return leaf


def _slot(leaf: Any) -> Slot:
    # An array made while tracing is an output. One that existed before is the same
    # object for all replicas, and comes back as itself.
    return Slot(True) if isinstance(leaf, Tracer) else Slot(False, leaf)


def _from_row(x: jax.Array, kind: Kind, mesh: ReplicaMesh) -> jax.Array:
    return x[0] if kind == SPLIT_SCALAR and mesh.size > 1 else x


def _spec(kind: Kind, mesh: ReplicaMesh) -> PartitionSpec:
    return mesh.split_spec if isinstance(kind, Split) else PartitionSpec()


def in_program(local: jax.Array, num_replicas: int) -> PerReplica:
    """This replica's array as the per-replica value that a `merge_fn` sees."""
    return PerReplica.of(InProgram(jnp.asarray(local), num_replicas))
