"""`WorkerPool` and `run_workers`: functions in several worker processes of this machine."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mirrax._src.cluster.local_cluster import (
    LOST_ANOTHER,
    LocalCluster,
    WorkerEnd,
    read_tail,
)
from mirrax._src.testing import travel, worker
from mirrax._src.testing.failures import Failure, error_of, timeout_error

# After a failure: how long others that fail at the same time are waited for, and how long
# the one is that made the first report a consequence.
_TOGETHER_SECONDS = 0.2
_CAUSE_SECONDS = 10.0
_STACK_SECONDS = 2.0
_START_SECONDS = 120.0


class WorkerPool:
    """Processes that form a cluster, started once for many calls.

        with WorkerPool(workers=2, devices=2) as pool:
            assert pool.run(lambda: jax.local_device_count()) == [2, 2]

    Each worker has a `TF_CONFIG`, as `mirrax run` gives it, and has imported mirrax, but not
    started JAX's devices. What a call leaves in a process, such as a strategy that has
    joined the cluster, is there in the next one. After a failure the processes are ended,
    and the next call starts new ones.

    Args:
        workers: How many processes.
        devices: The logical CPU devices of each; None leaves it to the environment.
    """

    __module__ = "mirrax.testing"

    def __init__(self, workers: int = 2, devices: int | None = 2) -> None:
        for name, value in (("workers", workers), ("devices", devices)):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        self.workers, self.devices = workers, devices
        self.is_closed = False
        self._processes: _Processes | None = _Processes(workers, devices)

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = 120.0,
    ) -> list[Any]:
        """Calls `fn` on all workers at the same time; their results, in order.

        Args:
            fn: Any function, also a closure. It and its arguments are copied to the workers.
            args: Its arguments.
            kwargs: Its keyword arguments.
            timeout: Seconds after which the call fails and says where the workers are.

        Raises:
            WorkerError: If a worker fails, or does not return in time.
        """
        if self.is_closed:
            raise RuntimeError(
                f"This WorkerPool of {self.workers} worker(s) is closed; make a new one."
            )
        call = travel.pack_call(fn, tuple(args), dict(kwargs or {}))
        if self._processes is not None and not self._processes.are_there():
            self._end_processes()
        if self._processes is None:
            self._processes = _Processes(self.workers, self.devices)
        try:
            self._processes.wait_until_ready()
            return self._processes.call(call, timeout)
        except BaseException:
            self._end_processes()
            raise

    def close(self) -> None:
        """Ends the processes, and all that they have started."""
        self.is_closed = True
        self._end_processes()

    def _end_processes(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" * self.is_closed
        return f"WorkerPool(workers={self.workers}, devices={self.devices}{state})"


def run_workers(
    fn: Callable[..., Any],
    workers: int = 2,
    devices: int | None = 2,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: float = 120.0,
) -> list[Any]:
    """Calls `fn` in new processes that form a cluster; their results, in order.

        def train():
            strategy = mx.distribute.MultiWorkerMirroredStrategy()
            return strategy.num_replicas_in_sync

        assert run_workers(train, workers=2, devices=2) == [4, 4]

    Starting processes takes seconds; a `WorkerPool` does it once for many calls.

    Args:
        fn: Any function, also a closure. It and its arguments are copied to the workers.
        workers: How many processes.
        devices: The logical CPU devices of each; None leaves it to the environment.
        args: Its arguments.
        kwargs: Its keyword arguments.
        timeout: Seconds after which it fails and says where the workers are.

    Raises:
        WorkerError: If a worker fails, or does not return in time.
    """
    with WorkerPool(workers, devices) as pool:
        return pool.run(fn, args, kwargs, timeout)


class _Processes:
    """The processes of a pool, and a connection to each."""

    def __init__(self, workers: int, devices: int | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mirrax-testing-"))
        pipes = [Pipe() for _ in range(workers)]
        self.connections: list[Connection] = [ours for ours, _ in pipes]
        self.workers = range(workers)
        self._calls, self._is_ready = 0, False
        try:
            self.cluster = LocalCluster(
                [sys.executable, str(worker.__file__)],
                workers,
                self.folder,
                devices,
                [{"MIRRAX_POOL": str(theirs.fileno())} for _, theirs in pipes],
                descriptors=[[theirs.fileno()] for _, theirs in pipes],
            )
        finally:
            for _, theirs in pipes:
                theirs.close()
        self._starting = _Answers(self, _START_SECONDS)
        self.tell(lambda _: sys.path)

    def tell(self, message_of: Callable[[int], Any]) -> None:
        for n in self.workers:
            with contextlib.suppress(OSError):  # its process has ended: `cluster` tells
                self.connections[n].send(message_of(n))

    def are_there(self) -> bool:
        """Whether no process has ended while nobody was looking."""
        return not self.cluster.wait(0) and self.cluster.running == set(self.workers)

    def wait_until_ready(self) -> None:
        """Waits until all have imported mirrax; not part of a call's time."""
        if not self._is_ready:
            self._starting.collect()
            self._is_ready = True

    def call(self, call: bytes, timeout: float) -> list[Any]:
        """Makes a call on all workers."""
        self._calls += 1
        file = self.folder / f"call-{self._calls}"
        results = [file.with_name(f"{file.name}-result-{n}") for n in self.workers]
        file.write_bytes(call)
        answers = _Answers(self, timeout)
        self.tell(lambda n: (str(file), str(results[n])))
        answers.collect()
        values = [travel.unpack(result.read_bytes()) for result in results]
        for each in (file, *results):
            each.unlink()
        return values

    def close(self) -> None:
        self.cluster.close()
        for each in self.connections:
            each.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Answers:
    """The workers' answers to one message, from now to the last of them."""

    def __init__(self, processes: _Processes, timeout: float) -> None:
        self._processes, self._cluster = processes, processes.cluster
        self._waiting = set(processes.workers)
        self._deaf: set[int] = set()  # those whose connection is closed
        self._failures: dict[int, Failure] = {}
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._log_starts = [log.stat().st_size for log in self._cluster.logs]

    def collect(self) -> None:
        """Waits until all have answered; raises if one of them fails."""
        while self._waiting and (left := self._deadline - time.monotonic()) > 0:
            self._hear(left)
        if self._failures:
            raise error_of(self._failures, self._outputs())
        if self._waiting:
            outputs = self._outputs()
            raise timeout_error(self._timeout, self._places(), outputs)

    def _hear(self, seconds: float) -> None:
        """Takes in the next answers."""
        speaking = {
            self._processes.connections[n]: n for n in self._waiting - self._deaf
        }
        ready = connection.wait([*speaking, self._cluster], seconds)  # pyright: ignore
        for each, n in speaking.items():
            if each in ready:
                self._take_answer(n, each)
        if self._cluster in ready:
            for end in self._cluster.wait(0):
                self._take_end(end)

    def _take_answer(self, n: int, each: Connection) -> None:
        try:
            report = each.recv()
        except (EOFError, OSError):
            self._deaf.add(n)
            return
        self._waiting.discard(n)
        if report is not None:
            first_line = report["message"].partition("\n")[0]
            exception = report["exception"]
            self._fail(
                n,
                Failure(
                    summary=f"{report['type']}: {first_line}".removesuffix(": "),
                    traceback=report["traceback"],
                    time=report["time"],
                    is_consequence=report["is_consequence"],
                    exception=exception and travel.unpack(exception),
                ),
            )

    def _take_end(self, end: WorkerEnd) -> None:
        if end.worker in self._waiting:
            self._waiting.discard(end.worker)
            summary = f"its process ended before it returned, with {end.describe()}"
            is_consequence = end.returncode == LOST_ANOTHER
            self._fail(end.worker, Failure(summary, "", end.time, is_consequence))

    def _fail(self, n: int, failure: Failure) -> None:
        self._failures[n] = failure
        grace = _CAUSE_SECONDS if failure.is_consequence else _TOGETHER_SECONDS
        self._deadline = min(self._deadline, time.monotonic() + grace)

    def _outputs(self) -> dict[int, str]:
        """What each worker has printed in this call."""
        logs = zip(self._cluster.logs, self._log_starts)
        return {n: read_tail(log, start) for n, (log, start) in enumerate(logs)}

    def _places(self) -> dict[int, str]:
        """Where those are that have not answered: Python shows it when it is aborted."""
        starts = {n: self._cluster.logs[n].stat().st_size for n in self._waiting}
        stopped = {n for n in self._waiting if self._cluster.is_stopped(n)}
        self._cluster.send_signal(signal.SIGABRT, self._waiting)
        end = time.monotonic() + _STACK_SECONDS
        while self._cluster.running & (self._waiting - stopped):
            if time.monotonic() > end:
                break
            self._cluster.wait(0.1)
        return {
            n: "stopped, by SIGSTOP or a debugger"
            if n in stopped
            else _stacks(read_tail(self._cluster.logs[n], start))
            for n, start in starts.items()
        }


def _stacks(text: str) -> str:
    """The stacks in what Python prints when it is aborted."""
    lines = [
        line
        for line in text.splitlines()
        if not line.startswith(("Fatal Python error", "Extension modules"))
        and str(worker.__file__) not in line
    ]
    return "\n".join(lines).strip() or "unknown: it has not answered SIGABRT"
