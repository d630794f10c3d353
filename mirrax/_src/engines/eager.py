"""The eager engine: the function is called once per replica every step, as plain Python."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from mirrax._src.base import context
from mirrax._src.base.context import Context
from mirrax._src.base.jax_compat import Device, thread_settings
from mirrax._src.base.launching import check_caller
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.structures import opened
from mirrax._src.base.values import (
    Args,
    Fn,
    Kwargs,
    Mirrored,
    PerReplica,
    PyTree,
    is_array,
    is_distributed,
    is_leaf,
    is_numeric,
    parts_of,
    regroup,
    to_device,
)
from mirrax._src.engines.meeting import Meeting
from mirrax._src.engines.replica_context import EagerReplicaContext, ReplicaContext


def run_eagerly(strategy: StrategyLike, fn: Fn, args: Args, kwargs: Kwargs) -> PyTree:
    """The merged results of `fn`, called on this worker's replicas one after another."""
    check_caller()
    mesh = strategy.replica_mesh
    args, kwargs = opened((args, kwargs), "argument")
    caller = replace(context.current(), strategy=strategy, replica=None, updating=None)

    if mesh.size == 1:
        alone = replace(caller, replica=ReplicaContext(strategy))
        try:
            result = _call(fn, args, kwargs, alone, mesh, 0)
            opened(result, "result")
            return result
        except Exception as error:
            error.add_note(f"Raised in {strategy.describe_replica(0)}.")
            raise

    meeting = Meeting(strategy.describe_replica)
    apply_settings = thread_settings()
    mirrored: dict[int, tuple[Any, Mirrored]] = {}
    replicas = [
        EagerReplicaContext(strategy, i, meeting, caller, mirrored)
        for i in range(len(mesh.local_ids))
    ]

    def body(replica: EagerReplicaContext) -> PyTree:
        apply_settings()
        here = replace(caller, replica=replica)
        return _call(fn, args, kwargs, here, mesh, replica.local_index)

    results = meeting.run([partial(body, replica) for replica in replicas])

    def merge(parts: Sequence[Any]) -> Any:
        known = replicas[0].rejoined(PerReplica(parts))
        return known if isinstance(known, Mirrored) else merge_parts(parts, mesh)

    given = {id(leaf) for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_leaf)}

    def may_stay_one(leaf: Any) -> bool:
        # What other workers return cannot be seen, but what they were given is the same.
        return not (mesh.spans_workers and is_array(leaf)) or id(leaf) in given

    return regroup(results, strategy.describe_replica, merge, may_stay_one, "result")


def merge_parts(parts: Sequence[Any], mesh: ReplicaMesh) -> PerReplica:
    """What replicas have returned, as arrays on their devices if it can be."""
    if all(map(is_numeric, parts)):
        parts = list(map(to_device, parts, mesh.local_devices))
    return PerReplica(parts, mesh=mesh)


def update_eagerly(
    strategy: StrategyLike,
    fn: Fn,
    args: Args,
    kwargs: Kwargs,
    copies: Sequence[Any] | None,
    devices: Collection[Device],
) -> list[PyTree]:
    """The results of `fn`, called once on each of `devices` in update context.

    `copies` are the components of the variable that is updated, put before `args`.
    """
    mesh = strategy.replica_mesh
    count = len(mesh.local_devices)

    def spread(leaf: Any) -> Any:
        # What lies on one of the devices is for all copies that are updated.
        is_one = is_distributed(leaf) and len(leaf.values) == 1 < count
        return leaf.values[0] if is_one else leaf

    args, kwargs = opened((args, kwargs), "argument")
    args, kwargs = jax.tree.map(spread, (args, kwargs), is_leaf=is_leaf)
    results = []
    for i, device in enumerate(mesh.local_devices):
        if device in devices:
            here = Context(strategy, replica=None, updating=i)
            update = fn if copies is None else partial(fn, copies[i])
            results.append(_call(update, args, kwargs, here, mesh, i))
    return results


def _call(
    fn: Fn, args: Args, kwargs: Kwargs, here: Context, mesh: ReplicaMesh, index: int
) -> PyTree:
    """`fn` of one replica's parts, called on its device in the context `here`."""
    with context.enter(here), jax.default_device(mesh.local_devices[index]):
        own_args, own_kwargs = parts_of((args, kwargs), mesh, index)
        return fn(*own_args, **own_kwargs)
