"""`mx.train.Progress`: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io

import pytest

import mirrax as mx


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def test_the_bar_says_that_the_first_step_compiles(screen: Terminal) -> None:
    with mx.train.Progress(3, file=screen) as progress:
        progress._bar.refresh()
        assert "0/3" in screen.getvalue() and "compiling" in screen.getvalue()
        for loss in (3.0, 2.0, 1.0):
            progress.update(examples=8, loss=loss)
    last = screen.getvalue().rpartition("training")[2]
    assert "3/3" in last and "loss 1" in last and "compiling" not in last


def test_the_bar_says_that_a_later_step_takes_long(screen: Terminal) -> None:
    with mx.train.Progress(5, file=screen) as progress:
        progress.update(2, loss=0.5)
        progress._updated -= 60
        progress._drawn -= 60
        progress._bar.refresh()
        last = screen.getvalue().rpartition("training")[2]
        assert "step 3 has taken 60 s, compiling?" in last
        progress.update(loss=0.25)
        progress._bar.refresh()
        assert "compiling" not in screen.getvalue().rpartition("training")[2]


def test_without_a_terminal_it_prints_lines() -> None:
    lines = io.StringIO()
    with mx.train.Progress(2, initial=1, interval=0, file=lines) as progress:
        progress.update(loss=mx.Variable(0.25))
    assert lines.getvalue() == "training: step 2/2, loss 0.25\n"


def test_a_value_for_each_replica_is_an_error() -> None:
    losses = mx.distribute.PerReplica([1.0, 2.0])
    with mx.train.Progress(file=io.StringIO()) as progress:
        with pytest.raises(ValueError, match=r'strategy.reduce\("SUM", loss'):
            progress.update(loss=losses)
