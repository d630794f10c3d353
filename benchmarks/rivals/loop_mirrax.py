"""A whole training loop with mirrax; see `looping.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from looping import MOMENTUM, ODD, RATE, Loop, run
from models import mlp_losses, vector_losses
from stepping import Steps

import mirrax as mx


def make(loop: Loop) -> Steps:
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
    losses_of = vector_losses if loop.is_variables else mlp_losses
    with strategy.scope():
        variables = [mx.Variable(p) for p in loop.parameters]
        optimizer = mx.train.Optimizer("sgd", learning_rate=RATE, momentum=MOMENTUM)

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

    return steps


if __name__ == "__main__":
    run(make)
