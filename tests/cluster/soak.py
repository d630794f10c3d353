"""A long training with kills: the same end, bit by bit, and no memory that grows.

    python tests/cluster/soak.py --minutes 30

Four workers train as in kill_training.py under `mirrax run --max-restarts`, saving all the time:
first undisturbed, then for at least the minutes asked for, in which every two minutes one of them
is killed. The weights at the end are compared, and the memory of workers, roster and launcher. Of
the undisturbed training it is that of the second quarter and of the last: all processes live as
long as it does, and have compiled everything by then. Of the other it is that of the first quarter
and of the last, which is what restarts add.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for those who run this file

from cluster.kills import HURRY, start, tail, workers_of  # noqa: E402

STEP_SECONDS = 0.1
LOOK_SECONDS = 2.0
# What memory may grow by: a share, and a number of bytes.
GROWTH = 0.03, 5e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--every", type=float, default=120, help="seconds between kills"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    seconds = given.minutes * 60
    steps = (
        int(seconds / STEP_SECONDS) + 1
    )  # each takes as long, and restarts repeat some
    with tempfile.TemporaryDirectory() as base:
        quiet = Soak(Path(base) / "undisturbed", given.workers, steps)
        quiet.run(0.0, math.inf, random.Random())
        print(f"undisturbed, {steps} steps in {quiet.seconds:.0f} s: {quiet.result()}")
        is_over = quiet.has_grown(since=0.25)
        soak = Soak(Path(base) / "soak", given.workers, steps)
        kills = soak.run(seconds, given.every, random.Random(given.seed))
        print(f"{kills} kills in {soak.seconds:.0f} s: {soak.result()}")
        is_over |= soak.has_grown(since=0.0)
        assert soak.result() == quiet.result() and len(quiet.result()) == 1
        assert soak.seconds >= seconds, tail(soak.log)
        return int(is_over)


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

    def run(self, least_seconds: float, every: float, chance: random.Random) -> int:
        """Waits for the end, killing a worker now and then; how often.

        After `least_seconds` the steps that are left take no longer than they need.
        """
        begin = last = time.monotonic()
        kills = 0
        try:
            while self._launcher.poll() is None:
                time.sleep(LOOK_SECONDS)
                if time.monotonic() - begin > least_seconds:
                    (self.directory / HURRY).touch()
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

    def result(self) -> set[str]:
        """The workers' digests of weights and metrics."""
        return {path.read_text() for path in self.directory.glob("result-*")}

    def _measure(self, pids: dict[str, int]) -> None:
        pids = {**pids, "launcher": self._launcher.pid}
        if "worker 0" in pids:
            for roster in _children(pids["worker 0"])[:1]:
                pids["roster"] = roster
        for name, pid in pids.items():
            if used := _used(pid):
                self._memory[name].append(used)

    def has_grown(self, since: float) -> bool:
        """Prints what each process needed at first and at last; whether one needs more.

        Args:
            since: The share of the time to leave out.
        """
        is_over = False
        for name, found in sorted(self._memory.items()):
            first, last, grown = compare(found, since)
            is_over |= grown
            line = f"{name}: {first / 1e6:.1f} MB at first, {last / 1e6:.1f} MB at last"
            print(f"  {line}{', which is MORE' if grown else ''}", flush=True)
        return is_over


def compare(used: Sequence[int], since: float) -> tuple[float, float, bool]:
    """The usual memory of the first and of the last quarter, and whether it has grown."""
    share, margin = GROWTH
    begin, quarter = int(len(used) * since), max(len(used) // 4, 1)
    first = statistics.median(used[begin : begin + quarter])
    last = statistics.median(used[-quarter:])
    return first, last, last > first * (1 + share) + margin


def _children(pid: int) -> list[int]:
    try:
        return [
            int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def _used(pid: int) -> int:
    """What a process has in memory or swapped out; not its files, which the kernel drops."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    kinds = re.findall(r"^(?:RssAnon|RssShmem|VmSwap):\s+(\d+) kB", text, re.MULTILINE)
    return sum(map(int, kinds)) * 1024


if __name__ == "__main__":
    sys.exit(main())
