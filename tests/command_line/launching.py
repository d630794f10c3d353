"""Starts `mirrax run`, in this process or in one of its own, on a few lines of Python."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.signals import received_signals
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx
from mirrax._src.command_line.run import RunOptions, launch

ROOT = Path(mx.__file__).parent.parent
MARK = "MIRRAX_TEST_MARK"

# What every script of these tests begins with.
PRELUDE = """\
import json, os, signal, subprocess, sys, time
config = json.loads(os.environ["TF_CONFIG"])
me, size = config["task"]["index"], len(config["cluster"]["worker"])
attempt = int(os.environ["MIRRAX_ATTEMPT"])

def report(kind, message, lost=None, at=None):
    content = {
        "worker": me, "type": kind, "message": message,
        "traceback": f"Traceback of {kind}: {message}\\n", "time": at or time.time(),
        "is_consequence": lost is not None, "lost": lost or [],
    }
    with open(os.environ["MIRRAX_FAILURE"], "w") as file:
        json.dump(content, file)

def wait_for(path, seconds=300):
    end = time.monotonic() + seconds
    while not os.path.exists(path):
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.01)

def place_of(worker):
    return f"{__file__}.{attempt}.{worker}"

def meet():
    # Returns when all workers are here: one may start long after another.
    with open(place_of(me) + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(place_of(me) + ".new", place_of(me))
    for worker in range(size):
        wait_for(place_of(worker))

def wait_for_the_end_of(worker):
    # Or until it is stopped; all must have met.
    with open(place_of(worker)) as file:
        stat = f"/proc/{file.read()}/stat"
    try:
        while open(stat).read().rpartition(")")[2].split()[0] not in "TZ":
            time.sleep(0.01)
    except OSError:
        pass  # it is gone

"""

# `import mirrax` brings JAX along, which the launcher does not use: a second for each test.
_WITHOUT_JAX = """
import sys, types
package = types.ModuleType("mirrax")
package.__path__, package.__version__ = [sys.argv.pop(1)], "test"
sys.modules["mirrax"], sys.modules["jax"] = package, None  # to import it is an error
from mirrax._src.command_line.main import main
main()
"""


def command_without_jax(*arguments: str) -> list[str]:
    """The command `mirrax`, for which it is an error to import JAX."""
    return [sys.executable, "-c", _WITHOUT_JAX, str(ROOT / "mirrax"), *arguments]


def write_script(folder: Path, body: str) -> Path:
    """A script whose first lines are `PRELUDE`."""
    path = folder / "train.py"
    path.write_text(PRELUDE + textwrap.dedent(body))
    return path


@dataclasses.dataclass(frozen=True)
class Result:
    """What a launch in this process has come to."""

    code: int
    out: str
    err: str

    def lines_of(self, worker: int) -> list[str]:
        """What a worker printed."""
        prefix = f"worker {worker} | "
        lines = self.out.splitlines()
        return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


class Launcher:
    """Launches in this process; the fixture `launcher` makes one."""

    def __init__(self, folder: Path, capfd: Any) -> None:
        self.folder, self._capfd = folder, capfd

    def __call__(
        self, body: str, workers: int | tuple[int, int] = 2, **options: Any
    ) -> Result:
        script = write_script(self.folder, body)
        low, high = (workers, workers) if isinstance(workers, int) else workers
        arguments = options.pop("arguments", ())
        values = {"grace_after_failure": 0.3, "grace_after_signal": 5.0, **options}
        command = (sys.executable, str(script), *arguments)
        code = launch(RunOptions(command, low, high, **values))
        out, err = self._capfd.readouterr()
        return Result(code, out, err)


class Process:
    """`mirrax run` in a process of its own, which signals can be sent to."""

    def __init__(
        self,
        folder: Path,
        body: str,
        *options: str,
        before: tuple[str, ...] = (),
        **settings: Any,
    ) -> None:
        script = write_script(folder, body)
        self.mark = uuid.uuid4().hex
        self._out, self._err = folder / "launcher.out", folder / "launcher.err"
        with (
            self._out.open("wb") as out,
            self._err.open("wb") as err,
            received_signals(),
        ):
            self.process = subprocess.Popen(
                [*before, *command_without_jax("run", *options, str(script))],
                env=os.environ
                | {
                    MARK: self.mark,
                    "TMPDIR": str(folder),
                    "XDG_STATE_HOME": str(folder),
                },
                stdin=subprocess.DEVNULL,
                **{"stdout": out, "stderr": err, "start_new_session": True} | settings,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        """Waits until the workers have printed `text` so many times."""
        wait_until(
            lambda: self.out.count(text) >= times or self.process.poll() is not None,
            lambda: f"{text!r} was not printed:\n{self.out}\n{self.err}",
        )
        assert self.out.count(text) >= times, f"{self.out}\n{self.err}"

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = SECONDS_TO_HANG) -> int:
        """The launcher's exit code; afterwards nothing may be left."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"it hangs:\n{self.out}\n{self.err}") from None
        self.check_nothing_is_left()
        return code

    def check_nothing_is_left(self, seconds: float = SECONDS_TO_HANG) -> None:
        """No process that descends from the launcher is there, after a moment."""
        wait_until(
            lambda: not processes_with(self.mark),
            lambda: f"these are left: {processes_with(self.mark)}",
            seconds,
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: Any) -> None:
        self.process.kill()
        self.process.wait()
        for pid in processes_with(self.mark):
            os.kill(pid, signal.SIGKILL)


def processes_with(mark: str) -> dict[int, str]:
    """The processes, from id to command, that have inherited a mark."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = command.decode(errors="replace")
        except OSError:
            continue
    return found


def wait_until(
    is_so: Callable[[], bool],
    complaint: Callable[[], str],
    seconds: float = SECONDS_TO_HANG,
) -> None:
    """Waits until something is so; else fails with the complaint."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, complaint()
        time.sleep(0.01)
