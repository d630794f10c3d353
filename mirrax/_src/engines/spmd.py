"""One program for all replicas: a replica function is traced once, then run by `shard_map`.

`trace_replica` turns the function into a `ReplicaTrace`: a jaxpr of one replica's arrays,
with the variables it reads as inputs and those it writes as outputs. `ReplicaTrace.bind`
runs that jaxpr on every device of the mesh.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from mirrax._src.base import context
from mirrax._src.base.jax_compat import (
    ClosedJaxpr,
    Tracer,
    eval_jaxpr,
    make_jaxpr,
    with_inputs,
)
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
)
from mirrax._src.state.distributed import DistributedVariable
from mirrax._src.state.frame import Frame
from mirrax._src.state.variable import Variable


@dataclass(frozen=True)
class Slot:
    """A place in a result.

    It is an array of the program; or an argument that comes back as it was given; or a
    value that is known since the trace.
    """

    is_array: bool = False
    argument: int | None = None
    static: Any = None

    def known(self, given: Sequence[Any]) -> Any:
        """What stands here if it is no array of the program."""
        if self.argument is not None:
            return given[self.argument]
        # A NumPy array can be changed by whoever gets it, so each call gives a new one.
        is_mutable = isinstance(self.static, np.ndarray)
        return self.static.copy() if is_mutable else self.static


@dataclass(frozen=True)
class ReplicaTrace:
    """A replica function as a program of one replica's arrays.

    The jaxpr takes the variables in `reads` and then the arrays of the arguments, and
    gives the arrays of the result and then the new values of `written`.
    """

    mesh: ReplicaMesh
    closed: ClosedJaxpr
    signature: Signature
    reads: Mapping[Variable, Kind]
    written: tuple[Variable, ...]
    created: tuple[Variable, ...]
    out_tree: Any
    slots: tuple[Slot, ...]
    is_same: tuple[bool, ...]

    @property
    def num_results(self) -> int:
        return sum(slot.is_array for slot in self.slots)

    @functools.cached_property
    def out_kinds(self) -> list[Kind]:
        """How each output of the program lies on the mesh."""
        if self.mesh.size == 1:
            return [SAME] * len(self.is_same)
        return [
            SAME if same else SPLIT_SCALAR if aval.ndim == 0 else SPLIT
            for same, aval in zip(self.is_same, self.closed.out_avals)
        ]

    @property
    def writes(self) -> dict[Variable, Kind]:
        """The variables that are written, with how they lie on the mesh afterwards."""
        return dict(zip(self.written, self.out_kinds[self.num_results :]))

    def bind(
        self, values: Sequence[jax.Array], arrays: Sequence[Any], consts: Sequence[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs the program on all devices: the arrays of the result, and what was written."""
        in_kinds = [*self.reads.values(), *self.signature.array_kinds()]
        out_kinds = self.out_kinds

        def body(consts: Sequence[Any], inputs: Sequence[Any]) -> list[jax.Array]:
            own = [
                x[0] if _has_row(k, self.mesh) else x for x, k in zip(inputs, in_kinds)
            ]
            outs = eval_jaxpr(self.closed.jaxpr, consts, *own)
            return [
                x[None] if k == SPLIT_SCALAR else x for x, k in zip(outs, out_kinds)
            ]

        outs = jax.shard_map(
            body,
            mesh=self.mesh.mesh,
            in_specs=(PartitionSpec(), [_spec(k, self.mesh) for k in in_kinds]),
            out_specs=[_spec(k, self.mesh) for k in out_kinds],
            check_vma=False,
        )(list(consts), [*values, *arrays])
        return outs[: self.num_results], outs[self.num_results :]

    def result(self, results: Sequence[Any], given: Sequence[Any]) -> PyTree:
        """What the function returns, from the program's results and the given arguments."""
        mesh, kinds = self.mesh, self.out_kinds
        if mesh.size > 1:
            results = [
                Mirrored.of(array)
                if kind is SAME
                else PerReplica.of(Stacked(array, mesh, kind is SPLIT_SCALAR))
                for array, kind in zip(results, kinds)
            ]
        it = iter(results)
        leaves = [next(it) if s.is_array else s.known(given) for s in self.slots]
        return jax.tree.unflatten(self.out_tree, leaves)


def first_copy(array: Any) -> Any:
    """A replicated array as one array on the first device; anything else as it is."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return array
    is_spread = len(array.sharding.device_set) > 1 and array.is_fully_replicated
    return copies_of(array)[0] if is_spread else array


def stored_form(variable: Variable, array: jax.Array, kind: Kind) -> Any:
    """An array of a program as what `variable` stores."""
    if not isinstance(variable, DistributedVariable) and variable.strategy is None:
        return first_copy(array)
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
    may_forward: bool = True,
    who: str | None = None,
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
        may_forward: Whether a plain argument that is returned comes back as it is; it
            cannot when it is donated.
        who: Whom the trace is for, in messages; all replicas by default.
    """
    count = strategy.num_replicas_in_sync
    who = who or f"the one program for all {count} replica(s)"
    outcome: list[Any] = []  # no tracers: they must not outlive the trace

    def body(values: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
        frame = Frame(
            dict(zip(variables, values)),
            is_local=True,
            is_spmd=True,
            is_uneven=is_uneven,
            parent=parent,
        )
        args, kwargs = signature.rebuild(arrays)
        with frame, context.enter(make_context(frame)), raised_in(who):
            result = fn(*args, **kwargs)
            leaves, tree = jax.tree.flatten(result, is_leaf=is_leaf)
            leaves = [_own_part(leaf) for leaf in leaves]
        kinds = signature.array_kinds()
        given = {id(a): i for i, (a, k) in enumerate(zip(arrays, kinds)) if k == SAME}
        given = given if may_forward else {}
        slots = tuple(_slot(leaf, given) for leaf in leaves)
        outcome[:] = tree, slots, set(frame.reads), tuple(frame.writes), frame.created
        return [x for x, slot in zip(leaves, slots) if slot.is_array] + list(
            frame.writes.values()
        )

    values = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
    closed = make_jaxpr(
        body, (AXIS_NAME, strategy.replica_mesh.size), (values, list(avals))
    )
    out_tree, slots, used, written, created = outcome
    closed = only_reads(closed, variables, used)
    reads = {v: kind for v, kind in variables.items() if v in used}
    kinds = [*reads.values(), *signature.array_kinds()]
    is_same = [not isinstance(kind, Split) for kind in kinds]
    return ReplicaTrace(
        mesh=strategy.replica_mesh,
        closed=closed,
        signature=signature,
        reads=reads,
        written=written,
        created=tuple(created),
        out_tree=out_tree,
        slots=slots,
        is_same=tuple(invariant_outputs(closed.jaxpr, is_same)),
    )


@contextlib.contextmanager
def raised_in(who: str) -> Iterator[None]:
    """Notes where an exception of the user's came from."""
    try:
        yield
    except Exception as error:
        error.add_note(f"Raised in {who}.")
        raise


def only_reads(
    closed: ClosedJaxpr, variables: Collection[Variable], used: Collection[Variable]
) -> ClosedJaxpr:
    """A trace of all variables as one of those only that were read."""
    invars = closed.jaxpr.invars
    kept = [var for var, v in zip(invars, variables) if v in used]
    return with_inputs(closed, [*kept, *invars[len(variables) :]])


def local_avals(
    signature: Signature, arrays: Sequence[Any], mesh: ReplicaMesh
) -> list[jax.ShapeDtypeStruct]:
    """One replica's part of each argument array, without its values."""
    avals = []
    for kind, array in zip(signature.array_kinds(), arrays):
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


def _slot(leaf: Any, given: Mapping[int, int]) -> Slot:
    # An array made while tracing is an output. One that existed before is the same object
    # for all replicas and comes back as itself, and so does a plain argument.
    if id(leaf) in given:
        return Slot(argument=given[id(leaf)])
    return Slot(is_array=True) if isinstance(leaf, Tracer) else Slot(static=leaf)


def _has_row(kind: Kind, mesh: ReplicaMesh) -> bool:
    return kind == SPLIT_SCALAR and mesh.size > 1


def _spec(kind: Kind, mesh: ReplicaMesh) -> PartitionSpec:
    return mesh.split_spec if isinstance(kind, Split) else PartitionSpec()


def in_program(local: jax.Array, num_local: int) -> PerReplica:
    """This replica's array as the per-replica value that a `merge_fn` sees."""
    return PerReplica.of(InProgram(jnp.asarray(local), num_local))
