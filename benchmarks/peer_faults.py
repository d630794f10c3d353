"""What happens to each peer when a worker dies or stops, when the last batch is odd, on resuming."""

from __future__ import annotations

import functools
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common import NoAnswer
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
AT_ONCE = 3  # of those that mostly wait

Start = Callable[[Peer, int, int], Any]
Try = Callable[[Start, Peer, float], str]


def measure_faults(
    start: Start, is_quick: bool, cells: dict[str, Cell], seconds: float
) -> None:
    """For each fault and peer what happened, in words."""
    end = time.monotonic() + seconds
    kill = functools.partial(hit, how=signal.SIGKILL)
    stop = functools.partial(hit, how=signal.SIGSTOP)
    one_by_one: dict[str, tuple[Try, tuple[Peer, ...]]] = {
        "an odd last batch": (odd_batch, (MIRRAX, EACH, TF, DDP, KERAS)),
        "kill -9 of a worker": (kill, (MIRRAX, PACKED, TF, DDP)),
        "resumed after kill -9": (resume, (MIRRAX, TF, DDP)),
    }
    side_by_side: dict[str, tuple[Try, tuple[Peer, ...]]] = {
        "a worker is stopped": (stop, (MIRRAX, PACKED, TF, DDP)),
        "500 steps, as installed": (many_steps, (MIRRAX, DEFAULT, KERAS_DEFAULT)),
    }

    def parts_of(tried: dict[str, tuple[Try, tuple[Peer, ...]]]) -> list[Any]:
        parts = [(fault, p, how) for fault, (how, ps) in tried.items() for p in ps]
        return [p for p in parts if not is_quick or p[1] in (MIRRAX, DDP)]

    def try_one(part: tuple[str, Peer, Try]) -> None:
        fault, peer, how = part
        left = end - time.monotonic()
        said = "not tried: out of time"
        if left > 5:
            said = outcome(how, start, peer, min(WAIT, left))
        cells[f"{fault}: {peer.name}"] = {"said": said}

    for part in parts_of(one_by_one):
        try_one(part)
    threads = ThreadPoolExecutor(AT_ONCE)
    try:
        list(threads.map(try_one, parts_of(side_by_side)))
    finally:
        threads.shutdown(cancel_futures=True)


def outcome(how: Try, start: Start, peer: Peer, limit: float) -> str:
    """What came of it, in words."""
    try:
        return how(start, peer, limit)
    except NotStarted as error:
        return f"not tried: {error}"
    except NoAnswer as error:
        return f"hangs: {error.reason}" if error.is_late else error.reason
    except RuntimeError as error:
        return f"not tried: {error}"


class NotStarted(Exception):
    """A peer did not come to its first step, which says nothing about the fault."""


def first_steps(workers: Any, peer: Peer, model: str, limit: float) -> float:
    """The loss of a first step; a short `limit` is that of the whole table."""
    seconds = START if limit >= WAIT else max(limit, 5.0)
    try:
        return workers.train(peer.way, model, 1, seconds)[1]
    except NoAnswer as error:
        if not error.is_late:
            raise
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


def resume(start: Start, peer: Peer, limit: float) -> str:
    """Saved after 3 steps, killed 3 steps later; new processes do those 3 steps again."""
    losses = []
    for what in ("save", "restore"):
        workers = start(peer, 2, 1)
        try:
            if what == "save":
                first_steps(workers, peer, "small", limit)
                workers.train(peer.way, "small", 2, limit)
            workers.train(what, "small", 1, START)
            losses.append(workers.train(peer.way, "small", 3, START)[1])
        finally:
            workers.kill()
    undisturbed, resumed = losses
    if undisturbed == resumed:
        return "goes on where it was saved, with the same loss to the last bit"
    return (
        f"goes on with the saved weights, but the first rows: loss {resumed:.5f}, "
        f"undisturbed {undisturbed:.5f}"
    )


def many_steps(start: Start, peer: Peer, limit: float) -> str:
    """Two replicas in one process, as installed; nobody waits between the steps."""
    workers = start(peer, 2, 1)
    try:
        first_steps(workers, peer, "small", limit)
        workers.train(peer.way, "small", 500, limit)
        return "trains"
    finally:
        workers.kill()
