"""Programs for devices that are not here: a step, lowered from shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import mirrax as mx
from mirrax._src.base.mesh import Layout
from mirrax._src.engines.arguments import Signature
from mirrax._src.engines.trace import trace_replica


def lower(
    strategy: mx.distribute.Strategy,
    step: Callable[..., Any],
    params: Any,
    state: Any,
    batch: Any,
    shard_state: bool,
) -> jax.stages.Lowered:
    """`strategy.run(step, (params, state, batch))`, in functional style, not yet compiled.

    Args:
        strategy: On which devices.
        step: Returns the new parameters and state first; these are donated.
        params: Shapes of what every device has a copy of.
        state: Shapes of the optimizer's state.
        batch: The shape of the global batch.
        shard_state: Whether the state lies in parts.
    """
    mesh = strategy.replica_mesh

    def kind(leaf: Any) -> Layout:
        in_parts = shard_state and mesh.sharded_axis(leaf.shape) is not None
        return Layout.SHARDED if in_parts else Layout.PLAIN

    leaves, tree = jax.tree.flatten(((params, state, batch), {}))
    kinds = [Layout.PLAIN for _ in jax.tree.leaves(params)]
    kinds += [kind(x) for x in jax.tree.leaves(state)]
    kinds.append(Layout.SPLIT)
    parts = [
        jax.ShapeDtypeStruct(mesh.part_shape(k, x.shape), x.dtype)
        for x, k in zip(leaves, kinds)
    ]
    traced = trace_replica(strategy, step, Signature(tree, tuple(kinds)), parts)
    places = {Layout.PLAIN: mesh.mirrored, Layout.SPLIT: mesh.split}
    arguments = [
        jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=places.get(k) or mesh.sharded(x.shape)
        )
        for x, k in zip(leaves, kinds)
    ]
    apply = jax.jit(
        lambda *arrays: traced.apply([], arrays, traced.closed.consts)[0],
        donate_argnums=tuple(range(len(arguments) - 1)),
    )
    return apply.lower(*arguments)
