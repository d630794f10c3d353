"""What does a step of another library's model cost on the host?

Flax NNX: modules, optimizer and metrics made in a scope, beside the same model in mirrax's
functional style, with the state as an argument and a result. Only the calls are timed, as
in host_time.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from common import Devices, Report, Step, find_devices, parser
from host_time import time_calls

import mirrax as mx

LAYERS = (10, 50)
WIDTH, ROWS = 8, 4
MOST = 1.1  # times the host time of the functional style


def main() -> None:
    options = parser(__doc__).parse_args()
    devices = find_devices(options.replicas)
    report = Report("models_of_others", options)
    for measure in (measure_nnx,):
        measure(devices, report, batches=10 if options.quick else 200)
    report.finish(devices)


# Flax NNX ---------------------------------------------------------------------------------


def measure_nnx(devices: Devices, report: Report, batches: int) -> None:
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


if __name__ == "__main__":
    main()
