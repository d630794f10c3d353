"""What does a strategy cost the models of other libraries?

Keras' `fit` under a strategy beside `fit` under Keras' own `keras.distribution.DataParallel`, on
the same devices at the same batch. The models are tiny, so that the time is the host's. A round
is one `fit` of one epoch of each, in turn; what an epoch costs at its beginning and end is
part of it.
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

from collections.abc import Sequence
from typing import Any

import numpy as np
from common import Devices, Ratio, Report, Step, find_devices, interleaved, parser

import mirrax as mx

LAYERS = (3, 20)
WIDTH = 32
BATCH = 64
BATCHES = 100  # an epoch
MOST = 1.1


def main() -> None:
    options = parser(__doc__).parse_args()
    devices = find_devices(options.replicas, at_least=options.replicas)
    report = Report("models_of_others", options)
    compare_fit(report, devices)
    report.finish(devices)


def compare_fit(report: Report, devices: Devices) -> None:
    rounds = 5 if report.options.quick else 40
    rows: list[list[object]] = []
    for layers in LAYERS:
        variants = {"strategy": in_scope, "keras": data_parallel}
        epochs = {name: make(layers, devices) for name, make in variants.items()}
        figures = interleaved(epochs, rounds, round_seconds=0.0)
        ratio = Ratio.of(figures["strategy"], figures["keras"])
        each = [float(np.median(figures[name])) / BATCHES * 1e3 for name in variants]
        rows.append([layers, *(f"{x:.0f}" for x in each), str(ratio)])
        report.check(f"`fit` of {layers} layers beside Keras' own", ratio.median, MOST)
    header = ["layers", "strategy", "DataParallel", "ratio"]
    report.table("Microseconds a step of Keras' `fit`", header, rows)


def in_scope(layers: int, devices: Devices) -> Step:
    """An epoch under a strategy."""
    with mx.distribute.MirroredStrategy(devices).scope():
        return epoch_of(model_of(layers))


def data_parallel(layers: int, devices: Devices) -> Step:
    """An epoch under Keras' own distribution, which is set only while it runs."""
    import keras

    names = [f"{device.platform}:{device.id}" for device in devices]
    distribution = keras.distribution.DataParallel(devices=names)
    with distribution.scope():
        epoch = epoch_of(model_of(layers))

    def run() -> Any:
        with distribution.scope():
            return epoch()

    return run


def model_of(layers: int) -> Any:
    import keras

    model: Any = keras.Sequential([keras.layers.Input((WIDTH,))])
    for _ in range(layers):
        model.add(keras.layers.Dense(WIDTH))
    model.compile("adam", "mse")
    return model


def epoch_of(model: Any) -> Step:
    """`fit` over one epoch; gives back what has to be there in the end."""
    x, y = (np.random.rand(BATCH * BATCHES, WIDTH).astype("float32") for _ in range(2))

    def epoch() -> Sequence[Any]:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        return [variable.value for variable in model.trainable_variables]

    return epoch


if __name__ == "__main__":
    main()
