"""Joining a cluster: the roster first, then JAX's own distributed runtime."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from mirrax._src.base import hooks, jax_compat, logical
from mirrax._src.base.errors import UnavailableError, line_of_error
from mirrax._src.cluster.options import ClusterOptions
from mirrax._src.cluster.reporting import (
    LOST_EXIT_CODE,
    end_with_codes,
    is_of_lost_worker,
    message_of,
)
from mirrax._src.cluster.roster import Roster, say
from mirrax._src.cluster.secret import read_secret

_SERVER = Path(__file__).with_name("roster_server")
_SOON_SECONDS = 0.5
_EXPLAINING_SECONDS = 5.0
_LONGEST_REASON = 2000
_WRITTEN = "written a checkpoint"
_PART = "written its part of a checkpoint"
_CONNECT_SECONDS = 120


class Cluster:
    """The workers that train together, as this one sees them.

    Attributes:
        worker: This worker's number.
        size: How many there are.
        local_size: How many of them are on this machine.
    """

    def __init__(self, roster: Roster, options: ClusterOptions) -> None:
        self._roster = roster
        self._counts: dict[str, int] = {}
        self._has_told = False
        self.options = options
        self.names = roster.names
        self.worker, self.size = roster.worker, len(roster.names)
        self.addresses = roster.facts[0]["addresses"]
        self.hosts = [facts["host"] for facts in roster.facts]
        self.local_size = self.hosts.count(self.hosts[self.worker])

    def agree(self, what: str, value: Any) -> list[Any]:
        """All workers' values (as JSON has them), in the order of workers.

        Every worker has to call it equally often for each `what`.
        """
        return self.agree_numbered(what, value)[0]

    def agree_numbered(self, what: str, value: Any) -> tuple[list[Any], int]:
        """All workers' values, and how many agreements on `what` there have been."""
        self._counts[what] = number = self._counts.get(what, 0) + 1
        return self._roster.agree(f"{what} {number}", value), number

    def agree_ahead(
        self, name: str, value: Any, wanted: Callable[[], bool | None]
    ) -> list[Any]:
        """As `agree`, on a thread that works ahead, until nobody wants it any more.

        `wanted` says whether somebody waits for it, or None if it is of no use any more.

        `name` is used once. Workers that have ended are no failure here: they may never
        have got to it.
        """
        return self._roster.agree(name, value, wanted)

    def check(self) -> None:
        """Raises UnavailableError if a worker is lost."""
        self._roster.check()

    def note_steps(self, count: int) -> None:
        """Counts steps, for those who look at the job and for messages that name the last one."""
        self._roster.steps += count

    def note_run(self) -> None:
        """Counts a step that is a call of `run`, of which all workers have to make as many.

        Raises:
            UnavailableError: If a worker is lost.
        """
        if self._roster.failure is not None:
            self._roster.check()
        self._roster.steps += 1
        self._roster.runs += 1

    def explaining(self) -> contextlib.AbstractContextManager[None]:
        """Says in place of JAX's error which worker is lost, where that is the cause."""
        return _Explaining(self)

    def explain(self, error: Exception) -> None:
        """Raises UnavailableError if `error` comes of a lost worker."""
        failure = self.explanation_of(error)
        if failure is not None:
            self._roster.note_raised()
            raise UnavailableError(str(failure), failure.workers) from error

    def explanation_of(self, error: BaseException) -> UnavailableError | None:
        """Which worker is lost, if `error` comes of that."""
        if isinstance(error, UnavailableError) or not _is_of_transport(error):
            return None
        if not self._roster.wait_for_failure(_SOON_SECONDS):
            self._roster.accuse_ended()
            self._roster.wait_for_failure(_EXPLAINING_SECONDS)
        return self._roster.failure

    def limit_waiting(self, seconds: float) -> None:
        """Lowers how long another worker may be behind this one."""
        self._roster.step_timeout = min(self._roster.step_timeout, seconds)

    def compare(self, program: str) -> None:
        """In debug mode: raises unless all workers are about to run the same new program."""
        if not self.options.debug:
            return
        found = self.agree("a new program", program)
        for k, theirs in enumerate(found):
            if theirs != found[0]:
                raise RuntimeError(
                    f"The workers are about to run different programs.\n  {self.names[0]}: "
                    f"{found[0]}\n  {self.names[k]}: {theirs}\nAll workers have to take the "
                    "same steps with the same shapes and dtypes."
                )

    def announce_written(self, count: int, path: str | None) -> None:
        """Tells the others how many checkpoints this worker has written, and the last one.

        `path` is None if it could not be written.
        """
        self._roster.announce(_WRITTEN, count)
        if path is not None:
            self._roster.tell_saved(path)

    def wait_until_written(self, count: int) -> None:
        """Waits until the first worker has written so many checkpoints."""
        self._roster.wait_for_note(_WRITTEN, count)

    def announce_part(self, number: int) -> None:
        """Tells the first worker that this one is done with its part of a checkpoint."""
        self._roster.announce(f"{_PART} {self.worker}", number)

    def wait_for_part(self, worker: int, number: int) -> None:
        """Waits until a worker is done with its part of a checkpoint."""
        self._roster.wait_for_note(_PART, number, worker)

    def request_stop(self, reason: str) -> None:
        """Asks all workers to stop at the same step."""
        self._roster.request_stop(reason)

    def should_stop(self) -> bool:
        """Whether all workers stop at this step; each calls it once a step."""
        return self._roster.should_stop()

    def tell_failed(self, error: BaseException) -> None:
        """Tells the others why this worker is about to end."""
        reason = f"{type(error).__name__}: {message_of(error)}"
        code = LOST_EXIT_CODE if is_of_lost_worker(error) else 1
        line = line_of_error(error)
        self._roster.tell_failed(reason[:_LONGEST_REASON], code, line)
        self._has_told = True

    def leave(self) -> None:
        """Says that this worker's program is done, once its last step is."""
        # Whoever has replaced `sys.excepthook`: this is why the program ends.
        error = getattr(sys, "last_value", None)
        if error is not None and not hasattr(sys, "ps1") and not self._has_told:
            self.tell_failed(error)
            if is_of_lost_worker(error):
                logging.shutdown()
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.flush()
                os._exit(LOST_EXIT_CODE)  # Python would end with 1
        self._roster.leave()

    def forget(self) -> None:
        """In a process that was forked: it is no worker."""
        self._roster.forget()


class _Explaining:
    """`Cluster.explaining`: entered at each step, where a generator would take twice as long."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            self._cluster.explain(error)


def _is_of_transport(error: BaseException) -> bool:
    """Whether a lost connection may be the cause; JAX has no type of its own for that."""
    is_jax = isinstance(error, jax.errors.JaxRuntimeError)
    return is_jax or any(
        name in str(error) for name in ("Gloo", "NCCL", "gloo", "nccl")
    )


_current: Cluster | None = None


def current_cluster() -> Cluster | None:
    """The cluster that this process has joined."""
    return _current


def join_cluster(
    addresses: Sequence[str], names: Sequence[str], worker: int, options: ClusterOptions
) -> Cluster:
    """Joins the workers at `addresses` as number `worker`; a second time gives the same.

    Raises:
        RuntimeError: If JAX has been started already, or the process is in another cluster.
        UnavailableError: If workers are missing.
    """
    global _current
    end_with_codes()
    facts = {"addresses": list(addresses), "name": names[worker], **_own_facts()}
    if _current is not None:
        if [list(addresses), worker] != _joined_as:
            raise RuntimeError(
                f"This process has joined the cluster {', '.join(_joined_as[0])} as worker "
                f"{_joined_as[1]}, and cannot be in another one as well. Start a process for "
                "each."
            )
        return _current
    if jax_compat.backend_started() and not jax.distributed.is_initialized():
        raise RuntimeError(
            "MultiWorkerMirroredStrategy has to be made before anything uses JAX's devices, "
            f"but JAX has started already, with {jax.local_device_count()} device(s). Make the "
            "strategy at the top of the program, before arrays are made or devices are listed."
        )
    _check_mpi()
    host, port = _host_and_port(addresses[0])
    if worker == 0 and not _servers:
        _start_server(list(addresses), host, port, options.heartbeat)
    roster = Roster(
        (host, port),
        worker,
        names,
        facts,
        options.heartbeat,
        options.step_timeout,
        read_secret(),
    )
    roster.join(options.join_timeout)
    _check_facts(roster)
    hosts = [each["host"] for each in roster.facts]
    logical.Pool.workers_here = hosts.count(facts["host"])
    if not jax.distributed.is_initialized():
        _connect_jax(roster, host)
    _current = Cluster(roster, options)
    _joined_as[:] = [list(addresses), worker]
    _install_hooks(_current)
    return _current


_joined_as: list[Any] = []


def join_running_jax(options: ClusterOptions) -> Cluster:
    """Joins the processes that `jax.distributed.initialize` has brought together."""
    client, address, worker, count = jax_compat.running_processes()
    names = [f"worker {k}" for k in range(count)]
    if _current is None and worker == 0:
        host = address.rpartition(":")[0]
        addresses = [f"{host}:0", *names[1:]]
        port = _start_server(addresses, host.strip("[]"), 0, options.heartbeat)
        client.key_value_set(_ROSTER_KEY, f"{host}:{port}")
    seconds = int(options.join_timeout)
    found = client.blocking_key_value_get(_ROSTER_KEY, seconds * 1000)
    return join_cluster([found, *names[1:]], names, worker, options)


_ROSTER_KEY = "mirrax/roster"


def _own_facts() -> dict[str, Any]:
    import mirrax

    return {
        "host": socket.gethostname(),
        "process": f"process {os.getpid()} on {socket.gethostname()}",
        "log": os.environ.get("MIRRAX_LOG", ""),
        "versions": {
            "mirrax": mirrax.__version__,
            "jax": jax.__version__,
            "python": ".".join(platform.python_version_tuple()[:2]),
        },
        "settings": {name: getattr(jax.config, name) for name in _SETTINGS},
    }


# What changes the programs that workers run together.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
)


def _check_facts(roster: Roster) -> None:
    """Raises where workers have been set up differently, with both sides."""
    for k, facts in enumerate(roster.facts):
        for kind in ("versions", "settings"):
            for name, value in facts[kind].items():
                first = roster.facts[0][kind][name]
                if value != first:
                    raise RuntimeError(
                        f"The workers differ: {name} is {first} on {roster.names[0]} and {value} "
                        f"on {roster.names[k]}. Set up all workers the same way."
                    )


def _check_mpi() -> None:
    """Raises where JAX would end the process."""
    wanted = jax.config.jax_cpu_collectives_implementation  # pyright: ignore[reportAttributeAccessIssue]
    if wanted == "mpi" and not os.environ.get("MPITRAMPOLINE_LIB"):
        raise RuntimeError(
            "`jax_cpu_collectives_implementation` is mpi, for which JAX needs the environment "
            "variable MPITRAMPOLINE_LIB: the path of an MPI library that is wrapped for "
            "MPItrampoline. Set it, or leave the setting at gloo."
        )


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _start_server(addresses: list[str], host: str, port: int, heartbeat: float) -> int:
    secret = read_secret()
    config = {
        "addresses": addresses,
        "host": host,
        "port": port,
        "heartbeat": heartbeat,
        "secret": secret,
    }
    server = subprocess.Popen(
        [sys.executable, "-P", str(_SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(config) + "\n")
    server.stdin.flush()
    answer = json.loads(server.stdout.readline() or '{"error": "it has ended at once"}')
    if "error" in answer:
        raise RuntimeError(
            f"Worker 0 cannot listen at its address {addresses[0]}: {answer['error']}. Does "
            "another program, or an earlier run, still use the port?"
        )
    _servers.append(server)  # its input stays open as long as this process lives
    if not secret:
        _say_who_can_join(host, answer["hosts"], answer["ready"])
    return answer["ready"]


def _say_who_can_join(name: str, hosts: list[str], port: int) -> None:
    """A line about the network that an unprotected roster listens on, if it does on one."""
    if hosts == [name] and (name in ("localhost", "::1") or name.startswith("127.")):
        return
    where = " and ".join(_address(host, port) for host in hosts)
    if not hosts:
        where = f"any address of this machine, port {port} ({name} is none of them)"
    say(
        f"worker 0 listens at {where}, and the job has no secret: anyone who can connect can "
        "disturb it. Set MIRRAX_SECRET on all workers."
    )


_servers: list[Any] = []


def _connect_jax(roster: Roster, host: str) -> None:
    """Joins JAX's runtime, on a thread: it cannot be interrupted."""
    outcome: list[Any] = []
    done = threading.Event()

    def connect() -> None:
        try:
            jax_compat.connect_workers(
                _address(host, roster.port),
                roster.worker,
                len(roster.names),
                roster.host,
                _CONNECT_SECONDS,
            )
        except Exception as error:
            outcome.append(error)
        done.set()

    threading.Thread(target=connect, name="mirrax-connect", daemon=True).start()
    while not done.wait(0.2):
        roster.check()
    if outcome:
        roster.wait_for_failure(_EXPLAINING_SECONDS)
        roster.check()
        raise outcome[0]


def _install_hooks(cluster: Cluster) -> None:
    """Has the others told how this process ends, and its user which worker was lost."""

    def tell(error: BaseException, show: Callable[[], None]) -> None:
        explanation = cluster.explanation_of(error)
        if explanation is not None and error.__cause__ is None:
            error.__cause__ = explanation
        try:
            show()
        finally:
            if explanation is not None:
                print(f"mirrax: {explanation}", file=sys.stderr, flush=True)
            cluster.tell_failed(error)

    hooks.on_uncaught(tell)
    hooks.on_exit(cluster.leave)
    hooks.after_fork_in_child(_forget)


def _forget() -> None:
    """In a child process: neither its end nor its failure is that of the worker."""
    global _current
    if _current is not None:
        _current.forget()
    _current = None
    for server in _servers:
        server.stdin.close()
    _servers.clear()
