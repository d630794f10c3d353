"""What does a loop of many steps in one program save, and is it as fast as one by hand?

`strategy.run_steps` beside as many calls of `strategy.run`, and beside a hand-written
`lax.scan` over batches that lie stacked on the devices. Then the host's time for a step of
a trivial program: what Python and JAX need before the devices have their work.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Devices, Ratio, Report, Step, find_devices, interleaved, parser
from host_time import time_calls
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import MODELS, Model
from steps import check_same_losses
from training import AXIS, RATE, distribute, mean_loss, one_by_one, variables_step

import mirrax as mx

STEPS = 20
COUNTS = (10, 100)
MOST_OF_ONE_BY_ONE = 1.0
MOST_OF_HANDWRITTEN = 1.05
MOST_HOST_TIME = 0.5  # of what single steps need


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    given = options.parse_args()
    devices = find_devices(given.replicas)
    report = Report("many_steps", given)
    for name in given.models:
        compare(MODELS[name], devices, report)
    compare_host_time(devices, report)
    report.finish(devices)


def compare(model: Model, devices: Devices, report: Report) -> None:
    """Times `STEPS` steps of each way to take them."""
    variants = {
        "run, one by one": one_at_a_time(model, devices),
        "run_steps": in_one_program(model, devices),
        "scan by hand": by_hand(model, devices),
    }
    check_same_losses(variants, steps=2)
    rounds, seconds = (3, 0.02) if report.options.quick else (30, 0.2)
    figures = interleaved(variants, rounds, seconds)
    ours = figures["run_steps"]
    rows = [
        [name, float(np.median(values)) / STEPS, str(Ratio.of(ours, values))]
        for name, values in figures.items()
    ]
    title = f"{model.name}, {STEPS} steps, {len(devices)} replicas"
    report.table(title, ["", "ms a step", "run_steps / this"], rows)
    for name, target in (
        ("run, one by one", MOST_OF_ONE_BY_ONE),
        ("scan by hand", MOST_OF_HANDWRITTEN),
    ):
        ratio = Ratio.of(ours, figures[name]).median
        report.check(f"{model.name}, run_steps / {name}", ratio, target)


def one_at_a_time(model: Model, devices: Devices) -> Step:
    """A `run` for each step."""
    strategy = mx.distribute.MirroredStrategy(devices)
    step = variables_step(strategy, model)
    x, y = distribute(strategy, model.make_batch())

    def run() -> Any:
        losses = [strategy.run(step, args=(x, y)) for _ in range(STEPS)]
        return losses[-1]

    return run


def in_one_program(model: Model, devices: Devices) -> Step:
    """One `run_steps` for all."""
    strategy = mx.distribute.MirroredStrategy(devices)
    step = variables_step(strategy, model)
    batches = itertools.repeat(distribute(strategy, model.make_batch()))

    def on_batch(batch: Any) -> jax.Array:
        return step(*batch)

    last = mx.function(lambda losses: losses[-1])
    return lambda: strategy.run(
        last, args=(strategy.run_steps(on_batch, batches, STEPS),)
    )


def by_hand(model: Model, devices: Devices) -> Step:
    """A scan inside `shard_map`, over batches that are stacked already."""
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    copied, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, AXIS))
    total = model.batch_size

    def step(params: list[jax.Array], batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(params, model, *batch, total)
        pairs = zip(params, one_by_one(gradients))
        return [p - RATE * g for p, g in pairs], loss.reshape(1)

    def loop(params: list[jax.Array], batches: Any) -> Any:
        params, losses = lax.scan(step, params, batches)
        return params, losses[-1]

    mapped = jax.shard_map(
        loop,
        mesh=mesh,
        in_specs=(P(), P(None, AXIS)),
        out_specs=(P(), P(AXIS)),
        check_vma=False,
    )
    compiled = jax.jit(mapped, donate_argnums=0)
    params = jax.device_put(model.make_parameters(), copied)
    batches = tuple(np.stack([part] * STEPS) for part in model.make_batch())
    batches = jax.device_put(batches, split)

    def run() -> jax.Array:
        nonlocal params
        params, loss = compiled(params, batches)
        return loss

    return run


def compare_host_time(devices: Devices, report: Report) -> None:
    """Times the calls only, of a program that does next to nothing."""
    rows: list[list[object]] = []
    for count in COUNTS:
        strategy = mx.distribute.MirroredStrategy(devices)
        with strategy.scope():
            variables = [mx.Variable(0.0) for _ in range(count)]

        def step(x: jax.Array, variables: Any = tuple(variables)) -> jax.Array:
            for variable in variables:
                variable.assign_add(1.0)
            return x * 2

        x = strategy.experimental_distribute_values_from_function(
            lambda _: jnp.zeros(8)
        )
        single = mx.function(step)
        batches = itertools.repeat(x)
        sides: dict[str, Step] = {
            "run": lambda s=strategy, f=single, x=x: s.run(f, args=(x,)),
            "run_steps": lambda s=strategy, f=step, it=batches: s.run_steps(
                f, it, STEPS
            ),
        }
        figures = time_calls(sides, 10 if report.options.quick else 100)
        run = float(np.median(figures["run"]))
        many = float(np.median(figures["run_steps"])) / STEPS
        rows.append([count, run, many])
        report.check(
            f"host time a step, {count} variables, run_steps / run",
            many / run,
            MOST_HOST_TIME,
        )
    report.table(
        "Microseconds of host time a step, by number of variables",
        ["n", "run", f"run_steps of {STEPS}"],
        rows,
    )


if __name__ == "__main__":
    main()
