"""`extended.update`: a function is called for each copy of a variable, on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from mirrax._src.base import context
from mirrax._src.base.context import Context
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.values import (
    InProgram,
    Mirrored,
    PerReplica,
    PyTree,
    ReplicaValues,
    is_array,
    is_leaf,
    regroup,
)
from mirrax._src.engines.eager import update_eagerly
from mirrax._src.engines.staging import call_in_trace
from mirrax._src.state.distributed import ComponentVariable, DistributedVariable
from mirrax._src.state.variable import Variable


def update_copies(
    strategy: Any,
    variable: Variable | None,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    group: bool,
    what: str,
) -> PyTree:
    """`fn(copy, *args, **kwargs)` for each copy of `variable`; for each device without one.

    `what` names the method in messages.
    """
    here = context.current()
    mesh = strategy.replica_mesh
    if here.replica is not None and here.strategy is strategy and mesh is not None:

        def merge(strategy: Any, *args: Any, **kwargs: Any) -> PyTree:
            return update_copies(strategy, variable, fn, args, kwargs, group, what)

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

    with strategy.entered(what):
        if here.frame is not None and here.frame.is_spmd:
            merged = _update_in_program(strategy, call, args, kwargs)
        elif here.frame is not None:
            merged = call_in_trace(
                strategy,
                call,
                args,
                kwargs,
                lambda frame: Context(strategy, updating=0, frame=frame),
            )
        else:
            copies = variable.values if is_ours else None
            results = update_eagerly(strategy, fn, args, kwargs, copies)
            merged = regroup(results, strategy.describe_replica, _merge)
        return merged if group else _ungroup(strategy, merged)


def _update_in_program(
    strategy: Any,
    call: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PyTree:
    """Inside the program that all replicas run: each updates its own copy."""

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, ReplicaValues):
            return leaf
        if isinstance(leaf.piece, InProgram):
            return leaf.piece.array
        return leaf.piece if leaf.piece is not None else leaf.values[0]

    def spread(leaf: Any) -> Any:
        return strategy.in_program_value(leaf) if isinstance(leaf, Tracer) else leaf

    args, kwargs = jax.tree.map(own, (args, kwargs), is_leaf=is_leaf)
    with context.changed(updating=0, replica=None):
        result = call(*args, **kwargs)
    return jax.tree.map(spread, result, is_leaf=is_leaf)


def _merge(parts: Sequence[Any]) -> Any:
    return Mirrored(parts) if all(map(is_array, parts)) else PerReplica(parts)


def _ungroup(strategy: Any, merged: PyTree) -> PyTree:
    return jax.tree.map(
        strategy.experimental_local_results,
        merged,
        is_leaf=lambda x: x is None or is_leaf(x),
    )
