"""An MLP's training step under TensorFlow's MirroredStrategy on logical CPUs.

Run by `steps.py`, with an interpreter that has TensorFlow:
`tensorflow_mlp.py 784-128-128-10 BATCH REPLICAS ROUNDS`. Prints {"ms": milliseconds}.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def main() -> None:
    sizes = [int(size) for size in sys.argv[1].split("-")]
    batch, replicas, rounds = map(int, sys.argv[2:])
    configuration = [tf.config.LogicalDeviceConfiguration()] * replicas
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, configuration)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    rng = np.random.default_rng(0)

    with strategy.scope():
        weights = [
            tf.Variable((rng.standard_normal((n, m)) / np.sqrt(n)).astype("f"))
            for n, m in zip(sizes, sizes[1:])
        ]
        biases = [tf.Variable(tf.zeros(m)) for m in sizes[1:]]
    variables = weights + biases
    x = rng.standard_normal((batch, sizes[0]), dtype="f")
    y = rng.integers(sizes[-1], size=batch).astype("i4")

    def part(array: np.ndarray) -> object:
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                np.split(array, replicas)[context.replica_id_in_sync_group]
            )
        )

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for w, b in zip(weights[:-1], biases):
                x = tf.nn.relu(x @ w + b)
            logits = x @ weights[-1] + biases[-1]
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_sum(losses) / batch
        gradients = tape.gradient(loss, variables)
        gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
        for variable, gradient in zip(variables, gradients):
            variable.assign_sub(0.01 * gradient)
        return loss

    @tf.function
    def step(x: object, y: object) -> object:
        return strategy.run(replica_step, args=(x, y))

    inputs = part(x), part(y)
    print(json.dumps({"ms": measure(lambda: step(*inputs), strategy, rounds)}))


def measure(
    step: Callable[[], Any], strategy: tf.distribute.Strategy, rounds: int
) -> float:
    """The median over rounds of milliseconds a step."""

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            last = step()
        for loss in strategy.experimental_local_results(last):
            loss.numpy()
        return (time.perf_counter() - start) / count

    run(3)
    count = max(1, round(0.2 / run(3)))
    return statistics.median(run(count) for _ in range(rounds)) * 1e3


if __name__ == "__main__":
    main()
