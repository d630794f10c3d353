"""Hooks of the process: what was there before is called, forked children do not act."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from helpers.waiting import SECONDS_TO_HANG

from mirrax._src.base import hooks


def end_of(code: str) -> tuple[int, str]:
    """How a program ends: its exit code, and what it prints."""
    prelude = "import os, sys, threading, time\nfrom mirrax._src.base import hooks\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", prelude + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
    )
    assert not done.stderr
    return done.returncode, done.stdout


def test_the_last_hook_for_uncaught_exceptions_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *all: said.append(all))

    def around(name: str, error: BaseException, show: object) -> None:
        assert callable(show)
        said.append((name, error))
        show()
        said.append(name)

    hooks.on_uncaught(lambda *args: around("a", *args))
    hooks.on_uncaught(lambda *args: around("b", *args))
    error = ValueError("boom")
    sys.excepthook(ValueError, error, None)
    before = (ValueError, error, None)
    assert said == [("b", error), ("a", error), before, "a", "b"]


def test_in_a_forked_child_only_the_hook_of_before_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *all: said.append(all))
    hooks.on_uncaught(lambda error, show: said.append("hook"))
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    error = ValueError("boom")
    sys.excepthook(ValueError, error, None)
    assert said == [(ValueError, error, None)]


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12),
    reason="Python 3.12 starts no thread once the main thread has ended",
)
@pytest.mark.slow
def test_the_end_of_a_program() -> None:
    code = """
    def say(words):  # at once: threads do not interleave
        os.write(1, words.encode() + b"\\n")

    def last_work():
        threading.Thread(target=say, args=("a new thread",)).start()
        say("the main thread ends")

    hooks.on_exit(lambda: say("exit, first registered"))
    hooks.on_exit(lambda: say("exit, last registered"))
    hooks.before_threads_end(last_work)
    """
    _, said = end_of(code)
    lines = said.splitlines()
    assert sorted(lines[:2]) == ["a new thread", "the main thread ends"]
    assert lines[2:] == ["exit, last registered", "exit, first registered"]


@pytest.mark.slow
def test_after_the_main_thread_nothing_can_be_registered() -> None:
    code = """
    def late():
        threading.main_thread().join()
        while threading.main_thread().is_alive() or not ended.wait(10):
            pass
        try:
            hooks.before_threads_end(print)
        except RuntimeError:
            print("refused", flush=True)

    ended = threading.Event()
    threading._register_atexit(ended.set)
    threading.Thread(target=late).start()
    """
    assert end_of(code) == (0, "refused\n")


@pytest.mark.slow
def test_a_forked_child_does_not_end_for_its_parent() -> None:
    code = """
    hooks.on_exit(lambda: print("the parent's end", flush=True))
    hooks.after_fork_in_child(lambda: print("forked", flush=True))
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    """
    assert end_of(code) == (0, "forked\nthe parent's end\n")
