"""`--max-restarts`, `--min-workers`, and `--workers MIN:MAX`."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import mirrax as mx
from mirrax._src.command_line import run

from .launching import ROOT, Launcher


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_FIRST_PAUSE_SECONDS", 0.02)


def test_all_workers_are_started_anew_until_they_succeed(
    launcher: Launcher, tmp_path: Path
) -> None:
    done = launcher(
        """
        print("attempt", attempt, config["cluster"]["worker"][0])
        meet()
        if attempt < 2 and me == 1:
            raise ValueError(f"number {attempt}")
        if attempt < 2:
            time.sleep(60)
        """,
        max_restarts=5,
        log_dir=tmp_path / "logs",
        grace_after_failure=0.1,
    )
    assert done.code == 0
    starts = [line for line in done.lines_of(0) if line.startswith("attempt")]
    assert [start.split()[1] for start in starts] == ["0", "1", "2"]
    assert len({start.split()[2] for start in starts}) == 3  # new ports
    assert (
        "mirrax: restart 1 of 5 in 0.02 s, with 2 workers, because worker 1 ended: "
        "ValueError: number 0" in done.err
    )
    assert "mirrax: restart 2 of 5 in 0.04 s" in done.err
    assert "restart 3" not in done.err
    log = (tmp_path / "logs" / "worker-1.log").read_text()
    assert log.index("number 0") < log.index("=== restart 1, ") < log.index("number 1")
    assert "logs are in" in done.err  # of what failed on the way


def test_each_failure_is_explained_with_its_own_lines(launcher: Launcher) -> None:
    done = launcher("sys.exit(f'no {attempt}')", workers=1, max_restarts=1)
    first, second = done.err.split("restart 1 of 1")
    assert "  no 0\n" in first and "no 1" not in first
    assert "  no 1\n" in second and "no 0" not in second.partition("because")[2][60:]


def test_a_failure_that_repeats_ends(launcher: Launcher) -> None:
    done = launcher("raise ValueError('always')", workers=1, max_restarts=3)
    assert done.code == 1
    assert done.out.count("ValueError: always") == 4
    assert (
        "mirrax: none of the 3 restarts is left. Every attempt failed in the same"
        in (done.err)
    )


def test_different_failures_are_not_called_the_same(launcher: Launcher) -> None:
    done = launcher("sys.exit(3 + attempt)", workers=1, max_restarts=1)
    assert done.code == 4
    assert "none of the 1 restarts is left" in done.err
    assert "in the same way" not in done.err


def test_pauses_grow_up_to_a_limit() -> None:
    pauses = [run._pause(count) for count in range(12)]
    assert pauses[0] == 0
    assert pauses[1:4] == [0.02, 0.04, 0.08]
    assert max(pauses) <= run._LONGEST_PAUSE_SECONDS


def test_a_preempted_worker_is_started_again(launcher: Launcher) -> None:
    done = launcher(
        """
        if attempt == 0:
            sys.exit(42)
        print("goes on")
        """,
        max_restarts=1,
    )
    assert done.code == 0
    assert "was preempted" in done.err
    assert "mirrax: restart 1 of 1, with 2 workers" in done.err  # at once
    assert done.lines_of(0) == ["goes on"]


def test_preempted_without_restarts_gives_42(launcher: Launcher) -> None:
    done = launcher("sys.exit(42)")
    assert done.code == 42
    assert "was preempted" in done.err


def test_others_may_save_when_one_is_preempted(launcher: Launcher) -> None:
    done = launcher(
        """
        if me == 0:
            time.sleep(0.6)
            print("saved", flush=True)
        sys.exit(42)
        """,
        grace_after_failure=0.0,
    )
    assert done.lines_of(0) == ["saved"]
    assert done.code == 42


# Sizes --------------------------------------------------------------------------------------


def sizes(lines: list[str]) -> list[int]:
    return [int(line.removeprefix("size ")) for line in lines if "size" in line]


def test_it_goes_on_with_fewer_but_not_with_too_few(launcher: Launcher) -> None:
    done = launcher(
        """
        print("size", size, flush=True)
        meet()
        if me == size - 1 and attempt < 6:
            raise ValueError("a broken machine")
        time.sleep(60 if attempt < 6 else 0)
        """,
        workers=(2, 4),
        max_restarts=6,
        grace_after_failure=0.1,
    )
    assert done.code == 0
    assert sizes(done.lines_of(0)) == [4, 4, 3, 3, 2, 2, 2]
    assert "with 3 workers instead of 4 (worker 3 failed twice in a row)" in done.err
    assert "with 2 workers instead of 3 (worker 2 failed twice in a row)" in done.err
    assert done.err.count("with 2 workers as before") == 2


def test_another_worker_each_time_takes_nobody_away(launcher: Launcher) -> None:
    done = launcher(
        """
        print("size", size, flush=True)
        meet()
        if attempt < 4 and me == attempt % 2:
            raise ValueError("an accident")
        time.sleep(60 if attempt < 4 else 0)
        """,
        workers=(1, 2),
        max_restarts=4,
        grace_after_failure=0.1,
    )
    assert done.code == 0
    assert sizes(done.lines_of(0)) == [2] * 5


def test_two_failures_take_two_away_and_consequences_none(launcher: Launcher) -> None:
    done = launcher(
        """
        print("size", size, flush=True)
        if attempt < 2 and me < 2:
            sys.exit(9)
        if attempt < 2:
            report("UnavailableError", "worker 0 is gone", lost=[0])
            sys.exit(1)
        """,
        workers=(1, 4),
        max_restarts=2,
        grace_after_failure=5.0,
    )
    assert sizes(done.lines_of(0)) == [4, 4, 2]
    assert "instead of 4 (workers 0, 1 failed twice in a row)" in done.err


def test_as_many_are_taken_away_as_there_may_be(launcher: Launcher) -> None:
    done = launcher(
        """
        print("size", size, flush=True)
        sys.exit(9 if attempt < 2 else 0)
        """,
        workers=(2, 3),
        max_restarts=2,
        grace_after_failure=5.0,
    )
    assert done.code == 0
    assert sizes(done.lines_of(0)) == [3, 3, 2]


def test_a_lost_worker_is_taken_away(launcher: Launcher) -> None:
    done = launcher(
        """
        print("size", size, flush=True)
        meet()
        if attempt < 2 and me == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if attempt < 2:
            wait_for_the_end_of(1)
            report("UnavailableError", "worker 1 does not answer", lost=[1])
            sys.exit(43)
        """,
        workers=(1, 3),
        max_restarts=2,
    )
    assert sizes(done.lines_of(0)) == [3, 3, 2]


def test_when_all_are_preempted_all_come_back(launcher: Launcher) -> None:
    done = launcher(
        "print('size', size); sys.exit(0 if attempt else 42)",
        workers=(1, 3),
        max_restarts=1,
    )
    assert sizes(done.lines_of(0)) == [3, 3]


# Worker 1 is killed whenever it has taken two steps more, as long as there are three workers.
# All numbers are small integers: sums are the same whatever the number of replicas.
SHRINKING = f"""
sys.path.insert(0, {str(ROOT)!r})
import jax.numpy as jnp
import mirrax as mx
strategy = mx.distribute.MultiWorkerMirroredStrategy(heartbeat=60, step_timeout=100)
with strategy.scope():
    total = mx.Variable(0.0, aggregation=mx.VariableAggregation.SUM)
    count = mx.Variable(0.0, aggregation=mx.VariableAggregation.MEAN)

@mx.function
def train_step(x):
    total.assign_add(jnp.sum(x) * (count + 1))
    count.assign_add(jnp.float32(1.0))

dataset = mx.data.Dataset.range(60).shuffle(60, seed=3)
iterator = iter(strategy.experimental_distribute_dataset(dataset.batch(6).repeat()))
checkpoint = mx.train.Checkpoint(total=total, count=count, iterator=iterator)
manager = mx.train.CheckpointManager(checkpoint, sys.argv[1], max_to_keep=2)
manager.restore_or_initialize()
start = int(count.numpy())
print("start", start, "of", size, flush=True)
for step in range(start, 12):
    strategy.run(train_step, args=(next(iterator),))
    manager.save(wait=True)
    if size == 3 and me == 1 and step == start + 1:
        os.kill(os.getpid(), signal.SIGKILL)
print("total", float(total.numpy()), "after", float(count.numpy()), flush=True)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_worker_that_stays_away_costs_no_step_and_no_row(
    launcher: Launcher, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoints")
    done = launcher(SHRINKING, workers=(2, 3), max_restarts=2, arguments=(folder,))
    assert done.code == 0, done.out + done.err
    lines = done.lines_of(0)
    starts = [line for line in lines if line.startswith("start")]
    assert starts == ["start 0 of 3", "start 2 of 3", "start 4 of 2"]
    assert "with 2 workers instead of 3 (worker 1 failed twice in a row)" in done.err
    batches = mx.data.Dataset.range(60).shuffle(60, seed=3).batch(6).repeat()
    sums = [float(np.sum(b)) for b in itertools.islice(iter(batches), 12)]
    expected = sum(total * (k + 1) for k, total in enumerate(sums))
    for worker in range(2):
        assert done.lines_of(worker)[-1] == f"total {expected} after 12.0"
