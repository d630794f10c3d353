"""How much host time does mirrax add to a compiled `run`?

The same trivial program, which adds 1 to n variables and returns a number, is called
through `strategy.run` and bare, as the jitted function with the same flat, donated
arguments. Only the calls are timed, a few at a time, from idle devices; the waiting is
not. All sides take turns in random order, and mirrax is compared with the bare calls of
the same round. What it adds is fitted as a + b n.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from common import Devices, Report, Step, find_devices, in_turns, parser, until_stopped
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mirrax as mx

COUNTS = (10, 100, 1000)
CALLS = 20  # fewer than the programs that XLA keeps in flight, so that no call waits
MOST_ADDED = {"variables": (15.0, 0.1), "state": (20.0, 0.5)}  # microseconds


def main() -> None:
    options = parser(__doc__).parse_args()
    devices = find_devices(options.replicas)
    batches = 10 if options.quick else 300
    report = Report("host_time", options)
    sides = {"variables": with_variables, "state": with_state}
    rows: list[list[object]] = []
    added: dict[str, list[np.ndarray]] = {name: [] for name in sides}
    with until_stopped():
        for count in COUNTS:
            steps = {name: make(count, devices) for name, make in sides.items()}
            figures = time_calls({"bare": bare(count, devices), **steps}, batches)
            for name in sides:
                added[name].append(figures[name] - figures["bare"])
            medians = [float(np.median(values)) for values in figures.values()]
            differences = [float(np.median(added[name][-1])) for name in sides]
            rows.append([count, *medians, *differences])
    header = ["n", "bare", *sides, *(f"{name} add" for name in sides)]
    report.table("Microseconds a call, by number of variables", header, rows)
    for name in sides if len(rows) == len(COUNTS) else ():
        fixed, slope = fit(added[name])
        what = f"host time added to `run`, {name}"
        report.check(what, fixed, MOST_ADDED[name][0], unit="us")
        what += ", each"
        report.check(what, slope, MOST_ADDED[name][1], unit="us")
    report.finish(devices)


def bare(count: int, devices: Devices) -> Step:
    """The program, without mirrax."""
    mesh = Mesh(np.array(devices), ("replica",), axis_types=(AxisType.Auto,))

    def step(state: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        return [value + 1 for value in state], state[0] * 2

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    compiled = jax.jit(mapped, donate_argnums=0)
    copied = NamedSharding(mesh, P())
    state = [jax.device_put(np.float32(0), copied) for _ in range(count)]

    def call() -> jax.Array:
        nonlocal state
        state, loss = compiled(state)
        return loss

    return call


def with_variables(count: int, devices: Devices) -> Step:
    """Through `run`, with variables."""
    strategy = mx.distribute.MirroredStrategy(devices)
    with strategy.scope():
        variables = [mx.Variable(0.0) for _ in range(count)]

    @mx.function
    def step() -> jax.Array:
        loss = variables[0] * 2
        for variable in variables:
            variable.assign_add(1.0)
        return loss

    return lambda: strategy.run(step)


def with_state(count: int, devices: Devices) -> Step:
    """Through `run`, with the values as state that goes in and comes out."""
    strategy = mx.distribute.MirroredStrategy(devices)
    state = strategy.replicate([np.float32(0)] * count)

    @mx.function(donate_argnums=0)
    def step(state: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        return [value + 1 for value in state], state[0] * 2

    def call() -> Any:
        nonlocal state
        state, loss = strategy.run(step, args=(state,))
        return loss

    return call


def time_calls(sides: dict[str, Step], batches: int) -> dict[str, np.ndarray]:
    """Microseconds a call of each side, one figure for each batch of calls."""
    for name in list(sides) * 3:
        jax.block_until_ready(sides[name]())

    def measure(name: str) -> float:
        call = sides[name]
        jax.block_until_ready(call())
        start = time.perf_counter()
        for _ in range(CALLS):
            last = call()
        seconds = time.perf_counter() - start
        jax.block_until_ready(last)
        return seconds / CALLS * 1e6

    figures = in_turns(sides, batches, measure)
    return {name: np.array(values) for name, values in figures.items()}


def fit(added: Sequence[np.ndarray]) -> tuple[float, float]:
    """a and b of a + b n through the medians, each weighted by how sure it is."""
    medians = [float(np.median(values)) for values in added]
    spreads = [
        float(np.subtract(*np.percentile(values, [75, 25]))) + 0.1 for values in added
    ]
    slope, fixed = np.polyfit(COUNTS, medians, 1, w=1 / np.array(spreads))
    return float(fixed), float(slope)


if __name__ == "__main__":
    main()
