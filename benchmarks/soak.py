"""Does a long training loop on logical CPUs ever stop?

XLA's CPU collectives can dead-lock when their thread pool is too small. Thousands of
steps of both MLPs on 2, 4 and 8 logical CPUs, dispatched without waiting, with fresh
NumPy input every step and nothing set in the environment. Each configuration is a
process of its own, which is ended when it has run for too long.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from common import cpu_devices, parser, print_table
from models import MODELS
from training import distribute, variables_step

import mirrax as mx

DEVICES = (2, 4, 8)
PROGRESS_EVERY = 100


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=0, help="default: 2000")
    options.add_argument(
        "--limit", type=float, default=900, help="seconds for a configuration"
    )
    options.add_argument("--model", choices=MODELS, help="train, in this process")
    given = options.parse_args()
    steps = given.steps or (50 if given.quick else 2000)
    if given.model:
        return train(given.model, given.replicas, steps)
    rows = []
    for model in ("small", "large"):
        for count in DEVICES:
            rows.append(soak(model, count, steps, given.limit))
            print(" ".join(map(str, rows[-1])), flush=True)
    print()
    print_table(("model", "devices", "steps", "seconds", "outcome"), rows)
    return int(any(row[-1] != "ok" for row in rows))


def soak(model: str, count: int, steps: int, limit: float) -> list[object]:
    """One configuration; its outcome is `ok` or what went wrong."""
    command = [sys.executable, str(Path(__file__).resolve()), "--model", model]
    command += ["--replicas", str(count), "--steps", str(steps)]
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
    return [MODELS[model].name, count, steps, round(seconds, 1), outcome]


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


def _text(output: bytes | str | None) -> str:
    return output.decode() if isinstance(output, bytes) else output or ""


if __name__ == "__main__":
    sys.exit(main())
