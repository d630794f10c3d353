"""Training steps of workers with mirrax, and hand-written on JAX's distributed runtime.

Run by `workers.py` and `sharded_state.py`, once for each worker: `jax_workers.py SIDE WORKER ADDRESSES FOLDER`.
See `rivals/stepping.py`. Ways of one side share a process, and so its thread pool: mirrax
sizes it itself, and the hand-written side gives each worker its share of the cores, which
is faster than JAX's default here.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Step
from jax import lax
from models import MODELS, Arrays
from rivals.stepping import Steps, Ways, Worker, answer
from training import (
    AXIS,
    Reduce,
    distribute,
    handwritten,
    one_by_one,
    optimizer_step,
    state_step,
    variables_step,
)

import mirrax as mx

# Larger gradients travel each alone: the copy into a pack costs more.
LARGE_BYTES = 2**20


def main() -> None:
    side, *arguments = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    answer(SIDES[side], arguments)


# Hand-written -------------------------------------------------------------------------


def with_jax(worker: Worker) -> Ways:
    os.environ["PJRT_NPROC"] = str(worker.threads)
    count = len(worker.addresses)
    jax.distributed.initialize(worker.addresses[0], count, worker.number)
    reduces = {"psum each": one_by_one, "psum packed": in_one, "gather": gathered}

    def way_of(reduce: Reduce) -> Callable[[str], Steps]:
        return lambda model: waiting(handwritten(MODELS[model], jax.devices(), reduce))

    return {name: way_of(reduce) for name, reduce in reduces.items()}


def in_one(gradients: Arrays) -> list[jax.Array]:
    """All tensors in one psum."""
    flat = jnp.concatenate([gradient.reshape(-1) for gradient in gradients])
    total = lax.psum(lax.optimization_barrier(flat), AXIS)
    return unpacked(lax.optimization_barrier(total), gradients)


def gathered(gradients: Arrays) -> list[jax.Array]:
    """All but the large tensors in one pack; every worker adds up what all of them have.

    Gloo's all-reduce sends many messages where its all-gather sends one. The pack is filled
    piece by piece: XLA's concatenation is slow on a pool of more than one thread.
    """

    def add_all(array: jax.Array) -> jax.Array:
        # Not by pairs that swap: XLA may then add a worker's own product unrounded, and
        # the sums of the workers differ.
        return functools.reduce(operator.add, lax.all_gather(array, AXIS))

    small = [gradient for gradient in gradients if gradient.nbytes < LARGE_BYTES]
    flat, end = jnp.zeros(sum(g.size for g in small), gradients[0].dtype), 0
    for gradient in small:
        flat = lax.dynamic_update_slice(flat, gradient.reshape(-1), (end,))
        end += gradient.size
    parts = iter(unpacked(add_all(flat), small))
    return [
        next(parts) if gradient.nbytes < LARGE_BYTES else add_all(gradient)
        for gradient in gradients
    ]


def unpacked(flat: jax.Array, likes: Arrays) -> list[jax.Array]:
    """The pieces of `flat`, shaped as `likes`."""
    ends = np.cumsum([like.size for like in likes])[:-1]
    pieces = jnp.split(flat, ends)
    return [piece.reshape(like.shape) for piece, like in zip(pieces, likes)]


# With mirrax --------------------------------------------------------------------------


def with_mirrax(worker: Worker) -> Ways:
    os.environ["TF_CONFIG"] = worker.tf_config
    strategy = mx.distribute.MultiWorkerMirroredStrategy()

    def variables(name: str) -> Steps:
        model = MODELS[name]
        step = variables_step(strategy, model)
        batch = distribute(strategy, model.make_batch())
        return waiting(lambda: strategy.run(step, args=tuple(batch)), strategy)

    def state(name: str) -> Steps:
        model = MODELS[name]
        step = state_step(model)
        x, y = distribute(strategy, model.make_batch())
        kept = strategy.replicate([jnp.asarray(p) for p in model.make_parameters()])

        def run() -> Any:
            nonlocal kept
            kept, loss = strategy.run(step, args=(kept, x, y))
            return loss

        return waiting(run, strategy)

    return {"mirrax variables": variables, "mirrax state": state}


def with_adam(worker: Worker) -> Ways:
    """Adam with its state on every device, and in parts."""
    os.environ["TF_CONFIG"] = worker.tf_config
    strategy = mx.distribute.MultiWorkerMirroredStrategy()

    def way_of(shard_state: bool) -> Callable[[str], Steps]:
        def make(name: str) -> Steps:
            adam = optax.adam(1e-3)
            step, *_ = optimizer_step(strategy, MODELS[name], adam, shard_state)
            batch = distribute(strategy, MODELS[name].make_batch())
            return waiting(lambda: strategy.run(step, args=tuple(batch)), strategy)

        return make

    return {"mirrored": way_of(False), "in parts": way_of(True)}


def waiting(step: Step, strategy: mx.distribute.Strategy | None = None) -> Steps:
    """Steps that are waited for at the end only, as in a training loop."""

    def steps(count: int) -> float:
        for _ in range(count):
            losses = step()
        if strategy is None:
            parts = [shard.data for shard in losses.addressable_shards]
        else:
            parts = strategy.experimental_local_results(losses)
        return float(sum(np.asarray(part).sum() for part in parts))

    return steps


SIDES = {"JAX": with_jax, "mirrax": with_mirrax, "adam": with_adam}


if __name__ == "__main__":
    main()
