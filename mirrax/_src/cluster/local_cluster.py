"""N processes on this machine that form a cluster, and one more that sees to their end.

    with LocalCluster([sys.executable, "train.py"], workers=2, directory=logs) as cluster:
        while cluster.running:
            for end in cluster.wait(timeout_seconds=1.0):
                print(end.worker, end.returncode)

A process that is killed cannot end its children. So another one stands between this process
and the workers, the keeper (`keeper.py`): it starts them, reports their ends, and kills all
that descends from it when it is told to, or when this process is gone, however that came
about. Each worker leads a session of its own: Ctrl-C in a terminal reaches it only if it is
passed on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from mirrax._src.cluster import keeper
from mirrax._src.cluster.keeper import Lines
from mirrax._src.cluster.nodes import Nodes
from mirrax._src.cluster.secret import secret_for_workers

_SECONDS_TO_START = 30.0
_HOST = "127.0.0.1"

# Exit codes by which a worker tells something: it has saved and wants to be started again;
# it could not go on without another one.
PREEMPTED, LOST_ANOTHER = 42, 43

_MEANINGS: dict[int, str] = {
    PREEMPTED: "preempted: it has saved and wants to be started again",
    LOST_ANOTHER: "another worker was lost",
    -signal.SIGABRT: "a check in native code failed",
    -signal.SIGBUS: "native code crashed: often a full /dev/shm, or a file that shrank",
    -signal.SIGFPE: "native code crashed",
    -signal.SIGILL: "native code was built for another processor",
    -signal.SIGINT: "interrupted",
    -signal.SIGSEGV: "native code crashed",
    -signal.SIGTERM: "somebody asked it to end",
}


@dataclass(frozen=True)
class WorkerEnd:
    """How a worker has ended.

    Attributes:
        worker: Its number.
        returncode: Its exit code; the negative number of the signal that killed it.
        time: When, in seconds since the epoch.
        peak_bytes: The most memory that it used.
    """

    worker: int
    returncode: int
    time: float
    peak_bytes: int

    def describe(self) -> str:
        """`exit code 1`, or which signal ended it, and what that means."""
        code = self.returncode
        meaning = f" ({_MEANINGS[code]})" if code in _MEANINGS else ""
        return (f"exit code {code}" if code >= 0 else _signal_name(-code)) + meaning


class LocalCluster:
    """Workers 0 to n-1 on this machine, each with `TF_CONFIG` and a log of its own.

    Args:
        command: What each worker runs.
        workers: How many.
        directory: Where the logs `worker-0.log`, ... are; they are appended to.
        devices: The logical CPU devices of each worker; None leaves it to the environment.
        environments: More variables for each worker.
        attempt: How often the workers were started before.
        descriptors: File descriptors that each worker inherits.
        log_bytes: If it is not 0, a longer log becomes `worker-0.log.1` and so on, of which
            three are kept, and a full disk does not reach the workers. If it is 0, workers
            write to their logs themselves.
        nodes: The machines of a job of which these workers are one machine's share; they then
            have the numbers from `first_worker` on.
    """

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        directory: Path,
        devices: int | None = None,
        environments: Sequence[Mapping[str, str]] | None = None,
        attempt: int = 0,
        descriptors: Sequence[Sequence[int]] | None = None,
        log_bytes: int = 0,
        nodes: Nodes | None = None,
    ) -> None:
        self.first_worker = nodes.rank * workers if nodes else 0
        numbers = range(self.first_worker, self.first_worker + workers)
        self.logs = [directory / f"worker-{i}.log" for i in numbers]
        self.failures = [directory / f"worker-{i}.failure.json" for i in numbers]
        self.log_starts = [_size(log) for log in self.logs]
        self.running = set(numbers)
        # Of several machines none can make a secret for all.
        self._variables = {} if nodes else secret_for_workers()
        self.log_problem = ""
        for path in self.failures:
            path.unlink(missing_ok=True)
        addresses = (
            nodes.addresses(workers)
            if nodes
            else [f"{_HOST}:{port}" for port in free_ports(workers)]
        )
        self.address, self.secret = addresses[0], "".join(self._variables.values())
        inherited = descriptors or [[] for _ in range(workers)]
        job = {
            "command": list(command),
            "log_bytes": log_bytes,
            "workers": [
                {
                    "log": str(self.logs[i]),
                    "descriptors": list(inherited[i]),
                    "environment": self._environment(i, addresses, devices, attempt)
                    | dict(environments[i] if environments else {}),
                }
                for i in range(workers)
            ],
        }
        # No `preexec_fn` here: it would run the fork handlers of JAX, which warn. The keeper
        # is small and has one thread, where forking is safe.
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[fd for fds in inherited for fd in fds],
        )
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._commands = self._keeper.stdin
        self._reports = Lines(self._keeper.stdout.fileno())
        self._tell(json.dumps(job))
        self.pids: list[int] = self._read_pids()

    def _environment(
        self, worker: int, addresses: list[str], devices: int | None, attempt: int
    ) -> dict[str, str]:
        task = {"type": "worker", "index": self.first_worker + worker}
        values = {
            "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task}),
            "MIRRAX_LOG": str(self.logs[worker]),
            "MIRRAX_FAILURE": str(self.failures[worker]),
            "MIRRAX_ATTEMPT": str(attempt),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        values |= self._variables
        if devices is not None:
            values["JAX_NUM_CPU_DEVICES"] = str(devices)
        return values

    def _read_pids(self) -> list[int]:
        """The keeper's first line, and nothing of the next: a worker may have ended already."""
        line = b""
        while connection.wait([self._reports.descriptor], _SECONDS_TO_START):
            byte = os.read(self._reports.descriptor, 1)
            if byte == b"\n":
                return json.loads(line)["pids"]
            if not byte:
                break
            line += byte
        self._keeper.kill()
        code = self._keeper.wait()
        self._close_pipes()
        raise RuntimeError(
            f"The process that starts the workers failed (exit code {code}); what it printed "
            "to stderr says why."
        )

    def fileno(self) -> int:
        """Can be read when `wait` has something to tell."""
        return self._reports.descriptor

    def wait(self, timeout_seconds: float) -> list[WorkerEnd]:
        """The workers that have ended since the last call, waiting for the first if none has."""
        if not connection.wait([self._reports.descriptor], timeout_seconds):
            return []
        lines = self._reports.read()
        if lines is None:
            raise RuntimeError(
                "The process that keeps the workers has ended, and they with it. Something "
                f"killed it (process {self._keeper.pid}, exit code {self._keeper.wait()})."
            )
        messages = [json.loads(line) for line in lines]
        for message in messages:
            self.log_problem = message.get("log_problem", self.log_problem)
        ends = [
            WorkerEnd(**{**each, "worker": self.first_worker + each["worker"]})
            for each in messages
            if "worker" in each
        ]
        self.running -= {end.worker for end in ends}
        return ends

    def send_signal(self, number: int, workers: Iterable[int] | None = None) -> None:
        """Sends a signal to the processes of some workers, or of all that still run."""
        chosen = self.running if workers is None else self.running & set(workers)
        places = (str(worker - self.first_worker) for worker in sorted(chosen))
        self._tell(f"signal {int(number)} {' '.join(places)}")

    def is_stopped(self, worker: int) -> bool:
        """Whether the worker's process is stopped: by SIGSTOP, or by a debugger."""
        return _state(self.pids[worker - self.first_worker]) in ("T", "t")

    def close(self) -> None:
        """Kills what still runs: the workers, their children, and the children of those."""
        if self._commands.closed:
            return
        self._tell("end")
        try:
            self._keeper.wait(2 * keeper.SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # the kernel then kills the workers
            self._keeper.wait()
        self.running.clear()
        self._close_pipes()

    def _tell(self, line: str) -> None:
        try:
            self._commands.write(line.encode() + b"\n")
            self._commands.flush()
        except BrokenPipeError:
            pass  # `wait` says it

    def _close_pipes(self) -> None:
        assert self._keeper.stdout is not None
        self._keeper.stdout.close()
        try:
            self._commands.close()
        except BrokenPipeError:
            pass

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"LocalCluster({len(self.logs)} workers, running: {sorted(self.running)})"
        )


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on.

    They are taken from below those that the kernel gives to outgoing connections, so that
    none of them is gone by the time a worker wants it.
    """
    choices = random.SystemRandom().sample(range(12_000, 32_000), 2_000)
    found: list[int] = []
    for port in choices:
        if len(found) == count:
            break
        with socket.socket() as trial:
            try:
                trial.bind((_HOST, port))
            except OSError:
                continue
        found.append(port)
    if len(found) < count:
        raise RuntimeError(f"There are no {count} free ports on {_HOST}.")
    return found


def read_tail(path: Path, start: int = 0, limit: int = 65_536) -> str:
    """The end of a file from `start` on, at most `limit` bytes, whatever it contains."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if start > size:  # it is a new file
                start = 0
            file.seek(max(start, size - limit))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _signal_name(number: int) -> str:
    try:
        return f"signal {signal.Signals(number).name}"
    except ValueError:  # one of the nameless real-time signals
        return f"signal {number}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _state(pid: int) -> str | None:
    """The kernel's letter for what a process does; None where that cannot be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
