"""A long training with kills: the same end, bit by bit, and no memory that grows.

    python tests/cluster/soak.py --minutes 30

Four workers train as in kill_training.py under `mirrax run --max-restarts`, saving all the time;
every two minutes one of them is killed. The weights at the end are compared with those of a run
that nobody disturbs, and the memory of workers, roster and launcher in the last quarter of the
time with that in the first.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from kills import STEP_SECONDS, run_with_kills, start, tail, workers_of

# What memory may grow by: a share, and a number of bytes.
GROWTH = 0.05, 20e6
LOOK_SECONDS = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--every", type=float, default=120, help="seconds between kills"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    steps = int(given.minutes * 60 / (2 * STEP_SECONDS))
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "undisturbed"
        expected = run_with_kills(folder, 0, 0, steps, given.workers).result
        print(f"undisturbed, {steps} steps: {expected}", flush=True)
        soak = Soak(Path(base) / "soak", given.workers, steps)
        kills = soak.run(given.every, random.Random(given.seed))
        found = {path.read_text() for path in soak.directory.glob("result-*")}
        print(f"{kills} kills in {soak.seconds:.0f} s: {found}")
        assert found == expected and len(found) == 1, tail(soak.log)
        return int(soak.has_grown())


class Soak:
    """One training, and what its processes need."""

    def __init__(self, directory: Path, workers: int, steps: int) -> None:
        directory.mkdir()
        self.directory, self.log = directory, directory / "launcher.log"
        self._launcher = start(
            directory, self.log, workers, steps, 10_000, STEP_SECONDS
        )
        self._memory: dict[str, list[int]] = defaultdict(list)
        self.seconds = 0.0

    def run(self, every: float, chance: random.Random) -> int:
        """Waits for the end, killing a worker now and then; how often."""
        begin = last = time.monotonic()
        kills = 0
        try:
            while self._launcher.poll() is None:
                time.sleep(LOOK_SECONDS)
                found = workers_of(self.directory)
                self._measure({f"worker {w.number}": w.pid for w in found})
                if time.monotonic() - last > every and found:
                    last = time.monotonic()
                    os.kill(chance.choice(found).pid, signal.SIGKILL)
                    kills += 1
        finally:
            self._launcher.kill()
            code = self._launcher.wait()
        self.seconds = time.monotonic() - begin
        assert code == 0, f"The launcher ended with {code}.\n{tail(self.log)}"
        return kills

    def _measure(self, pids: dict[str, int]) -> None:
        pids = {**pids, "launcher": self._launcher.pid}
        if "worker 0" in pids:
            for roster in _children(pids["worker 0"])[:1]:
                pids["roster"] = roster
        for name, pid in pids.items():
            if resident := _resident(pid):
                self._memory[name].append(resident)

    def has_grown(self) -> bool:
        """Prints what each process needed at first and at last; whether one needs more."""
        share, margin = GROWTH
        is_over = False
        for name, found in sorted(self._memory.items()):
            quarter = max(len(found) // 4, 1)
            first = statistics.median(found[:quarter])
            last = statistics.median(found[-quarter:])
            grown = last > first * (1 + share) + margin
            is_over |= grown
            line = f"{name}: {first / 1e6:.0f} MB at first, {last / 1e6:.0f} MB at last"
            print(line + (", which is MORE" if grown else ""))
        return is_over


def _children(pid: int) -> list[int]:
    try:
        return [
            int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
