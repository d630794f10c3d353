"""How fast all-reduces are; as a program, between the workers of a cluster.

Each time is that of one all-reduce among many in the same compiled loop, so that it is the
network's or the memory's, not Python's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import mirrax as mx

SIZES = (4, 64 * 1024, 1024 * 1024, 16 * 1024 * 1024)
_IN_A_LOOP = 8
_ROUNDS = 3
_SECONDS_FOR_EACH = 0.1
_BETWEEN_WORKERS = "mirrax._src.command_line.measuring"


def measure(strategy: mx.distribute.Strategy) -> list[dict[str, Any]]:
    """For each size the seconds that one all-reduce takes, and its bytes per second."""
    return [_row(strategy, size) for size in SIZES]


def command(result: Path) -> tuple[str, ...]:
    """The command by which workers measure; the first one writes `result`."""
    return sys.executable, "-m", _BETWEEN_WORKERS, str(result)


def main() -> None:
    """What a worker runs."""
    strategy = mx.distribute.MultiWorkerMirroredStrategy()
    content = {
        "replicas": strategy.num_replicas_in_sync,
        "all_reduce": measure(strategy),
    }
    if strategy.extended.should_save_summary:
        Path(sys.argv[1]).write_text(json.dumps(content))


def _row(strategy: mx.distribute.Strategy, size: int) -> dict[str, Any]:
    step = _many_all_reduces(strategy)
    value = strategy.run(mx.function(lambda: jnp.ones(size // 4, jnp.float32)))
    jax.block_until_ready(strategy.run(step, (value,)))  # compiles
    repeats = max(1, int(_SECONDS_FOR_EACH / _seconds(strategy, step, value, 1)))
    # All workers have to take equally many steps.
    repeats = int(strategy.reduce("MEAN", jnp.float32(min(repeats, 1000)), axis=None))
    rounds = [_seconds(strategy, step, value, repeats) for _ in range(_ROUNDS)]
    seconds = min(rounds) / (repeats * _IN_A_LOOP)
    return {"bytes": size, "seconds": seconds, "bytes_per_second": size / seconds}


def _many_all_reduces(strategy: mx.distribute.Strategy) -> Callable[..., Any]:
    scale = 1.0 / strategy.num_replicas_in_sync

    def replica_fn(x: jax.Array) -> jax.Array:
        def body(_: Any, x: jax.Array) -> jax.Array:
            return jax.lax.psum(x, strategy.axis_name) * scale

        return jax.lax.fori_loop(0, _IN_A_LOOP, body, x)

    return mx.function(replica_fn)


def _seconds(
    strategy: mx.distribute.Strategy, step: Callable[..., Any], value: Any, repeats: int
) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        value = strategy.run(step, (value,))
    jax.block_until_ready(value)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
