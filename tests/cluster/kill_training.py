"""What the kill tests train: every way to lose time between two saves is in it."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrax as mx


def main(directory: Path, steps: int, step_seconds: float) -> None:
    strategy = mx.distribute.MultiWorkerMirroredStrategy()
    random = np.random.default_rng(0)
    features = random.normal(size=(150, 8)).astype(np.float32)
    targets = (features @ random.normal(size=(8, 1))).astype(np.float32)
    dataset = mx.data.Dataset.from_tensor_slices((features, targets))
    dataset = dataset.shuffle(150, seed=1).batch(16).repeat()  # the last one of 6
    with strategy.scope():
        hidden = mx.Variable(random.normal(size=(8, 16)).astype(np.float32))
        out = mx.Variable(jnp.full((16, 1), 0.1))
        optimizer = mx.train.Optimizer(optax.adam(0.01))
        mean = mx.metrics.Mean()

    @mx.function
    def train_step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            errors = (jnp.tanh(x @ hidden) @ out - y)[:, 0] ** 2
            return mx.nn.compute_average_loss(errors)

        value, gradients = mx.value_and_grad(loss, [hidden, out])()
        optimizer.apply_gradients(zip(gradients, [hidden, out]))
        mean.update_state(value)
        return value

    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    checkpoint = mx.train.Checkpoint(
        hidden=hidden, out=out, optimizer=optimizer, mean=mean, iterator=iterator
    )
    manager = mx.train.CheckpointManager(
        checkpoint, directory / "checkpoints", max_to_keep=2
    )
    resolver = strategy.cluster_resolver
    with mx.train.PreemptionCheckpointHandler(resolver, manager) as handler:
        while handler.total_run_calls < steps:
            handler.run(lambda: strategy.run(train_step, next(iterator)))
            if not (directory / "hurry").exists():
                time.sleep(step_seconds)
            if handler.total_run_calls % 7 == 0:
                manager.save()
    manager.sync()
    weights = hidden.numpy().tobytes() + out.numpy().tobytes()
    digest = hashlib.sha256(weights).hexdigest()
    result = f"{digest} {float(mean.result()):.9g}"
    (directory / f"result-{resolver.task_id}").write_text(result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
