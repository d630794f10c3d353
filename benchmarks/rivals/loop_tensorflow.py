"""A whole training loop with TensorFlow's strategies; see `looping.py`.

As TensorFlow's guide to custom training loops writes it. The way `few threads` gives a worker
its share of the cores; `loop` has the loop over batches in a `tf.function`, too.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from looping import ADAM_RATE, MOMENTUM, ODD, RATE, Loop, Training, run

HEADS = 4


def make(loop: Loop) -> Training:
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
        optimizer = (
            tf.keras.optimizers.Adam(ADAM_RATE)
            if loop.is_transformer
            else tf.keras.optimizers.SGD(RATE, momentum=MOMENTUM)
        )
        optimizer.build(variables)

    def losses_of(x: Any, y: Any) -> Any:
        if loop.is_variables:
            return tf.add_n([tf.reduce_sum((x - v) ** 2, -1) for v in variables])
        if loop.is_transformer:
            logits = transform(variables, x)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            return tf.reduce_mean(losses, -1)
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

    @tf.function
    def many_steps(batches: Any, count: Any) -> Any:
        loss = tf.constant(0.0)
        for _ in tf.range(count):
            loss = step(next(batches))
        return loss

    def steps(count: int) -> float:
        if loop.way == "loop":
            return float(many_steps(batches, tf.constant(count))) / loop.workers
        for _ in range(count):
            loss = step(next(batches))
        return float(loss) / loop.workers

    state = tf.train.Checkpoint(variables=variables, optimizer=optimizer)
    return Training(steps, state.write, lambda path: state.read(path).assert_consumed())


def transform(parameters: list[Any], tokens: Any) -> Any:
    """The transformer of `models.py`: the next token's logits."""
    embedding, positions, *layers, head = parameters
    length, width = positions.shape
    causal = tf.linalg.band_part(tf.ones((length, length), tf.bool), -1, 0)

    def normalize(x: Any, gain: Any, bias: Any) -> Any:
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, bias, 1 + gain, 1e-6)

    x = tf.gather(embedding, tokens) + positions
    for i in range(0, len(layers), 10):
        g1, b1, w_qkv, w_out, g2, b2, w1, c1, w2, c2 = layers[i : i + 10]
        qkv = tf.reshape(
            normalize(x, g1, b1) @ w_qkv, (-1, length, 3, HEADS, width // HEADS)
        )
        q, k, v = tf.unstack(tf.transpose(qkv, (2, 0, 3, 1, 4)))
        scores = tf.matmul(q, k, transpose_b=True) / (width // HEADS) ** 0.5
        mixed = tf.nn.softmax(tf.where(causal, scores, -1e9)) @ v
        mixed = tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), (-1, length, width))
        x += mixed @ w_out
        hidden = tf.nn.gelu(normalize(x, g2, b2) @ w1 + c1, approximate=True)
        x += hidden @ w2 + c2
    return x @ head


if __name__ == "__main__":
    run(make)
