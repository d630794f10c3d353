"""TensorFlow 2.0: arrays in memory, and an exact evaluation although the last batch is uneven.

    python examples/older/r2_0_numpy_evaluation.py --replicas 2 --epochs 8

A small network tells benign from malignant tumours (scikit-learn's bundled table of 569 of
them). The arrays become a dataset with `experimental_make_numpy_dataset`. The evaluation
returns a value for each row and combines them with `reduce(..., axis=0)`, which counts rows, not
replicas: 17 rows in the last batch are 9 and 8. Comments name what the program called in
TensorFlow.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_breast_cancer

import mirrax as mx

GLOBAL_BATCH_SIZE = 32
TRAINING_ROWS = 456  # leaves 113 rows to test with: the last batch has 17

Rows = dict[str, Any]


def load_arrays() -> tuple[Rows, Rows]:
    """Rows to train with and to test with: measures, scaled, and whether benign."""
    table: Any = load_breast_cancer()
    order = np.random.default_rng(0).permutation(len(table.target))
    measures, labels = table.data[order], table.target[order]
    known = measures[:TRAINING_ROWS]
    scaled = ((measures - known.mean(0)) / known.std(0)).astype("float32")
    rows = {"measures": scaled, "label": labels.astype("float32")}
    first = {name: array[:TRAINING_ROWS] for name, array in rows.items()}
    return first, {name: array[TRAINING_ROWS:] for name, array in rows.items()}


class Model:  # tf.keras.Sequential([Dense(16, activation="relu"), Dense(1)])
    """Two dense layers that say how likely a tumour is benign, as a logit."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.kernel = mx.Variable(rng.normal(size=(30, 16)).astype("float32") / 4)
        self.bias = mx.Variable(jnp.zeros(16))
        self.output = mx.Variable(rng.normal(size=16).astype("float32") / 4)
        self.trainable_variables = [self.kernel, self.bias, self.output]

    def __call__(self, measures: jax.Array) -> jax.Array:
        return jax.nn.relu(measures @ self.kernel + self.bias) @ self.output


def train(strategy: mx.distribute.Strategy, epochs: int) -> tuple[list[float], float]:
    """The test loss after each epoch, and the accuracy in the end."""
    train_rows, test_rows = load_arrays()
    train_dataset = strategy.experimental_make_numpy_dataset(train_rows)
    test_dataset = strategy.experimental_make_numpy_dataset(test_rows)
    train_batches = strategy.experimental_distribute_dataset(
        train_dataset.shuffle(TRAINING_ROWS, seed=0).batch(GLOBAL_BATCH_SIZE)
    )
    test_batches = strategy.experimental_distribute_dataset(
        test_dataset.batch(GLOBAL_BATCH_SIZE)
    )
    with strategy.scope():
        model = Model()
        # tf.keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer = mx.train.Optimizer(optax.sgd(0.05, momentum=0.9))

    def losses_of(logits: jax.Array, rows: Rows) -> jax.Array:
        # tf.nn.sigmoid_cross_entropy_with_logits
        return optax.sigmoid_binary_cross_entropy(logits, rows["label"])

    @mx.function  # @tf.function
    def train_step(rows: Rows) -> None:
        def loss() -> jax.Array:  # with tf.GradientTape()
            # tf.nn.compute_average_loss; the rows of all replicas are counted: 8 at last
            return mx.nn.compute_average_loss(losses_of(model(rows["measures"]), rows))

        gradients = mx.grad(loss, model.trainable_variables)()  # tape.gradient
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    @mx.function  # @tf.function
    def test_step(rows: Rows) -> dict[str, jax.Array]:
        logits = model(rows["measures"])
        is_right = (logits > 0) == (rows["label"] > 0.5)
        return {
            "loss": losses_of(logits, rows),
            "accuracy": is_right.astype(jnp.float32),
            "rows": jnp.ones_like(logits),
        }

    def evaluate() -> dict[str, float]:
        """Means over all test rows."""
        sums = {"loss": 0.0, "accuracy": 0.0, "rows": 0.0}
        for batch in test_batches:
            per_row = strategy.experimental_run_v2(test_step, args=(batch,))
            for name in sums:
                sums[name] += float(
                    strategy.reduce(mx.distribute.ReduceOp.SUM, per_row[name], axis=0)
                )
        return {name: sums[name] / sums["rows"] for name in ("loss", "accuracy")}

    losses, accuracy = [], 0.0
    for epoch in range(epochs):
        for batch in train_batches:
            strategy.experimental_run_v2(train_step, args=(batch,))
        found = evaluate()
        losses.append(found["loss"])
        accuracy = found["accuracy"]
        print(f"epoch {epoch + 1}: test loss {losses[-1]:.5f}, accuracy {accuracy:.2%}")

    predictions: list[np.ndarray] = []
    for batch in test_batches:
        logits = strategy.experimental_run_v2(model, args=(batch["measures"],))
        predictions += map(np.asarray, strategy.experimental_local_results(logits))
    is_right = (np.concatenate(predictions) > 0) == (test_rows["label"] > 0.5)
    print(f"{is_right.sum()} of {len(is_right)} predictions are right.")
    return losses, accuracy


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2, help="logical CPUs")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(arguments)
    mx.config.set_logical_device_configuration(cpu=options.replicas)
    strategy = mx.distribute.MirroredStrategy()  # tf.distribute.MirroredStrategy()
    _, accuracy = train(strategy, options.epochs)
    print(f"{accuracy:.2%} on {strategy.num_replicas_in_sync} replicas.")
    return accuracy


if __name__ == "__main__":
    main()
