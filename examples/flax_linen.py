"""A Flax Linen model, trained on several replicas through Flax's own `TrainState`.

    python examples/flax_linen.py --replicas 4 --epochs 10

What differs from a program for one device: the state is replicated, the optimizer is
wrapped in `mx.train.Optimizer`, the loss is divided by the examples of all replicas, and the
step goes through `strategy.run`.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import mirrax as mx

BATCH = 100


class Classifier(nn.Module):
    """A small convolutional network with dropout."""

    @nn.compact
    def __call__(self, x: jax.Array, is_training: bool = False) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
        x = x.reshape(len(x), -1)
        x = nn.Dropout(0.2, deterministic=not is_training)(x)
        return nn.Dense(10)(x)


def load_datasets() -> tuple[mx.data.Dataset, mx.data.Dataset]:
    """Images to train with and to test with, in batches."""
    data: Any = load_digits()
    images = (data.images[..., None] / 16).astype("float32")
    labels = data.target.astype("int32")
    training = mx.data.Dataset.from_tensor_slices((images[:1437], labels[:1437]))
    testing = mx.data.Dataset.from_tensor_slices((images[1437:], labels[1437:]))
    # Without the partial last batch every step has the same shapes and is compiled once.
    training = training.shuffle(1437, seed=0).batch(BATCH, drop_remainder=True)
    return training, testing.batch(BATCH)


@mx.function(donate_argnums=0)
def train_step(
    state: TrainState, images: jax.Array, labels: jax.Array
) -> tuple[TrainState, jax.Array]:
    """What each replica does with its part of a batch."""
    # Every step and every replica drops other activations.
    replica_id = mx.get_replica_context().replica_id_in_sync_group
    key = jax.random.fold_in(jax.random.key(state.step), replica_id)

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn(params, images, is_training=True, rngs={"dropout": key})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return mx.nn.compute_average_loss(losses)

    loss, gradients = jax.value_and_grad(loss_fn)(state.params)
    # The optimizer sums the gradients over the replicas.
    return state.apply_gradients(grads=gradients), loss


def train(strategy: mx.MirroredStrategy, epochs: int) -> float:
    """The accuracy on images that were never seen."""
    training, testing = map(strategy.experimental_distribute_dataset, load_datasets())
    model = Classifier()
    params = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
    optimizer = mx.train.Optimizer(optax.adam(2e-3))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    state = strategy.replicate(state)
    with strategy.scope():
        accuracy = mx.metrics.SparseCategoricalAccuracy()

    @mx.function
    def test_step(state: TrainState, images: jax.Array, labels: jax.Array) -> None:
        accuracy.update_state(labels, state.apply_fn(state.params, images))

    for epoch in range(1, epochs + 1):
        for batch in training:
            state, loss = strategy.run(train_step, args=(state, *batch))
        total = strategy.reduce("SUM", loss, axis=None)
        print(f"epoch {epoch}, step {int(state.step)}: loss {total:.4f}")

    for batch in testing:
        strategy.run(test_step, args=(state, *batch))
    return float(accuracy.result())


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2, help="logical CPUs")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.replicas)
    strategy = mx.MirroredStrategy()  # all accelerators, or the CPUs
    accuracy = train(strategy, options.epochs)
    print(f"{accuracy:.1%} of the test images are right.")
    return accuracy


if __name__ == "__main__":
    main()
