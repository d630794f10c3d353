"""What happens to each peer when a worker dies or stops, and when the last batch is odd."""

from __future__ import annotations

import functools
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from peer_libraries import (
    DDP,
    DEFAULT,
    EACH,
    KERAS,
    KERAS_DEFAULT,
    MIRRAX,
    PACKED,
    TF,
    Peer,
)
from peer_report import Cell

WAIT = 30.0  # seconds until a worker that has noticed nothing is taken for hung
START = 60.0  # seconds to import, to join and to compile

Start = Callable[[Peer, int, int], Any]


def measure_faults(
    start: Start, is_quick: bool, cells: dict[str, Cell], seconds: float
) -> None:
    """For each fault and peer what happened, in words."""
    end = time.monotonic() + seconds
    kill = functools.partial(hit, how=signal.SIGKILL)
    stop = functools.partial(hit, how=signal.SIGSTOP)
    tried: dict[str, tuple[Callable[..., str], tuple[Peer, ...]]] = {
        "an odd last batch": (odd_batch, (MIRRAX, EACH, TF, DDP, KERAS)),
        "kill -9 of a worker": (kill, (MIRRAX, PACKED, TF, DDP)),
        "200 steps, as installed": (many_steps, (MIRRAX, DEFAULT, KERAS_DEFAULT)),
        "a worker is stopped": (stop, (MIRRAX, PACKED, TF, DDP)),
    }
    parts = [(fault, p, how) for fault, (how, ps) in tried.items() for p in ps]
    if is_quick:
        parts = [part for part in parts if part[1] in (MIRRAX, DDP)]
    for fault, peer, try_it in parts:
        left = end - time.monotonic()
        said = "not tried: out of time"
        if left > 5:
            try:
                said = try_it(start, peer, min(WAIT, left))
            except NotStarted as error:
                said = f"not tried: {error}"
            except RuntimeError as error:
                lines = [line for line in str(error).splitlines() if line.strip()]
                said = f"fails: {lines[-1].strip()[:120]}"
                if "no answer" in lines[0]:
                    said = f"hangs: {lines[0].split(' gave ')[-1].split(' at ')[0]}"
        cells[f"{fault}: {peer.name}"] = {"said": said}


class NotStarted(Exception):
    """A peer did not come to its first step, which says nothing about the fault."""


def first_steps(workers: Any, peer: Peer, model: str, limit: float) -> float:
    """The loss of a first step; a short `limit` is that of the whole table."""
    seconds = START if limit >= WAIT else max(limit, 5.0)
    try:
        return workers.train(peer.way, model, 1, seconds)[1]
    except RuntimeError as error:
        raise NotStarted(f"no first step in {seconds:.0f} s") from error


def hit(start: Start, peer: Peer, limit: float, how: signal.Signals) -> str:
    """How long the other worker trains or waits on after one of two is hit."""
    workers = start(peer, 2, 2)
    try:
        first_steps(workers, peer, "small", limit)
        workers.begin(peer.way, "small", 1_000_000)
        time.sleep(1.0)
        first, second = workers.processes
        begin = time.monotonic()
        second.send_signal(how)
        try:
            first.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return f"the other still waits after {limit:.0f} s"
        return f"the other has ended after {time.monotonic() - begin:.1f} s"
    finally:
        workers.kill()


def odd_batch(start: Start, peer: Peer, limit: float) -> str:
    """Two replicas, batches of 256 and 17 rows."""
    workers = start(peer, 2, 1)
    try:
        first_steps(workers, peer, "odd", limit)
        losses = [workers.train(peer.way, "odd", 1, limit)[1] for _ in range(3)]
        return f"trains; loss of the 4th step {losses[-1]:.5f}"
    finally:
        workers.kill()


def many_steps(start: Start, peer: Peer, limit: float) -> str:
    """Two replicas in one process, as installed."""
    workers = start(peer, 2, 1)
    try:
        first_steps(workers, peer, "small", limit)
        for _ in range(10):
            workers.train(peer.way, "small", 20, limit)
        return "trains"
    finally:
        workers.kill()
