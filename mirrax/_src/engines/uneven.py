"""Uneven steps, compiled: replicas whose arguments differ in shape.

Such a step cannot be one program for all replicas. The function is traced once for each
shape and cut where replicas communicate (cutting.py); each device runs its own compiled
stages, and between them small programs over all devices do the communication.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.base.errors import RunEagerly
from mirrax._src.base.jax_compat import Literal
from mirrax._src.base.launching import launching
from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.base.protocols import Mode, StrategyLike
from mirrax._src.base.structures import opened
from mirrax._src.base.values import (
    Args,
    Fn,
    Kwargs,
    Mirrored,
    PerReplica,
    PyTree,
    abstract,
    is_array,
    is_leaf,
    is_number,
    join,
    part_of,
    regroup,
    to_device,
)
from mirrax._src.collectives.programs import launch
from mirrax._src.engines.arguments import Kind, Signature, Static
from mirrax._src.engines.cutting import Cut, Stage, cut_trace
from mirrax._src.engines.eager import merge_parts, run_eagerly
from mirrax._src.engines.program import layouts_match, lies_on, one_copy_of
from mirrax._src.engines.trace import trace_replica, until_no_new_variables
from mirrax._src.state.foreign import settings
from mirrax._src.state.variable import handed_out


def run_uneven(
    function: Any, strategy: StrategyLike, fn: Fn, args: Args, kwargs: Kwargs
) -> PyTree:
    """`strategy.run(fn, ...)` where per-replica arguments have unequal shapes."""
    mesh = strategy.replica_mesh
    leaves, tree = jax.tree.flatten(opened((args, kwargs)), is_leaf=is_leaf)

    def cut_for(who: str, avals: tuple[jax.ShapeDtypeStruct, ...]) -> Cut:
        """The function for a replica's shapes; traced if it has not been yet."""
        key = ((strategy, None, settings.token), signature, avals)
        known, refusals = function.cuts.setdefault(key, ([], []))
        for cut in known:
            if layouts_match(cut.trace):
                return cut
        if len(refusals) > 1:  # in plain Python the first call may have made variables
            raise RunEagerly(refusals[-1])
        options = {"mode": Mode.UNEVEN, "may_forward": False, "who": who}
        try:
            traced = until_no_new_variables(
                lambda: trace_replica(strategy, fn, signature, avals, **options), fn
            )
            known.append(cut_trace(traced))
        except RunEagerly as reason:
            refusals.append(str(reason))
            raise
        function.note_trace(key)
        return known[-1]

    try:
        signature = Signature(tree, tuple(_kind(leaf) for leaf in leaves))
        arrays = signature.arrays_of(leaves)
        inputs = [
            [to_device(part_of(array, mesh, i), device) for array in arrays]
            for i, device in enumerate(mesh.local_devices)
        ]
        # Also for the shapes of other workers' replicas: all have to decide alike.
        avals = _avals_of_all(arrays, inputs, mesh)
        while True:
            cuts = list(map(cut_for, map(mesh.describe, range(mesh.size)), avals))
            _check_alike(cuts, mesh)
            # No other step may take or assign the variables in between.
            with launching():
                if all(layouts_match(cut.trace) for cut in cuts):
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


def _avals_of_all(
    arrays: Sequence[Any], inputs: Sequence[Sequence[Any]], mesh: ReplicaMesh
) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
    """Every replica's arguments without their values, in the order of replicas."""
    if not mesh.spans_workers:
        return [tuple(map(abstract, own)) for own in inputs]

    def of_all(array: Any, parts: Sequence[Any]) -> Sequence[jax.ShapeDtypeStruct]:
        if not isinstance(array, PerReplica):
            return [abstract(parts[0])] * mesh.size
        shapes = array.shapes
        if array.array is not None:
            shapes = mesh.equal_shapes(parts[0])
        elif shapes is None:
            shapes = array.shapes = mesh.agreed_shapes(parts)
        return [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s, dtype in shapes or ()]

    columns = [of_all(array, parts) for array, parts in zip(arrays, zip(*inputs))]
    return [tuple(column[i] for column in columns) for i in range(mesh.size)]


def _check_alike(cuts: Sequence[Cut], mesh: ReplicaMesh) -> None:
    """Hands what cannot be done here to the eager engine, which can, or explains why not."""
    first, places = cuts[0], [[o.is_array for o in cut.trace.outs] for cut in cuts]
    for i, cut in enumerate(cuts):
        who = mesh.describe(i)
        if cut.exchanges != first.exchanges:
            raise RunEagerly(f"{who} communicates differently")
        if list(map(id, cut.trace.writes)) != list(map(id, first.trace.writes)):
            raise RunEagerly(f"{who} assigns other variables")
        if places[i] != places[0]:
            raise RunEagerly(f"{who} returns arrays in other places")


def _execute(
    strategy: StrategyLike, every_cut: Sequence[Cut], inputs: Sequence[Sequence[Any]]
) -> PyTree:
    mesh = strategy.replica_mesh
    cuts = [every_cut[i] for i in mesh.local_ids]
    values = {
        v: v.in_full() if lies_on(v, mesh) else one_copy_of(v)
        for v in cuts[0].trace.reads
    }
    envs = [
        _bind_inputs(*own, mesh, values) for own in zip(range(len(cuts)), cuts, inputs)
    ]
    for k, stages in enumerate(zip(*(cut.stages for cut in cuts))):
        ins = [
            [env[v] for v in stage.program.invars] for stage, env in zip(stages, envs)
        ]
        if k % 2:
            outs = _exchange(stages[0], ins, mesh)
        else:
            outs = list(map(Stage.compute, stages, ins, mesh.local_devices))
        for stage, env, own in zip(stages, envs, outs):
            env.update(zip(stage.program.outvars, own))
    values = _join_outputs(every_cut, envs, mesh)
    trace = cuts[0].trace
    for variable, value in zip(trace.writes, values[trace.num_results :]):
        variable.stored = value.array if isinstance(value, Mirrored) else value
    # Results may be the very arrays that variables hold, before or after.
    handed_out.update(v.number for v in (*trace.reads, *trace.writes))
    results = []
    for cut in cuts:
        it = iter(values)
        leaves = [next(it) if out.is_array else out.known(()) for out in cut.trace.outs]
        results.append(cut.trace.out_tree.unflatten(leaves))
    merge = functools.partial(merge_parts, mesh=mesh)
    return regroup(results, strategy.describe_replica, merge)


def _bind_inputs(
    local_index: int,
    cut: Cut,
    own: Sequence[Any],
    mesh: ReplicaMesh,
    values: dict[Any, Any],
) -> dict[Any, Any]:
    replica_id = np.int32(mesh.local_ids[local_index])
    copies = [part_of(values[v], mesh, local_index) for v in cut.trace.reads]
    consts = [mesh.local_view(const, local_index) for const in cut.consts]
    names = [*cut.jaxpr.invars, *cut.jaxpr.constvars]
    return dict(zip(names, [replica_id, *copies, *own, *consts]))


def _exchange(
    stage: Stage, inputs: Sequence[Sequence[Any]], mesh: ReplicaMesh
) -> list[Any]:
    """Each replica's outputs of a stage that all do together."""
    parts = [PerReplica(each, mesh.equal_shapes(each[0])) for each in zip(*inputs)]
    joined = [join(value, mesh) for value in parts]
    outs = launch(stage, mesh, joined, mesh.split.spec)
    layouts = [mesh.split_layout(var.aval.ndim) for var in stage.program.outvars]
    return list(zip(*(PerReplica.of(x, mesh, k).values for x, k in zip(outs, layouts))))


def _join_outputs(
    every_cut: Sequence[Cut], envs: Sequence[dict[Any, Any]], mesh: ReplicaMesh
) -> list[Mirrored | PerReplica]:
    """The outputs of all replicas' programs, one by one."""
    values: list[Mirrored | PerReplica] = []
    trace = every_cut[0].trace
    layouts = [*trace.out_layouts, *trace.writes.values()]
    outvars = zip(*(cut.jaxpr.outvars for cut in every_cut))
    every_way = zip(*(cut.ways for cut in every_cut))
    for layout, atoms, ways in zip(layouts, outvars, every_way):
        own = [_value(atoms[i], env) for i, env in zip(mesh.local_ids, envs)]
        parts = list(map(to_device, own, mesh.local_devices))
        # What depends on a shape looks like a constant in each replica's program, so all
        # of them have to compute it in the same way.
        if not layout.is_split and len(set(ways)) == 1:
            values.append(Mirrored.of(mesh.join(parts, mirrored=True), mesh))
        else:
            avals: list[Any] = [atom.aval for atom in atoms]
            shapes = tuple((aval.shape, aval.dtype.name) for aval in avals)
            values.append(PerReplica(parts, shapes, mesh))
    return values


def _value(atom: Any, env: dict[Any, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def _kind(leaf: Any) -> Kind:
    if isinstance(leaf, PerReplica):
        if not all(is_array(part) or is_number(part) for part in leaf.values):
            raise RunEagerly("a per-replica argument that holds no arrays")
        return Layout.SPLIT
    is_one = isinstance(leaf, Mirrored) or is_number(leaf) or is_array(leaf)
    return Layout.PLAIN if is_one else Static.of(leaf)
