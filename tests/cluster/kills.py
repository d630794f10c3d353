"""Random kills of workers under `mirrax run --max-restarts`.

    python tests/cluster/kills.py --kills 50 --seed 1

Starts the training of kill_training.py, undisturbed and then with a signal (SIGKILL, SIGSTOP,
SIGTERM and others) to a random worker at random moments of the start-up, the training and the saving,
and compares the weights. What is not as it should be is raised with the launcher's output.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for those who run this file

from helpers.signals import received_signals  # noqa: E402

SCRIPT = Path(__file__).with_name("kill_training.py")
SIGNALS = (
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
    * 2,  # what schedulers send, mostly
    *(signal.SIGINT, signal.SIGHUP, signal.SIGABRT, signal.SIGSEGV),
)
# From a signal to the start of all workers: noticing, ending, starting JAX anew.
LONGEST_RESTART_SECONDS = 120
LONGEST_RUN_SECONDS = 400
STEP_SECONDS = 0.05
# In the directory of a training that nobody disturbs any more, whose steps need not take long.
HURRY = "hurry"
_LIMITS = {
    "MIRRAX_HEARTBEAT": "5",
    "MIRRAX_JOIN_TIMEOUT": "40",
    "JAX_PLATFORMS": "cpu",
}


@dataclasses.dataclass
class Kills:
    """What came of a run.

    Attributes:
        result: The workers' digests of weights and metrics.
        kills: Each signal, to which worker, how long after its start, or its first save.
        restarts: How often the launcher has started the workers anew.
        output: What the launcher has printed.
    """

    result: set[str]
    kills: list[str]
    restarts: int
    output: str


def run_with_kills(
    directory: Path, count: int, seed: int, steps: int, workers: int = 2
) -> Kills:
    """Trains with `count` kills, and checks that nothing hangs or is left."""
    directory.mkdir(parents=True)
    log = directory / "launcher.log"
    pause = STEP_SECONDS if count else 0.0
    launcher = start(directory, log, workers, steps, 100 + 10 * count, pause)
    try:
        killer, chance = _Killer(launcher, directory, workers), random.Random(seed)
        while len(killer.kills) < count:
            killer.kill(chance)
        (directory / HURRY).touch()
        code = launcher.wait(LONGEST_RUN_SECONDS + steps / 10)
    except BaseException as error:
        left = {w.number: _state(w.pid) for w in workers_of(directory)}
        error.add_note(f"Workers: {left}.\n{tail(log)}")
        raise
    finally:
        launcher.kill()
        launcher.wait()
    assert code == 0, f"The launcher ended with {code}.\n{tail(log)}"
    time.sleep(1.5)
    left = _processes(str(directory))
    assert not left, f"Left behind: {left}.\n{tail(log)}"
    results = {path.read_text() for path in directory.glob("result-*")}
    output = log.read_text()
    return Kills(results, killer.kills, output.count("mirrax: restart "), output)


def steps_for(kills: int) -> int:
    """So many that all kills come before the end: of 9 s and a few steps after each start."""
    return int(max(kills, 1) * 10 / STEP_SECONDS)


def start(
    directory: Path, log: Path, workers: int, steps: int, restarts: int, pause: float
) -> subprocess.Popen[bytes]:
    """The launcher of the training, whose steps take `pause` seconds more."""
    command = [sys.executable, "-m", "mirrax", "run", "--workers", str(workers)]
    command += ["--max-restarts", str(restarts), "--log-dir", str(directory / "logs")]
    command += [str(SCRIPT), str(directory), str(steps), str(pause)]
    with open(log, "w") as output, received_signals():
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_LIMITS},
        )


class _Killer:
    """Sends signals, each after all workers have been started anew since the last one."""

    def __init__(
        self, launcher: subprocess.Popen[bytes], directory: Path, workers: int
    ) -> None:
        self._launcher, self._directory, self._size = launcher, directory, workers
        self._attempt = -1  # the last one whose workers have got a signal
        self.kills: list[str] = []

    def kill(self, chance: random.Random) -> None:
        """Sends a signal, and waits until that has had its effect."""
        self._wait_until(self._targets, "The workers were not started anew")
        after = self._wait_for_moment(chance)
        if not (found := self._targets()):
            return
        worker, which = chance.choice(found), chance.choice(SIGNALS)
        log = self._directory / "logs" / f"worker-{worker.number}.log"
        printed, saved = _size(log), self._last_save()
        try:
            os.kill(worker.pid, which)
        except ProcessLookupError:
            return
        self._attempt = worker.attempt
        self.kills.append(f"{which.name} to worker {worker.number} {after}")

        def is_dropped() -> bool:
            """Python drops an interrupt inside a callback, such as JAX's of the collector."""
            if which != signal.SIGINT or not _dropped_in(log, printed):
                return False
            alive = [w.attempt for w in workers_of(self._directory)]
            # One save may have been under way.
            is_training = self._last_save() > saved + 1
            return alive.count(worker.attempt) == self._size and is_training

        self._wait_until(
            lambda: self._targets() or is_dropped(), "The workers were not started anew"
        )
        if not self._targets():
            where = _dropped_in(log, printed)
            self.kills[-1] += f", dropped by Python ({where}): all trained on"
            self._attempt -= 1

    def _wait_for_moment(self, chance: random.Random) -> str:
        """Half of the moments are in the training, which may begin late on a busy machine."""
        start, event = time.monotonic(), ""
        if chance.random() < 0.5:
            last, event = self._last_save(), " of training"
            self._wait_until(lambda: self._last_save() > last, "Nothing was saved")
            start = time.monotonic()
        time.sleep(chance.choice([chance.uniform(0, 3), chance.uniform(2, 9)]))
        return f"after {time.monotonic() - start:.1f} s{event}"

    def _wait_until(self, is_so: Callable[[], object], problem: str) -> None:
        deadline = time.monotonic() + LONGEST_RESTART_SECONDS
        while not is_so():
            if self._launcher.poll() is not None:
                raise RuntimeError(f"The launcher has ended after {self.kills}.")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{problem} after {self.kills}.")
            time.sleep(0.05)

    def _targets(self) -> list[Worker]:
        return [w for w in workers_of(self._directory) if w.attempt > self._attempt]

    def _last_save(self) -> int:
        names = (path.name for path in (self._directory / "checkpoints").glob("ckpt-*"))
        return max((int(n[5:]) for n in names if n[5:].isdigit()), default=0)


@dataclasses.dataclass(frozen=True, order=True)
class Worker:
    """A worker process of a run."""

    attempt: int
    number: int
    pid: int


def workers_of(directory: Path) -> list[Worker]:
    """The worker processes of a run that are there now."""
    found = []
    for pid in _processes(str(directory)):
        pairs = (line.partition("=") for line in _read(pid, "environ").split("\0"))
        environment = {name: value for name, _, value in pairs}
        if "TF_CONFIG" in environment and "MIRRAX_ATTEMPT" in environment:
            number = json.loads(environment["TF_CONFIG"])["task"]["index"]
            found.append(Worker(int(environment["MIRRAX_ATTEMPT"]), number, pid))
    return sorted(found)


def _processes(part: str) -> dict[int, str]:
    """The processes whose command has `part` in it."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            command = _read(int(entry.name), "cmdline").replace("\0", " ")
            if part in command:
                found[int(entry.name)] = command
    return found


def _dropped_in(log: Path, start: int) -> str:
    """The callback in which Python has dropped an interrupt, by what it has printed; or ""."""
    text = log.read_bytes()[start:].decode(errors="replace") if _size(log) else ""
    found = re.search(r"Exception ignored in: (.*)(?s:.*)KeyboardInterrupt", text)
    return found[1] if found else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _state(pid: int) -> str:
    return _read(pid, "stat").rpartition(")")[2][1:2]


def _read(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-60:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kills-a-run", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        steps, size = steps_for(args.kills_a_run), args.workers
        expected = run_with_kills(Path(base) / "undisturbed", 0, 0, steps, size).result
        assert len(expected) == 1, expected
        print(f"undisturbed: {expected}, seed {args.seed}", flush=True)
        done = 0
        while done < args.kills:
            count = min(args.kills_a_run, args.kills - done)
            start = time.monotonic()
            place = Path(base) / str(done)
            found = run_with_kills(place, count, args.seed + done, steps, size)
            done += count
            for kill in found.kills:
                print(f"  {kill}")
            assert found.result == expected, (found.result, found.output[-5000:])
            seconds = time.monotonic() - start
            text = f"{done} kills: the same weights ({seconds:.0f} s"
            print(f"{text}, {found.restarts} restarts)", flush=True)


if __name__ == "__main__":
    main()
