"""Functions that fail, hang or cannot travel."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.waiting import SECONDS_TO_HANG

from mirrax._src.testing import pool as pool_module
from mirrax.errors import UnavailableError
from mirrax.testing import WorkerError, WorkerPool, run_workers

from .helper import own_number, without_jax

Pools = Callable[..., WorkerPool]


class OwnError(Exception):
    """An exception of the test's own."""


class BadError(Exception):
    """It can be packed but not unpacked."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("bad")


@pytest.fixture(scope="module")
def worker_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """A pool of this file's own. Its workers and those of `run_workers` start without JAX.

    They are started anew after each failure.
    """
    place = without_jax(tmp_path_factory.mktemp("light"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [place, *sys.path])
        with WorkerPool() as pool:
            yield lambda: pool


# It holds for `run_workers` as well.
pytestmark = pytest.mark.usefixtures("worker_pool")


def test_an_exception_names_the_worker_and_carries_its_traceback(
    worker_pool: Pools,
) -> None:
    def fail() -> None:
        print("from worker", own_number())
        if own_number() == 1:
            raise OwnError("boom")
        time.sleep(60)

    pool = worker_pool()
    before = pool.run(os.getpid)
    with pytest.raises(WorkerError) as caught:
        pool.run(fail)
    text = str(caught.value)
    assert text.startswith("Worker 1 of 2 failed: OwnError: boom\n")
    assert 'in fail\n      raise OwnError("boom")\n' in text
    assert "worker.py" not in text
    assert "Worker 1 printed:\n  from worker 1" in text
    assert caught.value.worker == 1
    assert caught.value.traceback.endswith("OwnError: boom\n")
    assert isinstance(caught.value.__cause__, OwnError)
    # The pool goes on with new processes.
    assert set(pool.run(os.getpid)).isdisjoint(before)
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)


def test_consequences_are_left_short(
    worker_pool: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both are waited for, also if the first one is late with its report.
    monkeypatch.setattr(pool_module, "_TOGETHER_SECONDS", SECONDS_TO_HANG)

    def fail() -> None:
        if own_number() == 0:
            (tmp_path / "raises").touch()
            raise UnavailableError("worker 1 is gone", workers=(1,))
        while not (tmp_path / "raises").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        raise KeyError("the cause")

    with pytest.raises(WorkerError) as caught:
        worker_pool().run(fail)
    text = str(caught.value)
    assert text.startswith("Worker 1 of 2 failed: KeyError: 'the cause'")
    assert "Worker 0 failed because of it: UnavailableError: worker 1 is gone" in text
    assert text.count("Traceback") == 1


def test_all_workers_that_fail_at_once_are_named(
    worker_pool: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_TOGETHER_SECONDS", 10.0)

    def fail() -> None:
        assert own_number() == 7

    with pytest.raises(WorkerError) as caught:
        worker_pool().run(fail)
    text = str(caught.value)
    assert "AssertionError: assert" in text and "== 7" in text  # pytest's own words
    assert text.count("failed as well") == 1
    assert isinstance(caught.value.__cause__, AssertionError)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os._exit(5), "ended before it returned, with exit code 5"),
        (lambda: os._exit(0), "ended before it returned, with exit code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "with signal SIGKILL"),
        (lambda: sys.exit("enough"), "SystemExit: enough"),
    ],
)
def test_a_process_that_ends(end: Callable[[], None], words: str) -> None:
    with pytest.raises(WorkerError) as caught:
        run_workers(end, workers=1, devices=None)
    assert words in str(caught.value)


def test_a_crash_shows_where_python_was() -> None:
    def crash() -> None:
        os.abort()

    with pytest.raises(WorkerError) as caught:
        run_workers(crash, workers=1)
    assert "with signal SIGABRT" in str(caught.value)
    assert "in crash" in str(caught.value)


def test_an_exception_that_cannot_travel_is_text(worker_pool: Pools) -> None:
    def fail() -> None:
        raise BadError(1, 2)

    with pytest.raises(WorkerError, match="BadError: bad") as caught:
        worker_pool().run(fail)
    assert caught.value.__cause__ is None


def test_a_result_that_cannot_travel(worker_pool: Pools) -> None:
    with pytest.raises(WorkerError) as caught:
        worker_pool().run(threading.Lock)
    assert "cannot pickle '_thread.lock' object" in str(caught.value)
    assert "its result cannot be sent back" in str(caught.value)


def test_a_function_that_cannot_travel_leaves_the_pool_alone(
    worker_pool: Pools,
) -> None:
    pool, lock = worker_pool(), threading.Lock()
    before = pool.run(os.getpid)

    def use() -> bool:
        return lock.locked()

    with pytest.raises(
        TypeError, match=r"use and its arguments cannot be sent to other"
    ):
        pool.run(use)
    assert pool.run(os.getpid) == before


def run_until_late(pool: WorkerPool, fn: Callable[[], Any], wanted: str) -> WorkerError:
    """The error after a time limit; on a busy machine workers get there in a longer one."""
    pool.run(os.getpid)  # the processes are there
    for seconds in (1, 10, 100):
        with pytest.raises(WorkerError) as caught:
            pool.run(fn, timeout=seconds)
        if wanted in str(caught.value):
            break
    return caught.value


def test_a_worker_that_hangs_is_shown_where(worker_pool: Pools) -> None:
    def wait_for_ever() -> None:
        threading.Event().wait()

    def hang() -> None:
        print("from worker", own_number())
        if own_number() == 1:
            wait_for_ever()

    error = run_until_late(worker_pool(), hang, "in wait_for_ever")
    text = str(error)
    assert re.match(r"Worker 1 of 2 did not return within \d+ s; worker 0 did\.", text)
    assert "in hang" in text and "Worker 0 printed:\n  from worker 0" in text
    assert error.worker == 1 and "wait_for_ever" in error.traceback


def test_a_stopped_worker_is_named(worker_pool: Pools) -> None:
    def stop() -> None:
        if own_number() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)

    wanted = "Worker 0 is here:\n  stopped, by SIGSTOP"
    assert wanted in str(run_until_late(worker_pool(), stop, wanted))


def test_a_worker_that_died_between_calls_is_replaced() -> None:
    with WorkerPool(1, None) as pool:
        (pid,) = pool.run(os.getpid)
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        assert pool.run(os.getpid) != [pid]


def test_a_worker_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with WorkerPool(1, None) as pool, pytest.raises(WorkerError) as caught:
        pool.run(os.getpid)
    assert "with exit code 1" in str(caught.value)
    assert "ModuleNotFoundError" in str(caught.value)


def test_processes_that_workers_started_are_ended(tmp_path: Path) -> None:
    def start() -> int:
        import subprocess

        return subprocess.Popen(["sleep", "100"], start_new_session=True).pid

    (pid,) = run_workers(start, workers=1, devices=None)
    assert not Path(f"/proc/{pid}").exists()


def test_an_interrupt_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerPool(1, None) as pool:
        (pid,) = pool.run(os.getpid)

        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(pool_module._Answers, "collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.run(os.getpid)
        assert not Path(f"/proc/{pid}").exists()


def test_the_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(WorkerError("text", 3, "trace")))
    assert (str(error), error.worker, error.traceback) == ("text", 3, "trace")
