"""Uneven steps, compiled: replicas whose arguments differ in shape.

Such a step cannot be one program for all replicas. The function is traced once for each
shape and cut where replicas communicate (cutting.py); each device runs its own compiled
segments, and between them small programs over all devices do the communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from mirrax._src.base.errors import RunEagerly
from mirrax._src.base.jax_compat import Literal
from mirrax._src.base.logical import after_launch, launching
from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.base.protocols import Mode, StrategyLike
from mirrax._src.base.values import (
    Mirrored,
    PerReplica,
    PyTree,
    abstract,
    is_array,
    is_distributed,
    is_leaf,
    is_number,
    join,
    part_of,
    regroup,
    to_device,
)
from mirrax._src.cluster import launches
from mirrax._src.collectives.launch import describe_program
from mirrax._src.engines.arguments import Kind, Signature, Static
from mirrax._src.engines.cutting import Cut, cut_trace, equal_outputs
from mirrax._src.engines.eager import run_eagerly
from mirrax._src.engines.jaxprs import is_combining
from mirrax._src.engines.program import lies_on, one_copy_of
from mirrax._src.engines.staged import Trace
from mirrax._src.engines.trace import trace_replica, until_no_new_variables
from mirrax._src.state.variable import shared

Env = dict[Any, Any]


def run_uneven(
    function: Any,
    strategy: StrategyLike,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PyTree:
    """`strategy.run(fn, ...)` where per-replica arguments have unequal shapes."""
    mesh = strategy.replica_mesh
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_leaf)
    try:
        signature = Signature(tree, tuple(_kind(leaf) for leaf in leaves))
        arrays = signature.arrays_of(leaves)
        inputs = [
            [to_device(part_of(array, mesh, i), device) for array in arrays]
            for i, device in enumerate(mesh.local_devices)
        ]
        # Also for the shapes of other workers' replicas: all have to decide alike.
        cuts = [
            _cut(function, strategy, fn, signature, avals, i)
            for i, avals in enumerate(_avals_of_all(arrays, inputs, mesh))
        ]
        _check_same_exchanges(cuts, mesh)
        return _execute(strategy, cuts, inputs)
    except RunEagerly as reason:
        try:
            return run_eagerly(strategy, fn, args, kwargs)
        except Exception as error:
            error.add_note(
                f"The batch is uneven and {reason}, so this step runs as plain Python. Pad "
                "the batch, or drop the remainder, to have it compiled."
            )
            raise


def _cut(
    function: Any,
    strategy: StrategyLike,
    fn: Callable[..., PyTree],
    signature: Signature,
    avals: tuple[jax.ShapeDtypeStruct, ...],
    replica_id: int,
) -> Cut:
    """The function for one replica's shapes; traced if it has not been yet."""
    known = function.cuts.setdefault((strategy, signature, avals), [])
    for cut in known:
        if cut.layouts_match():
            return cut

    def trace() -> Trace:
        return trace_replica(
            strategy,
            fn,
            signature,
            avals,
            mode=Mode.UNEVEN,
            may_forward=False,
            who=strategy.replica_mesh.describe(replica_id),
        )

    cut = cut_trace(until_no_new_variables(trace, fn))
    function.note_trace((strategy, signature, avals))
    known.append(cut)
    return cut


def _avals_of_all(
    arrays: Sequence[Any], inputs: Sequence[Sequence[Any]], mesh: ReplicaMesh
) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
    """Every replica's arguments without their values, in the order of replicas."""
    own = [[abstract(array) for array in each] for each in inputs]
    if not mesh.is_shared:
        return [tuple(each) for each in own]
    for array in arrays:
        if isinstance(array, PerReplica) and _shapes(array) is None:
            array.shapes = mesh.agreed_shapes([jnp.asarray(p) for p in array.values])

    def aval(array: Any, like: jax.ShapeDtypeStruct, replica_id: int) -> Any:
        shapes = _shapes(array) if isinstance(array, PerReplica) else None
        if shapes is None:
            return like
        shape, dtype = shapes[replica_id]
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    return [
        tuple(aval(a, like, i) for a, like in zip(arrays, own[0]))
        for i in range(mesh.size)
    ]


def _shapes(value: PerReplica) -> tuple[Any, ...] | None:
    mesh, layout = value.mesh, value.layout
    if value.array is None or mesh is None or layout is None:
        return value.shapes
    shape = mesh.part_shape(layout, value.array.shape)
    return mesh.equal_shapes(jax.ShapeDtypeStruct(shape, value.array.dtype))


def _execute(
    strategy: StrategyLike, every_cut: Sequence[Cut], inputs: Sequence[Sequence[Any]]
) -> PyTree:
    mesh = strategy.replica_mesh
    cuts = [every_cut[i] for i in mesh.local_ids]
    envs = [
        _bind_inputs(cut, own, i, mesh)
        for i, (cut, own) in enumerate(zip(cuts, inputs))
    ]
    for k in range(len(cuts[0].segments)):
        for cut, env, device in zip(cuts, envs, mesh.local_devices):
            segment = cut.segments[k]
            with jax.default_device(device):
                outs = segment.compiled(*(env[var] for var in segment.inputs))
            env.update(zip(segment.outputs, outs))
        if k < len(cuts[0].exchanges) and cuts[0].exchanges[k]:
            _exchange(
                [cut.exchanges[k] for cut in cuts],
                every_cut[0].exchanges[k],
                envs,
                mesh,
            )
    outs = [
        [_value(atom, env) for atom in cut.jaxpr.outvars]
        for cut, env in zip(cuts, envs)
    ]
    is_same = equal_outputs(every_cut)
    trace = cuts[0].trace
    with launching:
        for i, variable in enumerate(trace.writes, start=trace.num_results):
            parts = [to_device(own[i], d) for own, d in zip(outs, mesh.local_devices)]
            variable.stored = (
                mesh.join(parts, mirrored=True)
                if is_same[i]
                else PerReplica(parts, mesh.equal_shapes(variable), mesh)
            )
        # Results may be the very arrays that variables hold, before or after.
        shared.update(v.number for v in (*trace.reads, *trace.writes))
    return _merge_results(strategy, every_cut, outs, is_same)


def _bind_inputs(
    cut: Cut, own: Sequence[Any], local_index: int, mesh: ReplicaMesh
) -> Env:
    replica_id = np.int32(mesh.local_ids[local_index])
    copies = [
        part_of(v.stored if lies_on(v, mesh) else one_copy_of(v), mesh, local_index)
        for v in cut.trace.reads
    ]
    values = [replica_id, *copies, *own]
    consts = [mesh.local_view(const, local_index) for const in cut.consts]
    return dict(zip([*cut.jaxpr.invars, *cut.jaxpr.constvars], [*values, *consts]))


def _exchange(
    exchanges: Sequence[tuple[Any, ...]],
    first: tuple[Any, ...],
    envs: Sequence[Env],
    mesh: ReplicaMesh,
) -> None:
    """Does the collectives of all replicas' programs at one place; `first` is replica 0's."""
    operands = [[atom for eqn in eqns for atom in eqn.invars] for eqns in exchanges]
    joined = [
        join(
            PerReplica(map(_value, atoms, envs), mesh.equal_shapes(atoms[0].aval)), mesh
        )
        for atoms in zip(*operands)
    ]
    results = [[var for eqn in eqns for var in eqn.outvars] for eqns in exchanges]
    arrays = [array for array, _ in joined]
    rows = tuple(mesh.has_row(layout) for _, layout in joined)
    with launching:
        communicate = _communication(mesh, first, rows)
        if mesh.is_shared:
            label = describe_program("an uneven step", arrays)
            outs = launches.last.watch(label, communicate, arrays)
        else:
            outs = communicate(arrays)
    after_launch(outs)
    combined = [is_combining(eqn) for eqn in first for _ in eqn.outvars]
    for variables, whole, is_combined in zip(zip(*results), outs, combined):
        layout = mesh.split_layout(variables[0].aval.ndim)
        value = (
            Mirrored.of(whole, mesh)
            if is_combined
            else PerReplica.of(whole, mesh, layout)
        )
        for env, variable, part in zip(envs, variables, value.values):
            env[variable] = part


_communications: dict[Any, Any] = {}
_MOST_COMMUNICATIONS = 256


def _communication(
    mesh: ReplicaMesh, eqns: tuple[Any, ...], rows: tuple[bool, ...]
) -> Callable[[list[Any]], list[Any]]:
    """The collectives of one exchange as one program over all devices."""
    key = (mesh, tuple(map(id, eqns)), rows)
    if key not in _communications:
        combined = [is_combining(eqn) for eqn in eqns for _ in eqn.outvars]

        def body(arrays: list[Any]) -> list[Any]:
            it = iter(a[0] if has_row else a for a, has_row in zip(arrays, rows))
            outs: list[Any] = []
            for eqn in eqns:
                result = eqn.primitive.bind(
                    *(next(it) for _ in eqn.invars), **eqn.params
                )
                outs += result if eqn.primitive.multiple_results else [result]
            return [o if c or o.ndim else o[None] for o, c in zip(outs, combined)]

        compiled = jax.jit(
            jax.shard_map(
                body,
                mesh=mesh.mesh,
                in_specs=mesh.split_spec,
                out_specs=[PartitionSpec() if c else mesh.split_spec for c in combined],
                check_vma=False,
            )
        )
        if len(_communications) >= _MOST_COMMUNICATIONS:
            _communications.pop(next(iter(_communications)))
        # The equations are kept too, so that their ids stay their own.
        _communications[key] = (compiled, eqns)
    return _communications[key][0]


def _check_same_exchanges(cuts: Sequence[Cut], mesh: ReplicaMesh) -> None:
    """Hands what cannot be done here to the eager engine, which can, or explains why not."""

    def shape_of(cut: Cut) -> list[Any]:
        return [
            [(e.primitive.name, [str(a.aval) for a in e.invars]) for e in eqns]
            for eqns in cut.exchanges
        ]

    for i, cut in enumerate(cuts):
        if shape_of(cut) != shape_of(cuts[0]):
            raise RunEagerly(f"{mesh.describe(i)} communicates differently")
        if len(cut.segments) != len(cuts[0].segments):
            raise RunEagerly(f"{mesh.describe(i)} computes differently")
        if list(map(id, cut.trace.writes)) != list(map(id, cuts[0].trace.writes)):
            raise RunEagerly(f"{mesh.describe(i)} assigns other variables")


def _merge_results(
    strategy: StrategyLike,
    every_cut: Sequence[Cut],
    outs: Sequence[Sequence[Any]],
    is_same: Sequence[bool],
) -> PyTree:
    mesh = strategy.replica_mesh
    cuts = [every_cut[i] for i in mesh.local_ids]
    results = []
    for cut, own in zip(cuts, outs):
        it = iter(own)
        leaves = [next(it) if out.is_array else out.known(()) for out in cut.trace.outs]
        results.append(jax.tree.unflatten(cut.trace.out_tree, leaves))
    same = {id(value) for value, flag in zip(outs[0], is_same) if flag}
    position = {id(value): i for i, value in enumerate(outs[0])}

    def shapes_of(part: Any) -> tuple[Any, ...] | None:
        if not mesh.is_shared or id(part) not in position:
            return None
        at = position[id(part)]
        avals: list[Any] = [cut.jaxpr.outvars[at].aval for cut in every_cut]
        return tuple((aval.shape, aval.dtype.name) for aval in avals)

    def merge(parts: Sequence[Any]) -> Any:
        if not all(is_array(part) or is_number(part) for part in parts):
            return PerReplica(parts, mesh=mesh)
        arrays = [to_device(part, d) for part, d in zip(parts, mesh.local_devices)]
        if id(parts[0]) in same:
            return Mirrored.of(mesh.join(arrays, mirrored=True), mesh)
        return PerReplica(arrays, shapes_of(parts[0]), mesh)

    return regroup(
        results,
        strategy.describe_replica,
        merge,
        lambda leaf: not (mesh.is_shared and id(leaf) in position),
    )


def _value(atom: Any, env: Env) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def _kind(leaf: Any) -> Kind:
    if isinstance(leaf, PerReplica):
        if not all(is_array(part) or is_number(part) for part in leaf.values):
            raise RunEagerly("a per-replica argument that holds no arrays")
        return Layout.SPLIT
    if is_distributed(leaf) or is_number(leaf) or is_array(leaf):
        return Layout.PLAIN
    return Static(leaf)
