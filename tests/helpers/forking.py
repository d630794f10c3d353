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

    @property
    def output(self) -> str:
        """What it has printed so far, errors included."""
        return self._log.read_text() if self._log.exists() else ""

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

    def wait(self, timeout: float = SECONDS_TO_HANG) -> int:
        """Its exit code; one that hangs is an error."""
        code = self._zygote._read(timeout)
        if code is None:
            self.send(signal.SIGKILL)
            self._zygote._read(timeout)
            raise AssertionError(f"it hangs; so far:\n{self.output[-3000:]}")
        self._zygote._running = None
        return int(code)


class Zygote:
    """Forks a process, one at a time, that has imported everything already.

    Args:
        setup: Python that defines what the processes do; it must not start JAX's devices.
    """

    def __init__(self, setup: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0
        self._running: Child | None = None
        # Forking is safe here: JAX has started none of its threads.
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _SERVER.replace("{setup}", textwrap.dedent(setup)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        ready = self._read(SECONDS_TO_HANG)
        assert ready == "ready", f"the first process said {ready!r}"

    def _read(self, timeout: float) -> str | None:
        """The next line, or None if there is none in time."""
        import select

        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return None
        return self._process.stdout.readline().strip()

    def start(self, code: str) -> Child:
        """Starts a process that executes `code`; one that a failed test has left is killed."""
        if self._running is not None:
            self._running.kill()
        self._count += 1
        log = Path(self._folder.name) / f"{self._count}.log"
        assert self._process.stdin is not None
        self._process.stdin.write(repr((self._count, str(log), code)) + "\n")
        self._process.stdin.flush()
        pid = self._read(SECONDS_TO_HANG)
        assert pid, "no process was started"
        self._running = Child(self, int(pid), log)
        return self._running

    def run_program(
        self, path: Path, *arguments: object, warn: str = ""
    ) -> tuple[str, str]:
        """What a program has printed when it has ended well, and its errors apart.

        Args:
            path: Its file; it runs there, as `python file.py` would.
            arguments: Those of its command line.
            warn: A kind of warning that it may give; all others are errors.
        """
        errors = Path(self._folder.name) / "errors.log"
        child = self.start(f"""
import os, runpy, sys, warnings
os.dup2(os.open({str(errors)!r}, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
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
        code = child.wait()
        assert code == 0, child.output + errors.read_text()
        return child.output, errors.read_text()

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
