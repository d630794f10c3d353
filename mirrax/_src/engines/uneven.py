"""Uneven steps, compiled: replicas whose arguments differ in shape.

Such a step cannot be one program for all replicas. The function is traced once for each
shape and cut where replicas communicate (cutting.py); each device runs its own compiled
segments, and between them small programs over all devices do the communication.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from mirrax._src.base.errors import RunEagerly
from mirrax._src.base.jax_compat import Literal
from mirrax._src.base.logical import launching
from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.base.protocols import Mode, StrategyLike
from mirrax._src.base.values import (
    Args,
    Fn,
    Kwargs,
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
from mirrax._src.collectives.launch import launch
from mirrax._src.engines.arguments import Kind, Signature, Static
from mirrax._src.engines.cutting import Cut, Equations, cut_trace, equal_outputs
from mirrax._src.engines.eager import run_eagerly
from mirrax._src.engines.jaxprs import is_combining
from mirrax._src.engines.program import layouts_match, lies_on, one_copy_of
from mirrax._src.engines.trace import trace_replica, until_no_new_variables
from mirrax._src.state.variable import handed_out

Env = dict[Any, Any]


def run_uneven(
    function: Any, strategy: StrategyLike, fn: Fn, args: Args, kwargs: Kwargs
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
    fn: Fn,
    signature: Signature,
    avals: tuple[jax.ShapeDtypeStruct, ...],
    replica_id: int,
) -> Cut:
    """The function for one replica's shapes; traced if it has not been yet."""
    known = function.cuts.setdefault((strategy, signature, avals), [])
    for cut in known:
        if layouts_match(cut.trace):
            return cut
    who = strategy.replica_mesh.describe(replica_id)
    options = {"mode": Mode.UNEVEN, "may_forward": False, "who": who}
    trace = functools.partial(trace_replica, strategy, fn, signature, avals, **options)
    cut = cut_trace(until_no_new_variables(trace, fn))
    function.note_trace((strategy, signature, avals))
    known.append(cut)
    return cut


def _avals_of_all(
    arrays: Sequence[Any], inputs: Sequence[Sequence[Any]], mesh: ReplicaMesh
) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
    """Every replica's arguments without their values, in the order of replicas."""
    if not mesh.spans_workers:
        return [tuple(map(abstract, own)) for own in inputs]

    def of_all(array: Any, own: Any) -> Sequence[jax.ShapeDtypeStruct]:
        if not isinstance(array, PerReplica):
            return [abstract(own)] * mesh.size
        if array.array is not None:
            return [jax.ShapeDtypeStruct(own.shape, own.dtype)] * mesh.size
        if array.shapes is None:
            array.shapes = mesh.agreed_shapes([jnp.asarray(p) for p in array.values])
        return [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s, dtype in array.shapes]

    columns = [of_all(array, own) for array, own in zip(arrays, inputs[0])]
    return [tuple(column[i] for column in columns) for i in range(mesh.size)]


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
            own = [cut.exchanges[k] for cut in cuts]
            _exchange(own, every_cut[0].exchanges[k], envs, mesh)
    outs = [
        [_value(atom, env) for atom in cut.jaxpr.outvars]
        for cut, env in zip(cuts, envs)
    ]
    is_same = equal_outputs(every_cut)
    trace = cuts[0].trace
    with launching:
        for i, variable in enumerate(trace.writes, start=trace.num_results):
            parts = [to_device(own[i], d) for own, d in zip(outs, mesh.local_devices)]
            if is_same[i]:
                variable.stored = mesh.join(parts, mirrored=True)
            else:
                variable.stored = PerReplica(parts, mesh.equal_shapes(variable), mesh)
        # Results may be the very arrays that variables hold, before or after.
        handed_out.update(v.number for v in (*trace.reads, *trace.writes))
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
    own: Sequence[Equations], first: Equations, envs: Sequence[Env], mesh: ReplicaMesh
) -> None:
    """Does the collectives of all replicas' programs at one place; `first` is replica 0's."""
    operands = [[atom for eqn in eqns for atom in eqn.invars] for eqns in own]
    joined = []
    for atoms in zip(*operands):
        parts = PerReplica(map(_value, atoms, envs), mesh.equal_shapes(atoms[0].aval))
        joined.append(join(parts, mesh))
    program = _Exchange(first)
    combined = program.is_combined
    specs = tuple(PartitionSpec() if flag else mesh.split_spec for flag in combined)
    outs = launch(program, mesh, joined, specs)
    results = [[var for eqn in eqns for var in eqn.outvars] for eqns in own]
    for variables, whole, flag in zip(zip(*results), outs, combined):
        layout = mesh.split_layout(variables[0].aval.ndim)
        apart = PerReplica.of(whole, mesh, layout)
        value = Mirrored.of(whole, mesh) if flag else apart
        for env, variable, part in zip(envs, variables, value.values):
            env[variable] = part


@dataclass(frozen=True)
class _Exchange:
    """What one replica does in the collectives at one place."""

    eqns: Equations
    __name__ = "an uneven step"  # for messages

    @property
    def is_combined(self) -> list[bool]:
        """For each result whether it is the same on all replicas."""
        return [is_combining(eqn) for eqn in self.eqns for _ in eqn.outvars]

    def __call__(self, arrays: list[Any]) -> tuple[Any, ...]:
        it = iter(arrays)
        outs: list[Any] = []
        for eqn in self.eqns:
            result = eqn.primitive.bind(*(next(it) for _ in eqn.invars), **eqn.params)
            outs += result if eqn.primitive.multiple_results else [result]
        flags = self.is_combined
        return tuple(o if f or o.ndim else o[None] for o, f in zip(outs, flags))


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

    def merge(parts: Sequence[Any]) -> Any:
        if not all(is_array(part) or is_number(part) for part in parts):
            return PerReplica(parts, mesh=mesh)
        arrays = [to_device(part, d) for part, d in zip(parts, mesh.local_devices)]
        if id(parts[0]) in same:
            return Mirrored.of(mesh.join(arrays, mirrored=True), mesh)
        merged = PerReplica(arrays, mesh=mesh)
        at = position.get(id(parts[0]))
        if mesh.spans_workers and at is not None:
            avals: list[Any] = [cut.jaxpr.outvars[at].aval for cut in every_cut]
            merged.shapes = tuple((aval.shape, aval.dtype.name) for aval in avals)
        return merged

    def may_stay_one(leaf: Any) -> bool:
        return not (mesh.spans_workers and id(leaf) in position)

    return regroup(results, strategy.describe_replica, merge, may_stay_one)


def _value(atom: Any, env: Env) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def _kind(leaf: Any) -> Kind:
    if isinstance(leaf, PerReplica):
        if not all(is_array(part) or is_number(part) for part in leaf.values):
            raise RunEagerly("a per-replica argument that holds no arrays")
        return Layout.SPLIT
    if is_distributed(leaf) or is_number(leaf) or is_array(leaf):
        return Layout.PLAIN
    return Static.of(leaf)
