"""A benchmark that is stopped early shows what it has; a rival that hangs is named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import common


@pytest.fixture(autouse=True)
def not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_stopped", [])


def stopped_at(number: int) -> Callable[[str], int]:
    """Counts its calls, and is interrupted in one of them."""
    calls = 0

    def measure(name: str) -> int:
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        return calls

    return measure


def test_whole_rounds_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    found = common.in_turns("ab", 5, stopped_at(6))
    assert sorted([*found["a"], *found["b"]]) == [1, 2, 3, 4]
    assert [len(values) for values in found.values()] == [2, 2]
    assert "stopped after 2 of 5 rounds" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):  # nothing is begun after it
        common.in_turns("ab", 5, stopped_at(0))


def test_without_a_whole_round_it_is_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        common.in_turns("ab", 5, stopped_at(2))
    with pytest.raises(KeyboardInterrupt):
        common.in_turns("ab", 5, stopped_at(4), at_least=2)


def test_what_follows_an_interrupt_shows_what_there_is() -> None:
    rows = []
    with common.until_stopped():
        for row in range(3):
            if row == 2:
                raise KeyboardInterrupt
            rows.append(row)
    assert rows == [0, 1]


@pytest.fixture
def rival(tmp_path: Path) -> Iterator[Callable[[str], common.Rival]]:
    """Starts a rival that runs some code."""
    started: list[common.Rival] = []

    def start(code: str) -> common.Rival:
        script = tmp_path / "rival.py"
        script.write_text(code)
        started.append(common.Rival([str(script)], sys.executable))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_a_rival_that_fails_says_why(rival) -> None:
    with pytest.raises(common.NoAnswer) as raised:
        rival("raise OSError('no room')").ask("work")
    assert raised.value.reason == "fails: OSError: no room"
    assert not raised.value.is_late


def test_a_rival_that_hangs_is_ended(rival) -> None:
    hung = rival("import time; time.sleep(600)")
    with pytest.raises(common.NoAnswer) as raised:
        hung.ask("work", 0.2)
    assert raised.value.is_late and raised.value.reason == "no answer in 0 s"
    assert hung.process.wait(60) == -9


def test_all_rivals_are_ended_at_once(rival) -> None:
    hung = rival("import time; time.sleep(600)")
    common.Rival.kill_all()
    assert hung.process.wait(60) == -9
