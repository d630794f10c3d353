"""Random kills of workers under `mirrax run --max-restarts`.

    python tests/cluster/kills.py --kills 50 --seed 1

Starts the training of kill_training.py, undisturbed and then with a signal (SIGKILL, SIGSTOP
or SIGTERM) to a random worker at random moments, start-up and saving included, and compares
the weights. What is not as it should be is raised with the launcher's output.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("kill_training.py")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
# From a signal to the start of all workers: noticing, ending, starting JAX anew.
LONGEST_RESTART_SECONDS = 120
LONGEST_RUN_SECONDS = 240
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
    directory: Path, count: int, seed: int, workers: int = 2, restarts: int = 10_000
) -> Kills:
    """Trains with `count` kills, and checks that nothing hangs or is left."""
    directory.mkdir(parents=True)
    log = directory / "launcher.log"
    command = [sys.executable, "-m", "mirrax", "run", "--workers", str(workers)]
    command += ["--max-restarts", str(restarts), "--log-dir", str(directory / "logs")]
    command += [str(SCRIPT), str(directory)]
    with open(log, "w") as output:
        launcher = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_LIMITS},
        )
    try:
        kills = _kill(launcher, directory, count, random.Random(seed))
        code = launcher.wait(LONGEST_RUN_SECONDS)
    except BaseException as error:
        left = {k: _state(pid) for pid, k in _workers(directory).items()}
        error.add_note(f"Workers: {left}.\n{_tail(log)}")
        raise
    finally:
        launcher.kill()
        launcher.wait()
    assert code == 0, f"The launcher ended with {code}.\n{_tail(log)}"
    time.sleep(1.5)
    left = _processes(str(directory))
    assert not left, f"Left behind: {left}.\n{_tail(log)}"
    results = {path.read_text() for path in directory.glob("result-*")}
    return Kills(results, kills, log.read_text())


def _kill(
    launcher: subprocess.Popen[bytes],
    directory: Path,
    count: int,
    chance: random.Random,
) -> list[str]:
    """Sends signals, each after all workers have been started anew since the last one."""
    kills: list[str] = []
    gone: set[int] = set()
    while len(kills) < count:
        deadline = time.monotonic() + LONGEST_RESTART_SECONDS
        while not (alive := set(_workers(directory)) - gone):
            if launcher.poll() is not None:
                raise RuntimeError(f"The launcher has ended after {kills}.")
            if time.monotonic() > deadline:
                raise TimeoutError(f"The workers were not started anew after {kills}.")
            time.sleep(0.02)
        start = time.monotonic()
        # About half of the moments are in the start-up, the others in the training.
        time.sleep(chance.choice([chance.uniform(0, 3), chance.uniform(2, 9)]))
        found = {pid: k for pid, k in _workers(directory).items() if pid not in gone}
        if not found or launcher.poll() is not None:
            raise RuntimeError(f"Training had ended before all kills: {kills}.")
        pid = chance.choice(sorted(found))
        which = chance.choice(SIGNALS)
        gone |= alive | set(found)
        try:
            os.kill(pid, which)
        except ProcessLookupError:
            continue
        after = time.monotonic() - start
        kills.append(f"{which.name} to worker {found[pid]} after {after:.1f} s")
    return kills


def _workers(directory: Path) -> dict[int, str]:
    """The worker processes of a run: their numbers by process."""
    found = {}
    for pid, command in _processes(str(directory)).items():
        if str(SCRIPT) in command and "mirrax run" not in command:
            environment = _read(pid, "environ")
            number = environment.partition('"index": ')[2][:1]
            if number and "-m mirrax" not in command:
                found[pid] = number
    return found


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


def _tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-60:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kills-a-run", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        expected = run_with_kills(Path(base) / "undisturbed", 0, 0).result
        assert len(expected) == 1, expected
        print(f"undisturbed: {expected}, seed {args.seed}", flush=True)
        done = 0
        while done < args.kills:
            count = min(args.kills_a_run, args.kills - done)
            start = time.monotonic()
            found = run_with_kills(Path(base) / str(done), count, args.seed + done)
            done += count
            for kill in found.kills:
                print(f"  {kill}")
            assert found.result == expected, (found.result, found.output[-5000:])
            seconds = time.monotonic() - start
            print(f"{done} kills: the same weights ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
