"""`mirrax run`: attempts, until one succeeds or there are no restarts left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mirrax._src.cluster.local_cluster import PREEMPTED, LocalCluster
from mirrax._src.cluster.nodes import Nodes
from mirrax._src.command_line import exits, gpus
from mirrax._src.command_line.attempt import Attempt
from mirrax._src.command_line.jobs import Job, announced, is_running, state_directory
from mirrax._src.command_line.screen import Screen
from mirrax._src.command_line.stopping import StopSignals
from mirrax._src.command_line.verdict import Verdict, judge

_KEPT_RUNS = 20
# A failure this soon after the start is followed by a pause, twice as long each time.
_SOON_SECONDS = 30.0
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True)
class RunOptions:
    """What `mirrax run` was asked for; `mirrax run --help` explains each."""

    command: tuple[str, ...]
    minimum: int
    maximum: int
    devices: int | None = None
    max_restarts: int = 0
    log_dir: Path | None = None
    log_bytes: int = 100 * 2**20
    platform: str | None = None
    grace_after_failure: float = 10.0
    grace_after_signal: float = 60.0
    nodes: Nodes | None = None


class LaunchError(Exception):
    """The workers cannot be started or watched, whatever they do."""


def launch(options: RunOptions) -> int:
    """Runs the workers; the exit code, or the negative number of the signal to end by.

    Raises:
        LaunchError: If workers cannot be started here.
    """
    directory = _make_directory(options.log_dir)
    with StopSignals() as stop, Screen(stop.is_urgent) as screen:
        launcher = _Launcher(options, directory, stop, screen)
        if os.environ.get("TF_CONFIG") and options.nodes is None:
            screen.say(
                "mirrax: TF_CONFIG is set, but not used: the workers started here form a "
                "cluster of their own on this machine (--nodes starts a share of it).",
                "bold",
            )
        try:
            code = launcher.run()
        finally:
            screen.drain()
            if launcher.has_failed:
                screen.say(f"The workers' logs are in {directory}.")
            elif options.log_dir is None:
                shutil.rmtree(directory, ignore_errors=True)
    return code


def end_with(code: int) -> None:
    """Ends this process with an exit code, or by a signal as if that had not been caught."""
    if code >= 0:
        sys.exit(code)
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


class _Launcher:
    def __init__(
        self, options: RunOptions, directory: Path, stop: StopSignals, screen: Screen
    ) -> None:
        self._options, self._directory = options, directory
        self._stop, self._screen = stop, screen
        self._size = options.maximum
        self._failed_before: set[int] = set()
        self._soon_failures: list[str] = []
        self.has_failed = False

    def run(self) -> int:
        for attempt in range(self._options.max_restarts + 1):
            started, oom_kills = time.time(), exits.count_oom_kills()
            verdict = self._attempt(attempt)
            oom_kills = exits.count_oom_kills() - oom_kills
            if self._stop.first is not None:
                return self._end_after_signal(verdict, started, oom_kills)
            if verdict.first is None:
                return 0
            self._explain(verdict, started, oom_kills)
            self._count_failure(verdict, time.time() - started)
            if attempt == self._options.max_restarts:
                break
            self._prepare_restart(attempt + 1, verdict)
            if self._stop.first is not None:
                return -self._stop.first
        self._say_that_it_is_over()
        return verdict.code

    def _attempt(self, attempt: int) -> Verdict:
        options = self._options
        try:
            variables = gpus.environments(self._size, options.devices, options.platform)
        except ValueError as error:
            raise LaunchError(str(error)) from None
        self._begin_logs(attempt)
        with LocalCluster(
            options.command,
            self._size,
            self._directory,
            options.devices,
            variables,
            attempt,
            log_bytes=options.log_bytes,
            nodes=options.nodes,
        ) as cluster:
            self._screen.follow(cluster.logs, cluster.log_starts, cluster.first_worker)
            watching = Attempt(
                cluster,
                self._stop,
                self._screen,
                options.grace_after_failure,
                options.grace_after_signal,
            )
            try:
                with announced(self._job(cluster)):
                    cases = watching.watch()
            except RuntimeError as error:
                self.has_failed = True
                raise LaunchError(str(error)) from None
        self._screen.drain()
        return judge(cases)

    def _job(self, cluster: LocalCluster) -> Job:
        command = " ".join(self._options.command[1:])
        logs = str(self._directory)
        return Job(cluster.address, cluster.secret, command, logs, os.getpid())

    def _begin_logs(self, attempt: int) -> None:
        """A line between what earlier attempts or runs have left in a log, and this one."""
        what = f"restart {attempt}" if attempt else "a new run"
        line = f"=== {what}, {time.strftime('%Y-%m-%d %H:%M:%S')} ===\n"
        nodes = self._options.nodes
        first = nodes.rank * self._size if nodes else 0
        for worker in range(first, first + self._size):
            path = self._directory / f"worker-{worker}.log"
            with contextlib.suppress(OSError):  # the workers' own lines will say it
                if path.exists() and path.stat().st_size:
                    with path.open("a") as log:
                        log.write(line)

    def _explain(self, verdict: Verdict, started: float, oom_kills: int) -> None:
        self.has_failed = True
        style = "yellow" if verdict.is_preemption else "red"
        self._screen.say("\n" + verdict.explain(started, oom_kills) + "\n", style)

    def _count_failure(self, verdict: Verdict, lasted_seconds: float) -> None:
        assert verdict.first is not None
        if lasted_seconds < _SOON_SECONDS and not verdict.is_preemption:
            self._soon_failures.append(verdict.first.reason())
        else:
            self._soon_failures = []

    def _prepare_restart(self, number: int, verdict: Verdict) -> None:
        assert verdict.first is not None
        lost = self._given_up(verdict)
        before, self._size = self._size, self._size - len(lost)
        pause = _pause(len(self._soon_failures))
        size = f"{self._size} workers" if self._size != 1 else "1 worker"
        if lost:
            size += f" instead of {before} ({_names(lost)} failed twice in a row)"
        elif self._options.minimum < self._options.maximum:
            size += " as before"
        when = f" in {pause:g} s" if pause else ""
        self._screen.say(
            f"mirrax: restart {number} of {self._options.max_restarts}{when}, with {size}, "
            f"because worker {verdict.first.worker} ended: {verdict.first.reason()}.",
            "bold",
        )
        end = time.monotonic() + pause
        while time.monotonic() < end and self._stop.first is None:
            time.sleep(0.05)

    def _say_that_it_is_over(self) -> None:
        restarts, failures = self._options.max_restarts, self._soon_failures
        if not restarts:
            return
        text = f"mirrax: none of the {restarts} restarts is left."
        if len(failures) > restarts and len(set(failures)) == 1:
            text += " Every attempt failed in the same way, soon after its start."
        self._screen.say(text, "bold")

    def _given_up(self, verdict: Verdict) -> list[int]:
        """The workers to go on without: a restart did not help them, and enough others are left.

        If all were preempted, nobody is gone.
        """
        failed = set(verdict.blamed)
        if verdict.is_preemption and len(failed) == self._size:
            failed = set()
        lost = sorted(failed & self._failed_before)
        lost = lost[: max(self._size - self._options.minimum, 0)]
        self._failed_before = set() if lost else failed  # the others get new numbers
        return lost

    def _end_after_signal(
        self, verdict: Verdict, started: float, oom_kills: int
    ) -> int:
        """Workers' own failures count; else 42 if some have saved; else it is the signal."""
        number, passed = self._stop.first, self._stop.passed
        assert number is not None and passed is not None
        expected = {0, PREEMPTED, -passed, 128 + passed}
        left = [case for case in verdict.cases if not case.was_killed]
        codes = {case.end.returncode for case in left}
        odd = judge([case for case in left if case.end.returncode not in expected])
        if odd.first is not None and odd.first.failed_by_itself:
            self._explain(odd, started, oom_kills)
            return odd.code
        if PREEMPTED in codes:
            return PREEMPTED
        is_done = codes == {0} and len(left) == len(verdict.cases)
        return 0 if is_done else -number


def _names(workers: list[int]) -> str:
    return f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"


def _pause(soon_failures: int) -> float:
    if not soon_failures:
        return 0.0
    pause = _FIRST_PAUSE_SECONDS * 2 ** (soon_failures - 1)
    return min(pause, _LONGEST_PAUSE_SECONDS)


def _make_directory(given: Path | None) -> Path:
    if given is None:
        return _default_directory()
    try:
        given.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"The directory for logs cannot be made: {error}.") from None
    return given.absolute()


def _default_directory() -> Path:
    """A new directory in the user's state directory, else a temporary one."""
    name = f"{time.strftime('%Y-%m-%d-%H-%M-%S')}-{os.getpid()}"
    try:
        runs = state_directory() / "runs"
        directory = runs / name
        directory.mkdir(parents=True)
    except (OSError, RuntimeError):
        return Path(tempfile.mkdtemp(prefix="mirrax-run-"))
    for old in sorted(runs.iterdir())[:-_KEPT_RUNS]:
        if not is_running(old.name.rpartition("-")[2]):
            shutil.rmtree(old, ignore_errors=True)
    return directory
