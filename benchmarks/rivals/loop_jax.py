"""A whole training loop, hand-written in JAX; see `looping.py`.

Ways: `each` has one psum a tensor; `packed` packs tensors and the loss (all of them between
workers, small ones in one process); `gathered` packs them all, gathers the replicas' packs and adds
them up, which Gloo does in fewer messages. All have a thread pool of a safe size, but `default`,
which is `each` with JAX's own.
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
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from looping import ADAM_RATE, MOMENTUM, RATE, Loop, Training, run
from models import losses_named

SMALL = 64 * 1024


def make(loop: Loop) -> Training:
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
    losses_of = losses_named(loop.model)
    optimizer = (
        optax.adam(ADAM_RATE)
        if loop.is_transformer
        else optax.sgd(RATE, momentum=MOMENTUM)
    )
    limit = SMALL if loop.workers == 1 else 2**40

    def total(arrays: list[jax.Array]) -> list[jax.Array]:
        if loop.way not in ("packed", "gathered"):
            return [lax.psum(a, "r") for a in arrays]
        small = [a for a in arrays if a.nbytes < limit]
        flat = lax.optimization_barrier(jnp.concatenate([a.ravel() for a in small]))
        if loop.way == "gathered":
            summed = lax.all_gather(flat, "r").sum(0)
        else:
            summed = lax.optimization_barrier(lax.psum(flat, "r"))
        parts = iter(jnp.split(summed, np.cumsum([a.size for a in small])[:-1]))
        return [
            next(parts).reshape(a.shape) if a.nbytes < limit else lax.psum(a, "r")
            for a in arrays
        ]

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(params: list[jax.Array]) -> jax.Array:
            return jnp.sum(losses_of(params, x, y)) / loop.batch

        params, slots = state
        loss, gradients = jax.value_and_grad(loss_fn)(params)
        *gradients, loss = total([*gradients, loss])
        updates, slots = optimizer.update(gradients, slots, params)
        return (optax.apply_updates(params, updates), slots), loss

    specs = ((P(), P()), P("r"), P("r"))
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=((P(), P()), P()), check_vma=False
    )
    compiled = jax.jit(mapped, donate_argnums=0)
    slots = jax.tree.map(np.asarray, optimizer.init(loop.parameters))
    state = jax.device_put((loop.parameters, slots), copied)
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

    return Training(steps)


if __name__ == "__main__":
    run(make)
