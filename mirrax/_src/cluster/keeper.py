"""The keeper: a small process that starts workers, watches them, and sees to their end.

`LocalCluster` runs this file as a program. The first line of its input is a job; then come
commands, `signal NUMBER WORKER ...` and `end`. Its output are the workers' process ids, and
later a line for each worker that ends, and one if logs cannot be written. It ends, with all that descends from it, when it is
told to, when its input ends and when its parent is gone. It uses nothing but the standard
library, has one thread and starts in 50 ms.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SECONDS_TO_END = 7.0
KEPT_LOGS = 3
_MOST_CHUNKS = 64
_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER


class Lines:
    """Whole lines from a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._rest = b""

    def read(self) -> list[bytes] | None:
        """The lines that are there, waiting for the first bytes; None at the end."""
        chunk = os.read(self.descriptor, 65_536)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return lines if chunk or lines else None


class Output:
    """What a worker prints, on its way to its log: a full disk does not reach the worker.

    Args:
        path: The log, which is appended to.
        most_bytes: A log that is longer becomes `path.1`, that one `path.2`, ...
    """

    def __init__(self, path: str, most_bytes: int) -> None:
        self.descriptor, self.end = os.pipe()
        os.set_blocking(self.descriptor, False)
        self._path, self._most_bytes = path, most_bytes
        self._log: int | None = None
        self._is_in_line = False
        self._lost = 0
        self.problem = ""

    def pump(self) -> bool:
        """Writes what is there to the log; false when nobody can print any more."""
        for _ in range(_MOST_CHUNKS):  # the others want to be served, too
            try:
                chunk = os.read(self.descriptor, 65_536)
            except BlockingIOError:
                return True
            if not chunk:
                os.close(self.descriptor)
                return False
            self._keep(chunk)
        return True

    def _keep(self, chunk: bytes) -> None:
        try:
            length = os.fstat(self._log).st_size if self._log else 0
            if length > self._most_bytes:
                end = self._end_of_line(chunk, length)
                self._append(chunk[:end])
                chunk = chunk[end:]
                if chunk:
                    self._rotate()  # not earlier: the newest log is always there
            self._append(chunk)
        except OSError as error:
            self._lost += len(chunk)
            self.problem = self.problem or error.strerror or str(error)

    def _end_of_line(self, chunk: bytes, length: int) -> int:
        """How much of `chunk` belongs to the line that was begun, unless that never ends."""
        if not self._is_in_line:
            return 0
        end = chunk.find(b"\n") + 1
        return len(chunk) if not end and length <= 2 * self._most_bytes else end

    def _append(self, chunk: bytes) -> None:
        if self._log is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._log = os.open(self._path, flags, 0o666)
        if self._lost:
            lost = f"\n=== {self._lost} bytes could not be written here ===\n"
            os.write(self._log, lost.encode())
            self._lost = 0
        if chunk:
            self._is_in_line = not chunk.endswith(b"\n")
        while chunk:
            chunk = chunk[os.write(self._log, chunk) :]

    def _rotate(self) -> None:
        assert self._log is not None
        os.close(self._log)
        self._log = None
        for number in range(KEPT_LOGS, 0, -1):
            older = f"{self._path}.{number - 1}" if number > 1 else self._path
            if os.path.exists(older):
                os.replace(older, f"{self._path}.{number}")


def _keep() -> None:
    """The keeper's program: a job comes in as the first line, then commands."""
    _prctl(_ADOPT_ORPHANS, 1)  # what a worker leaves behind becomes the keeper's child
    woken, parent = _wake_by_signals(), os.getppid()
    commands, workers, outputs = Lines(0), {}, {}
    try:
        while os.getppid() == parent:
            watched = [commands.descriptor, woken, *outputs]
            ready, _, _ = select.select(watched, [], [], 1.0)
            if woken in ready:
                os.read(woken, 4_096)
            lines = commands.read() if commands.descriptor in ready else []
            if lines is None:
                return
            for line in lines:
                if line == b"end":
                    return
                _obey(line, workers, outputs)
            _pump(outputs, ready)
            _reap(workers, outputs)
    except BrokenPipeError:
        pass
    finally:
        _end_all(workers)
        for output in outputs.values():
            output.pump()


def _pump(outputs: dict[int, Output], ready: list[int]) -> None:
    """Brings what workers have printed to their logs; the first problem is reported."""
    had_problem = any(output.problem for output in outputs.values())
    for descriptor in outputs.keys() & set(ready):
        if not outputs[descriptor].pump():
            del outputs[descriptor]
    problems = [output.problem for output in outputs.values() if output.problem]
    if problems and not had_problem:
        _report(log_problem=problems[0])


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


def _start_workers(
    job: dict[str, Any], workers: dict[int, int], outputs: dict[int, Output]
) -> None:
    """Starts all of them, and notes which process is which worker."""
    prepare = _dying_with(os.getpid())
    for number, worker in enumerate(job["workers"]):
        if job["log_bytes"]:
            output = Output(worker["log"], job["log_bytes"])
            outputs[output.descriptor], log = output, output.end
        else:
            log = os.open(worker["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
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
        os.close(log)
        workers[process.pid] = number
        # Else its finalizer would wait for the process, and `_reap` would miss it.
        process.returncode = 0
    for worker in job["workers"]:
        for descriptor in worker["descriptors"]:
            os.close(descriptor)  # so that the other end sees when the worker has ended


def _dying_with(keeper: int) -> Callable[[], None]:
    def prepare() -> None:
        _prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != keeper:  # it was gone before
            os._exit(1)

    return prepare


def _obey(line: bytes, workers: dict[int, int], outputs: dict[int, Output]) -> None:
    if line.startswith(b"{"):
        _start_workers(json.loads(line), workers, outputs)
        _report(pids=list(workers))
        return
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


def _reap(workers: dict[int, int], outputs: dict[int, Output]) -> bool:
    """Reports the workers that have ended; false when there is no child any more."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if pid in workers:
            _pump(
                outputs, list(outputs)
            )  # its last words are in the log, then it has ended
            _report(
                worker=workers.pop(pid),
                returncode=os.waitstatus_to_exitcode(status),
                time=time.time(),
                peak_bytes=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1_024),
            )


def _report(**message: Any) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _end_all(workers: dict[int, int]) -> None:
    """Kills all descendants, also those that are born or orphaned meanwhile."""
    known = set(workers)
    deadline = time.monotonic() + SECONDS_TO_END
    while time.monotonic() < deadline:
        for pid in known | set(_descendants()):
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        if not _reap({}, {}):
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
