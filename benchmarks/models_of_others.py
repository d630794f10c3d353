"""What does a step of another library's model cost on the host?

Flax NNX: modules, optimizer and metrics made in a scope, beside the same model in mirrax's
functional style, with the state as an argument and a result. Only the calls are timed, as
in host_time.py.

Keras: `fit` under a strategy beside `fit` under Keras' own `keras.distribution.DataParallel`, on
the same devices at the same batch. The models are tiny, so that the time is the host's. A round
is one `fit` of one epoch of each, in turn; what an epoch costs at its beginning and end is
part of it.

By default the libraries that are installed are measured.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from common import Devices, Ratio, Report, Step, find_devices, interleaved, parser
from host_time import time_calls

import mirrax as mx

LAYERS = (10, 50)
WIDTH, ROWS = 8, 4
KERAS_LAYERS, KERAS_WIDTH, KERAS_BATCH = (3, 20), 32, 64
EPOCH = 100  # batches
MOST = 1.1  # times the host time of the functional style, or of Keras' own distribution


def main() -> None:
    options = parser(__doc__)
    found = [name for name in MEASURES if importlib.util.find_spec(name)]
    options.add_argument("--libraries", nargs="+", default=found, choices=MEASURES)
    given = options.parse_args()
    devices = find_devices(given.replicas, at_least=given.replicas)
    report = Report("models_of_others", given)
    for name in given.libraries:
        MEASURES[name](devices, report)
    report.finish(devices)


# Flax NNX ---------------------------------------------------------------------------------


def measure_nnx(devices: Devices, report: Report) -> None:
    batches = 10 if report.options.quick else 200
    rows: list[list[object]] = []
    for layers in LAYERS:
        sides = {
            "functional": functional_step,
            "NNX, arguments": nnx_step,
            "NNX, closure": closing_step,
        }
        steps = {name: make(layers, devices) for name, make in sides.items()}
        figures = time_calls(steps, batches)
        base = figures["functional"]
        ratios = {name: float(np.median(figures[name] / base)) for name in sides}
        medians = [float(np.median(figures[name])) for name in sides]
        rows.append([layers, *medians, *list(ratios.values())[1:]])
        for name in list(sides)[1:]:
            what = f"host time of {name}, {layers} layers, / functional"
            report.check(what, ratios[name], MOST)
    names = ["functional", "arguments", "closure", "arguments /", "closure /"]
    report.table("NNX: microseconds a call", ["layers", *names], rows)


def make_parts(layers: int) -> tuple[Any, optax.GradientTransformation, Any]:
    from flax import nnx

    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        *(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(layers))
    )
    return model, optax.sgd(0.01, momentum=0.9), nnx.metrics.Average()


def batch_of(strategy: Any) -> Any:
    x = np.ones((ROWS, WIDTH), "float32")
    return strategy.experimental_distribute_values_from_function(lambda _: x)


def make_scoped(layers: int, devices: Devices) -> tuple[Any, Any, Callable[..., Any]]:
    from flax import nnx

    strategy = mx.MirroredStrategy(devices)
    with strategy.scope():
        model, transformation, metric = make_parts(layers)
        optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

    def step(model: Any, optimizer: Any, metric: Any, x: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        metric.update(values=loss)
        return loss

    return strategy, (model, optimizer, metric), step


def nnx_step(layers: int, devices: Devices) -> Step:
    strategy, objects, fn = make_scoped(layers, devices)
    step, x = mx.function(fn), batch_of(strategy)
    return lambda: strategy.run(step, args=(*objects, x))


def closing_step(layers: int, devices: Devices) -> Step:
    strategy, objects, fn = make_scoped(layers, devices)
    step, x = mx.function(lambda x: fn(*objects, x)), batch_of(strategy)
    return lambda: strategy.run(step, args=(x,))


def functional_step(layers: int, devices: Devices) -> Step:
    """The same model; its arrays go in and come out."""
    from flax import nnx

    strategy = mx.MirroredStrategy(devices)
    model, transformation, _ = make_parts(layers)
    params = nnx.to_pure_dict(nnx.state(model))
    optimizer = mx.train.Optimizer(transformation)
    with strategy.scope():
        metric = mx.metrics.Mean()
    state = strategy.replicate((params, optimizer.init(params), np.int32(0)))

    @mx.function(donate_argnums=0)
    def step(state: Any, x: jax.Array) -> Any:
        params, slots, count = state

        def loss_fn(params: Any) -> Any:
            y = x
            for layer in params["layers"].values():
                y = y @ layer["kernel"] + layer["bias"]
            return (y**2).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, slots = optimizer.update(gradients, slots, params)
        metric.update_state(loss)
        return (optax.apply_updates(params, updates), slots, count + 1), loss

    x = batch_of(strategy)

    def call() -> Any:
        nonlocal state
        state, loss = strategy.run(step, args=(state, x))
        return loss

    return call


# Keras ------------------------------------------------------------------------------------


def measure_keras(devices: Devices, report: Report) -> None:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    rounds = 5 if report.options.quick else 40
    rows: list[list[object]] = []
    for layers in KERAS_LAYERS:
        variants = {"strategy": in_scope, "keras": data_parallel}
        epochs = {name: make(layers, devices) for name, make in variants.items()}
        figures = interleaved(epochs, rounds, round_seconds=0.0)
        ratio = Ratio.of(figures["strategy"], figures["keras"])
        each = [float(np.median(figures[name])) / EPOCH * 1e3 for name in variants]
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

    model: Any = keras.Sequential([keras.layers.Input((KERAS_WIDTH,))])
    for _ in range(layers):
        model.add(keras.layers.Dense(KERAS_WIDTH))
    model.compile("adam", "mse")
    return model


def epoch_of(model: Any) -> Step:
    """`fit` over one epoch; gives back what has to be there in the end."""
    x, y = (
        np.random.rand(KERAS_BATCH * EPOCH, KERAS_WIDTH).astype("float32")
        for _ in range(2)
    )

    def epoch() -> Sequence[Any]:
        model.fit(x, y, batch_size=KERAS_BATCH, shuffle=False, verbose=0)
        return [variable.value for variable in model.trainable_variables]

    return epoch


MEASURES = {"flax": measure_nnx, "keras": measure_keras}

if __name__ == "__main__":
    main()
