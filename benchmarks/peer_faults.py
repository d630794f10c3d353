"""What happens to each peer when a worker dies or stops, and when the last batch is odd."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Callable
from typing import Any

from peer_report import Cell

WAIT = 45.0  # seconds until a worker that has noticed nothing is taken for hung

Start = Callable[[Any, int, int], Any]


def measure_faults(
    start: Start, is_quick: bool, cells: dict[str, Cell], seconds: float
) -> None:
    """For each fault and peer what happened, in words."""
    from peers import DDP, EACH, KERAS, MIRRAX, PACKED, TF, Peer

    end = time.monotonic() + seconds
    default = Peer("JAX, default threads", "jax", "default")
    keras = Peer("Keras 3, default threads", "keras", "default")
    parts: list[tuple[str, Any, Callable[..., str]]] = []
    for peer in (MIRRAX, PACKED, TF, DDP):
        parts.append(
            ("kill -9 of a worker", peer, functools.partial(hit, how=signal.SIGKILL))
        )
    for peer in (MIRRAX, PACKED, TF, DDP):
        parts.append(
            ("a worker is stopped", peer, functools.partial(hit, how=signal.SIGSTOP))
        )
    for peer in (MIRRAX, EACH, TF, DDP, KERAS):
        parts.append(("an odd last batch", peer, odd_batch))
    for peer in (MIRRAX, default, keras):
        parts.append(("200 steps, default settings", peer, many_steps))
    if is_quick:
        parts = [part for part in parts if part[1] in (MIRRAX, DDP)]
    for i, (fault, peer, try_it) in enumerate(parts):
        left = end - time.monotonic()
        limit = min(WAIT, max(left / (len(parts) - i) * 2, 12.0))
        if left < 3:
            said = "not tried: out of time"
        else:
            try:
                said = try_it(start, peer, limit)
            except RuntimeError as error:
                lines = [line for line in str(error).splitlines() if line.strip()]
                said = f"failed: {lines[-1].strip()[:120]}"
                if "no answer" in str(error):
                    said = f"hangs: no answer in {limit:.0f} s"
        cells[f"{fault}: {peer.name}"] = {"said": said}


def hit(start: Start, peer: Any, limit: float, how: signal.Signals) -> str:
    """How long the other worker trains or waits on after one of two is hit."""
    workers = start(peer, 2, 2)
    try:
        workers.train(peer.way, "small", 20, limit)
        workers.begin(peer.way, "small", 1_000_000)
        time.sleep(1.0)
        first, second = workers.processes
        begin = time.monotonic()
        second.send_signal(how)
        try:
            first.wait(timeout=limit)
        except Exception:
            return f"the other still waits after {limit:.0f} s"
        return f"the other has ended after {time.monotonic() - begin:.1f} s"
    finally:
        workers.kill()


def odd_batch(start: Start, peer: Any, limit: float) -> str:
    """Two replicas, batches of 256 and 17 rows."""
    workers = start(peer, 2, 1)
    try:
        losses = [workers.train(peer.way, "odd", 1, limit)[1] for _ in range(4)]
        return f"trains; loss of the 4th step {losses[-1]:.5f}"
    finally:
        workers.kill()


def many_steps(start: Start, peer: Any, limit: float) -> str:
    """Two replicas in one process, as installed."""
    workers = start(peer, 2, 1)
    try:
        with contextlib.suppress(KeyError):
            for _ in range(10):
                workers.train(peer.way, "small", 20, limit)
        return "trains"
    finally:
        workers.kill()
