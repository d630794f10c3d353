"""Training steps of workers under TensorFlow's MultiWorkerMirroredStrategy.

Run by `workers.py`, once for each worker, with an interpreter that has TensorFlow:
`tensorflow_workers.py NAME WORKER ADDRESSES FOLDER`. See `stepping.py`.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import os
import sys

import tensorflow as tf
from stepping import RATE, Problem, Steps, Ways, Worker, answer


def main() -> None:
    name, *arguments = sys.argv[1:]
    answer(lambda worker: join(worker, name), arguments)


def join(worker: Worker, name: str) -> Ways:
    os.environ["TF_CONFIG"] = worker.tf_config
    if name == "TensorFlow, few threads":
        tf.config.threading.set_intra_op_parallelism_threads(worker.threads)
    communication = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(
            implementation=communication
        )
    )
    return {name: lambda model: make(worker.load(model), strategy)}


def make(problem: Problem, strategy: tf.distribute.Strategy) -> Steps:
    with strategy.scope():
        variables = [tf.Variable(tf.constant(p)) for p in problem.parameters]
    x, y = tf.constant(problem.x), tf.constant(problem.y)
    logits_of = cnn if problem.is_cnn else mlp

    def replica_step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                y, logits_of(variables, x)
            )
            loss = tf.reduce_sum(losses) / problem.total
        gradients = tape.gradient(loss, variables)
        gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
        for variable, gradient in zip(variables, gradients):
            variable.assign_sub(RATE * gradient)
        return loss

    @tf.function
    def step() -> tf.Tensor:
        return strategy.run(replica_step)

    def steps(count: int) -> float:
        for _ in range(count):
            loss = step()
        return float(loss)

    return steps


def mlp(variables: list[tf.Variable], x: tf.Tensor) -> tf.Tensor:
    for w, b in zip(variables[:-2:2], variables[1:-2:2]):
        x = tf.nn.relu(x @ w + b)
    return x @ variables[-2] + variables[-1]


def cnn(variables: list[tf.Variable], x: tf.Tensor) -> tf.Tensor:
    k1, b1, k2, b2, w, b = variables
    x = tf.nn.relu(tf.nn.conv2d(x, k1, 1, "SAME") + b1)
    x = tf.nn.relu(tf.nn.conv2d(x, k2, 2, "SAME") + b2)
    return tf.reshape(x, [len(x), -1]) @ w + b


if __name__ == "__main__":
    main()
