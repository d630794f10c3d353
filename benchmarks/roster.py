"""How many workers can one roster carry, and do strangers disturb it?

The roster's process is the real one. Its workers are simulated: connections of this process
that prove the secret, say hello, report their status as often as workers do, and agree. Told
are the seconds until all have joined, how long agreements take (from the first worker that
asks to the last that is answered; with equal values, and with values that differ), and the
share of a core that the roster needs. On a machine that has other work to do the times say
little; the processor time of an agreement, the roster's and that of all simulated workers
together, does. `--fuzz` adds 2,000 connections with 10,000 lines of
nonsense meanwhile. Any word of a failure is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from mirrax._src.cluster.roster_server import proving

SERVER = Path(proving.__file__).parent
SECRET = "a secret for the benchmark"
NO_PROGRAM = [0, 0, ""]
LIMITS = {"join s": 5.0, "median ms": 25.0, "worst ms": 250.0, "share of a core": 0.5}


class Worker:
    """A connection that behaves as a worker does."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.socket = socket.create_connection(("127.0.0.1", job.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.rest = b""
        self.step = 0
        self.next_status = 0.0

    def send(self, kind: str, content: object) -> None:
        data = json.dumps({kind: content}).encode() + b"\n"
        sent = self.socket.send(data)
        assert sent == len(data), "the roster does not read"

    def read(self) -> None:
        while True:
            try:
                chunk = self.socket.recv(1 << 16)
            except BlockingIOError:
                return
            assert chunk, f"worker {self.number} has lost its connection"
            if b"\n" not in chunk:
                self.rest += chunk
                continue
            *lines, rest = (self.rest + chunk).split(b"\n")
            self.rest = rest
            for line in lines:
                self.hear(line)
            if len(chunk) < 1 << 16:
                return

    def hear(self, line: bytes) -> None:
        job = self.job
        if line.startswith(b'{"agreed"'):
            job.answered += 1
        elif line.startswith(b'{"roster"'):
            self.prove(json.loads(line)["challenge"])
        elif line.startswith(b'{"proved"'):
            facts = {**job.facts, "process": f"process {self.number} on host"}
            self.send("hello", {"worker": self.number, "facts": facts})
        elif line.startswith(b'{"go"'):
            job.joined += 1
        elif line.startswith((b'{"failure"', b'{"refused"')):
            job.alarms.append(line[:300].decode())

    def prove(self, theirs: str) -> None:
        challenges = theirs, proving.new_challenge()
        proof = proving.proof_of(SECRET, "worker", self.number, challenges)
        content = {"worker": self.number, "challenge": challenges[1], "proof": proof}
        self.send("prove", content)

    def report(self, now: float) -> None:
        """Says where it is, as often as a worker of so many does."""
        self.next_status = now + max(0.2, self.job.size / 1000)
        self.step += 1
        count = self.step // 16 * 16
        status = {
            "step": self.step,
            "launches": self.step,
            "label": "train_step(float32[256, 784])",
            "is_busy": True,
            "mark": [count, count, "train_step(float32[256, 784])"],
            "doing": "train.py:31",
            "waits_in": "train_step(float32[256, 784])",
            "rate": 9.125,
            "occupied": 0.987,
            "memory": 412_000_000,
        }
        self.send("status", status)


class Job:
    """The roster, and all workers."""

    def __init__(self, size: int) -> None:
        self.size = size
        addresses = [f"worker-{k}.cluster.local:12345" for k in range(size)]
        self.facts = {
            "addresses": addresses,
            "host": "host",
            "log": "",
            "versions": {"mirrax": "0", "jax": "0", "python": "3"},
            "settings": {},
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        config = {"addresses": addresses, "host": "127.0.0.1", "port": 0}
        config |= {"heartbeat": 20.0, "secret": SECRET}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(config) + "\n")
        self.process.stdin.flush()
        self.port = json.loads(self.process.stdout.readline())["ready"]
        self.selector = selectors.DefaultSelector()
        self.workers: list[Worker] = []
        self.due: deque[Worker] = deque()
        self.joined = self.answered = 0
        self.alarms: list[str] = []
        self.strangers: Strangers | None = None

    def turn(self, seconds: float) -> None:
        """Listens to the roster for a moment, and reports what is due."""
        for key, _ in self.selector.select(seconds):
            key.data.read()
        now = time.monotonic()
        if self.due:
            while now > self.due[0].next_status:  # all wait equally long
                self.due[0].report(now)
                self.due.rotate(-1)
        if self.strangers is not None:
            self.strangers.disturb()

    def join(self) -> float:
        """The seconds until all have joined."""
        begin = time.monotonic()
        for number in range(self.size):
            worker = Worker(self, number)
            self.workers.append(worker)
            self.selector.register(worker.socket, selectors.EVENT_READ, worker)
        while self.joined < self.size:
            self.turn(0.1)
            assert time.monotonic() - begin < 300, f"{self.joined} of {self.size}"
        now = time.monotonic()
        for worker in self.workers:  # not all at once
            worker.next_status = now + worker.number / self.size
        self.due = deque(self.workers)
        return now - begin

    def agree(self, name: str, is_same: bool) -> float:
        """The seconds that an agreement takes."""
        lines = [
            json.dumps(
                {
                    "agree": {
                        "name": name,
                        "value": [1.5, 0 if is_same else worker.number],
                        "is_soft": False,
                        "mark": NO_PROGRAM,
                    }
                }
            ).encode()
            + b"\n"
            for worker in self.workers
        ]
        self.answered = 0
        begin = time.monotonic()
        for worker, line in zip(self.workers, lines):
            worker.socket.send(line)
        while self.answered < self.size:
            # Real workers do not take turns on one core: waking up for each answer would slow
            # the roster's sending down. This counts as waiting.
            time.sleep(self.size / 1e6)
            self.turn(0.1)
            assert time.monotonic() - begin < 60, f"{self.answered} of {self.size}"
        return time.monotonic() - begin

    def seconds_used(self) -> float:
        """The processor time of the roster's main thread so far; the rest is JAX's."""
        return (
            int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[0])
            / 1e9
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Strangers:
    """Connections that know nothing, and say all kinds of things."""

    def __init__(self, port: int) -> None:
        self.port, self.connections, self.lines = port, 0, 0
        self.open: list[socket.socket] = []
        self.random = random.Random(0)

    def disturb(self) -> None:
        if self.connections < 2000:
            self.connections += 1
            self.open.append(socket.create_connection(("127.0.0.1", self.port)))
            self.open[-1].setblocking(False)
        for stranger in self.random.sample(self.open, min(9, len(self.open))):
            if self.lines < 10_000:
                self.lines += 1
                self.send(stranger)
        if len(self.open) > 500:
            self.open.pop(0).close()

    def send(self, stranger: socket.socket) -> None:
        kind = self.random.choice(["hello", "prove", "agree", "bye", "failed", "x"])
        content = self.random.choice([None, 3, {}, {"worker": 1, "facts": {}}, [[]]])
        whole = json.dumps({kind: content}).encode() + b"\n"
        odd = self.random.randbytes(200), b"[" * 10_000 + b"\n", whole[:-5], b"\n"
        try:
            stranger.send(self.random.choice((whole, *odd)))
        except OSError:
            pass  # it was sent away


def measure(size: int, seconds: float, has_strangers: bool) -> dict[str, object]:
    """All figures for so many workers."""
    job = Job(size)
    try:
        found: dict[str, object] = {"workers": size, "join s": job.join()}
        job.strangers = Strangers(job.port) if has_strangers else None
        used, begin = job.seconds_used(), time.monotonic()
        taken: dict[bool, list[float]] = {True: [], False: []}
        number, of_roster, of_workers = 0, [], []
        while time.monotonic() - begin < seconds:
            number += 1
            is_same = number % 2 == 0
            before = job.seconds_used(), time.process_time()
            taken[is_same].append(job.agree(f"agreement {number}", is_same) * 1000)
            of_roster.append((job.seconds_used() - before[0]) * 1000)
            of_workers.append((time.process_time() - before[1]) * 1000)
            pause = time.monotonic() + 0.5
            while time.monotonic() < pause:
                job.turn(0.01)
        every = taken[True] + taken[False]
        share = (job.seconds_used() - used) / (time.monotonic() - begin)
        found |= {
            "median ms": statistics.median(every),
            "same ms": statistics.median(taken[True]),
            "differing ms": statistics.median(taken[False]),
            "worst ms": max(every),
            "roster's CPU ms": statistics.median(of_roster),
            "workers' CPU ms": statistics.median(of_workers),
            "share of a core": share,
            "false alarms": len(job.alarms),
        }
        for alarm in job.alarms[:3]:
            print(alarm)
        if job.strangers is not None:
            found["lines of strangers"] = job.strangers.lines
    finally:
        job.close()
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--workers", type=int, nargs="*", default=[2, 64, 256, 1024])
    options.add_argument("--seconds", type=float, default=20, help="for each number")
    options.add_argument("--fuzz", action="store_true", help="with strangers")
    given = options.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    is_over = False
    for size in given.workers:
        found = measure(size, given.seconds, given.fuzz)
        print(", ".join(f"{k} {_show(v)}" for k, v in found.items()), flush=True)
        over = [k for k, limit in LIMITS.items() if float(str(found[k])) > limit]
        is_over |= bool(over or found["false alarms"])
    return int(is_over)


def _show(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
