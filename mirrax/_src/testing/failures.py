"""`WorkerError`: one exception for all workers, which shows the one that failed first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SHOWN_LINES = 40


class WorkerError(Exception):
    """A function failed on a worker, or did not end in time.

    The exception that the worker raised is its `__cause__`, if it could be sent here.

    Attributes:
        worker: The worker that failed first.
        traceback: That worker's traceback; of one that hangs, where its threads are.
    """

    __module__ = "mirrax.testing"

    def __init__(self, message: str, worker: int = 0, traceback: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.traceback = traceback

    def __reduce__(self) -> tuple:
        return WorkerError, (str(self), self.worker, self.traceback)


@dataclass(frozen=True)
class Failure:
    """What one worker did instead of returning.

    Attributes:
        summary: One line: the exception, or how the process ended.
        traceback: Where it was.
        time: When, in seconds since the epoch.
        is_consequence: Whether it failed because another worker did.
        exception: The exception, if it could be sent.
    """

    summary: str
    traceback: str
    time: float
    is_consequence: bool
    exception: BaseException | None = None


def error_of(
    failures: Mapping[int, Failure], outputs: Mapping[int, str]
) -> WorkerError:
    """The error for what some workers did, with what they printed."""
    worker = min(failures, key=lambda n: (failures[n].is_consequence, failures[n].time))
    first = failures[worker]
    parts = [f"Worker {worker} of {len(outputs)} failed: {first.summary}"]
    if first.traceback:
        parts.append(f"Its traceback:\n{_indented(first.traceback)}")
    parts += [
        f"Worker {other} failed {'because of it' if failure.is_consequence else 'as well'}: "
        f"{failure.summary}"
        for other, failure in sorted(failures.items())
        if other != worker
    ]
    parts += _shown(outputs)
    error = WorkerError("\n\n".join(parts), worker, first.traceback)
    error.__cause__ = first.exception
    return error


def timeout_error(
    seconds: float, places: Mapping[int, str], outputs: Mapping[int, str]
) -> WorkerError:
    """The error for workers that hang; `places` says where each of them is."""
    hung, count = sorted(places), len(outputs)
    done = [str(n) for n in sorted(outputs) if n not in places]
    parts = [
        f"Worker {', '.join(map(str, hung))} of {count} did not return within {seconds:g} s"
        + (f"; worker {', '.join(done)} did." if done else ".")
    ]
    parts += [f"Worker {n} is here:\n{_indented(places[n])}" for n in hung]
    parts += _shown(outputs)
    return WorkerError("\n\n".join(parts), hung[0], places[hung[0]])


def _shown(outputs: Mapping[int, str]) -> list[str]:
    """What workers printed, the last lines of each."""
    return [
        f"Worker {n} printed:\n{_indented(text)}"
        for n, text in sorted(outputs.items())
        if text.strip()
    ]


def _indented(text: str) -> str:
    lines = text.rstrip().splitlines()
    cut = ["..."] * (len(lines) > _SHOWN_LINES)
    return "\n".join(f"  {line}".rstrip() for line in cut + lines[-_SHOWN_LINES:])
