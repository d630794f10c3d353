"""Does a large model of another library train as fast in a scope as on its own?

About 50 million weights, one replica: Keras' `fit` (20 steps a call, the data on the host) and an
NNX step under `nnx.jit`, each beside the same code with the model made in a strategy's
scope. `--libraries` chooses; Keras has to run on JAX (`KERAS_BACKEND=jax`).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from common import Devices, Report, Step, find_devices, interleaved, parser

import mirrax as mx

WIDTH, LAYERS, BATCH = 2048, 12, 4096
STEPS = 20  # of a `fit`
MOST = 1.02


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--libraries", nargs="+", default=["keras", "nnx"])
    given = options.parse_args()
    devices = find_devices(given.replicas)
    report = Report("large_models", given)
    size = (64, 2, 32) if given.quick else (WIDTH, LAYERS, BATCH)
    makers = {"keras": (keras_fit, STEPS), "nnx": (nnx_steps, 1)}
    for name in given.libraries:
        make, steps = makers[name]
        sides = {
            side: make(devices, side == "mirrax", *size) for side in ("own", "mirrax")
        }
        rounds, seconds = (2, 0.02) if given.quick else (15, 1.0)
        figures = interleaved(sides, rounds, seconds)
        ratio = float(np.median(figures["mirrax"] / figures["own"]))
        rows = [[side, float(np.median(figures[side])) / steps] for side in sides]
        report.table(f"{name}: milliseconds a step", ["model", "ms"], rows)
        report.check(f"{name}, in a scope / on its own", ratio, MOST)
    report.finish(devices)


def keras_fit(
    devices: Devices, in_scope: bool, width: int, layers: int, batch: int
) -> Step:
    import keras

    def make() -> Any:
        keras.utils.set_random_seed(0)
        stack = [keras.layers.Dense(width, "relu") for _ in range(layers)]
        model = keras.Sequential([keras.layers.Input((width,)), *stack])
        model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), "mse")
        return model

    if in_scope:
        with mx.MirroredStrategy(devices).scope():
            model = make()
    else:
        with jax.default_device(devices[0]):
            model = make()
    x = np.random.default_rng(0).normal(size=(batch * STEPS, width)).astype("float32")
    return lambda: model.fit(x, x, batch_size=batch, shuffle=False, verbose=0).history[
        "loss"
    ]


def nnx_steps(
    devices: Devices, in_scope: bool, width: int, layers: int, batch: int
) -> Step:
    from flax import nnx

    def make() -> tuple[Any, Any]:
        rngs = nnx.Rngs(0)
        stack = (nnx.Linear(width, width, rngs=rngs) for _ in range(layers))
        model = nnx.Sequential(*stack)
        optimizer = nnx.Optimizer(model, optax.sgd(1e-3, momentum=0.9), wrt=nnx.Param)
        return model, optimizer

    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda m: ((m(x) - x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    x = np.random.default_rng(0).normal(size=(batch, width)).astype("float32")
    if in_scope:
        strategy = mx.MirroredStrategy(devices)
        with strategy.scope():
            objects = make()
        compiled = mx.function(step)
        own = strategy.experimental_distribute_values_from_function(lambda _: x)
        return lambda: strategy.run(compiled, args=(*objects, own))
    with jax.default_device(devices[0]):
        objects = make()
    plain, own = nnx.jit(step, donate_argnums=(0, 1)), jax.device_put(x, devices[0])
    return lambda: plain(*objects, own)


if __name__ == "__main__":
    main()
