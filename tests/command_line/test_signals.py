"""Signals to `mirrax run`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.waiting import SECONDS_TO_HANG

from .launching import Process

READY = "print('ready', flush=True); time.sleep(60)\n"
COUNT = """
got = []
def note(number, frame):
    print("got", signal.Signals(number).name, flush=True)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, note)
print("ready", flush=True)
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    time.sleep(0.05)
sys.exit({code})
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_workers_get_the_signal_and_it_ends_the_launcher(
    number: signal.Signals, tmp_path: Path
) -> None:
    with Process(tmp_path, READY, "--workers", "2") as launched:
        launched.wait_for("ready", times=2)
        launched.send(number)
        assert launched.wait() == -number
    assert f"mirrax: {number.name} is passed on to the workers" in launched.err
    assert launched.out.count("KeyboardInterrupt") == (
        2 if number == signal.SIGINT else 0
    )


def test_ctrl_c_reaches_workers_once(tmp_path: Path) -> None:
    body = COUNT.format(seconds=1.2, code=0)
    with Process(tmp_path, body, "--workers", "2") as launched:
        launched.wait_for("ready", times=2)
        os.killpg(launched.process.pid, signal.SIGINT)  # as a terminal does
        assert launched.wait() == 0
    assert launched.out.count("got SIGINT") == 2


def test_a_signal_that_comes_twice_at_once_is_one(tmp_path: Path) -> None:
    body = COUNT.format(seconds=1.2, code=42)
    with Process(tmp_path, body, "--workers", "1") as launched:
        launched.wait_for("ready")
        launched.send(signal.SIGTERM)  # as `timeout` does: to the process,
        time.sleep(0.1)
        launched.send(signal.SIGTERM)  # and to its group
        assert launched.wait() == 42
    assert launched.out.count("got SIGTERM") == 1


def test_workers_that_save_give_42(tmp_path: Path) -> None:
    body = """
        def save(number, frame):
            print("saved", flush=True)
            sys.exit(42)
        signal.signal(signal.SIGTERM, save)
        """
    restarts = ("--max-restarts", "3")
    with Process(
        tmp_path, body + "\n        " + READY, "--workers", "2", *restarts
    ) as p:
        p.wait_for("ready", times=2)
        p.send(signal.SIGTERM)
        assert p.wait() == 42
    assert p.out.count("saved") == 2
    assert "restart" not in p.err
    assert "failed" not in p.err


def test_a_worker_that_fails_while_it_ends_is_reported(tmp_path: Path) -> None:
    body = """
        def save(number, frame):
            raise OSError("no space left")
        if me == 1:
            signal.signal(signal.SIGTERM, save)
        """
    with Process(tmp_path, body + "\n        " + READY, "--workers", "2") as launched:
        launched.wait_for("ready", times=2)
        launched.send(signal.SIGTERM)
        assert launched.wait() == 1
    assert "Worker 1 failed first" in launched.err
    assert "OSError: no space left" in launched.err


def test_a_second_signal_kills(tmp_path: Path) -> None:
    body = COUNT.format(seconds=60, code=0)
    with Process(tmp_path, body, "--workers", "2") as launched:
        launched.wait_for("ready", times=2)
        launched.send(signal.SIGTERM)
        launched.wait_for("got SIGTERM", times=2)
        time.sleep(0.4)
        launched.send(signal.SIGTERM)
        assert launched.wait() == -signal.SIGTERM


def test_workers_that_do_not_end_in_time_are_killed(tmp_path: Path) -> None:
    body = COUNT.format(seconds=60, code=0)
    limit = ("--grace-after-signal", "0.5")
    with Process(tmp_path, body, "--workers", "2", *limit) as launched:
        launched.wait_for("ready", times=2)
        launched.send(signal.SIGINT)
        assert launched.wait() == -signal.SIGINT
    assert "still running and killed now: worker 0, 1" in launched.err


def test_a_stopped_worker_does_not_keep_the_launcher(tmp_path: Path) -> None:
    body = "print('ready', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    limit = ("--grace-after-signal", "0.3")
    with Process(tmp_path, body, "--workers", "2", *limit) as launched:
        launched.wait_for("ready", times=2)
        launched.send(signal.SIGTERM)
        assert launched.wait() == -signal.SIGTERM


def test_a_signal_in_the_pause_before_a_restart(tmp_path: Path) -> None:
    with Process(
        tmp_path, "sys.exit(1)", "--workers", "1", "--max-restarts", "9"
    ) as launched:
        deadline = time.monotonic() + SECONDS_TO_HANG
        while "restart 2 of 9 in 1 s" not in launched.err:
            assert time.monotonic() < deadline, launched.err
            time.sleep(0.01)
        launched.send(signal.SIGTERM)
        assert launched.wait() == -signal.SIGTERM


def test_nohup_holds(tmp_path: Path) -> None:
    body = COUNT.format(seconds=0.8, code=0)
    with Process(tmp_path, body, "--workers", "1", before=("nohup",)) as launched:
        launched.wait_for("ready")
        launched.send(signal.SIGHUP)
        assert launched.wait() == 0
    assert "got" not in launched.out
