"""Many short-lived processes, without the seconds that importing JAX takes for each.

    with Zygote(setup) as zygote:
        child = zygote.start("train()")
        child.kill()
        child = zygote.start("train()")
        assert child.wait() == 0

One process imports everything, without starting JAX's devices, and then forks for each start.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import mirrax as mx

from .waiting import SECONDS_TO_HANG

_ROOT = Path(mx.__file__).parent.parent

_SERVER = """
import os, sys, traceback
import jax, jax.numpy as jnp, numpy as np, optax, orbax.checkpoint
import mirrax as mx
for name in dir(mx):
    getattr(mx, name)  # loads it
{setup}
print("ready", flush=True)
for line in sys.stdin:
    number, log, code = eval(line)
    pid = os.fork()
    if pid == 0:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        exec(code)
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Child:
    """A process that a `Zygote` has started."""

    def __init__(self, zygote: Any, pid: int, log: Path) -> None:
        self._zygote, self.pid, self._log = zygote, pid, log
        self._code: int | None = None

    @property
    def output(self) -> str:
        """What it has printed so far, errors included."""
        return self._log.read_text() if self._log.exists() else ""

    @property
    def errors(self) -> str:
        """What a program has printed to its standard error, which it has to itself."""
        path = self._zygote._errors
        return path.read_text() if path.exists() else ""

    def send(self, number: int) -> None:
        """Sends it a signal, if it is still there."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def kill(self) -> int:
        """Kills it at once."""
        self.send(signal.SIGKILL)
        return self.wait()

    def wait_for(self, text: str, timeout: float = SECONDS_TO_HANG) -> None:
        """Waits until it has printed `text`."""
        deadline = time.monotonic() + timeout
        while text not in self.output:
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise AssertionError(f"never printed {text!r}:\n{self.output[-3000:]}")
            time.sleep(0.005)

    def poll(self, timeout: float = 0) -> int | None:
        """Its exit code, or None if it runs after `timeout` seconds."""
        if self._code is None and (line := self._zygote._read(timeout)) is not None:
            self._zygote._running, self._code = None, int(line)
        return self._code

    def wait(self, timeout: float = SECONDS_TO_HANG) -> int:
        """Its exit code; one that hangs is an error."""
        code = self.poll(timeout)
        if code is None:
            self.kill()
            raise AssertionError(f"it hangs; so far:\n{self.output[-3000:]}")
        return code


class Zygote:
    """Forks a process, one at a time, that has imported everything already.

    Args:
        setup: Python that defines what the processes do; it must not start JAX's devices.
    """

    def __init__(self, setup: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name, "errors.log")
        self._count = 0
        self._running: Child | None = None
        self._rest = b""  # what was read after the last line
        # Forking is safe here: JAX has started none of its threads.
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _SERVER.replace("{setup}", textwrap.dedent(setup)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
        )
        ready = self._read(SECONDS_TO_HANG)
        assert ready == "ready", f"the first process said {ready!r}"

    def _read(self, timeout: float) -> str | None:
        """The next line, or None if there is none in time."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([pipe], [], [], timeout)[0]:
                return None
            chunk = os.read(pipe, 4096)
            assert chunk, "the process to fork from has ended"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def start(self, code: str) -> Child:
        """Starts a process that executes `code`; one that a failed test has left is killed."""
        if self._running is not None:
            self._running.kill()
        self._count += 1
        log = Path(self._folder.name) / f"{self._count}.log"
        assert self._process.stdin is not None
        job = repr((self._count, str(log), code))
        self._process.stdin.write(job.encode() + b"\n")
        self._process.stdin.flush()
        pid = self._read(SECONDS_TO_HANG)
        assert pid, "no process was started"
        self._running = Child(self, int(pid), log)
        return self._running

    def start_program(self, path: Path, *arguments: object, warn: str = "") -> Child:
        """Starts a program, as `python file.py` would in its directory.

        Args:
            path: Its file.
            arguments: Those of its command line.
            warn: A kind of warning that it may give; all others are errors.
        """
        return self.start(f"""
import os, runpy, sys, warnings
os.dup2(os.open({str(self._errors)!r}, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
os.chdir({str(path.parent)!r})
sys.path[0] = {str(path.parent)!r}
sys.argv[:] = {[str(path), *map(str, arguments)]}
warnings.resetwarnings()
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
if {warn!r}:
    warnings.simplefilter("always", {warn or None})
runpy.run_path(sys.argv[0], run_name="__main__")
""")

    def run_program(
        self, path: Path, *arguments: object, warn: str = ""
    ) -> tuple[str, str]:
        """What a program has printed when it has ended well, and its errors apart."""
        child = self.start_program(path, *arguments, warn=warn)
        code = child.wait()
        assert code == 0, child.output + child.errors
        return child.output, child.errors

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *exc: Any) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._running is not None:
            self._running.kill()
        self._process.stdin.close()
        try:
            self._process.wait(SECONDS_TO_HANG)
        finally:
            self._process.kill()
            self._process.stdout.close()
            self._folder.cleanup()
