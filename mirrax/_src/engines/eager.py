"""The eager engine: the function is called once per replica every step, as plain Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax

from mirrax._src.base import context
from mirrax._src.base.context import Context
from mirrax._src.base.jax_compat import Device, thread_settings
from mirrax._src.base.values import (
    Mirrored,
    PerReplica,
    PyTree,
    check_parts,
    is_array,
    is_distributed,
    is_leaf,
    is_number,
    on_device,
    regroup,
    to_device,
)
from mirrax._src.engines.meeting import Meeting
from mirrax._src.engines.replica_context import EagerReplicaContext, ReplicaContext


def run_eagerly(
    strategy: Any,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PyTree:
    """The merged results of `fn`, called on this worker's replicas one after another."""
    mesh = strategy.replica_mesh
    caller = replace(context.current(), strategy=strategy, replica=None, updating=None)

    def localize(local_index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def own(leaf: Any) -> Any:
            if is_distributed(leaf):
                check_parts(leaf, mesh)
                device = mesh.local_devices[local_index]
                return on_device(leaf.values[local_index], device)
            return mesh.local_view(leaf, local_index)

        return jax.tree.map(own, (args, kwargs), is_leaf=is_leaf)

    if mesh.size == 1:
        own_args, own_kwargs = localize(0)
        alone = replace(caller, replica=ReplicaContext(strategy))
        with context.enter(alone), jax.default_device(mesh.local_devices[0]):
            try:
                return fn(*own_args, **own_kwargs)
            except Exception as error:
                error.add_note(f"Raised in {strategy.describe_replica(0)}.")
                raise

    meeting = Meeting(strategy.describe_replica)
    apply_settings = thread_settings()
    shared: dict[int, tuple[Any, Mirrored]] = {}

    def body(local_index: int) -> Callable[[], PyTree]:
        replica = EagerReplicaContext(strategy, local_index, meeting, caller, shared)

        def run() -> PyTree:
            apply_settings()
            own_args, own_kwargs = localize(local_index)
            here = replace(caller, replica=replica)
            with (
                context.enter(here),
                jax.default_device(mesh.local_devices[local_index]),
            ):
                return fn(*own_args, **own_kwargs)

        return run

    results = meeting.run([body(i) for i in range(len(mesh.local_devices))])

    def merge(parts: Sequence[Any]) -> Any:
        origins = {id(shared[id(part)][1]) for part in parts if id(part) in shared}
        if len(origins) == 1 and all(id(part) in shared for part in parts):
            return shared[id(parts[0])][1]
        if all(is_array(p) or is_number(p) or isinstance(p, bool) for p in parts):
            return PerReplica(
                to_device(part, device)
                for part, device in zip(parts, mesh.local_devices)
            )
        return PerReplica(parts)

    given = {id(leaf) for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_leaf)}

    def may_share(leaf: Any) -> bool:
        # What other workers return cannot be seen, but what they were given is the same.
        return not (mesh.is_shared and is_array(leaf)) or id(leaf) in given

    return regroup(results, strategy.describe_replica, merge, may_share)


def update_eagerly(
    strategy: Any,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    copies: Sequence[Any] | None,
    devices: Collection[Device],
) -> list[PyTree]:
    """The results of `fn`, called once on each of `devices` in update context.

    `copies` are the components of the variable that is updated, put before `args`.
    """
    mesh = strategy.replica_mesh
    results = []
    for i, device in enumerate(mesh.local_devices):
        if device not in devices:
            continue

        def own(leaf: Any, i: int = i) -> Any:
            if is_distributed(leaf):
                part = leaf.values[i if len(leaf.values) > 1 else 0]
                return on_device(part, mesh.local_devices[i])
            return mesh.local_view(leaf, i)

        own_args, own_kwargs = jax.tree.map(own, (args, kwargs), is_leaf=is_leaf)
        here = Context(strategy, replica=None, updating=i)
        with context.enter(here), jax.default_device(device):
            first = () if copies is None else (copies[i],)
            results.append(fn(*first, *own_args, **own_kwargs))
    return results
