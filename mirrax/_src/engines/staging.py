"""Traces a function that uses variables: once, to a program of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from mirrax._src.base import context
from mirrax._src.base.jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    Tracer,
    eval_jaxpr,
    make_jaxpr,
)
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.values import (
    InProgram,
    Mirrored,
    PerReplica,
    PyTree,
    ReplicaValues,
    Stacked,
    is_leaf,
)
from mirrax._src.engines.program import Staged
from mirrax._src.engines.replica_context import SpmdReplicaContext
from mirrax._src.engines.signature import (
    SAME,
    SAME_WRAPPED,
    SPLIT,
    SPLIT_SCALAR,
    Kind,
    Signature,
    Split,
    Static,
    sort_arguments,
)
from mirrax._src.engines.spmd import (
    ReplicaTrace,
    Slot,
    first_copy,
    layout_in,
    local_avals,
    only_reads,
    stored_form,
    trace_replica,
)
from mirrax._src.state.distributed import DistributedVariable
from mirrax._src.state.frame import Frame
from mirrax._src.state.variable import Variable, live_variables


def stage_run(
    strategy: Any,
    fn: Callable[..., PyTree],
    signature: Signature,
    arrays: Sequence[Any],
    may_forward: bool = True,
) -> Staged:
    """`strategy.run(fn, ...)` as a program."""
    mesh = strategy.replica_mesh
    avals = local_avals(signature, arrays, mesh)

    def trace() -> ReplicaTrace:
        variables = {v: layout_in(v, v.stored)[0] for v in usable_variables(strategy)}
        return trace_replica(
            strategy,
            fn,
            signature,
            avals,
            variables,
            replica_context(strategy),
            may_forward=may_forward,
        )

    traced = until_no_new_variables(trace, fn)
    consts = [
        mesh.mirror(c) if isinstance(c, jax.Array) else c for c in traced.closed.consts
    ]
    return Staged(
        signature=signature,
        reads=traced.reads,
        writes=traced.writes,
        apply=lambda values, arrays: traced.bind(
            values, arrays[: len(avals)], _filled(consts, arrays[len(avals) :])
        ),
        consts=spanning(consts),
        result=traced.result,
        mesh=mesh,
        moves_arguments=False,
        forwarded=forwarded(
            traced.closed.jaxpr, traced.reads, traced.writes, traced.num_results
        ),
    )


def run_in_trace(
    strategy: Any,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PyTree:
    """`strategy.run(fn, ...)` inside a function that is being traced."""
    if context.in_program(context.current()):
        replica = SpmdReplicaContext(strategy)
        return call_in_program(strategy, fn, args, kwargs, replica=replica)
    return call_in_trace(strategy, fn, args, kwargs, replica_context(strategy))


def call_in_program(
    strategy: Any,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    **place: Any,
) -> PyTree:
    """`fn` on each replica, from a `merge_fn` inside the program that all replicas run.

    `place` says what context `fn` runs in.
    """

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, ReplicaValues):
            return leaf
        if isinstance(leaf.piece, InProgram):
            return leaf.piece.array
        return leaf.piece if leaf.piece is not None else leaf.values[0]

    def spread(leaf: Any) -> Any:
        return strategy.in_program_value(leaf) if isinstance(leaf, Tracer) else leaf

    args, kwargs = jax.tree.map(own, (args, kwargs), is_leaf=is_leaf)
    with context.changed(**place):
        result = fn(*args, **kwargs)
    return jax.tree.map(spread, result, is_leaf=is_leaf)


def call_in_trace(
    strategy: Any,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    make_context: Callable[[Frame], context.Context],
) -> PyTree:
    """`fn` on all replicas, as a part of the program that is being traced."""
    mesh = strategy.replica_mesh
    parent = context.current().frame
    if parent is not None:
        parent.meshes.append(mesh)
    signature, arrays, given = sort_arguments(args, kwargs, mesh)
    look_up = parent.look_up if parent else lambda variable: variable.stored
    variables = {v: layout_in(v, look_up(v))[0] for v in usable_variables(strategy)}
    traced = trace_replica(
        strategy,
        fn,
        signature,
        local_avals(signature, arrays, mesh),
        variables,
        make_context,
        parent,
    )
    read = parent.read if parent else look_up
    values = [layout_in(v, read(v))[1] for v in traced.reads]
    results, written = traced.bind(values, arrays, traced.closed.consts)
    for (variable, kind), array in zip(traced.writes.items(), written):
        if parent is None:
            raise RuntimeError(
                f"Variable {variable.name!r} is assigned in a `run` inside `jax.jit`, which "
                "knows nothing of variables. Use `mx.function` in place of `jax.jit`."
            )
        parent.write(variable, stored_form(variable, array, kind))
    return traced.result(results, given)


@dataclass(frozen=True)
class _Code:
    """A traced call as a program; it knows nothing of the variables that it reads."""

    closed: ClosedJaxpr
    out_tree: Any
    out_kinds: tuple[Kind, ...]
    out_meshes: tuple[ReplicaMesh | None, ...]

    @property
    def num_results(self) -> int:
        return sum(not isinstance(kind, Static) for kind in self.out_kinds)

    def apply(
        self, values: Sequence[jax.Array], arrays: Sequence[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        count = len(self.closed.in_avals) - len(values)
        consts = _filled(self.closed.consts, arrays[count:])
        outs = eval_jaxpr(self.closed.jaxpr, consts, *values, *arrays[:count])
        return outs[: self.num_results], outs[self.num_results :]

    def result(self, results: Sequence[jax.Array], arrays: Sequence[Any]) -> PyTree:
        it = iter(results)
        leaves = [
            Slot(static=kind.value).known(arrays)
            if isinstance(kind, Static)
            else _wrap(next(it), kind, mesh)
            for kind, mesh in zip(self.out_kinds, self.out_meshes)
        ]
        return jax.tree.unflatten(self.out_tree, leaves)


@dataclass(frozen=True)
class CallTrace:
    """A traced call: its program takes the variables it reads, then the arguments."""

    code: _Code
    reads: Mapping[Variable, Kind]
    writes: Mapping[Variable, Kind]
    created: tuple[Variable, ...]
    mesh: ReplicaMesh | None


def stage_call(
    fn: Callable[..., PyTree],
    signature: Signature,
    arrays: Sequence[Any],
    mesh: ReplicaMesh | None,
    *,
    is_local: bool = False,
) -> Staged:
    """A call of `fn` in the current context as a program; `run`s inside become part of it.

    With `is_local` the variables are one replica's own copies: a part of an eager replica.
    """
    traced = until_no_new_variables(
        lambda: trace_call(fn, signature, arrays, mesh, is_local=is_local), fn
    )
    return Staged(
        signature=signature,
        reads=traced.reads,
        writes=traced.writes,
        apply=on_every_worker(traced.code.apply, traced.code.out_kinds, traced.mesh),
        consts=spanning(traced.code.closed.consts),
        result=traced.code.result,
        mesh=traced.mesh,
        moves_arguments=traced.mesh is not None and traced.mesh != mesh,
        forwarded=forwarded(
            traced.code.closed.jaxpr,
            traced.reads,
            traced.writes,
            traced.code.num_results,
        ),
    )


def spanning(consts: Sequence[Any]) -> list[jax.Array]:
    """Those that lie on the devices of several workers."""
    return [c for c in consts if _isspanning(c)]


def _filled(consts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """All constants, with `given` in the places of those that span workers."""
    it = iter(given)
    return [next(it) if _isspanning(c) else c for c in consts]


def _isspanning(const: Any) -> bool:
    is_real = isinstance(const, jax.Array) and not isinstance(const, Tracer)
    return is_real and not const.is_fully_addressable


_Apply = Callable[
    [Sequence[jax.Array], Sequence[Any]], tuple[list[jax.Array], list[jax.Array]]
]


def on_every_worker(
    apply: _Apply, out_kinds: Sequence[Kind], mesh: ReplicaMesh | None
) -> _Apply:
    """The program of a call, with plain results on every device if workers share it."""
    if mesh is None or not mesh.is_shared:
        return apply
    kinds = [k for k in out_kinds if not isinstance(k, Static)]

    def spread(
        values: Sequence[jax.Array], arrays: Sequence[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        results, written = apply(values, arrays)
        constrain = jax.lax.with_sharding_constraint
        return [
            r if isinstance(k, Split) else constrain(r, mesh.mirrored)
            for r, k in zip(results, kinds)
        ], written

    return spread


def trace_call(
    fn: Callable[..., PyTree],
    signature: Signature,
    arrays: Sequence[Any],
    mesh: ReplicaMesh | None,
    *,
    is_local: bool = False,
) -> CallTrace:
    """Traces a call of `fn` in the current context."""
    variables = {
        v: SAME if is_local else layout_in(v, v.stored)[0] for v in live_variables()
    }
    outcome: list[Any] = []  # no tracers: they must not outlive the trace

    def body(values: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
        known = zip(variables.items(), values)
        frame = Frame(
            {v: stored_form(v, x, k) for (v, k), x in known}, is_local=is_local
        )
        args, kwargs = signature.rebuild(_wrap_arguments(signature, arrays, mesh))
        with frame, context.changed(frame=frame):
            result = fn(*args, **kwargs)
        leaves, tree = jax.tree.flatten(result, is_leaf=is_leaf)
        results = [_unwrap(leaf) for leaf in leaves]
        written = [layout_in(v, value) for v, value in frame.writes.items()]
        outcome[:] = (
            tree,
            tuple(kind for kind, _, _ in results),
            tuple(mesh for _, _, mesh in results),
            set(frame.reads),
            {v: kind for v, (kind, _) in zip(frame.writes, written)},
            tuple(frame.created),
            None if is_local else _mesh_used(frame),
        )
        outs = [array for kind, array, _ in results if not isinstance(kind, Static)]
        return outs + [array for _, array in written]

    values = [_global_aval(v, kind) for v, kind in variables.items()]
    closed = make_jaxpr(body, None, (values, [aval_of(array) for array in arrays]))
    tree, kinds, meshes, used, writes, created, used_mesh = outcome
    return CallTrace(
        code=_Code(only_reads(closed, variables, used), tree, kinds, meshes),
        reads={v: kind for v, kind in variables.items() if v in used},
        writes=writes,
        created=created,
        mesh=used_mesh,
    )


def _mesh_used(frame: Frame) -> ReplicaMesh | None:
    """The mesh of the `run`s and variables in a traced call."""
    used = [
        v.strategy.replica_mesh for v in (*frame.reads, *frame.writes) if v.strategy
    ]
    return next(iter([*frame.meshes, *used]), None)


def usable_variables(strategy: Any) -> list[Variable]:
    """The variables that replicas of `strategy` can use: its own and ordinary ones."""
    return [
        v
        for v in live_variables()
        if v.strategy is strategy or not isinstance(v, DistributedVariable)
    ]


_Trace = TypeVar("_Trace", ReplicaTrace, CallTrace)


def until_no_new_variables(
    trace: Callable[[], _Trace], fn: Callable[..., Any]
) -> _Trace:
    """The first trace in which `fn` makes no variables; it may make them once."""
    traced = trace()
    if traced.created:
        traced = trace()
    if traced.created:
        names = ", ".join(repr(v.name) for v in traced.created)
        raise ValueError(
            f"{getattr(fn, '__name__', fn)!r} makes new variables ({names}) each time it is "
            "traced. A compiled function may make variables on its first call only: keep "
            "them, for example `if self.w is None: self.w = mx.Variable(...)`."
        )
    return traced


def replica_context(strategy: Any) -> Callable[[Frame], context.Context]:
    return lambda frame: context.Context(
        strategy, replica=SpmdReplicaContext(strategy), frame=frame
    )


def _wrap_arguments(
    signature: Signature, arrays: Sequence[jax.Array], mesh: ReplicaMesh | None
) -> list[Any]:
    kinds = signature.array_kinds()
    return [_wrap_argument(kind, array, mesh) for kind, array in zip(kinds, arrays)]


def _wrap_argument(kind: Kind, array: jax.Array, mesh: ReplicaMesh | None) -> Any:
    if isinstance(kind, Split):
        assert mesh is not None
        return PerReplica.of(Stacked(array, mesh, kind.is_scalar))
    return Mirrored.of(array) if kind == SAME_WRAPPED else array


def _unwrap(leaf: Any) -> tuple[Kind, Any, ReplicaMesh | None]:
    """A leaf that a traced function returns: its kind, its array and its mesh."""
    if isinstance(leaf, PerReplica):
        if isinstance(leaf.piece, Stacked):
            return (
                (SPLIT_SCALAR if leaf.piece.is_scalar else SPLIT),
                leaf.piece.array,
                leaf.piece.mesh,
            )
        return Static(leaf), None, None
    if isinstance(leaf, Mirrored) and leaf.piece is not None:
        return SAME_WRAPPED, leaf.piece, None
    if isinstance(leaf, Tracer):
        return SAME, leaf, None
    return Static(leaf), None, None


def _wrap(array: jax.Array, kind: Kind, mesh: ReplicaMesh | None) -> Any:
    if isinstance(kind, Split):
        return _wrap_argument(kind, array, mesh)
    if kind == SAME_WRAPPED:
        return Mirrored.of(array)
    return first_copy(array)


def _global_aval(variable: Variable, kind: Kind) -> jax.ShapeDtypeStruct:
    shape = variable.shape
    if isinstance(kind, Split):
        size = variable.strategy.replica_mesh.size
        shape = (size,) if kind.is_scalar else (shape[0] * size, *shape[1:])
    return jax.ShapeDtypeStruct(shape, variable.dtype)


def aval_of(array: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(array)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def forwarded(
    jaxpr: Jaxpr,
    reads: Iterable[Variable],
    writes: Iterable[Variable],
    num_results: int,
) -> frozenset[Variable]:
    """The variables whose array somebody else may hold after a call.

    JAX returns an input that is an output as the very same array: a variable that is
    returned, an argument that is assigned, a value that is assigned twice.
    """
    inputs = dict(zip(jaxpr.invars, reads))
    outs = [None if isinstance(v, Literal) else v for v in jaxpr.outvars]
    returned = {inputs[var] for var in outs[:num_results] if var in inputs}
    given = {None, *jaxpr.invars, *jaxpr.constvars}
    assigned = {
        variable
        for variable, var in zip(writes, outs[num_results:])
        if var in given or outs.count(var) > 1
    }
    return frozenset(returned | assigned)
