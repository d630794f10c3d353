"""Strangers who say all kinds of things to a job that trains.

A few hundred lines here; with MIRRAX_THOROUGH 10,000 on 2,000 connections.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from random import Random

import pytest
from helpers.waiting import SECONDS_TO_HANG
from property.examples import IS_THOROUGH

from . import workers as processes

CONNECTIONS, LINES = (2000, 10_000) if IS_THOROUGH else (60, 300)

# Worker 0 asks all to stop once the strangers are done; each step adds 1 on each replica.
TRAINING = """
strategy = join()
with strategy.scope():
    total = mx.Variable(0.0, aggregation=mx.VariableAggregation.SUM)
add = mx.function(lambda: total.assign_add(jnp.float32(1.0), read_value=False))
steps = 0
while not strategy.should_stop():
    strategy.run(add)
    steps += 1
    if steps == 3:
        say("trains")
    if me == 0 and os.path.exists(os.environ["STOP_FILE"]):
        strategy.request_stop("the strangers are gone")
    time.sleep(0.002)
assert float(total.numpy()) == 2 * steps, (float(total.numpy()), steps)
say("undisturbed after", steps, "steps")
"""


@pytest.mark.parametrize("secret", ["", "correct horse battery staple"])
def test_a_training_job_is_not_disturbed_by_strangers(
    secret: str, tmp_path: Path
) -> None:
    if secret and not IS_THOROUGH:
        pytest.skip("with MIRRAX_THOROUGH; who has no secret is disturbed more easily")
    stop = tmp_path / "stop"
    with processes.start(
        TRAINING,
        2,
        STOP_FILE=str(stop),
        MIRRAX_HEARTBEAT="60",
        MIRRAX_SECRET=secret,
    ) as workers:
        workers.wait_for("trains")
        sent = disturb(workers.addresses)
        stop.touch()
        workers.expect_end(0, 0, within=SECONDS_TO_HANG)
        for worker in workers:
            assert "undisturbed after" in worker.output, workers.show()
    assert sent == LINES


def disturb(addresses: list[str]) -> int:
    """Sends lines to worker 0's address, on many connections; how many."""
    host, _, port = addresses[0].rpartition(":")
    random, sent = Random(os.environ.get("MIRRAX_SEED", "0")), 0
    open_ones: list[socket.socket] = []
    for k in range(CONNECTIONS):
        stranger = socket.create_connection((host, int(port)), SECONDS_TO_HANG)
        open_ones.append(stranger)
        for _ in range(LINES // CONNECTIONS):
            with contextlib.suppress(OSError):  # it was sent away
                random.choice(open_ones).sendall(_nonsense(random, addresses))
            sent += 1
        if len(open_ones) > 100 or k % 3 == 0:
            open_ones.pop(random.randrange(len(open_ones))).close()
    for stranger in open_ones:
        stranger.close()
    return sent


def _nonsense(random: Random, addresses: list[str]) -> bytes:
    """A line that a worker might send, one that nobody would, or a part of one."""
    kinds = ["hello", "prove", "look", "agree", "status", "bye", "failed", "accuse"]
    kinds += ["stop", "saved", "note", "gave_up", "withdraw", "reached", "x"]
    worker = random.choice([-1, 0, 1, 2, 10**9, "0", None])
    others = random.choice([addresses, addresses[::-1], [], "x"])
    contents = [
        None,
        3,
        [[]],
        {"worker": worker, "facts": {"addresses": others}},
        {"worker": worker, "challenge": "0", "proof": "0" * 64},
        {"workers": [worker], "text": "a stranger says so"},
        {"runs": 1, "mark": [0, 0, ""]},
    ]
    line = json.dumps({random.choice(kinds): random.choice(contents)}).encode() + b"\n"
    cut = line[: random.randrange(len(line))]
    odd = [random.randbytes(200), b"[" * 9000 + b"\n", b"x" * 20_000, b"\n", cut]
    return random.choice([line, line, line, *odd])
