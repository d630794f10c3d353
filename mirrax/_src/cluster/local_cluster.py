"""N processes on this machine that form a cluster, and one more that sees to their end.

    with LocalCluster([sys.executable, "train.py"], workers=2, directory=logs) as cluster:
        while cluster.running:
            for end in cluster.wait(timeout_seconds=1.0):
                print(end.worker, end.returncode)

A process that is killed cannot end its children. So a third one stands between this process
and the workers: the keeper, which is this file run as a program. It starts the workers,
reports their ends, and kills all that descends from it when it is told to or when this
process is gone, however that came about. Each worker leads a session of its own: Ctrl-C in a
terminal reaches it only if it is passed on.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

_SECONDS_TO_START = 30.0
_SECONDS_TO_END = 15.0
_HOST = "127.0.0.1"


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
    ) -> None:
        self.logs = [directory / f"worker-{i}.log" for i in range(workers)]
        self.failures = [directory / f"worker-{i}.failure.json" for i in range(workers)]
        self.log_starts = [_size(log) for log in self.logs]
        self.running = set(range(workers))
        for path in self.failures:
            path.unlink(missing_ok=True)
        addresses = [f"{_HOST}:{port}" for port in free_ports(workers)]
        inherited = descriptors or [[] for _ in range(workers)]
        job = {
            "command": list(command),
            "parent": os.getpid(),
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
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[fd for fds in inherited for fd in fds],
        )
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._commands = self._keeper.stdin
        self._reports = _Lines(self._keeper.stdout.fileno())
        self._unread: list[bytes] = []
        self._tell(json.dumps(job))
        self.pids: list[int] = self._read_pids()

    def _environment(
        self, worker: int, addresses: list[str], devices: int | None, attempt: int
    ) -> dict[str, str]:
        task = {"type": "worker", "index": worker}
        values = {
            "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task}),
            "MIRRAX_LOG": str(self.logs[worker]),
            "MIRRAX_FAILURE": str(self.failures[worker]),
            "MIRRAX_ATTEMPT": str(attempt),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        if devices is not None:
            values["JAX_NUM_CPU_DEVICES"] = str(devices)
        return values

    def _read_pids(self) -> list[int]:
        while connection.wait([self._reports.descriptor], _SECONDS_TO_START):
            lines = self._reports.read()
            if lines is None:
                break
            if lines:
                self._unread = lines[1:]  # a worker may have ended already
                return json.loads(lines[0])["pids"]
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
        lines, self._unread = self._unread, []
        if not lines:
            if not connection.wait([self._reports.descriptor], timeout_seconds):
                return []
            lines = self._reports.read()
        if lines is None:
            raise RuntimeError(
                "The process that keeps the workers has ended, and they with it. Something "
                f"killed it (process {self._keeper.pid}, exit code {self._keeper.wait()})."
            )
        ends = [WorkerEnd(**json.loads(line)) for line in lines]
        self.running -= {end.worker for end in ends}
        return ends

    def send_signal(self, number: int, workers: Sequence[int] | None = None) -> None:
        """Sends a signal to the processes of some workers, or of all that still run."""
        chosen = self.running if workers is None else self.running & set(workers)
        self._tell(f"signal {int(number)} {' '.join(map(str, sorted(chosen)))}")

    def is_stopped(self, worker: int) -> bool:
        """Whether the worker's process is stopped: by SIGSTOP, or by a debugger."""
        return _state(self.pids[worker]) in ("T", "t")

    def close(self) -> None:
        """Kills what still runs: the workers, their children, and the children of those."""
        if self._commands.closed:
            return
        self._tell("end")
        try:
            self._keeper.wait(_SECONDS_TO_END)
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
        return f"LocalCluster({len(self.logs)} workers, running: {sorted(self.running)})"


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
            file.seek(max(start, size - limit))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


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


class _Lines:
    """Whole lines from a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._rest = b""

    def read(self) -> list[bytes] | None:
        """The lines that are there, waiting for the first bytes; None at the end."""
        chunk = os.read(self.descriptor, 65_536)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return lines if chunk or lines else None


# The keeper -----------------------------------------------------------------------------------

_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER


def _keep() -> None:
    """The keeper's program: a job comes in as the first line, then commands."""
    commands = _Lines(0)
    _prctl(_ADOPT_ORPHANS, 1)  # what a worker leaves behind becomes the keeper's child
    woken = _wake_by_signals()
    lines: list[bytes] = []
    while not lines:
        lines = commands.read() or sys.exit()
    job = json.loads(lines.pop(0))
    workers: dict[int, int] = {}
    try:
        _start_workers(job, workers)
        _report({"pids": list(workers)})
        while os.getppid() == job["parent"]:
            for line in lines:
                if line == b"end":
                    return
                _obey(line, workers)
            _reap(workers)
            ready, _, _ = select.select([commands.descriptor, woken], [], [], 1.0)
            if woken in ready:
                os.read(woken, 4_096)
            lines = []
            if commands.descriptor in ready:
                received = commands.read()
                if received is None:
                    return
                lines = received
    except BrokenPipeError:
        pass
    finally:
        _end_all(workers)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _wake_by_signals() -> int:
    """A descriptor that can be read when a child has ended; no signal ends the keeper."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A handler, not SIG_IGN, which the workers would inherit.
        signal.signal(number, lambda *_: None)
    return read


def _start_workers(job: dict[str, Any], workers: dict[int, int]) -> None:
    """Starts all of them, and notes which process is which worker."""
    prepare = _dying_with(os.getpid())
    for number, worker in enumerate(job["workers"]):
        with open(worker["log"], "ab") as log:
            process = subprocess.Popen(
                job["command"],
                env=os.environ | worker["environment"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=worker["descriptors"],
                preexec_fn=prepare,
            )
        workers[process.pid] = number
        process.returncode = 0  # else its finalizer would wait for it, and `_reap` miss it
    for worker in job["workers"]:
        for descriptor in worker["descriptors"]:
            os.close(descriptor)  # so that the other end sees when the worker has ended


def _dying_with(keeper: int) -> Callable[[], None]:
    def prepare() -> None:
        _prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != keeper:  # it was gone before
            os._exit(1)

    return prepare


def _obey(line: bytes, workers: Mapping[int, int]) -> None:
    _, number, *chosen = line.split()
    targets = set(map(int, chosen))
    for pid, worker in workers.items():
        if worker in targets:
            if int(number) == signal.SIGABRT:
                _leave_no_core(pid)
            os.kill(pid, int(number))


def _leave_no_core(pid: int) -> None:
    import resource

    try:
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    except (AttributeError, OSError):
        pass


def _reap(workers: dict[int, int]) -> bool:
    """Reports the workers that have ended; false when there is no child any more."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if pid in workers:
            end = WorkerEnd(
                workers.pop(pid),
                os.waitstatus_to_exitcode(status),
                time.time(),
                usage.ru_maxrss * (1 if sys.platform == "darwin" else 1_024),
            )
            _report(vars(end))


def _report(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _end_all(workers: dict[int, int]) -> None:
    """Kills all descendants, also those that are born or orphaned meanwhile."""
    known = set(workers)
    deadline = time.monotonic() + _SECONDS_TO_END / 2
    while time.monotonic() < deadline:
        for pid in known | set(_descendants()):
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        if not _reap({}):
            return
        known = set()
        time.sleep(0.005)


def _descendants() -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    yield from found[1:]


if __name__ == "__main__":
    _keep()
