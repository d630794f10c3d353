"""A whole training loop with mirrax; see `looping.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import optax
from looping import ADAM_RATE, MOMENTUM, ODD, RATE, Loop, Training, run
from models import losses_named

import mirrax as mx


def make(loop: Loop) -> Training:
    jax.config.update("jax_platforms", "cpu")
    if loop.workers > 1:
        os.environ["TF_CONFIG"] = loop.worker.tf_config
        strategy = mx.distribute.MultiWorkerMirroredStrategy(step_timeout=10)
    else:
        mx.config.set_logical_device_configuration(cpu=loop.replicas)
        strategy = mx.distribute.MirroredStrategy()
    rows = mx.data.Dataset.from_tensor_slices((loop.x, loop.y))
    rows = rows.batch(loop.batch, drop_remainder=loop.model != ODD).repeat()
    batches = iter(strategy.experimental_distribute_dataset(rows))
    losses_of = losses_named(loop.model)
    with strategy.scope():
        variables = [mx.Variable(p) for p in loop.parameters]
        optimizer = mx.train.Optimizer(
            optax.adam(ADAM_RATE)
            if loop.is_transformer
            else optax.sgd(RATE, momentum=MOMENTUM)
        )

    def replica_step(x: Any, y: Any) -> Any:
        def loss_fn() -> Any:
            losses = losses_of([v.read_value() for v in variables], x, y)
            return jnp.sum(losses) / loop.batch

        loss, gradients = mx.value_and_grad(loss_fn, variables)()
        optimizer.apply_gradients(zip(gradients, variables))
        return loss

    @mx.function
    def step(batch: Any) -> Any:
        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce("sum", losses, axis=None)

    def steps(count: int) -> float:
        for _ in range(count):
            loss = step(next(batches))
        return float(loss) / loop.workers

    state = mx.train.Checkpoint(
        variables=variables, optimizer=optimizer, batches=batches
    )
    return Training(steps, lambda path: state.write(path, wait=True), state.read)


if __name__ == "__main__":
    run(make)
