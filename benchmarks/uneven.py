"""What does a partial last batch cost, after its first time?

128 + 17 rows on two replicas cannot be one program for both. The step of the small MLP
on such a batch, against the step on a full one; each step is waited for, as the last
one of an epoch is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import (
    Devices,
    Ratio,
    Report,
    Step,
    find_devices,
    in_turns,
    parser,
    seconds_of,
    until_stopped,
)
from models import MODELS, Model
from training import distribute, state_step, variables_step

import mirrax as mx

FULL, PARTIAL = 128, 17  # rows of a replica; of the last replica in the last batch
TARGET = 3.0


def main() -> None:
    options = parser(__doc__).parse_args()
    devices = find_devices(options.replicas, at_least=2)
    report = Report("uneven", options)
    model = MODELS["small"]
    rounds = 5 if options.quick else 200
    rows: list[list[object]] = []
    with until_stopped():
        for name, make in {"variables": with_variables, "state": with_state}.items():
            full, partial = make(model, devices)
            times = alternate({"full": full, "partial": partial}, rounds)
            ratio = Ratio.of(times["partial"], times["full"])
            medians = [float(np.median(values)) for values in times.values()]
            rows.append([name, *medians, str(ratio)])
            report.check(f"partial batch, {name} / full", ratio.median, TARGET)
    shape = " + ".join(str(size) for size in partial_sizes(len(devices)))
    title = f"{model.name}, milliseconds a step; the partial batch has {shape} rows"
    report.table(title, ("step", "full", "partial", "partial / full"), rows)
    report.finish(devices)


def partial_sizes(replicas: int) -> list[int]:
    return [FULL] * (replicas - 1) + [PARTIAL]


def with_variables(model: Model, devices: Devices) -> tuple[Step, Step]:
    """A full and a partial step that train the same variables."""
    strategy = mx.distribute.MirroredStrategy(devices)
    step = variables_step(strategy, model)
    full, partial = make_batches(model, strategy)
    check_loss(model, strategy.run(step, args=partial), len(devices))
    return (
        lambda: strategy.run(step, args=full),
        lambda: strategy.run(step, args=partial),
    )


def with_state(model: Model, devices: Devices) -> tuple[Step, Step]:
    """A full and a partial step that train the same state."""
    strategy = mx.distribute.MirroredStrategy(devices)
    step = state_step(model)
    full, partial = make_batches(model, strategy)
    state = strategy.replicate([jnp.asarray(p) for p in model.make_parameters()])

    def train(batch: Any) -> Any:
        nonlocal state
        state, loss = strategy.run(step, args=(state, *batch))
        return loss

    check_loss(model, train(partial), len(devices))
    return lambda: train(full), lambda: train(partial)


def make_batches(model: Model, strategy: mx.distribute.Strategy) -> tuple[Any, Any]:
    """A full batch and a partial one, on the devices."""
    count = strategy.num_replicas_in_sync
    sizes = partial_sizes(count)
    return (
        distribute(strategy, model.make_batch(size=FULL * count)),
        distribute(strategy, model.make_batch(size=sum(sizes)), sizes),
    )


def check_loss(model: Model, losses: Any, replicas: int) -> None:
    """Stops if the first, partial step has not seen every row once."""
    rows = sum(partial_sizes(replicas))
    x, y = map(jnp.asarray, model.make_batch(size=rows))
    expected = model.losses([jnp.asarray(p) for p in model.make_parameters()], x, y)
    found = sum(np.asarray(part).sum() for part in jax.tree.leaves(losses))
    total = float(expected.sum()) / model.batch_size
    np.testing.assert_allclose(found, total, rtol=1e-4)


def alternate(steps: dict[str, Step], rounds: int) -> dict[str, np.ndarray]:
    """Milliseconds of single steps, in turn and in random order."""
    for name in list(steps) * 3:
        seconds_of(steps[name])
    times = in_turns(steps, rounds, lambda name: seconds_of(steps[name]) * 1e3)
    return {name: np.array(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
