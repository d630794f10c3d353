"""Random kills of workers under `mirrax run --max-restarts`.

    python tests/cluster/kills.py --kills 50 --seed 1

Starts the training of kill_training.py, undisturbed and then with a signal (SIGKILL, SIGSTOP,
SIGTERM and others) to a random worker at random moments, start-up and saving included, and compares
the weights. What is not as it should be is raised with the launcher's output.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
        kills: Each signal, to which worker, how long after its start.
        output: What the launcher has printed.
    """

    result: set[str]
    kills: list[str]
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
        kills = _kill(launcher, directory, count, random.Random(seed))
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
    return Kills(results, kills, log.read_text())


def start(
    directory: Path, log: Path, workers: int, steps: int, restarts: int, pause: float
) -> subprocess.Popen[bytes]:
    """The launcher of the training, whose steps take `pause` seconds more."""
    command = [sys.executable, "-m", "mirrax", "run", "--workers", str(workers)]
    command += ["--max-restarts", str(restarts), "--log-dir", str(directory / "logs")]
    command += [str(SCRIPT), str(directory), str(steps), str(pause)]
    with open(log, "w") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_LIMITS},
        )


def _kill(
    launcher: subprocess.Popen[bytes],
    directory: Path,
    count: int,
    chance: random.Random,
) -> list[str]:
    """Sends signals, each after all workers have been started anew since the last one."""
    kills: list[str] = []
    attempt = -1
    while len(kills) < count:
        deadline = time.monotonic() + LONGEST_RESTART_SECONDS
        while not any(w.attempt > attempt for w in workers_of(directory)):
            if launcher.poll() is not None:
                raise RuntimeError(f"The launcher has ended after {kills}.")
            if time.monotonic() > deadline:
                raise TimeoutError(f"The workers were not started anew after {kills}.")
            time.sleep(0.02)
        start = time.monotonic()
        # About half of the moments are in the start-up, the others in the training.
        time.sleep(chance.choice([chance.uniform(0, 3), chance.uniform(2, 9)]))
        found = [w for w in workers_of(directory) if w.attempt > attempt]
        if not found:
            continue
        worker, which = chance.choice(found), chance.choice(SIGNALS)
        try:
            os.kill(worker.pid, which)
        except ProcessLookupError:
            continue
        attempt = worker.attempt
        after = time.monotonic() - start
        kills.append(f"{which.name} to worker {worker.number} after {after:.1f} s")
    return kills


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
        # Long enough for all kills: none comes later than 9 s after a start.
        steps = int(args.kills_a_run * 9 / STEP_SECONDS)
        size = args.workers
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
            print(f"{done} kills: the same weights ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
