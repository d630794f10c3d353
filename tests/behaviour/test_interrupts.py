"""Ctrl-C, or any exception of a signal's handler, in the middle of steps."""

from __future__ import annotations

import os
import signal
import threading

import jax.numpy as jnp
import pytest
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx

SIZE = 300
ROUNDS = 15


class Alarm(BaseException):
    """What the handler raises."""


@pytest.fixture
def raising_signal():
    def raise_alarm(*signal_and_frame: object) -> None:
        raise Alarm

    previous = signal.signal(signal.SIGUSR1, raise_alarm)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, previous)


@pytest.mark.slow
def test_no_variable_is_lost(two_cpus, raising_signal) -> None:
    with two_cpus.scope():
        w = mx.Variable(jnp.eye(SIZE))
        count = mx.Variable(0)

    @mx.function
    def step():
        w.assign(w @ w)  # long enough for the signal to arrive meanwhile
        count.assign_add(1)

    two_cpus.run(step)
    for i in range(ROUNDS):
        timer = threading.Timer(
            0.002 * (i + 1), os.kill, args=(os.getpid(), raising_signal)
        )
        before = int(count.numpy())
        done = 0
        with pytest.raises(Alarm):
            timer.start()
            while True:
                two_cpus.run(step)
                done += 1
        timer.join()
        assert int(count.numpy()) - before in (done, done + 1)
        assert float(w[0, 0]) == 1.0


@pytest.mark.parametrize("moment", ["start", "join"])
def test_no_replica_waits_for_ever(two_cpus, monkeypatch, moment) -> None:
    """An interrupt when the threads of eager replicas begin, or while they are unwound."""
    replicas: list[threading.Thread] = []
    original = getattr(threading.Thread, moment)

    def interrupted(thread: threading.Thread) -> None:
        replicas.append(thread)
        monkeypatch.undo()
        if moment == "start":
            original(thread)
        raise Alarm

    def step() -> None:
        replicas.append(threading.current_thread())
        mx.distribute.get_replica_context().all_reduce("sum", 1.0)
        raise KeyError

    monkeypatch.setattr(threading.Thread, moment, interrupted)
    with pytest.raises(Alarm):
        two_cpus.run(step)
    assert replicas
    for thread in replicas:
        thread.join(SECONDS_TO_HANG)
        assert not thread.is_alive()
