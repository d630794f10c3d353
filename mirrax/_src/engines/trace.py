"""Traces a function that uses variables: once, to a program of arrays.

`trace_replica` traces a replica function to a jaxpr of one replica's arrays, which every
device of the mesh then runs; `trace_call` traces cross-replica code, in which each `run`
becomes such a part. Variables that are read are inputs, those that are written outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from mirrax._src.base import context
from mirrax._src.base.context import Context
from mirrax._src.base.jax_compat import ClosedJaxpr, Tracer, make_jaxpr
from mirrax._src.base.mesh import AXIS_NAME, Layout, ReplicaMesh
from mirrax._src.base.protocols import Mode, StrategyLike
from mirrax._src.base.values import (
    Args,
    Fn,
    Kwargs,
    Mirrored,
    PerReplica,
    PyTree,
    ReplicaValues,
    abstract,
    is_leaf,
    join,
    parts_of,
)
from mirrax._src.engines.arguments import Signature, is_apart, sort_arguments
from mirrax._src.engines.jaxprs import invariant_outputs, only_used
from mirrax._src.engines.program import lies_on
from mirrax._src.engines.replica_context import SpmdReplicaContext
from mirrax._src.engines.traced import Out, Trace, wrapped
from mirrax._src.state.frame import Frame
from mirrax._src.state.on_read import SyncOnReadVariable
from mirrax._src.state.variable import Variable, live_variables

# A replica function ---------------------------------------------------------------------


def trace_replica(
    strategy: StrategyLike,
    fn: Fn,
    signature: Signature,
    avals: Sequence[jax.ShapeDtypeStruct],
    *,
    mode: Mode = Mode.REPLICAS,
    is_update: bool = False,
    parent: Frame | None = None,
    may_forward: bool = True,
    who: str | None = None,
) -> Trace:
    """Traces `fn` once, as every replica will run it.

    Args:
        strategy: Whose replicas run `fn`.
        fn: The replica function.
        signature: The structure and kinds of its arguments.
        avals: One replica's part of each argument array.
        mode: `REPLICAS`, or `UNEVEN` if other replicas' arguments have other shapes.
        is_update: Whether `fn` is one of `extended.update`, not of `run`.
        parent: The frame of the traced code that calls `run`, if any.
        may_forward: Whether a plain argument that is returned comes back as it is; it
            cannot when it is donated.
        who: Whom the trace is for, in messages; all replicas by default.
    """
    mesh = strategy.replica_mesh
    who = who or f"the one program for all {strategy.num_replicas_in_sync} replica(s)"
    layouts = signature.layouts()
    variables = {
        v: _layout_in(v, parent, mesh)
        for v in live_variables()
        # Of another strategy replicas can read those that have one value.
        if v.strategy is strategy or not isinstance(v, SyncOnReadVariable)
    }

    def body(values: list[jax.Array], arrays: list[jax.Array]) -> _Traced:
        frame = Frame(dict(zip(variables, values)), mode, parent)
        here = Context(strategy, frame=frame, **_place(strategy, is_update))
        args, kwargs = signature.rebuild(arrays)
        try:
            with frame, context.enter(here):
                result = fn(*args, **kwargs)
                leaves, tree = jax.tree.flatten(result, is_leaf=is_leaf)
                leaves = [_own_result(leaf) for leaf in leaves]
        except Exception as error:
            error.add_note(f"Raised in {who}.")
            raise
        plain = [i for i, k in enumerate(layouts) if may_forward and not k.is_split]
        given = {id(arrays[i]): i for i in plain}
        results = [(_out(leaf, given), leaf) for leaf in leaves]
        written = [(value, Layout.PLAIN) for value in frame.writes.values()]
        return frame, tree, results, written, mesh

    shapes = [v.shape for v in variables]
    axis = (AXIS_NAME, mesh.size)
    traced = _stage(body, signature, variables, shapes, list(avals), axis)
    ins = [*traced.reads.values(), *layouts]
    it = iter(_out_layouts(traced.closed, ins, mesh))
    outs = tuple(Out(next(it), mesh) if out.is_array else out for out in traced.outs)
    return replace(traced, outs=outs, writes=dict(zip(traced.writes, it)))


def _place(strategy: StrategyLike, is_update: bool) -> dict[str, Any]:
    """In what context replicas' code runs: in a replica's, or in that of an update."""
    if is_update:
        return {"replica": None, "updating": 0}
    return {"replica": SpmdReplicaContext(strategy), "updating": None}


def _out_layouts(
    closed: ClosedJaxpr, ins: Sequence[Layout], mesh: ReplicaMesh
) -> list[Layout]:
    """How each output of a replica's program lies on the mesh."""
    if mesh.size == 1:
        return [Layout.PLAIN] * len(closed.out_avals)
    same = invariant_outputs(closed.jaxpr, [not layout.is_split for layout in ins])
    return [
        Layout.MIRRORED if is_same else mesh.split_layout(aval.ndim)
        for is_same, aval in zip(same, closed.out_avals)
    ]


def _own_result(leaf: Any) -> Any:
    """A leaf that a replica function returns, as this replica's own."""
    is_of_all = isinstance(leaf, PerReplica) and leaf.layout is not Layout.OWN
    if is_of_all or (isinstance(leaf, Mirrored) and leaf.array is None):
        raise ValueError(
            "A replica function returned a per-replica value, which has parts of all "
            "replicas; return this replica's part only."
        )
    return leaf.array if isinstance(leaf, ReplicaValues) else leaf


def _out(leaf: Any, given: Mapping[int, int]) -> Out:
    # An array made while tracing is an output. One that existed before is the same object
    # for all replicas and comes back as itself, and so does a plain argument.
    if id(leaf) in given:
        return Out(argument=given[id(leaf)])
    return Out(Layout.PLAIN) if isinstance(leaf, Tracer) else Out(static=leaf)


def run_in_trace(
    strategy: StrategyLike, fn: Fn, args: Args, kwargs: Kwargs, is_update: bool = False
) -> PyTree:
    """`strategy.run(fn, ...)`, or an update of it, inside a function that is being traced."""
    here = context.current()
    if context.in_program(here):
        return _run_in_program(strategy, fn, args, kwargs, is_update)
    mesh = strategy.replica_mesh
    parent: Any = here.frame
    if parent is not None:
        parent.meshes.append(mesh)
    call = sort_arguments(args, kwargs, mesh)
    avals = call.signature.avals_of_part(call.arrays, mesh)
    traced = trace_replica(
        strategy, fn, call.signature, avals, is_update=is_update, parent=parent
    )
    values = [_array_in(v, parent, mesh) for v in traced.reads]
    results, written = traced.apply(values, call.arrays, traced.closed.consts)
    for (variable, layout), array in zip(traced.writes.items(), written):
        if parent is None:
            raise RuntimeError(
                f"Variable {variable.name!r} is assigned in a `run` inside `jax.jit`, which "
                "knows nothing of variables. Use `mx.function` in place of `jax.jit`."
            )
        parent.write(variable, _seen(variable, array, layout))
    return traced.result(results, call.given)


def _run_in_program(
    strategy: StrategyLike, fn: Fn, args: Args, kwargs: Kwargs, is_update: bool
) -> PyTree:
    """`fn` on each replica, from a `merge_fn` inside the program that all replicas run."""
    mesh = strategy.replica_mesh

    def spread(leaf: Any) -> Any:
        is_own = isinstance(leaf, Tracer)
        return PerReplica.of(leaf, mesh, Layout.OWN) if is_own else leaf

    args, kwargs = parts_of((args, kwargs), mesh, None)
    with context.changed(**_place(strategy, is_update)):
        result = fn(*args, **kwargs)
    return jax.tree.map(spread, result, is_leaf=is_leaf)


# Cross-replica code ---------------------------------------------------------------------


def trace_call(
    fn: Fn,
    signature: Signature,
    arrays: Sequence[Any],
    mesh: ReplicaMesh | None,
    mode: Mode = Mode.CALL,
) -> Trace:
    """Traces a call of `fn` in the current context; `run`s inside become part of it.

    In mode `PART` variables are one replica's own copies: a part of an eager replica.
    """
    is_part = mode is Mode.PART
    variables = {
        v: Layout.PLAIN if is_part else v.in_one_array()[1] for v in live_variables()
    }

    def body(values: list[jax.Array], arrays: list[jax.Array]) -> _Traced:
        known = zip(variables.items(), values)
        frame = Frame({v: _seen(v, x, k) for (v, k), x in known}, mode)
        args, kwargs = signature.rebuild(
            a if k is Layout.PLAIN else wrapped(a, k, mesh)
            for a, k in zip(arrays, signature.layouts())
        )
        with frame, context.changed(frame=frame):
            result = fn(*args, **kwargs)
        leaves, tree = jax.tree.flatten(result, is_leaf=_is_result)
        results = [_unwrapped(leaf) for leaf in leaves]
        written = [_laid_out(v, value) for v, value in frame.writes.items()]
        return frame, tree, results, written, None if is_part else _mesh_used(frame)

    shapes = [_whole_shape(v, layout) for v, layout in variables.items()]
    return _stage(body, signature, variables, shapes, list(map(abstract, arrays)))


def _unwrapped(leaf: Any) -> tuple[Out, Any]:
    """A leaf that traced cross-replica code returns: its place, and its array."""
    if isinstance(leaf, ReplicaValues) and leaf.array is not None:
        return Out(leaf.layout, leaf.mesh), leaf.array
    is_array = isinstance(leaf, Tracer)
    return (Out(Layout.PLAIN), leaf) if is_array else (Out(static=leaf), None)


def _is_result(value: Any) -> bool:
    """What is a leaf of a result; traced parts that are apart become outputs one by one."""
    has_tracers = is_apart(value) and any(isinstance(p, Tracer) for p in value.values)
    return is_leaf(value) and not has_tracers


def _mesh_used(frame: Frame) -> ReplicaMesh | None:
    """The mesh of the `run`s and variables in a traced call."""
    used = [
        v.strategy.replica_mesh for v in (*frame.reads, *frame.writes) if v.strategy
    ]
    return next(iter([*frame.meshes, *used]), None)


# Both ------------------------------------------------------------------------------------

# The frame, the structure of the result, its places and arrays, what each variable that was
# written is and how that lies, and the mesh.
_Traced = tuple[
    Frame,
    Any,
    list[tuple[Out, Any]],
    list[tuple[Any, Layout]],
    ReplicaMesh | None,
]


def _stage(
    body: Callable[[list[jax.Array], list[jax.Array]], _Traced],
    signature: Signature,
    variables: Mapping[Variable, Layout],
    shapes: Sequence[tuple[int, ...]],
    avals: list[jax.ShapeDtypeStruct],
    axis: tuple[str, int] | None = None,
) -> Trace:
    """`body` of the arrays of `variables`, which have `shapes`, and of arguments, traced."""

    def outputs(values: list[jax.Array], arrays: list[jax.Array]) -> Any:
        frame, tree, results, written, mesh = body(values, arrays)
        outs = tuple(out for out, _ in results)
        writes = {v: layout for v, (_, layout) in zip(frame.writes, written)}
        known = set(frame.reads), writes, tuple(frame.created), tree, outs, mesh
        given = [array for out, array in results if out.is_array]
        return [*given, *(array for array, _ in written)], known

    values = [jax.ShapeDtypeStruct(s, v.dtype) for s, v in zip(shapes, variables)]
    closed, known = make_jaxpr(outputs, axis, (values, avals))
    used, *known = known
    closed = only_used(closed, variables, used)
    reads = {v: layout for v, layout in variables.items() if v in used}
    return Trace(closed, signature, reads, *known, is_replicas=axis is not None)


# Variables --------------------------------------------------------------------------------


def _seen(variable: Variable, array: jax.Array, layout: Layout) -> Any:
    """An array of a program as what traced cross-replica code sees of `variable`."""
    if not layout.is_split:
        return array
    return PerReplica.of(array, variable.strategy.replica_mesh, layout)


def _laid_out(variable: Variable, value: Any) -> tuple[Any, Layout]:
    """What traced cross-replica code has assigned, and how it lies on the mesh."""
    plain = type(variable)._layout
    if not isinstance(value, PerReplica):
        return value, plain
    mesh = variable.strategy.replica_mesh
    array, layout = join(value, mesh)
    return array, layout if mesh.size > 1 else plain


def _layout_in(variable: Variable, parent: Frame | None, mesh: ReplicaMesh) -> Layout:
    if not lies_on(variable, mesh):
        return Layout.PLAIN
    if parent is None:
        return variable.in_one_array()[1]
    return _laid_out(variable, parent.look_up(variable))[1]


def _array_in(variable: Variable, parent: Frame | None, mesh: ReplicaMesh) -> Any:
    value = variable.stored if parent is None else parent.read(variable)
    if isinstance(value, PerReplica) and not lies_on(variable, mesh):
        return value.values[0]
    return _laid_out(variable, value)[0]


def _whole_shape(variable: Variable, layout: Layout) -> tuple[int, ...]:
    if not layout.is_split:
        return variable.shape
    return variable.strategy.replica_mesh.whole_shape(layout, variable.shape)


def until_no_new_variables(trace: Callable[[], Trace], fn: Fn) -> Trace:
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
