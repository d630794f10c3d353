"""`extended.update`: a function is called for each copy of a variable, on its device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.jax_compat import Device
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.values import (
    Mirrored,
    PerReplica,
    PyTree,
    is_leaf,
    is_numeric,
    regroup,
)
from mirrax._src.engines.eager import update_eagerly
from mirrax._src.engines.trace import run_in_trace
from mirrax._src.state.distributed import ComponentVariable, DistributedVariable
from mirrax._src.state.variable import Variable


def update_copies(
    strategy: StrategyLike,
    variable: Variable | None,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    group: bool,
    what: str,
    devices: Collection[Device] | None = None,
) -> PyTree:
    """`fn(copy, *args, **kwargs)` for each copy of `variable`; for each device without one.

    `what` names the method in messages; `devices` are those to run on, all by default.
    """
    here = context.current()
    mesh = strategy.replica_mesh
    if here.replica is not None and here.strategy is strategy and mesh is not None:

        def merge(strategy: StrategyLike, *args: Any, **kwargs: Any) -> PyTree:
            return update_copies(
                strategy, variable, fn, args, kwargs, group, what, devices
            )

        return here.replica.merge(what, merge, args, kwargs)
    is_ours = isinstance(variable, DistributedVariable)
    if variable is not None and (
        variable.strategy is not strategy
        if is_ours
        else strategy.num_replicas_in_sync > 1
    ):
        raise ValueError(
            f"Variable {variable.name!r} was made outside the scope of {strategy!r}, so it "
            "has no copy on each of its devices. Make it inside `with strategy.scope():`."
        )
    if not is_ours and (variable is not None or mesh is None):
        first = () if variable is None else (variable,)
        with context.changed(replica=None):
            result = fn(*first, *args, **kwargs)
        return result if group else (result,)

    def call(*args: Any, **kwargs: Any) -> PyTree:
        """`fn` on the copy of the replica that the traced code works for."""
        first = (ComponentVariable(variable, 0),) if is_ours else ()
        return fn(*first, *args, **kwargs)

    if mesh is not None and devices is None:
        devices = mesh.local_devices
    if here.frame is not None and mesh is not None and devices != mesh.local_devices:
        raise ValueError(
            f"`{what}` in a compiled function runs on all devices of the strategy; only in "
            "plain Python can it run on some."
        )
    with strategy.entered(what):
        if here.frame is not None:
            merged = run_in_trace(strategy, call, args, kwargs, is_update=True)
        else:
            copies = variable.values if is_ours else None
            results = update_eagerly(strategy, fn, args, kwargs, copies, devices or ())
            merged = regroup(
                results, strategy.describe_replica, lambda p: _merge(p, mesh)
            )
        return merged if group else _ungroup(strategy, merged)


def _merge(parts: Sequence[Any], mesh: ReplicaMesh | None) -> Any:
    mesh = mesh if mesh is not None and len(mesh.local_ids) == len(parts) else None
    if all(isinstance(part, ComponentVariable) for part in parts):
        wholes = {id(part.whole) for part in parts}
        return parts[0].whole if len(wholes) == 1 else PerReplica(parts, mesh=mesh)
    if all(map(is_numeric, parts)):
        return Mirrored(map(jnp.asarray, parts), mesh=mesh)
    return PerReplica(parts, mesh=mesh)


def _ungroup(strategy: StrategyLike, merged: PyTree) -> PyTree:
    return jax.tree.map(
        strategy.experimental_local_results,
        merged,
        is_leaf=lambda x: x is None or is_leaf(x),
    )
