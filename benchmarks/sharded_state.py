"""A step of a transformer of 4 billion weights for 8 devices, compiled from shapes alone.

    python benchmarks/sharded_state.py

Nothing is allocated: XLA tells what the program would take on each device, with the state of
AdamW on every device and in parts (`shard_state=True`), and with `jax.checkpoint` and without.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mirrax as mx
from mirrax._src.base.mesh import Layout
from mirrax._src.engines.arguments import Signature
from mirrax._src.engines.trace import trace_replica

REPLICAS, LAYERS, WIDTH, HEADS, WORDS, LENGTH = 8, 32, 3200, 32, 50304, 512
GIB = 2**30


def shape_of_params() -> dict[str, jax.ShapeDtypeStruct]:
    shapes = {
        "words": (WORDS, WIDTH),
        "attention": (LAYERS, WIDTH, 4 * WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
        "norms": (LAYERS, 2, WIDTH),
    }
    return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}


def loss_of(params: Any, tokens: jax.Array, is_checkpointed: bool) -> jax.Array:
    """The mean cross-entropy of the next word."""

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        rows, length, _ = x.shape
        mixed = norm(x, layer["norms"][0]) @ layer["attention"]
        *heads, last = jnp.split(mixed, 4, axis=-1)
        q, k, v = (h.reshape(rows, length, HEADS, -1) for h in heads)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.reshape(x.shape) * jax.nn.silu(last)
        hidden = jax.nn.gelu(norm(x, layer["norms"][1]) @ layer["up"])
        return x + hidden @ layer["down"], None

    block = jax.checkpoint(block) if is_checkpointed else block
    layers = {k: v for k, v in params.items() if k != "words"}
    x, _ = jax.lax.scan(block, params["words"][tokens[:, :-1]], layers)
    logits = x @ params["words"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(losses) / REPLICAS


def compile_step(shard_state: bool, is_checkpointed: bool) -> Any:
    """The compiled step of one strategy of 8 replicas, in functional style."""
    strategy = mx.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])
    mesh = strategy.replica_mesh
    optimizer = mx.train.Optimizer(optax.adamw(3e-4), shard_state=shard_state)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens, is_checkpointed)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = shape_of_params()
    state = jax.eval_shape(optimizer.begin, params)
    tokens = jax.ShapeDtypeStruct((REPLICAS, LENGTH + 1), jnp.int32)

    def kind(leaf: Any, is_state: bool) -> Layout:
        in_parts = (
            is_state and shard_state and mesh.sharded_axis(leaf.shape) is not None
        )
        return Layout.SHARDED if in_parts else Layout.PLAIN

    leaves, tree = jax.tree.flatten(((params, state, tokens), {}))
    kinds = [kind(x, False) for x in jax.tree.leaves(params)]
    kinds += [kind(x, True) for x in jax.tree.leaves(state)]
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
    return apply.lower(*arguments).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    weights = sum(math.prod(x.shape) for x in shape_of_params().values())
    print(f"{weights / 1e9:.2f} billion weights, {REPLICAS} devices, GiB on each")
    print("state    jax.checkpoint  arguments  temporary  collectives")
    for shard_state, is_checkpointed in ((0, 1), (1, 1), (1, 0)):
        compiled = compile_step(bool(shard_state), bool(is_checkpointed))
        sizes: Any = compiled.memory_analysis()
        found = re.findall(
            r" (all-reduce|reduce-scatter|all-gather)\(", compiled.as_text()
        )
        print(
            "in parts" if shard_state else "mirrored",
            f"{'yes' if is_checkpointed else 'no':>14}",
            f"{sizes.argument_size_in_bytes / GIB:10.2f}",
            f"{sizes.temp_size_in_bytes / GIB:10.2f} ",
            dict(Counter(found)),
        )


if __name__ == "__main__":
    main()
