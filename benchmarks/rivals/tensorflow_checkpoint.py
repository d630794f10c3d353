"""Checkpoints of TensorFlow's variables on logical CPUs.

Run by `checkpoints.py`, with an interpreter that has TensorFlow:
`tensorflow_checkpoint.py REPLICAS`. See `saving.py`.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from saving import MakeWay, Way, answer


def main() -> None:
    replicas = int(sys.argv[1])
    configuration = [tf.config.LogicalDeviceConfiguration()] * replicas
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, configuration)
    mirrored = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    answer(
        {
            "TensorFlow": way_of(mirrored),
            "TensorFlow, asynchronous": way_of(mirrored, is_async=True),
            "TensorFlow, no strategy": way_of(tf.distribute.get_strategy()),
        }
    )


def way_of(strategy: tf.distribute.Strategy, is_async: bool = False) -> MakeWay:
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=is_async)

    def make(values: Sequence[np.ndarray]) -> Way:
        with strategy.scope():
            variables = [tf.Variable(tf.constant(value)) for value in values]
        checkpoint = tf.train.Checkpoint(model=variables)

        def add() -> None:
            for variable in variables:
                variable.assign_add(tf.ones_like(variable))

        @tf.function
        def step() -> None:
            strategy.run(add)

        def save(folder: str) -> Any:
            return checkpoint.save(os.path.join(folder, "ckpt"), options=options)

        return Way(
            step=step,
            save=save,
            wait=checkpoint.sync if is_async else lambda: None,
            restore=lambda path: checkpoint.restore(path).assert_consumed(),
            read=lambda: [variable.numpy() for variable in variables],
        )

    return make


if __name__ == "__main__":
    main()
