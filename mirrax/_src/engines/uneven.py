"""Uneven steps, compiled: replicas whose arguments differ in shape.

Such a step cannot be one program for all replicas. The function is traced once for each
shape and cut where replicas communicate; each device runs its own compiled segments, and
between them small programs over all devices do the communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from mirrax._src.base.jax_compat import (
    Device,
    Jaxpr,
    Literal,
    eval_jaxpr,
    make_jaxpr,
    sub_program,
)
from mirrax._src.base.mesh import AXIS_NAME, ReplicaMesh
from mirrax._src.base.values import (
    Mirrored,
    PerReplica,
    PyTree,
    Stacked,
    is_array,
    is_distributed,
    is_leaf,
    is_number,
    regroup,
    stack,
    to_device,
)
from mirrax._src.engines.eager import run_eagerly
from mirrax._src.engines.invariance import (
    COMBINING,
    contains_collective,
    is_collective,
    sub_jaxprs,
)
from mirrax._src.engines.signature import SAME, SPLIT, Kind, Signature, Static
from mirrax._src.engines.spmd import ReplicaTrace, layout_in, trace_replica
from mirrax._src.engines.staging import (
    replica_context,
    until_no_new_variables,
    usable_variables,
)
from mirrax._src.state.frame import RunEagerly

_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "core_call",
)


def run_uneven(
    function: Any,
    strategy: Any,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PyTree:
    """`strategy.run(fn, ...)` where per-replica arguments have unequal shapes."""
    mesh = strategy.replica_mesh
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_leaf)
    kinds = tuple(_kind(leaf) for leaf in leaves)
    signature = Signature(tree, kinds)
    arrays = signature.arrays_of(leaves)
    inputs = [
        [_own(array, i, device, mesh) for array in arrays]
        for i, device in enumerate(mesh.local_devices)
    ]
    try:
        cuts = [_cut(function, strategy, fn, signature, own) for own in inputs]
        return _execute(strategy, cuts, inputs)
    except RunEagerly:
        return run_eagerly(strategy, fn, args, kwargs)


@dataclass(frozen=True)
class _Segment:
    """What a replica computes between two communications."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    compiled: Callable[..., list[Any]]


@dataclass(frozen=True)
class _Cut:
    """A replica function for one shape, cut at its communications.

    Segment k is followed by the collectives `exchanges[k]`.
    """

    trace: ReplicaTrace
    jaxpr: Jaxpr
    consts: Sequence[Any]
    segments: tuple[_Segment, ...]
    exchanges: tuple[tuple[Any, ...], ...]


def _cut(
    function: Any,
    strategy: Any,
    fn: Callable[..., PyTree],
    signature: Signature,
    own: Sequence[Any],
) -> _Cut:
    avals = tuple(
        jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in own
    )
    variables = {v: layout_in(v, v.stored)[0] for v in usable_variables(strategy)}
    shapes = tuple((a.shape, a.dtype, a.weak_type) for a in avals)
    key = (
        strategy,
        signature,
        shapes,
        tuple((v.number, kind) for v, kind in variables.items()),
    )
    cache = function.uneven_traces()
    if key not in cache:

        def trace() -> ReplicaTrace:
            variables = {
                v: layout_in(v, v.stored)[0] for v in usable_variables(strategy)
            }
            return trace_replica(
                strategy,
                fn,
                signature,
                avals,
                variables,
                replica_context(strategy),
                is_uneven=True,
            )

        traced = until_no_new_variables(trace, fn)
        function.note_trace((strategy, signature, tuple(jax.typeof(x) for x in own)))
        cache[key] = _cut_trace(traced)
    return cache[key]


def _cut_trace(trace: ReplicaTrace) -> _Cut:
    """Inlines calls that communicate, then sorts the equations by how many exchanges precede."""

    def flat(replica_id: jax.Array, *inputs: Any) -> list[Any]:
        return _inline(trace.closed.jaxpr, trace.closed.consts, inputs, replica_id)

    avals = [var.aval for var in trace.closed.jaxpr.invars]
    structs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals
    ]
    size = trace.mesh.size
    closed = make_jaxpr(flat, (AXIS_NAME, size), (np.int32(0), *structs))
    jaxpr = closed.jaxpr
    level: dict[Any, int] = {}

    def level_of(atom: Any) -> int:
        return 0 if isinstance(atom, Literal) else level.get(atom, 0)

    by_level: dict[int, list[Any]] = {}
    exchanges: dict[int, list[Any]] = {}
    for eqn in _live_equations(jaxpr):
        at = max((level_of(atom) for atom in eqn.invars), default=0)
        if is_collective(eqn):
            exchanges.setdefault(at, []).append(eqn)
            level.update((var, at + 1) for var in eqn.outvars)
        else:
            by_level.setdefault(at, []).append(eqn)
            level.update((var, at) for var in eqn.outvars)
    last = max([0, *by_level, *(k + 1 for k in exchanges)])
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    segments: list[_Segment] = []
    for k in range(last, -1, -1):
        needed |= {
            v
            for e in exchanges.get(k, ())
            for v in e.invars
            if not isinstance(v, Literal)
        }
        eqns = by_level.get(k, [])
        made = {v for e in eqns for v in e.outvars}
        used = dict.fromkeys(
            v for e in eqns for v in e.invars if not isinstance(v, Literal)
        )
        inputs = tuple(v for v in used if v not in made)
        outputs = tuple(v for v in made if v in needed)
        program = sub_program(jaxpr, eqns, inputs, outputs)
        compiled = jax.jit(functools.partial(eval_jaxpr, program, ()))
        segments.append(_Segment(inputs, outputs, compiled))
        needed |= set(inputs)
    return _Cut(
        trace,
        jaxpr,
        closed.consts,
        tuple(reversed(segments)),
        tuple(tuple(exchanges.get(k, ())) for k in range(last)),
    )


def _inline(
    jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], replica_id: Any
) -> list[Any]:
    """Evaluates `jaxpr`, going into calls that communicate."""
    env: dict[Any, Any] = {
        **dict(zip(jaxpr.constvars, consts)),
        **dict(zip(jaxpr.invars, inputs)),
    }

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if name == "axis_index" and is_collective(eqn):
            outs: Any = [replica_id]
        elif name in _CALLS and any(
            contains_collective(e) for j in sub_jaxprs(eqn) for e in j.eqns
        ):
            inner = (
                eqn.params.get("jaxpr")
                or eqn.params.get("call_jaxpr")
                or eqn.params["fun_jaxpr"]
            )
            closed_consts = getattr(inner, "consts", ())
            outs = _inline(
                getattr(inner, "jaxpr", inner), closed_consts, values, replica_id
            )
        elif not is_collective(eqn) and contains_collective(eqn):
            raise RunEagerly("replicas communicate inside a loop or a branch")
        else:
            given = {
                a: v for a, v in zip(eqn.invars, values) if not isinstance(a, Literal)
            }
            outs = eval_jaxpr(
                sub_program(jaxpr, [eqn], list(given), eqn.outvars), (), *given.values()
            )
        env.update(zip(eqn.outvars, outs))
    return [read(atom) for atom in jaxpr.outvars]


def _live_equations(jaxpr: Jaxpr) -> list[Any]:
    """The equations that an output or an effect needs, in order."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            live.append(eqn)
            needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return live[::-1]


def _execute(
    strategy: Any, cuts: Sequence[_Cut], inputs: Sequence[Sequence[Any]]
) -> PyTree:
    mesh = strategy.replica_mesh
    _check_same_exchanges(cuts, strategy)
    envs = [
        _bind_inputs(cut, own, i, mesh)
        for i, (cut, own) in enumerate(zip(cuts, inputs))
    ]
    for k in range(len(cuts[0].segments)):
        for i, (cut, env) in enumerate(zip(cuts, envs)):
            segment = cut.segments[k]
            with jax.default_device(mesh.local_devices[i]):
                outs = segment.compiled(*(env[v] for v in segment.inputs))
            env.update(zip(segment.outputs, outs))
        if k < len(cuts[0].exchanges):
            _exchange(cuts, envs, k, mesh)
    results = [
        [v.val if isinstance(v, Literal) else env[v] for v in cut.jaxpr.outvars]
        for cut, env in zip(cuts, envs)
    ]
    trace = cuts[0].trace
    for j, variable in enumerate(trace.written):
        at = trace.num_results + j
        is_same = all(cut.trace.is_same[at] for cut in cuts)
        parts = [to_device(r[at], d) for r, d in zip(results, mesh.local_devices)]
        variable.stored = (
            mesh.join(parts, mirrored=True) if is_same else PerReplica(parts)
        )
    return _merge_results(strategy, cuts, results)


def _bind_inputs(
    cut: _Cut, own: Sequence[Any], local_index: int, mesh: ReplicaMesh
) -> dict[Any, Any]:
    trace = cut.trace
    values: list[Any] = [np.int32(mesh.local_ids[local_index])]
    reads = set(trace.reads)
    for variable in trace.variables:
        used = variable in reads
        values.append(_copy_of(variable, local_index, mesh) if used else None)
    env = dict(zip(cut.jaxpr.invars, [*values, *own]))
    env.update(
        zip(cut.jaxpr.constvars, (mesh.local_view(c, local_index) for c in cut.consts))
    )
    return env


def _copy_of(variable: Any, local_index: int, mesh: ReplicaMesh) -> Any:
    if isinstance(variable.stored, PerReplica):
        return variable.stored.values[local_index]
    return mesh.local_view(variable.stored, local_index)


def _exchange(
    cuts: Sequence[_Cut], envs: Sequence[dict[Any, Any]], k: int, mesh: ReplicaMesh
) -> None:
    eqns = cuts[0].exchanges[k]
    if not eqns:
        return
    pieces = [
        stack(
            PerReplica(
                a.val if isinstance(a, Literal) else env[a]
                for env, a in zip(envs, (cut.exchanges[k][j].invars[m] for cut in cuts))
            ),
            mesh,
        )
        for j, eqn in enumerate(eqns)
        for m in range(len(eqn.invars))
    ]
    scalars = tuple(piece.is_scalar for piece in pieces)
    outs = iter(_communicate(mesh, eqns, scalars)([piece.array for piece in pieces]))
    for j, eqn in enumerate(eqns):
        for m, var in enumerate(eqn.outvars):
            whole = next(outs)
            if eqn.primitive.name in COMBINING and not eqn.params.get(
                "axis_index_groups"
            ):
                parts: tuple[Any, ...] = Mirrored.of(whole).values
            else:
                parts = Stacked(whole, mesh, var.aval.ndim == 0).parts()
            for cut, env, part in zip(cuts, envs, parts):
                env[cut.exchanges[k][j].outvars[m]] = part


_communications: dict[Any, Any] = {}


def _communicate(
    mesh: ReplicaMesh, eqns: tuple[Any, ...], scalars: tuple[bool, ...]
) -> Any:
    """The collectives of one exchange as one program over all devices."""
    key = (mesh, tuple(map(id, eqns)), scalars)
    if key not in _communications:
        specs = [
            PartitionSpec()
            if eqn.primitive.name in COMBINING
            and not eqn.params.get("axis_index_groups")
            else mesh.split_spec
            for eqn in eqns
            for _ in eqn.outvars
        ]

        def body(arrays: list[Any]) -> list[Any]:
            it = iter(a[0] if s else a for a, s in zip(arrays, scalars))
            outs: list[Any] = []
            for eqn in eqns:
                result = eqn.primitive.bind(
                    *(next(it) for _ in eqn.invars), **eqn.params
                )
                outs += result if eqn.primitive.multiple_results else [result]
            return [
                o[None] if o.ndim == 0 and spec == mesh.split_spec else o
                for o, spec in zip(outs, specs)
            ]

        mapped = jax.shard_map(
            body,
            mesh=mesh.mesh,
            in_specs=mesh.split_spec,
            out_specs=specs,
            check_vma=False,
        )
        # The equations are kept too, so that their ids stay their own.
        _communications[key] = (jax.jit(mapped), eqns)
    return _communications[key][0]


def _check_same_exchanges(cuts: Sequence[_Cut], strategy: Any) -> None:
    first = cuts[0]
    for i, cut in enumerate(cuts):
        names = [[e.primitive.name for e in level] for level in cut.exchanges]
        if names != [[e.primitive.name for e in level] for level in first.exchanges]:
            raise RunEagerly("replicas communicate differently for different shapes")
        for mine, theirs in zip(cut.exchanges, first.exchanges):
            for a, b in zip(mine, theirs):
                if [v.aval.shape for v in a.invars] == [v.aval.shape for v in b.invars]:
                    continue
                # The eager engine gathers uneven parts, and explains what cannot be.
                raise RunEagerly(f"{strategy.describe_replica(i)} brings another shape")


def _merge_results(
    strategy: Any, cuts: Sequence[_Cut], results: Sequence[Sequence[Any]]
) -> PyTree:
    mesh = strategy.replica_mesh
    trees = []
    for cut, result in zip(cuts, results):
        it = iter(result)
        leaves = [
            next(it) if slot.is_array else slot.static for slot in cut.trace.slots
        ]
        trees.append(jax.tree.unflatten(cut.trace.out_tree, leaves))
    is_same = {
        id(array): all(cut.trace.is_same[i] for cut in cuts)
        for i, array in enumerate(results[0][: cuts[0].trace.num_results])
    }

    def merge(parts: Sequence[Any]) -> Any:
        if not all(is_array(part) or is_number(part) for part in parts):
            return PerReplica(parts)
        arrays = [to_device(part, d) for part, d in zip(parts, mesh.local_devices)]
        if is_same.get(id(parts[0])):
            return Mirrored.of(mesh.join(arrays, mirrored=True))
        return PerReplica(arrays)

    return regroup(trees, strategy.describe_replica, merge)


def _kind(leaf: Any) -> Kind:
    if isinstance(leaf, PerReplica):
        return SPLIT
    if is_distributed(leaf) or is_number(leaf) or is_array(leaf):
        return SAME
    return Static(leaf)


def _own(array: Any, local_index: int, device: Device, mesh: ReplicaMesh) -> jax.Array:
    if is_distributed(array):
        array = array.values[local_index]
    elif isinstance(array, jax.Array):
        array = mesh.local_view(array, local_index)
    if is_number(array):
        array = jnp.asarray(array)
    return to_device(array, device)
