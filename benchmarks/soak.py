"""Does a long training loop on logical CPUs ever stop, or its memory ever grow?

XLA's CPU collectives can dead-lock when their thread pool is too small. Thousands of
steps of both MLPs on 2, 4 and 8 logical CPUs, dispatched without waiting, with fresh
NumPy input every step and nothing set in the environment. Then 20 epochs of 500 batches
of a distributed dataset, which may not need more memory than the first three, and 2,000
eager steps with an all-reduce inside a gradient, which may not need more than the first
200. Each configuration is a process of its own, which is ended when it has run for too
long.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import cpu_devices, parser, print_table
from models import MODELS
from training import distribute, variables_step

import mirrax as mx

DEVICES = (2, 4, 8)
PROGRESS_EVERY = 100
WARM_EPOCHS = 3
EAGER_REPORTS = 10
# What memory may grow by after them: a share, and a number of bytes.
GROWTH = 0.05, 20e6


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=0, help="default: 2000")
    options.add_argument(
        "--limit", type=float, default=900, help="seconds for a configuration"
    )
    options.add_argument("--model", choices=MODELS, help="train, in this process")
    options.add_argument(
        "--input", action="store_true", help="read a dataset, in this process"
    )
    options.add_argument(
        "--eager", action="store_true", help="train without compiling, in this process"
    )
    given = options.parse_args()
    steps = given.steps or (50 if given.quick else 2000)
    epochs, batches = (6, 100) if given.quick else (20, 500)
    if given.model:
        return train(given.model, given.replicas, steps)
    if given.input:
        return read(given.replicas, epochs, batches)
    if given.eager:
        return train_eagerly(given.replicas, steps)
    rows = []
    for model in ("small", "large"):
        for count in DEVICES:
            what = ["--model", model, "--replicas", str(count), "--steps", str(steps)]
            rows.append(soak(MODELS[model].name, count, steps, what, given.limit))
    what = ["--input", "--replicas", str(given.replicas), *["--quick"] * given.quick]
    rows.append(soak("input", given.replicas, epochs * batches, what, given.limit))
    what = ["--eager", "--replicas", str(given.replicas), "--steps", str(steps)]
    rows.append(soak("eager", given.replicas, steps, what, given.limit))
    print()
    print_table(("model", "devices", "steps", "seconds", "outcome"), rows)
    return int(any(row[-1] != "ok" for row in rows))


def soak(
    name: str, count: int, steps: int, arguments: list[str], limit: float
) -> list[object]:
    """One configuration; its outcome is `ok` or what went wrong."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        outcome = "ok" if done.returncode == 0 else f"exit code {done.returncode}"
        log, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        outcome = f"HUNG, ended after {limit:.0f} s"
        log, errors = _text(late.stdout), _text(late.stderr)
    seconds = time.perf_counter() - start
    if outcome != "ok":
        last = log.splitlines()[-1] if log else "no step"
        outcome += f" (last seen: {last})"
        print(errors[-4000:], file=sys.stderr)
    row = [name, count, steps, round(seconds, 1), outcome]
    print(" ".join(map(str, row)), flush=True)
    return row


def train(name: str, count: int, steps: int) -> int:
    """Trains in this process; prints how far it has come."""
    model = MODELS[name]
    strategy = mx.distribute.MirroredStrategy(cpu_devices(count))
    step = variables_step(strategy, model)
    for i in range(steps):
        x, y = distribute(strategy, model.make_batch(seed=i), on_devices=False)
        loss = strategy.run(step, args=(x, y))
        if i % PROGRESS_EVERY == 0:
            print(f"step {i} dispatched", flush=True)
    parts = strategy.experimental_local_results(loss)
    total = sum(float(np.asarray(part).sum()) for part in parts)
    print(f"all {steps} steps done, loss {total:.4f}", flush=True)
    return 0 if np.isfinite(total) else 1


def read(count: int, epochs: int, batches: int, batch_size: int = 256) -> int:
    """Reads a dataset in this process; fails if its memory grows."""
    strategy = mx.distribute.MirroredStrategy(cpu_devices(count))
    rows = batches * batch_size
    numbers = np.arange(rows, dtype=np.float32)
    x = np.broadcast_to(numbers[:, None], (rows, 64)).copy()
    dataset = mx.data.Dataset.from_tensor_slices((x, numbers)).shuffle(rows)
    dataset = dataset.map(lambda x, y: (x / rows, y)).batch(batch_size).prefetch(2)
    distributed = strategy.experimental_distribute_dataset(dataset)
    for epoch in range(epochs):
        for batch in distributed:
            jax.block_until_ready(batch)
        print(f"epoch {epoch}: {_resident_bytes() / 1e6:.0f} MB", flush=True)
        if epoch == WARM_EPOCHS - 1:
            before = _resident_bytes()
    return _has_grown(before)


def train_eagerly(count: int, steps: int) -> int:
    """Trains in plain Python in this process; fails if its memory grows.

    The loss is summed over replicas inside the gradient, and defined anew in each step.
    """
    strategy = mx.distribute.MirroredStrategy(cpu_devices(count))
    with strategy.scope():
        w = mx.Variable(jnp.ones(64))

    def step(x: jax.Array) -> jax.Array:
        context = mx.get_replica_context()

        def loss() -> jax.Array:
            return jnp.mean(context.all_reduce("SUM", w * x) ** 2)

        value, gradient = mx.value_and_grad(loss, w)()
        w.assign_sub(0.01 * context.all_reduce("MEAN", gradient))
        return value

    every = max(steps // EAGER_REPORTS, 1)
    before = 0
    for i in range(steps):
        x = jnp.full(64, 1.0 / (i + 1))
        value = strategy.run(step, (x,))
        if i % every == every - 1:
            resident = _resident_bytes()
            before = before or resident
            print(f"step {i}: {resident / 1e6:.0f} MB", flush=True)
    total = float(strategy.reduce("SUM", value, axis=None))
    print(f"all {steps} steps done, loss {total:.4f}", flush=True)
    return int(not np.isfinite(total)) or _has_grown(before)


def _has_grown(before: int) -> int:
    """The exit code: 1 if memory has grown beyond what is allowed."""
    share, margin = GROWTH
    return int(_resident_bytes() > before * (1 + share) + margin)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _text(output: bytes | str | None) -> str:
    return output.decode() if isinstance(output, bytes) else output or ""


if __name__ == "__main__":
    sys.exit(main())
