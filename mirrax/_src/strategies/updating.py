"""`extended.update`: a function is called for each copy of a variable, on its device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.jax_compat import Device
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.values import (
    Fn,
    Kwargs,
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
    what: str,
    variable: Variable | None,
    devices: Collection[Device] | None,
    group: bool,
    fn: Fn,
    args: Sequence[Any],
    kwargs: Kwargs | None,
) -> PyTree:
    """`fn(copy, *args, **kwargs)` for each copy of `variable`; for each device without one.

    `what` names the method in messages; `devices` are those to run on, None for all.
    """
    here, mesh = context.current(), strategy.replica_mesh
    args, kwargs = tuple(args), dict(kwargs or {})
    if here.replica is not None and here.strategy is strategy and mesh is not None:

        def merge(strategy: StrategyLike, *args: Any, **kwargs: Any) -> PyTree:
            call = (group, fn, args, kwargs)
            return update_copies(strategy, what, variable, devices, *call)

        return here.replica.merge(what, merge, args, kwargs)
    is_distributed = isinstance(variable, DistributedVariable)
    if variable is not None:
        _check_owner(variable, strategy)
    if mesh is None or (variable is not None and not is_distributed):
        first = () if variable is None else (variable,)
        with context.changed(replica=None):
            result = fn(*first, *args, **kwargs)
        return result if group else (result,)
    devices = mesh.local_devices if devices is None else devices
    if here.frame is not None and devices != mesh.local_devices:
        raise ValueError(
            f"`{what}` in a compiled function runs on all devices of the strategy; only in "
            "plain Python can it run on some."
        )

    def call(*args: Any, **kwargs: Any) -> PyTree:
        """`fn` on the copy of the replica that the traced code works for."""
        first = () if variable is None else (ComponentVariable(variable, 0),)
        return fn(*first, *args, **kwargs)

    with strategy.entered(what):
        if here.frame is not None:
            merged = run_in_trace(strategy, call, args, kwargs, is_update=True)
        else:
            copies = None if variable is None else variable.values
            results = update_eagerly(strategy, fn, args, kwargs, copies, devices)
            describe = strategy.describe_replica
            merged = regroup(results, describe, lambda parts: _merge(parts, mesh))
        if group:
            return merged
        local = strategy.experimental_local_results
        return jax.tree.map(local, merged, is_leaf=lambda x: x is None or is_leaf(x))


def _check_owner(variable: Variable, strategy: StrategyLike) -> None:
    is_distributed = isinstance(variable, DistributedVariable)
    is_foreign = is_distributed and variable.strategy is not strategy
    if is_foreign or (not is_distributed and strategy.num_replicas_in_sync > 1):
        raise ValueError(
            f"Variable {variable.name!r} was made outside the scope of {strategy!r}, so it "
            "has no copy on each of its devices. Make it inside `with strategy.scope():`."
        )


def _merge(parts: Sequence[Any], mesh: ReplicaMesh) -> Any:
    home = mesh if len(mesh.local_ids) == len(parts) else None
    if all(isinstance(part, ComponentVariable) for part in parts):
        if all(part.whole is parts[0].whole for part in parts):
            return parts[0].whole
    elif all(map(is_numeric, parts)):
        return Mirrored(map(jnp.asarray, parts), mesh=home)
    return PerReplica(parts, mesh=home)
