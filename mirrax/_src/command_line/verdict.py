"""Which worker failed first and why, when all of them have ended.

The first process to end is often not the one to blame: a worker that loses another may be
gone before the other has printed its traceback. So each worker's own report decides, and the
time only among those that failed by themselves.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirrax._src.cluster.local_cluster import (
    LOST_ANOTHER,
    PREEMPTED,
    WorkerEnd,
    read_tail,
)
from mirrax._src.command_line import exits

_SHOWN_LINES = 25
_SEARCHED_LINES = 150
_LONGEST_REASON = 160
_LOST_ERROR = "mirrax.errors.UnavailableError"
_MARKS = ("Traceback (most recent call last)", "Fatal Python error")


@dataclass(frozen=True)
class Case:
    """All that is known of a worker that has ended.

    Attributes:
        end: How its process ended.
        report: What it wrote down about an uncaught exception.
        was_killed: Whether the launcher did it.
        was_stopped: Whether it was stopped then, by SIGSTOP.
        last_lines: The end of its log.
    """

    end: WorkerEnd
    report: dict[str, Any] | None = None
    was_killed: bool = False
    was_stopped: bool = False
    last_lines: str = ""

    @property
    def worker(self) -> int:
        """Its number."""
        return self.end.worker

    @property
    def time(self) -> float:
        """When it failed: an interpreter may take long to end after that."""
        return self.report["time"] if self.report else self.end.time

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because another worker did."""
        if self.report is not None and self.report["is_consequence"]:
            return True
        if self.report is not None and self.worker in self.report["lost"]:
            return False  # it has been told that it is the one
        if self.end.returncode == LOST_ANOTHER:
            return True
        error = last_error(self.last_lines)
        return self.report is None and error.startswith(_LOST_ERROR)

    @property
    def failed_by_itself(self) -> bool:
        """Whether nobody else is to blame."""
        if self.is_consequence or self.end.returncode == 0:
            return False
        return self.report is not None or not self.was_killed

    @property
    def code(self) -> int:
        """Its exit code as a shell gives it; 1 for an exception that it could not end by."""
        is_late = self.was_killed and self.report is not None
        return 1 if is_late else exits.shell_code(self.end.returncode)

    def error(self) -> str:
        """The exception that ended it in one line; "" if it was none, or is not known."""
        if self.report is not None:
            first_line = self.report["message"].partition("\n")[0]
            return f"{self.report['type']}: {first_line}".removesuffix(": ")
        is_error = self.end.returncode in (1, LOST_ANOTHER)
        return last_error(self.last_lines) if is_error else ""

    def reason(self) -> str:
        """In a few words why it ended."""
        error = self.error()
        if not error:
            return self.end.describe()
        if len(error) > _LONGEST_REASON:
            error = f"{error[:_LONGEST_REASON].rstrip()}..."
        error = error.removesuffix(":")  # more lines follow in the traceback
        return f"{error} (exit code {self.code})" if self.code != 1 else error

    def traceback(self) -> str:
        """Its own traceback, else what its log ends with."""
        if self.report is not None:
            return self.report["traceback"].rstrip()
        return last_words(self.last_lines)


@dataclass(frozen=True)
class Verdict:
    """What became of an attempt.

    Attributes:
        cases: All workers, in order.
        first: The one that failed first; None if none has.
        blamed: The workers that failed by themselves, or that the others lost.
        code: The exit code that follows from it.
    """

    cases: tuple[Case, ...]
    first: Case | None
    blamed: tuple[int, ...]
    code: int

    @property
    def is_preemption(self) -> bool:
        """Whether workers have only saved, to be started again."""
        codes = {case.code for case in self.cases if case.worker in self.blamed}
        return codes == {PREEMPTED}

    def explain(self, started: float, oom_kills: int) -> str:
        """The verdict for a person to read."""
        first = self.first
        assert first is not None
        parts = [_head(first, f"{first.time - started:.1f} s after the start")]
        if first.end.returncode == -signal.SIGKILL and not first.was_killed:
            parts.append(exits.guess_about_kill(oom_kills, first.end.peak_bytes))
        if text := first.traceback():
            where = "" if first.report else "Its log ends with:\n"
            parts.append(where + _indented(text))
        parts += filter(None, [self._what_others_say(), self._others()])
        return "\n\n".join(parts)

    def _what_others_say(self) -> str:
        """A consequence's message, where the first failure has none of its own."""
        assert self.first is not None
        if self.first.failed_by_itself or self.first.is_consequence:
            return ""
        said = [c for c in self.cases if c.is_consequence and c.traceback()]
        if not said:
            return ""
        case = min(said, key=lambda c: c.time)
        return f"Worker {case.worker} said:\n{_indented(case.traceback())}"

    def _others(self) -> str:
        lines = [
            f"Worker {case.worker}: {text}"
            for case in self.cases
            if case is not self.first and (text := self._of_other(case))
        ]
        return "\n".join(lines)

    def _of_other(self, case: Case) -> str:
        if case.failed_by_itself:
            return case.reason()
        if case.is_consequence:
            how = case.error().partition(":")[0] or f"exit code {case.code}"
            return f"ended because another was lost ({how})"
        if case.was_stopped:
            return "was stopped (SIGSTOP), and killed"
        if case.was_killed:
            return "was still running, and was killed; its log says where it was"
        return "ended with exit code 0"


def read_case(
    end: WorkerEnd,
    log: Path,
    log_start: int,
    failure: Path,
    was_killed: bool,
    was_stopped: bool,
) -> Case:
    """Collects what a worker has left behind."""
    try:
        report = json.loads(failure.read_text())
    except (OSError, ValueError):
        report = None
    tail = read_tail(log, log_start)
    return Case(end, report, was_killed, was_stopped, tail)


def judge(cases: list[Case]) -> Verdict:
    """Finds out who failed first."""
    cases = sorted(cases, key=lambda case: case.worker)
    own = sorted((c for c in cases if c.failed_by_itself), key=lambda c: c.time)
    if own:
        blamed = tuple(sorted(case.worker for case in own))
        return Verdict(tuple(cases), own[0], blamed, own[0].code)
    others = sorted((c for c in cases if c.is_consequence), key=lambda c: c.time)
    stopped = [case for case in cases if case.was_stopped]
    if not others and stopped:  # the launcher has noticed it first
        numbers = tuple(case.worker for case in stopped)
        return Verdict(tuple(cases), stopped[0], numbers, stopped[0].code)
    if not others:
        return Verdict(tuple(cases), None, (), 0)
    lost = {n for c in others if c.report for n in c.report["lost"]}
    # Where nobody says who was lost: those that did not end by themselves, if any.
    lost = lost or {c.worker for c in cases if c.was_killed and not c.is_consequence}
    blamed = [case for case in cases if case.worker in lost] or others[:1]
    first = min(blamed, key=lambda case: case.time)
    numbers = tuple(case.worker for case in blamed)
    return Verdict(tuple(cases), first, numbers, others[0].code)


def _head(case: Case, when: str) -> str:
    """What the verdict begins with."""
    who = f"Worker {case.worker}"
    if case.end.returncode == PREEMPTED:
        return f"{who} was preempted {when}: {case.reason()}."
    if case.failed_by_itself:
        return f"{who} failed first, {when}: {case.reason()}."
    if case.is_consequence:
        return f"{who} ended because another was lost, {when}: {case.reason()}."
    if case.was_stopped:
        return f"{who} did not answer: its process was stopped (SIGSTOP). It was killed {when}."
    if case.was_killed:
        return f"{who} did not answer, and was killed {when}."
    return f"{who} ended its program {when}, while others still needed it."


def last_words(text: str) -> str:
    """The end of a log, from its last traceback on if that is near."""
    lines = text.rstrip().splitlines()
    start = max(len(lines) - _SHOWN_LINES, 0)
    near = range(max(len(lines) - _SEARCHED_LINES, 0), len(lines))
    marked = [i for i in near if any(mark in lines[i] for mark in _MARKS)]
    return "\n".join(lines[min(start, marked[-1]) if marked else start :])


def last_error(text: str) -> str:
    """The exception of the last traceback in a log; "" without one.

    Its line is the first after the indented ones; notes may follow.
    """
    lines = text.splitlines()[-_SEARCHED_LINES:]
    marked = [i for i, line in enumerate(lines) if _MARKS[0] in line]
    after = lines[marked[-1] + 1 :] if marked else []
    return next((line for line in after if line and line[0] not in " \t"), "")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())
