"""One attempt: watches the workers from their start to the end of the last one."""

from __future__ import annotations

import signal
import time

from mirrax._src.cluster.local_cluster import PREEMPTED, LocalCluster, WorkerEnd
from mirrax._src.cluster.options import ClusterOptions
from mirrax._src.command_line.screen import Screen
from mirrax._src.command_line.stopping import StopSignals
from mirrax._src.command_line.verdict import Case, read_case

_POLL_SECONDS = 0.1
_SECONDS_TO_SHOW_STACKS = 1.0


class Attempt:
    """Passes signals on, and ends the others when one worker has failed.

    Args:
        cluster: The workers.
        stop: The signals that the launcher gets.
        screen: Where to say what happens.
        grace_after_failure: Seconds that the others get to end by themselves.
        grace_after_signal: Seconds that workers get to save.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        stop: StopSignals,
        screen: Screen,
        grace_after_failure: float,
        grace_after_signal: float,
    ) -> None:
        self._cluster, self._stop, self._screen = cluster, stop, screen
        self._grace_after_failure = grace_after_failure
        self._grace_after_signal = grace_after_signal
        self._ends: list[WorkerEnd] = []
        self._killed: set[int] = set()
        self._stopped: set[int] = set()
        self._deadline: float | None = None
        self._has_passed_on = False
        self._has_said_problem = False
        self._stopped_since: dict[int, float] = {}
        self._heartbeat = ClusterOptions.of_environment().heartbeat

    def watch(self) -> list[Case]:
        """Waits until all workers have ended."""
        while self._cluster.running:
            self._note_ends(_POLL_SECONDS)
            self._look_for_signals()
            self._look_for_stopped()
            if self._stop.is_urgent():
                self._kill()
            elif self._deadline is not None and self._is_too_late():
                self._end_late_ones()
        return [self._case(end) for end in self._ends]

    def _note_ends(self, seconds: float) -> None:
        ends = self._cluster.wait(seconds)
        self._say_log_problem()
        for end in ends:
            self._ends.append(end)
            if end.returncode != 0 and self._deadline is None:
                self._start_grace(end)

    def _say_log_problem(self) -> None:
        """Says once that logs cannot be written; workers do not notice."""
        problem = self._cluster.log_problem
        if problem and not self._has_said_problem:
            self._has_said_problem = True
            self._screen.say(
                f"mirrax: the logs in {self._cluster.logs[0].parent} cannot be written: "
                f"{problem}. The workers go on; what they print is lost until it can be "
                "written again.",
                "bold",
            )

    def _start_grace(self, end: WorkerEnd) -> None:
        is_preempted = end.returncode == PREEMPTED
        grace = self._grace_after_signal if is_preempted else self._grace_after_failure
        self._deadline = time.monotonic() + grace
        if self._cluster.running:
            self._screen.say(
                f"mirrax: worker {end.worker} has ended: {end.describe()}. "
                f"The others get {grace:g} s to end on their own.",
                "bold",
            )

    def _look_for_signals(self) -> None:
        if self._screen.is_broken and self._stop.first is None:
            self._stop.request(
                signal.SIGPIPE
            )  # nobody reads any more, as with `| head`
        passed = self._stop.passed
        if passed is None or self._has_passed_on:
            return
        self._has_passed_on = True
        self._cluster.send_signal(passed)
        self._deadline = self._deadline or time.monotonic() + self._grace_after_signal
        self._screen.say(
            f"mirrax: {passed.name} is passed on to the workers, which get "
            f"{self._deadline - time.monotonic():.0f} s. Once more kills them at once.",
            "bold",
        )

    def _look_for_stopped(self) -> None:
        """Ends workers when one was stopped (SIGSTOP): the others may be waiting for it to join."""
        now = time.monotonic()
        stopped = {n for n in self._cluster.running if self._cluster.is_stopped(n)}
        self._stopped_since = {n: self._stopped_since.get(n, now) for n in stopped}
        late = [
            n
            for n, since in self._stopped_since.items()
            if now - since > self._heartbeat
        ]
        if late and self._deadline is None:
            grace = self._grace_after_failure
            self._deadline = now + grace
            self._screen.say(
                f"mirrax: worker {late[0]} has been stopped (SIGSTOP) for "
                f"{self._heartbeat:g} s. The others get {grace:g} s to end on their own.",
                "bold",
            )

    def _is_too_late(self) -> bool:
        assert self._deadline is not None
        # After a failure nobody waits for those that are stopped and cannot end.
        running = self._cluster.running
        is_stopped = bool(running) and all(map(self._cluster.is_stopped, running))
        return time.monotonic() > self._deadline or (
            is_stopped and not self._has_passed_on
        )

    def _end_late_ones(self) -> None:
        """Has those that still run say where they are, then kills them."""
        late = ", ".join(map(str, sorted(self._cluster.running)))
        self._screen.say(
            f"mirrax: still running and killed now: worker {late}.", "bold"
        )
        if not self._has_passed_on:
            self._note_killed()
            self._cluster.send_signal(signal.SIGABRT)
            end = time.monotonic() + _SECONDS_TO_SHOW_STACKS
            while self._cluster.running - self._stopped and time.monotonic() < end:
                self._note_ends(_POLL_SECONDS)
        self._kill()

    def _kill(self) -> None:
        self._note_killed()
        self._cluster.send_signal(signal.SIGKILL)
        while self._cluster.running:
            self._note_ends(_POLL_SECONDS)

    def _note_killed(self) -> None:
        running = self._cluster.running
        self._killed |= running
        self._stopped |= {n for n in running if self._cluster.is_stopped(n)}

    def _case(self, end: WorkerEnd) -> Case:
        n = end.worker
        place = n - self._cluster.first_worker
        return read_case(
            end,
            self._cluster.logs[place],
            self._cluster.log_starts[place],
            self._cluster.failures[place],
            n in self._killed,
            n in self._stopped,
        )
