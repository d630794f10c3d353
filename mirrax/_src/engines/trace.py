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
from jax.errors import JAXTypeError

from mirrax._src.base import context
from mirrax._src.base.context import Context
from mirrax._src.base.jax_compat import ClosedJaxpr, Tracer, make_jaxpr
from mirrax._src.base.mesh import AXIS_NAME, Layout, ReplicaMesh
from mirrax._src.base.protocols import Mode, StrategyLike
from mirrax._src.base.structures import opened
from mirrax._src.base.values import (
    Args,
    Fn,
    Kwargs,
    PerReplica,
    PyTree,
    ReplicaValues,
    abstract,
    is_leaf,
    join,
    parts_of,
)
from mirrax._src.engines.arguments import Signature, is_apart, sort_arguments
from mirrax._src.engines.blame import say_whose
from mirrax._src.engines.global_view import sharded_outputs
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
    """Traces `fn` once, as every replica will run it on its part of the arguments, `avals`.

    The mode is `UNEVEN` if other replicas' parts have other shapes, and `who` names the one
    in messages. `parent` is the frame of the traced code that calls `run`, if any. A plain
    argument that is returned comes back as it is, if it `may_forward`: it cannot when it is
    donated.
    """
    mesh = strategy.replica_mesh
    count = strategy.num_replicas_in_sync
    who = who or f"the program that all {count} replicas share"
    variables = {
        v: _layout_in(v, parent, mesh)
        for v in live_variables()
        # Of another strategy replicas can read those that have one value.
        if v.strategy is strategy or not isinstance(v, SyncOnReadVariable)
    }
    replica = None if is_update else SpmdReplicaContext(strategy)
    here = Context(strategy, replica, updating=0 if is_update else None)
    known = signature, avals, variables, mesh, mode, here, parent, may_forward
    try:
        traced = _trace(fn, *known)
    except Exception as error:
        error.add_note(f"Raised in {who}.")
        raise
    ins = [*traced.reads.values(), *signature.layouts()]
    it = iter(_out_layouts(traced.closed, ins, mesh))
    outs = tuple(Out(next(it), mesh) if out.is_array else out for out in traced.outs)
    writes = {v: v.written_layout(layout) for v, layout in zip(traced.writes, it)}
    return replace(traced, outs=outs, writes=writes, mesh=mesh)


def _out_layouts(
    closed: ClosedJaxpr, ins: Sequence[Layout], mesh: ReplicaMesh
) -> list[Layout]:
    """How each output of a replica's program lies on the mesh."""
    if mesh.size == 1:
        return [Layout.PLAIN] * len(closed.out_avals)
    same = invariant_outputs(closed.jaxpr, [not layout.is_split for layout in ins])
    kept = sharded_outputs(closed.jaxpr, ins)
    return [
        mesh.split_layout(aval.ndim)
        if not is_same
        else Layout.SHARDED
        if is_kept and mesh.sharded_axis(aval.shape) is not None
        else Layout.MIRRORED
        for is_same, is_kept, aval in zip(same, kept, closed.out_avals)
    ]


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
        parent.runs += not is_update
    call = sort_arguments(args, kwargs, mesh)
    known = strategy, fn, call.signature, call.avals_of_part(mesh)
    traced = trace_replica(*known, is_update=is_update, parent=parent)
    values = [_array_in(v, parent, mesh) for v in traced.reads]
    # `jax.jit` alone has nobody who would merge the sums of its `run`s.
    is_part = parent is not None and parent.mode is Mode.CALL
    consts = traced.closed.consts
    results, written = traced.apply(values, call.arrays, consts, is_part)
    for (variable, layout), array in zip(traced.writes.items(), written):
        if parent is None:
            raise RuntimeError(
                f"Variable {variable.name!r} is assigned in a `run` inside `jax.jit`, which "
                "does not know about variables. Use `mx.function` in place of `jax.jit`."
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
    replica = None if is_update else SpmdReplicaContext(strategy)
    with context.changed(replica=replica, updating=0 if is_update else None):
        result = opened(fn(*args, **kwargs), "result")
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
        v: Layout.PLAIN if is_part else v.layout_now() for v in live_variables()
    }

    avals = list(map(abstract, arrays))
    return _trace(fn, signature, avals, variables, mesh, mode, context.current())


# Both -------------------------------------------------------------------------------------


def _trace(
    fn: Fn,
    signature: Signature,
    avals: Sequence[jax.ShapeDtypeStruct],
    variables: Mapping[Variable, Layout],
    mesh: ReplicaMesh | None,
    mode: Mode,
    here: Context,
    parent: Frame | None = None,
    may_forward: bool = False,
) -> Trace:
    """Traces `fn` in the context `here`; `variables` lie so for whoever calls it."""
    layouts = signature.layouts()
    signature.check_modules()
    inside = {v: Layout.PLAIN if mode.is_local else k for v, k in variables.items()}

    def body(values: list[jax.Array], arrays: list[jax.Array]) -> Any:
        seen = {v: _seen(v, x, k) for (v, k), x in zip(inside.items(), values)}
        frame = Frame(seen, mode, parent)
        plain = [i for i, k in enumerate(layouts) if may_forward and not k.is_split]
        given = {id(arrays[i]): i for i in plain}
        is_result = is_leaf if mode.is_program else _is_result
        with frame, context.enter(replace(here, frame=frame)):
            args, kwargs = signature.rebuild(
                a if mode.is_program or k is Layout.PLAIN else wrapped(a, k, mesh)
                for a, k in zip(arrays, layouts)
            )
            result = opened(fn(*args, **kwargs), "result")
            leaves, tree = jax.tree.flatten(result, is_leaf=is_result)
            results = [_out(leaf, given, mode) for leaf in leaves]
        # What is assigned its own value (an optimizer's learning rate) is only read; not in an
        # uneven step, whose replicas are traced apart and have to write the same variables.
        has_all = mode is Mode.UNEVEN
        latest = frame.writes.items()
        writes = {v: x for v, x in latest if has_all or x is not seen.get(v)}
        written = [_laid_out(v, value) for v, value in writes.items()]
        known = (
            tree,
            tuple(out for out, _ in results),
            set(frame.reads),
            {v: layout for v, (_, layout) in zip(writes, written)},
            tuple(frame.created),
            None if mode is Mode.PART else _mesh_used(frame),
            frame.runs,
        )
        outs = [array for out, array in results if out.is_array]
        return [*outs, *(array for array, _ in written)], known

    shapes = {v: _whole_shape(v, layout) for v, layout in inside.items()}
    values = [_aval(shape, v.dtype) for v, shape in shapes.items()]
    axis = (AXIS_NAME, mesh.size) if mode.is_program and mesh is not None else None
    try:
        closed, known = make_jaxpr(body, axis, (values, list(avals)))
    except JAXTypeError as error:
        say_whose(error, fn, signature, [v.name for v in inside])
        raise
    tree, outs, used, writes, created, on, runs = known
    closed = only_used(closed, variables, used)
    reads = {v: layout for v, layout in variables.items() if v in used}
    result = created, tree, outs, on, mode.is_program, runs
    return Trace(closed, signature, reads, writes, *result)


def _out(leaf: Any, given: Mapping[int, int], mode: Mode) -> tuple[Out, Any]:
    """A leaf of a result: its place, and its array if it has one."""
    is_distributed = isinstance(leaf, ReplicaValues)
    if is_distributed and mode.is_program:
        if leaf.layout not in (Layout.OWN, Layout.MIRRORED, Layout.SHARDED):
            raise ValueError(
                "A replica function returned a per-replica value, which has parts of all "
                "replicas; return this replica's part only."
            )
        leaf = leaf.array
    elif is_distributed and leaf.array is not None:
        return Out(leaf.layout, leaf.mesh), leaf.array
    # An array made while tracing is an output. One that existed before is the same object
    # for all replicas and comes back as itself, and so does a plain argument.
    if id(leaf) in given:
        return Out(argument=given[id(leaf)]), None
    return Out(Layout.PLAIN) if isinstance(leaf, Tracer) else Out(static=leaf), leaf


def _is_result(value: Any) -> bool:
    """What is a leaf of a result; traced parts that are apart become outputs one by one."""
    has_tracers = is_apart(value) and any(isinstance(p, Tracer) for p in value.values)
    return is_leaf(value) and not has_tracers


def _mesh_used(frame: Frame) -> ReplicaMesh | None:
    """The mesh of the `run`s and variables in a traced call."""
    owners = [v.strategy for v in (*frame.reads, *frame.writes) if v.strategy]
    return next(iter([*frame.meshes, *(owner.replica_mesh for owner in owners)]), None)


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
        return variable.layout_now()
    return _laid_out(variable, parent.look_up(variable))[1]


def _array_in(variable: Variable, parent: Frame | None, mesh: ReplicaMesh) -> Any:
    value = variable.stored if parent is None else parent.read(variable)
    if isinstance(value, PerReplica) and not lies_on(variable, mesh):
        return value.values[0]
    return _laid_out(variable, value)[0]


def _aval(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Of 32 bits where JAX has no wider ones now. JAX warns, but few variables are used."""
    dtype = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(shape, dtype)


def _whole_shape(variable: Variable, layout: Layout) -> tuple[int, ...]:
    if not layout.is_split:
        return variable.shape
    return variable.strategy.replica_mesh.whole_shape(layout, variable.shape)


def until_no_new_variables(trace: Callable[[], Trace], fn: Fn) -> Trace:
    """The first trace in which `fn` makes no variables; it may make them once."""
    traced = trace()
    if traced.created:
        traced = trace()
    if not traced.created:
        return traced
    names = ", ".join(repr(v.name) for v in traced.created)
    raise ValueError(
        f"{getattr(fn, '__name__', fn)!r} makes new variables ({names}) each time it is "
        "traced. A compiled function may make variables on its first call only: keep "
        "them, for example `if self.w is None: self.w = mx.Variable(...)`."
    )
