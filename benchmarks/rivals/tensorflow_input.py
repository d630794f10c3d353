"""Epochs of TensorFlow's distributed dataset on logical CPUs.

Run by `input.py`, with an interpreter that has TensorFlow:
`tensorflow_input.py ROWS REPLICAS PLATFORM`. See `epochs.py`.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import sys

import tensorflow as tf
from epochs import BATCH, answer, make_rows


def main() -> None:
    rows, replicas = map(int, sys.argv[1:3])
    configuration = [tf.config.LogicalDeviceConfiguration()] * replicas
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, configuration)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    dataset = tf.data.Dataset.from_tensor_slices(make_rows(rows))
    dataset = dataset.shuffle(rows).batch(BATCH).prefetch(tf.data.AUTOTUNE)
    distributed = strategy.experimental_distribute_dataset(dataset)

    @tf.function
    def count_all() -> tuple[tf.Tensor, tf.Tensor]:
        batches, found = tf.constant(0), tf.constant(0)
        for _, y in distributed:
            batches += 1
            for part in strategy.experimental_local_results(y):
                found += tf.shape(part)[0]
        return batches, found

    def compiled_epoch() -> int:
        batches, found = count_all()
        assert int(found) == rows
        return int(batches)

    answer(
        {
            "TensorFlow": lambda: sum(1 for _ in distributed),
            "TensorFlow, in a tf.function": compiled_epoch,
        }
    )


if __name__ == "__main__":
    main()
