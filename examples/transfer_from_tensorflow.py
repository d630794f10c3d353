"""Transfer learning: weights that TensorFlow has trained go on learning here.

    python examples/transfer_from_tensorflow.py --replicas 4

TensorFlow trains a small network to tell signs with even numbers from those with odd ones, and saves
a checkpoint. mirrax reads its hidden layers, puts a new last layer on top, and learns all ten signs
from a few examples: first the new layer alone, then all layers. `--export` writes the weights as an
Orbax checkpoint for others. TensorFlow has to be installed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrax as mx

HIDDEN = 64
FEW = 100  # examples of the ten signs
HELD_OUT = 500


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Noisy pictures of ten signs, and which sign each shows."""
    rng = np.random.default_rng(0)
    signs = rng.integers(0, 2, (10, 64))
    y = rng.integers(0, 10, 2000)
    x = signs[y] + 0.8 * rng.normal(size=(len(y), 64))
    return x.astype("float32") - 0.5, y


def train_with_tensorflow(x: np.ndarray, y: np.ndarray, directory: str) -> str:
    """A checkpoint of a network that knows even signs from odd ones."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf  # pyright: ignore[reportMissingImports]

    def weights(*shape: int) -> Any:
        return tf.Variable(tf.random.normal(shape) / np.sqrt(shape[0]))

    class Network(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = weights(64, HIDDEN), weights(HIDDEN, HIDDEN)
            self.w3 = weights(HIDDEN, 1)

        def __call__(self, x: Any) -> Any:
            return tf.nn.relu(tf.nn.relu(x @ self.w1) @ self.w2) @ self.w3

    tf.random.set_seed(0)
    network: Any = Network()
    labels = tf.constant(y[:, None] % 2, tf.float32)
    for step in range(300):
        rows = slice(step % 10, None, 10)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(labels[rows], network(x[rows]))
            )
        trained = network.trainable_variables
        for weight, gradient in zip(trained, tape.gradient(loss, trained)):
            weight.assign_sub(0.5 * gradient)
    return tf.train.Checkpoint(model=network).save(os.path.join(directory, "parity"))


def logits_of(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(jax.nn.relu(x @ weights["w1"]) @ weights["w2"])
    return hidden @ weights["head"]


def learn(
    strategy: mx.MirroredStrategy,
    weights: dict[str, Any],
    trained: list[str],
    rate: float,
    x: np.ndarray,
    y: np.ndarray,
) -> None:
    """Trains some of the weights on all examples, 100 times."""
    chosen = [weights[name] for name in trained]
    optimizer = mx.train.Optimizer(optax.adam(rate))

    @mx.function
    def step(batch: Any) -> None:
        x, y = batch

        def loss() -> jax.Array:
            logits = logits_of(weights, x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return mx.nn.compute_average_loss(losses, global_batch_size=FEW)

        gradients = mx.grad(loss, chosen)()
        optimizer.apply_gradients(zip(gradients, chosen))

    dataset = mx.data.Dataset.from_tensor_slices((x, y)).batch(FEW).repeat(100)
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, (batch,))


def accuracy(weights: dict[str, Any], x: np.ndarray, y: np.ndarray) -> float:
    metric = mx.metrics.SparseCategoricalAccuracy()
    metric.update_state(y, logits_of(weights, jnp.asarray(x)))
    return float(metric.result())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--export", help="where to put the weights")
    options = parser.parse_args()
    strategy = mx.MirroredStrategy([f"CPU:{i}" for i in range(options.replicas)])
    x, y = make_data()
    test_x, test_y = x[-HELD_OUT:], y[-HELD_OUT:]
    directory = tempfile.mkdtemp()
    saved = train_with_tensorflow(x[FEW:-HELD_OUT], y[FEW:-HELD_OUT], directory)

    with strategy.scope():
        weights = {
            "w1": mx.Variable(jnp.zeros((64, HIDDEN))),
            "w2": mx.Variable(jnp.zeros((HIDDEN, HIDDEN))),
            "head": mx.Variable(jnp.zeros((HIDDEN, 10))),
        }
    read = mx.train.load_tensorflow_checkpoint(
        saved, assign_to={f"model/{name}": weights[name] for name in ("w1", "w2")}
    )
    print(f"Read from TensorFlow: {', '.join(read)}.")
    learn(strategy, weights, ["head"], 0.01, x[:FEW], y[:FEW])
    print(
        f"New last layer: {accuracy(weights, test_x, test_y):.1%} of unseen pictures."
    )
    learn(strategy, weights, ["w1", "w2", "head"], 0.001, x[:FEW], y[:FEW])
    print(f"All layers: {accuracy(weights, test_x, test_y):.1%} of unseen pictures.")
    if options.export:
        path = mx.train.Checkpoint(**weights).export(options.export, "orbax")
        print(f"Exported to {path}.")


if __name__ == "__main__":
    main()
