"""A whole training loop with TensorFlow's strategies; see `looping.py`.

As TensorFlow's guide to custom training loops writes it. The way `few threads` gives a worker
its share of the cores.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from looping import MOMENTUM, ODD, RATE, Loop, run
from stepping import Steps


def make(loop: Loop) -> Steps:
    if loop.way == "few threads":
        tf.config.threading.set_intra_op_parallelism_threads(loop.worker.threads)
    if loop.workers > 1:
        os.environ["TF_CONFIG"] = loop.worker.tf_config
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=options
        )
    else:
        devices = [tf.config.LogicalDeviceConfiguration()] * loop.replicas
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, devices)
        names = [f"CPU:{i}" for i in range(loop.replicas)]
        strategy = tf.distribute.MirroredStrategy(names)
    rows = tf.data.Dataset.from_tensor_slices((loop.x, loop.y))
    rows = rows.batch(loop.batch, drop_remainder=loop.model != ODD).repeat()
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.DATA
    options.experimental_distribute.auto_shard_policy = policy
    rows = rows.with_options(options).prefetch(tf.data.AUTOTUNE)
    batches = iter(strategy.experimental_distribute_dataset(rows))
    with strategy.scope():
        variables = [tf.Variable(tf.constant(p)) for p in loop.parameters]
        optimizer = tf.keras.optimizers.SGD(RATE, momentum=MOMENTUM)
        optimizer.build(variables)

    def losses_of(x: Any, y: Any) -> Any:
        if loop.is_variables:
            return tf.add_n([tf.reduce_sum((x - v) ** 2, -1) for v in variables])
        for w, b in zip(variables[:-2:2], variables[1:-2:2]):
            x = tf.nn.relu(x @ w + b)
        logits = x @ variables[-2] + variables[-1]
        return tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses_of(x, y)) / loop.batch
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    @tf.function
    def step(batch: Any) -> Any:
        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def steps(count: int) -> float:
        for _ in range(count):
            loss = step(next(batches))
        return float(loss) / loop.workers

    return steps


if __name__ == "__main__":
    run(make)
