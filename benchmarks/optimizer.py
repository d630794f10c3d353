"""Is a step with `mx.train.Optimizer` as fast as hand-written JAX with Optax?

Adam behind a clip by global norm, on the models of steps.py. The limit is the faster of one
psum for each gradient and small gradients packed, both with donated parameters and state.
`--quick` for a first look.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Devices, Report, Step, find_devices, parser
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import MODELS, Model
from steps import ACCELERATOR_BATCH_FACTOR, HEADER, measure
from training import (
    AXIS,
    Reduce,
    distribute,
    mean_loss,
    one_by_one,
    optimizer_step,
    packed,
)

import mirrax as mx


def transformation() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def handwritten(model: Model, devices: Devices, reduce: Reduce) -> Step:
    """jit(shard_map) with replicated, donated parameters and state."""
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    copied, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
    tx = transformation()

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(
            params, model, x, y, model.batch_size
        )
        updates, state = tx.update(reduce(gradients), state, params)
        return optax.apply_updates(params, updates), state, loss.reshape(1)

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P(), P(AXIS), P(AXIS)),
        out_specs=(P(), P(), P(AXIS)),
        check_vma=False,
    )
    compiled = jax.jit(mapped, donate_argnums=(0, 1))
    params = jax.device_put(model.make_parameters(), copied)
    state = jax.device_put(tx.init(params), copied)
    x, y = jax.device_put(model.make_batch(), split)

    def run() -> jax.Array:
        nonlocal params, state
        params, state, loss = compiled(params, state, x, y)
        return loss

    return run


def with_variables(model: Model, devices: Devices) -> Step:
    """`apply_gradients` on variables."""
    strategy = mx.MirroredStrategy(devices)
    step, *_ = optimizer_step(strategy, model, transformation())
    x, y = distribute(strategy, model.make_batch())
    return lambda: strategy.run(step, args=(x, y))


def with_state(model: Model, devices: Devices) -> Step:
    """Parameters and state that go in and come out."""
    strategy = mx.MirroredStrategy(devices)
    optimizer = mx.train.Optimizer(transformation())

    @mx.function(donate_argnums=0)
    def step(given: Any, x: jax.Array, y: jax.Array) -> Any:
        params, state = given
        loss, gradients = jax.value_and_grad(mean_loss)(
            params, model, x, y, model.batch_size
        )
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss.reshape(1)

    params = [jnp.asarray(p) for p in model.make_parameters()]
    held = strategy.replicate((params, optimizer.init(params)))
    x, y = distribute(strategy, model.make_batch())

    def run() -> Any:
        nonlocal held
        held, loss = strategy.run(step, args=(held, x, y))
        return loss

    return run


LIMITS = {
    "psum each": lambda model, devices: handwritten(model, devices, one_by_one),
    "psum packed": lambda model, devices: handwritten(model, devices, packed),
}
MIRRAX = {"mirrax variables": with_variables, "mirrax state": with_state}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    given = options.parse_args()
    devices = find_devices(given.replicas)
    report = Report("optimizer", given)
    platform = devices[0].platform
    factor = 1 if platform == "cpu" else ACCELERATOR_BATCH_FACTOR
    for name in given.models:
        model = MODELS[name]
        compare(replace(model, batch_size=model.batch_size * factor), devices, report)
    report.finish(devices)


def compare(model: Model, devices: Devices, report: Report) -> None:
    """Measures all ways of training `model`."""
    # One replica has nothing to pack.
    limits = LIMITS if len(devices) > 1 else {"psum each": LIMITS["psum each"]}
    rows, _ = measure(model, devices, report, limits, MIRRAX)
    title = f"{model.name}, Adam, batch {model.batch_size}, {len(devices)} replicas"
    report.table(title, HEADER, rows)


if __name__ == "__main__":
    main()
