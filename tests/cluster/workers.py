"""Real worker processes for tests, with limits on time that say what hung.

    with start("strategy = join(); say('joined'); ...", workers=2) as workers:
        workers.wait_for("joined")
        workers[1].kill()
        workers.expect_end(43, -9, within=10)

One process imports JAX once, without starting its devices, and is forked for each worker;
this file run as a program is that process. What workers leave behind becomes its child, so
that nothing can be overlooked.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mirrax._src.cluster.local_cluster import free_ports
from tests.helpers.forked_workers import import_late_parts_of_jax
from tests.helpers.programs import compile_quickly
from tests.helpers.signals import received_signals
from tests.helpers.waiting import SECONDS_TO_HANG

_ROOT = Path(__file__).parents[2]
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000

# What every script may use.
_PREAMBLE = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
import mirrax as mx

def say(*words):
    print(*words, flush=True)

def join(**options):
    return mx.distribute.MultiWorkerMirroredStrategy(**options)

def all_sum(x):
    return mx.get_replica_context().all_reduce("SUM", x)
"""


class Worker:
    """One process, and what it has printed."""

    def __init__(self, number: int, pid: int, log: Path) -> None:
        self.number, self.pid, self.log = number, pid, log
        self.code: int | None = None
        self.ended_at = 0.0

    @property
    def output(self) -> str:
        """What it has printed so far, errors included."""
        return self.log.read_text(errors="replace")

    @property
    def own_output(self) -> str:
        """The same without the lines that JAX and Gloo print themselves."""
        lines = self.output.splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("[Gloo]"))

    def send(self, number: int) -> None:
        """Sends it a signal."""
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def wait(self, within: float) -> int:
        """Its exit code; one that hangs is an error."""
        _wait(lambda: self.code is not None, within)
        assert self.code is not None, (
            f"worker {self.number} runs after {within} s:\n{self.output[-3000:]}"
        )
        return self.code

    def wait_for(self, text: str, within: float = SECONDS_TO_HANG) -> None:
        """Waits until it has printed `text`."""

        def has_it() -> bool:
            return text in self.output or self.code is not None

        _wait(has_it, within)
        assert text in self.output, (
            f"worker {self.number} never printed {text!r}:\n{self.output[-3000:]}"
        )

    def __repr__(self) -> str:
        state = "runs" if self.code is None else f"ended with {self.code}"
        return f"Worker({self.number}, process {self.pid}, {state})"


class Workers:
    """The workers of a cluster; at the end of `with` nothing of them is left."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self._workers: list[Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="mirrax-workers-")

    def add(
        self,
        number: int,
        script: str,
        devices: int = 1,
        namespace: str | None = None,
        setup: str = "",
        **variables: str,
    ) -> Worker:
        """Starts one more process, as worker `number`; `namespace` is its network's."""
        folder = Path(self._folder.name, f"process-{len(self._workers)}")
        folder.mkdir()
        log, program = folder / "log", folder / "train.py"
        log.touch()
        parts = [_PREAMBLE, f"me = {number}\n", setup, script]
        program.write_text("\n".join(map(textwrap.dedent, parts)))
        task = {"type": "worker", "index": number}
        cluster = {"cluster": {"worker": self.addresses}, "task": task}
        job = {
            "script": str(program),
            "log": str(log),
            "devices": devices,
            "namespace": namespace,
            "variables": {
                "TF_CONFIG": json.dumps(cluster),
                "MIRRAX_LOG": str(log),
                **variables,
            },
        }
        worker = Worker(number, _nursery().start(job), log)
        self._workers.append(worker)
        _nursery().workers[worker.pid] = worker
        return worker

    def __getitem__(self, index: int) -> Worker:
        return self._workers[index]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def wait_for(self, text: str, within: float = SECONDS_TO_HANG) -> None:
        """Waits until all have printed `text`."""
        for worker in self:
            worker.wait_for(text, within)

    def expect_end(self, *codes: int | tuple[int, ...], within: float) -> None:
        """Waits until all have ended, each with its code or one of its codes.

        One that is still there after `within` seconds prints where it is and fails the test,
        as does a process that the workers have started and left behind.
        """
        if not _wait(lambda: all(w.code is not None for w in self), within):
            hung = [w for w in self if w.code is None]
            for worker in hung:
                worker.send(signal.SIGCONT)
                worker.send(signal.SIGABRT)  # Python's fault handler shows its threads
            _wait(lambda: all(w.code is not None for w in hung), 3)
            numbers = [w.number for w in hung]
            raise AssertionError(f"run after {within} s: {numbers}\n{self.show()}")
        accepted = [c if isinstance(c, tuple) else (c,) for c in codes]
        found = [w.code for w in self]
        assert len(found) == len(accepted)
        assert all(f in a for f, a in zip(found, accepted)), (
            f"the exit codes are {found}, not {list(codes)}\n{self.show()}"
        )
        assert _wait(lambda: not _nursery().descendants(), SECONDS_TO_HANG), (
            f"left behind: {_nursery().descendants()}\n{self.show()}"
        )

    def all_processes(self) -> list[int]:
        """Those of the workers, and those that the workers have started."""
        return list(_nursery().descendants())

    def kill_servers(self) -> None:
        """Kills the process beside worker 0 that knows all workers."""
        for pid, command in _nursery().descendants().items():
            if "roster_server" in command:
                os.kill(pid, signal.SIGKILL)

    def show(self) -> str:
        """All that they have printed."""
        return "\n".join(f"---- {w}\n{w.output[-6000:]}" for w in self)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: Any) -> None:
        _nursery().end_all()
        self._folder.cleanup()


def start(
    script: str,
    workers: int,
    devices: int = 1,
    missing: Sequence[int] = (),
    setup: str = "",
    **variables: str,
) -> Workers:
    """Starts workers that all run `script`.

    It finds `me` (its worker's number), `say`, `join(**options)` and the usual imports.

    Args:
        script: What they run.
        workers: How many there are.
        devices: The logical CPU devices of each.
        missing: Workers of the cluster that are not started.
        setup: What they run before it.
        variables: More of their environment.
    """
    cluster = Workers([f"127.0.0.1:{port}" for port in free_ports(workers)])
    for number in range(workers):
        if number not in missing:
            cluster.add(number, script, devices, setup=setup, **variables)
    return cluster


def _wait(is_true: Callable[[], bool], seconds: float) -> bool:
    """Waits until something is so; false if it is not in time."""
    deadline = time.monotonic() + seconds
    while True:
        _nursery().listen(0.01)
        if is_true():
            return True
        if time.monotonic() > deadline:
            return False


class _Nursery:
    """The process that is forked, and its children."""

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        with received_signals():
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", "tests.cluster.workers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=_ROOT,
                start_new_session=True,
            )
        self._rest = b""
        self._started: list[int] = []
        atexit.register(self._close)

    def _close(self) -> None:
        """Its input ends, and with it all of its group."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SECONDS_TO_HANG)

    def start(self, job: dict[str, Any]) -> int:
        """The process id of a new worker."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + SECONDS_TO_HANG
        while not self._started:
            assert time.monotonic() < deadline, "the process to fork from hangs"
            self.listen(1)
        return self._started.pop()

    def listen(self, seconds: float) -> None:
        """Notes who has started and ended."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        if not select.select([pipe], [], [], seconds)[0]:
            return
        chunk = os.read(pipe, 65_536)
        assert chunk, "the process to fork from has ended"
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            pid, code, now = json.loads(line)
            if code is None:
                self._started.append(pid)
            elif pid in self.workers:
                worker = self.workers.pop(pid)
                worker.code, worker.ended_at = code, now

    def descendants(self) -> dict[int, str]:
        """What still runs, by process id."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it has just ended
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.parent.name))
        found = [self._process.pid]
        for pid in found:
            found += children.get(pid, [])
        return {pid: _command_of(pid) for pid in found[1:]}

    def end_all(self) -> None:
        """Kills what still runs."""
        deadline = time.monotonic() + SECONDS_TO_HANG
        while left := self.descendants():
            assert time.monotonic() < deadline, f"cannot be killed: {left}"
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self.listen(0.02)


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@functools.cache
def _nursery() -> _Nursery:
    return _Nursery()


# The process that is forked --------------------------------------------------------------


def _fork_on_demand() -> dict[str, Any]:
    """Forks for each job; returns in the child, with the job."""
    rest = b""
    while True:
        if select.select([0], [], [], 0.005)[0]:
            chunk = os.read(0, 65_536)
            if not chunk:
                os.killpg(0, signal.SIGKILL)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    return json.loads(line)
                _report(pid, None)
        _reap()


def _reap() -> None:
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            _report(found[0], os.waitstatus_to_exitcode(found[1]))
    except ChildProcessError:
        pass


def _report(pid: int, code: int | None) -> None:
    os.write(1, json.dumps([pid, code, time.monotonic()]).encode() + b"\n")


def _become(job: dict[str, Any]) -> Any:
    """Makes this process the worker of `job`; the code that it has to run."""
    import jax

    log = os.open(job["log"], os.O_WRONLY | os.O_APPEND)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ.update(job["variables"])
    if job["namespace"]:
        _move_to(job["namespace"])
    jax.config.update("jax_num_cpu_devices", job["devices"])
    return compile(Path(job["script"]).read_text(), job["script"], "exec")


def _move_to(namespace: str) -> None:
    """Gives this process the network of a namespace, and its name as the machine's."""
    libc = ctypes.CDLL(None, use_errno=True)
    network = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    for failed in (libc.setns(network, _CLONE_NEWNET), libc.unshare(_CLONE_NEWUTS)):
        if failed:
            raise OSError(ctypes.get_errno(), "no namespace of its own")
    socket.sethostname(namespace)


if __name__ == "__main__":
    compile_quickly()
    import_late_parts_of_jax()
    for _name in ("jax.numpy", "optax", "mirrax"):
        _module = importlib.import_module(_name)
    for _name in dir(_module):
        getattr(_module, _name)  # loads it
    gc.collect()
    gc.freeze()  # so that children do not copy it all when they end
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    _code = _become(_fork_on_demand())
    exec(_code, {"__name__": "__main__"})
