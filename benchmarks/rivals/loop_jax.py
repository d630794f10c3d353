"""A whole training loop, hand-written in JAX; see `looping.py`.

Ways: `each` has one psum a tensor and `packed` packs tensors and the loss (all of them
between workers, small ones in one process), both with a thread pool of a safe size. `default`
is `each` with JAX's own thread pool.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from looping import MOMENTUM, RATE, Loop, run
from models import mlp_losses, vector_losses
from stepping import Steps

SMALL = 64 * 1024


def make(loop: Loop) -> Steps:
    jax.config.update("jax_platforms", "cpu")
    local = loop.replicas // loop.workers
    if loop.way != "default":
        threads = loop.worker.threads if local == 1 else max(4, 2 * local)
        os.environ["PJRT_NPROC"] = str(threads)
    if loop.workers > 1:
        first = loop.worker.addresses[0]
        jax.distributed.initialize(first, loop.workers, loop.worker.number)
    else:
        jax.config.update("jax_num_cpu_devices", loop.replicas)
    mesh = Mesh(np.array(jax.devices()), ("r",), axis_types=(AxisType.Auto,))
    split, copied = NamedSharding(mesh, P("r")), NamedSharding(mesh, P())
    losses_of = vector_losses if loop.is_variables else mlp_losses
    limit = SMALL if loop.workers == 1 else 2**40

    def total(arrays: list[jax.Array]) -> list[jax.Array]:
        if loop.way != "packed":
            return [lax.psum(a, "r") for a in arrays]
        small = [a for a in arrays if a.nbytes < limit]
        flat = lax.optimization_barrier(jnp.concatenate([a.ravel() for a in small]))
        summed = lax.optimization_barrier(lax.psum(flat, "r"))
        parts = iter(jnp.split(summed, np.cumsum([a.size for a in small])[:-1]))
        return [
            next(parts).reshape(a.shape) if a.nbytes < limit else lax.psum(a, "r")
            for a in arrays
        ]

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(params: list[jax.Array]) -> jax.Array:
            return jnp.sum(losses_of(params, x, y)) / loop.batch

        params, speeds = state
        loss, gradients = jax.value_and_grad(loss_fn)(params)
        *gradients, loss = total([*gradients, loss])
        speeds = [MOMENTUM * m + g for m, g in zip(speeds, gradients)]
        return ([p - RATE * m for p, m in zip(params, speeds)], speeds), loss

    specs = ((P(), P()), P("r"), P("r"))
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=((P(), P()), P()), check_vma=False
    )
    compiled = jax.jit(mapped, donate_argnums=0)
    zeros = [np.zeros_like(p) for p in loop.parameters]
    state = jax.device_put((loop.parameters, zeros), copied)
    batches = loop.own_batches()

    def put(array: np.ndarray) -> jax.Array:
        if loop.workers == 1:
            return jax.device_put(array, split)
        return jax.make_array_from_process_local_data(split, array)

    def steps(count: int) -> float:
        nonlocal state
        for _ in range(count):
            state, loss = compiled(state, *map(put, next(batches)))
        return float(np.asarray(loss.addressable_data(0))) / loop.workers

    return steps


if __name__ == "__main__":
    run(make)
