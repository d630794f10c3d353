"""The jobs that `mirrax run` runs on this machine, for those who look for them.

Each leaves a file while it runs, which only its user can read: its address, and its secret if
`mirrax run` has made one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """A job of this machine.

    Attributes:
        address: Where its roster listens.
        secret: Its secret; "" if the job has inherited one, or has none.
        command: What its workers run.
        logs: Where their logs are.
        pid: The launcher's process.
    """

    address: str
    secret: str
    command: str
    logs: str
    pid: int


def state_directory() -> Path:
    """Where mirrax keeps what a user may look for later."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "mirrax")


@contextlib.contextmanager
def announced(job: Job) -> Iterator[None]:
    """Lets `mirrax top` find the job while it runs; if that fails, the job runs all the same."""
    path = None
    with contextlib.suppress(OSError, RuntimeError):  # no home, a full disk
        path = _directory() / f"{socket.gethostname()}-{job.pid}.json"
        _write(path, json.dumps(asdict(job)))
    try:
        yield
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def running_jobs() -> list[Job]:
    """This user's jobs on this machine; what killed ones have left is removed."""
    found = []
    with contextlib.suppress(OSError, RuntimeError):
        for path in sorted(_directory().glob(f"{socket.gethostname()}-*.json")):
            if not is_running(path.stem.rpartition("-")[2]):
                path.unlink(missing_ok=True)
                continue
            with contextlib.suppress(OSError, ValueError, TypeError):
                found.append(Job(**json.loads(path.read_text())))
    return found


def is_running(pid: str) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True


def _directory() -> Path:
    return state_directory() / "jobs"


def _write(path: Path, text: str) -> None:
    """Writes a file that nobody else can read, not even for a moment, and never half of it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)
    partial.replace(path)
