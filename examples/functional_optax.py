"""A functional training loop: the state is a pytree that goes through the step.

    python examples/functional_optax.py --replicas 4 --steps 200
    python examples/functional_optax.py --directory /tmp/tumours --steps 400

The second line saves a checkpoint every 50 steps; started again, it goes on with the next
step. The data is scikit-learn's: measurements of 569 tumours, of which 357 are benign.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_breast_cancer

import mirrax as mx

BATCH = 64
HELD_OUT = 169
SAVE_EVERY = 50

Params = dict[str, jax.Array]


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """30 numbers for each tumour, scaled, and whether it is benign."""
    data: Any = load_breast_cancer()
    order = np.random.default_rng(0).permutation(len(data.data))
    x, y = data.data[order], data.target[order]
    seen = x[HELD_OUT:]
    x = (x - seen.mean(axis=0)) / seen.std(axis=0)
    return x.astype("float32"), y.astype("float32")


def init_params(key: jax.Array) -> Params:
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (30, 32)) / np.sqrt(30),
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(second, (32,)) / np.sqrt(32),
        "b2": jnp.zeros(()),
    }


def predict(params: Params, x: jax.typing.ArrayLike) -> jax.Array:
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def train(strategy: mx.MirroredStrategy, steps: int, directory: str) -> float:
    """The accuracy on tumours that were never seen."""
    x, y = load_data()
    dataset = mx.data.Dataset.from_tensor_slices((x[HELD_OUT:], y[HELD_OUT:]))
    dataset = dataset.shuffle(len(x), seed=0).batch(BATCH).repeat()
    batches = iter(strategy.experimental_distribute_dataset(dataset))

    # A transformation like any other, except that `update` sums over the replicas first.
    optimizer = mx.train.Optimizer(optax.adamw(3e-3, weight_decay=1e-2))
    params = init_params(jax.random.key(0))
    state = strategy.replicate((params, optimizer.init(params)))

    @mx.function(donate_argnums=0)  # the new state takes the memory of the old one
    def train_step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(params: Params) -> jax.Array:
            losses = optax.sigmoid_binary_cross_entropy(predict(params, x), y)
            return mx.nn.compute_average_loss(losses)

        params, slots = state
        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, slots = optimizer.update(gradients, slots, params)
        return (optax.apply_updates(params, updates), slots), loss

    checkpoint = mx.train.Checkpoint(state=state, batches=batches, step=0)
    manager = mx.train.CheckpointManager(checkpoint, directory, max_to_keep=2)
    if manager.restore_or_initialize():
        state = checkpoint.state
        print(f"Going on after step {checkpoint.step}.")

    for step in range(checkpoint.step + 1, steps + 1):
        state, loss = strategy.run(train_step, args=(state, *next(batches)))
        if step % SAVE_EVERY == 0 or step == steps:
            checkpoint.state, checkpoint.step = state, step
            manager.save()
            total = strategy.reduce("SUM", loss, axis=None)
            print(f"step {step}: loss {total:.4f}")

    manager.sync()
    is_right = (predict(state[0], x[:HELD_OUT]) > 0) == y[:HELD_OUT]
    return float(jnp.mean(is_right))


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2, help="logical CPUs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--directory", help="where checkpoints are kept")
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.replicas)
    strategy = mx.MirroredStrategy()  # all accelerators, or the CPUs
    with tempfile.TemporaryDirectory() as temporary:
        accuracy = train(strategy, options.steps, options.directory or temporary)
    print(f"{accuracy:.1%} of {HELD_OUT} tumours are recognised.")
    return accuracy


if __name__ == "__main__":
    main()
