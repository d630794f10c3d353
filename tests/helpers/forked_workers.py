"""Workers of a `LocalCluster` without the seconds that importing JAX takes for each.

    with forked_workers():
        pool = WorkerPool(2)

One process imports everything, without starting JAX's devices. `LocalCluster` starts this file in
place of its keeper; it hands what it has inherited to that process, which is forked into a keeper,
and that one for each worker. Not for tests of how processes start and end. Python's hashes are the
same in all of them, which those of new processes are not.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

_PLACE = "MIRRAX_TESTS_FORKING"


def _hand_over() -> None:
    """What is started in place of a keeper: ends when the forked one does."""
    inherited = [0, 1, 2, *_inherited()]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[_PLACE])
        socket.send_fds(server, [b"+"], inherited)
        job = (inherited, dict(os.environ), os.getcwd())
        server.sendall(repr(job).encode())
        server.shutdown(socket.SHUT_WR)
        for descriptor in inherited[3:]:
            os.close(descriptor)  # the other end sees when the worker has ended
        server.recv(1)


def _inherited() -> list[int]:
    """The open descriptors after the first three."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # that of the listing itself
        found.append(int(name))
    return sorted(set(found) - {0, 1, 2})


if __name__ == "__main__" and len(sys.argv) == 1:
    _hand_over()  # without the imports below, which take longer
    sys.exit()

import atexit  # noqa: E402
import contextlib  # noqa: E402
import ctypes  # noqa: E402
import faulthandler  # noqa: E402
import fcntl  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import io  # noqa: E402
import runpy  # noqa: E402
import select  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

_ROOT = Path(__file__).parents[2]
_MOST_DESCRIPTORS = 64
_OUT_OF_THE_WAY = 500


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Workers of a `LocalCluster` that this process makes inside of the block are forked."""
    from mirrax._src.cluster import keeper

    with (
        mock.patch.dict(os.environ, {_PLACE: _server()}),
        mock.patch.object(keeper, "__file__", __file__),
    ):
        yield


def import_late_parts_of_jax() -> None:
    """What JAX imports when it compiles for several processes; starts no devices."""
    for name in ("jax.experimental.multihost_utils", "jaxlib.mlir.dialects.mhlo"):
        with contextlib.suppress(ImportError):  # the newest JAX has no such dialect
            importlib.import_module(name)


@functools.cache
def _server() -> str:
    """The address of the process that is forked; it ends with this one."""
    # A socket's path must be short, which those of tests are not.
    folder = tempfile.TemporaryDirectory(prefix="mirrax-forking-", dir="/tmp")
    address = f"{folder.name}/server"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(100)
        process = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            cwd=_ROOT,
            start_new_session=True,
        )
    assert process.stdin is not None and process.stdout is not None
    with process.stdout:  # a `LocalCluster` does not wait long for its keeper
        assert process.stdout.readline() == b"ready\n"

    def close() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        folder.cleanup()

    atexit.register(close)
    return address


# The process that is forked --------------------------------------------------------------


def _serve(listener: socket.socket) -> Callable[[], None]:
    """Forks for each cluster; returns in the child, with what it has to do."""
    while True:
        ready, _, _ = select.select([0, listener], [], [])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # a keeper that has ended
        if 0 in ready:
            sys.exit()
        client, _ = listener.accept()
        _, descriptors, _, _ = socket.recv_fds(client, 1, _MOST_DESCRIPTORS)
        text = b"".join(iter(lambda c=client: c.recv(65_536), b""))
        if os.fork() == 0:
            listener.close()
            return functools.partial(_keep, client, descriptors, *eval(text))
        for descriptor in descriptors:
            os.close(descriptor)
        client.close()


def _keep(
    client: socket.socket,
    descriptors: Sequence[int],
    numbers: Sequence[int],
    environment: dict[str, str],
    folder: str,
) -> None:
    """Is the keeper of a cluster, which forks where the real one starts programs."""
    from mirrax._src.cluster import keeper

    os.setsid()
    connection = _move(client.detach())
    for source, number in zip([_move(d) for d in descriptors], numbers):
        os.dup2(source, number)
        os.close(source)
    _take(environment)
    os.chdir(folder)
    starting = SimpleNamespace(Popen=_Forked, DEVNULL=subprocess.DEVNULL)
    with mock.patch.object(keeper, "subprocess", starting):
        keeper._keep()
    os.close(connection)  # now the other one ends


def _move(descriptor: int) -> int:
    """The same under a number that nobody has inherited."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
    os.close(descriptor)
    return moved


class _Forked:
    """As much of `subprocess.Popen` as a keeper uses, for Python programs."""

    def __init__(
        self,
        command: Sequence[str],
        env: dict[str, str],
        stdout: int,
        pass_fds: Sequence[int],
        preexec_fn: Callable[[], None],
        **_: Any,
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            preexec_fn()
            _become(env, stdout, pass_fds)
            _end(_code_of(lambda: _run(*command[1:])))


def _become(env: dict[str, str], output: int, kept: Sequence[int]) -> None:
    """Gives this process what a new one would have."""
    import jax

    from mirrax._src.cluster import reporting

    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for descriptor in set(_inherited()) - set(kept):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(open(2, "wb", 0, closefd=False), write_through=True)
    faulthandler.enable(2)
    _take(env)
    if "JAX_NUM_CPU_DEVICES" in env:
        jax.config.update("jax_num_cpu_devices", int(env["JAX_NUM_CPU_DEVICES"]))
    reporting.install()


def _take(environment: dict[str, str]) -> None:
    """Makes an environment that of this process."""
    os.environ.clear()
    os.environ.update(environment)


def _run(what: str, *arguments: str) -> None:
    """Does what Python does with these arguments, which are a script's or begin with `-m`."""
    if what == "-m":
        sys.argv[:], sys.path[0] = arguments, os.getcwd()
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:], sys.path[0] = [what, *arguments], str(Path(what).parent)
        runpy.run_path(what, run_name="__main__")


def _code_of(program: Callable[[], None]) -> int:
    """The exit code of a program, as Python makes it."""
    try:
        try:
            program()
        except SystemExit:
            raise
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            return 1
    except SystemExit as end:  # of the hook, maybe
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def _end(code: int) -> None:
    """Ends as Python does, but for the frames of the keeper, of which this is a copy."""
    ctypes.pythonapi.Py_Exit(code)


if __name__ == "__main__":
    sys.path[0] = str(_ROOT / "tests")
    importlib.import_module("helpers.programs").compile_quickly()
    import_late_parts_of_jax()
    for _name in ("jax.numpy", "optax", "cloudpickle", "mirrax.testing", "mirrax"):
        _module = importlib.import_module(_name)
    for _name in dir(_module):
        getattr(_module, _name)  # loads it
    gc.collect()
    gc.freeze()  # so that children do not copy it all
    print("ready", flush=True)
    _do = _serve(socket.socket(fileno=int(sys.argv[1])))
    _do()
