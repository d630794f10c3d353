"""`--max-restarts`, and `--workers MIN:MAX`."""

from __future__ import annotations

from pathlib import Path

import pytest

from mirrax._src.command_line import run

from .launching import Launcher


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_FIRST_PAUSE_SECONDS", 0.02)


def test_all_workers_are_started_anew_until_they_succeed(
    launcher: Launcher, tmp_path: Path
) -> None:
    done = launcher(
        """
        print("attempt", attempt, config["cluster"]["worker"][0])
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
        if me == size - 1 and attempt < 3:
            raise ValueError("a broken machine")
        time.sleep(60 if attempt < 3 else 0)
        """,
        workers=(2, 4),
        max_restarts=3,
        grace_after_failure=0.1,
    )
    assert done.code == 0
    assert sizes(done.lines_of(0)) == [4, 3, 2, 2]
    assert "with 3 workers instead of 4, for want of those that failed" in done.err
    assert "with 2 workers instead of 3" in done.err
    assert "with 2 workers as before" in done.err


def test_two_failures_take_two_away_and_consequences_none(launcher: Launcher) -> None:
    done = launcher(
        """
        print("size", size, flush=True)
        if attempt == 0 and me < 2:
            sys.exit(9)
        if attempt == 0:
            report("UnavailableError", "worker 0 is gone", lost=[0])
            sys.exit(1)
        """,
        workers=(1, 4),
        max_restarts=1,
        grace_after_failure=5.0,
    )
    assert sizes(done.lines_of(0)) == [4, 2]


def test_a_lost_worker_is_taken_away(launcher: Launcher) -> None:
    done = launcher(
        """
        print("size", size, flush=True)
        if attempt == 0 and me == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if attempt == 0:
            time.sleep(0.2)
            report("UnavailableError", "worker 1 does not answer", lost=[1])
            sys.exit(43)
        """,
        workers=(1, 3),
        max_restarts=1,
    )
    assert sizes(done.lines_of(0)) == [3, 2]


def test_when_all_are_preempted_all_come_back(launcher: Launcher) -> None:
    done = launcher(
        "print('size', size); sys.exit(0 if attempt else 42)",
        workers=(1, 3),
        max_restarts=1,
    )
    assert sizes(done.lines_of(0)) == [3, 3]
