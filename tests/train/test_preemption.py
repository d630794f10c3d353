"""A machine that is taken away costs no steps: SIGTERM, save, exit 42, go on."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import jax.numpy as jnp
import pytest
from helpers.engines import mirrored, parts
from helpers.forking import Zygote
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx
from mirrax._src.train import preemption
from mirrax.train import (
    Checkpoint,
    CheckpointManager,
    PreemptionCheckpointHandler,
    TerminationConfig,
    latest_checkpoint,
    load_checkpoint,
)

pytestmark = pytest.mark.slow


class Training:
    """A variable that counts steps; a signal may come inside of one."""

    def __init__(self, directory, manager=True, interval=None, **config):
        self.strategy = mirrored(2)
        with self.strategy.scope():
            self.v = mx.Variable(0.0)
            self.steps = mx.Variable(0)
        self.signal_in: float | None = None
        self.add = mx.function(lambda: self.v.assign_add(1.0, read_value=False))
        checkpoint = Checkpoint(v=self.v, steps=self.steps)
        self.manager = CheckpointManager(
            checkpoint,
            directory,
            5,
            step_counter=self.steps if interval else None,
            checkpoint_interval=interval,
        )
        settings = TerminationConfig(**config) if config else None
        if manager:
            what, where = self.manager, None
        else:
            what, where = checkpoint, directory
        self.handler = PreemptionCheckpointHandler(None, what, where, settings)

    def step(self):
        self.strategy.run(self.add)
        self.steps.assign_add(1)
        if self.signal_in == self.v.numpy():
            os.kill(os.getpid(), signal.SIGTERM)
        return float(self.v.numpy())


@pytest.fixture(autouse=True)
def same_handler():
    """No test leaves a signal handler behind."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    now = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    assert now is before


def newest(directory):
    path = latest_checkpoint(directory)
    assert path is not None
    return load_checkpoint(path)


# The signal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("manager", [True, False])
def test_a_signal_in_a_step(manager, tmp_path):
    t = Training(tmp_path, manager)
    t.signal_in = 2.0
    assert t.handler.run(t.step) == 1.0
    with pytest.raises(SystemExit) as caught:
        t.handler.run(t.step)
        t.handler.run(t.step)
    assert caught.value.code == 42
    saved = newest(tmp_path)
    assert saved["v"] == saved["checkpointed_runs"] == t.handler.total_run_calls
    again = Training(tmp_path, manager)
    assert again.handler.total_run_calls == saved["v"]
    assert parts(again.strategy, again.v) == [saved["v"]] * 2
    assert again.handler.run(again.step) == saved["v"] + 1
    assert again.handler.total_run_calls == saved["v"] + 1
    again.handler.close()


def test_a_signal_in_the_last_step_is_not_lost(tmp_path):
    t = Training(tmp_path)
    t.signal_in = 3.0
    with pytest.raises(SystemExit):
        while t.handler.total_run_calls < 3:
            t.handler.run(t.step)
    assert newest(tmp_path)["v"] == 3.0


def test_a_signal_before_the_first_step(tmp_path):
    t = Training(tmp_path)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        t.handler.run(t.step)
    assert newest(tmp_path)["v"] == 0.0


def test_two_signals_are_one(tmp_path):
    t = Training(tmp_path)

    def step():
        os.kill(os.getpid(), signal.SIGTERM)
        t.step()
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        t.handler.run(step)
    assert caught.value.code == 42
    assert os.listdir(tmp_path) == ["ckpt-1"]


def test_a_signal_while_a_save_is_being_written(tmp_path):
    t = Training(tmp_path)
    t.handler.run(t.step)
    t.manager.save()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        t.handler.run(t.step)
    assert sorted(os.listdir(tmp_path)) == ["ckpt-1", "ckpt-2"]
    assert newest(tmp_path)["v"] == 1.0


def test_without_a_signal_nothing_is_saved(tmp_path):
    t = Training(tmp_path)
    for k in range(3):
        assert t.handler.run(t.step) == k + 1.0
    assert t.handler.total_run_calls == 3
    assert os.listdir(tmp_path) == []
    t.handler.close()


def test_arguments_and_results_pass_through(tmp_path):
    t = Training(tmp_path)
    assert t.handler.run(lambda a, b=0: (a, b), 1, b=2) == (1, 2)
    t.handler.close()


def test_an_error_of_the_step_passes_and_does_not_count(tmp_path):
    t = Training(tmp_path)

    def fail():
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        t.handler.run(fail)
    assert t.handler.total_run_calls == 0
    t.handler.close()


def test_the_interval_of_the_manager_does_not_matter(tmp_path):
    t = Training(tmp_path, interval=100)
    t.handler.run(t.step)
    assert t.manager.save() is not None
    t.signal_in = 2.0
    with pytest.raises(SystemExit):
        t.handler.run(t.step)
    assert newest(tmp_path)["v"] == 2.0


def test_steps_by_hand_count_on_after_a_restart(tmp_path):
    t = Training(tmp_path)
    t.handler.run(t.step)
    t.manager.save()  # an ordinary save in between
    t.manager.sync()
    t.handler.close()
    again = Training(tmp_path)
    assert again.v.numpy() == 1.0
    assert again.handler.total_run_calls == 1
    again.handler.close()


# Loops that do not use `run` --------------------------------------------------------------------


def test_saving_at_the_end_of_each_step(tmp_path):
    t = Training(tmp_path)
    t.signal_in = 2.0
    with pytest.raises(SystemExit) as caught:
        for _ in range(4):
            t.step()
            t.handler.save_checkpoint_if_preempted()
    assert caught.value.code == 42
    assert newest(tmp_path)["v"] == 2.0
    again = Training(tmp_path)
    assert again.handler.total_run_calls == 2
    again.handler.close()


def test_what_is_passed_on_to_save(tmp_path):
    t = Training(tmp_path)
    t.signal_in = 1.0
    t.step()
    with pytest.raises(SystemExit):
        t.handler.save_checkpoint_if_preempted(checkpoint_number=77)
    assert os.listdir(tmp_path) == ["ckpt-77"]


def test_a_block_after_which_it_is_saved(tmp_path):
    t = Training(tmp_path)
    with t.handler.watch_preemption_scope():
        t.step()
    assert os.listdir(tmp_path) == []
    t.signal_in = 2.0
    with pytest.raises(SystemExit):
        with t.handler.watch_preemption_scope():
            t.step()
    assert newest(tmp_path)["v"] == 2.0


def test_a_block_that_fails_passes_its_error(tmp_path):
    t = Training(tmp_path)
    with pytest.raises(KeyError):
        with t.handler.watch_preemption_scope():
            raise KeyError("boom")
    t.handler.close()
    assert os.listdir(tmp_path) == []


# How it ends -----------------------------------------------------------------------------------


def test_an_exit_of_ones_own(tmp_path):
    called = []
    t = Training(tmp_path, exit_fn=lambda: called.append(latest_checkpoint(tmp_path)))
    t.signal_in = 2.0
    for _ in range(5):
        t.handler.run(t.step)
    assert called == [str(tmp_path / "ckpt-1")]  # on the disk before, and once
    assert t.v.numpy() == 5.0
    assert t.manager.checkpoints == [str(tmp_path / "ckpt-1")]
    assert newest(tmp_path)["v"] == 2.0


def test_a_save_of_ones_own(tmp_path):
    t = Training(tmp_path, save_fn=lambda *args, **kwargs: calls.append((args, kwargs)))
    calls = []
    t.signal_in = 1.0
    t.step()
    with pytest.raises(SystemExit):
        t.handler.save_checkpoint_if_preempted(1, a=2)
    assert calls == [((1,), {"a": 2})]
    assert os.listdir(tmp_path) == []


def test_a_last_save_that_fails_does_not_end_the_program_in_silence(
    tmp_path, monkeypatch
):
    t = Training(tmp_path)
    t.handler.run(t.step)

    def fail(*args):
        raise ValueError("x [os_error_code='28']")

    monkeypatch.setattr("mirrax._src.train.array_files.saving", fail)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(OSError, match="No space left on device"):
        t.handler.run(t.step)
    t.handler.close()


def test_time_that_is_left_is_used(tmp_path):
    t = Training(tmp_path, grace_period=2.0)
    for _ in range(50):  # the first one, which compiles, is not typical
        t.handler.run(t.step)
    os.kill(os.getpid(), signal.SIGTERM)
    started = time.monotonic()
    t.handler.run(lambda: (t.step(), time.sleep(0.01)))
    assert newest(tmp_path)["v"] == 50.0  # at once, whatever comes
    with pytest.raises(SystemExit):
        for _ in range(1000):
            t.handler.run(lambda: (t.step(), time.sleep(0.01)))
    assert time.monotonic() - started > 0.5
    assert sorted(os.listdir(tmp_path)) == ["ckpt-1", "ckpt-2"]
    assert newest(tmp_path)["v"] == t.v.numpy() > 55.0


def test_no_time_that_is_left(tmp_path):
    t = Training(tmp_path, grace_period=0.0)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        t.handler.run(t.step)
    assert os.listdir(tmp_path) == ["ckpt-1"]


# How it is noticed -------------------------------------------------------------------------------


def test_a_watcher_is_asked_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.01)
    asked = []

    def watch():
        asked.append(1)
        return len(asked) > 3

    before = signal.getsignal(signal.SIGTERM)
    t = Training(tmp_path, termination_watcher_fn=watch)
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(SystemExit) as caught:
        for _ in range(1000):
            t.handler.run(t.step)
            time.sleep(0.01)
    assert caught.value.code == 42
    assert len(asked) == 4
    assert newest(tmp_path)["v"] == t.v.numpy()


def test_closing_stops_the_watcher(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.01)
    t = Training(tmp_path, termination_watcher_fn=lambda: False)
    assert [th for th in threading.enumerate() if th.name == "mirrax-preemption"]
    t.handler.run(t.step)
    t.handler.close()
    for thread in threading.enumerate():
        if thread.name == "mirrax-preemption":
            thread.join(SECONDS_TO_HANG)
            assert not thread.is_alive()
    t.handler.run(t.step)
    assert os.listdir(tmp_path) == []


def test_closing_gives_the_signal_back(tmp_path):
    seen = []

    def mine(number, frame):
        seen.append(number)

    old = signal.signal(signal.SIGTERM, mine)
    try:
        t = Training(tmp_path)
        assert signal.getsignal(signal.SIGTERM) is not mine
        t.handler.close()
        assert signal.getsignal(signal.SIGTERM) is mine
        t.handler.close()  # twice is fine
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        t.handler.run(t.step)
        assert os.listdir(tmp_path) == []
    finally:
        signal.signal(signal.SIGTERM, old)


def test_a_handler_made_in_another_thread(tmp_path):
    errors = []

    def make():
        try:
            Training(tmp_path)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(SECONDS_TO_HANG)
    assert "must be made in the main thread" in errors[0]


def test_arguments_that_make_no_sense(tmp_path):
    checkpoint = Checkpoint(v=mx.Variable(1.0))
    with pytest.raises(ValueError, match="`checkpoint_dir` is needed"):
        PreemptionCheckpointHandler(None, checkpoint)
    with pytest.raises(TypeError, match="`cluster_resolver` must be that of the"):
        PreemptionCheckpointHandler(object(), checkpoint, tmp_path)
    config = TerminationConfig()
    assert config.exit_fn is config.save_fn is config.grace_period is None
    assert config.termination_watcher_fn is None


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    t = Training(tmp_path)
    for _ in range(2):
        t.handler.run(t.step)
        t.manager.save()
    t.manager.sync()
    t.handler.close()
    (tmp_path / "ckpt-2" / "mirrax.json").write_text("garbage")
    with pytest.warns(UserWarning, match="ckpt-2 is damaged"):
        again = Training(tmp_path)
    assert again.v.numpy() == 1.0
    again.handler.close()


# Real processes ----------------------------------------------------------------------------------

SETUP = """
import time

def train(directory, steps, pause=0.005, save_every=None, **config):
    mx.config.set_logical_device_configuration(cpu=2)
    strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        w = mx.Variable(jnp.arange(4.0), name="w")
        optimizer = mx.train.Optimizer(optax.adam(0.1))
    dataset = mx.data.Dataset.from_tensor_slices(
        np.random.default_rng(0).random((400, 4), "float32")
    ).shuffle(400, seed=1).repeat().batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    checkpoint = mx.train.Checkpoint(w=w, optimizer=optimizer, iterator=iterator)
    manager = mx.train.CheckpointManager(checkpoint, directory, 2)
    handler = mx.train.PreemptionCheckpointHandler(
        None, manager, termination_config=mx.train.TerminationConfig(**config)
    )
    print("start", handler.total_run_calls, flush=True)

    @mx.function
    def replica_step(x):
        gradient = mx.grad(lambda: jnp.sum(jnp.sin(x @ w)), w)()
        optimizer.apply_gradients([(gradient, w)])

    def step():
        time.sleep(pause / 2)
        strategy.run(replica_step, args=(next(iterator),))
        time.sleep(pause / 2)

    while handler.total_run_calls < steps:
        handler.run(step)
        if save_every and handler.total_run_calls % save_every == 0:
            manager.save()
        print("step", handler.total_run_calls, flush=True)
    handler.close()
    iterator.close()
    manager.sync()
    slots = [s.numpy().tobytes().hex() for s in optimizer.variables]
    print("end", w.numpy().tobytes().hex(), *slots, flush=True)
"""


@pytest.fixture(scope="module")
def zygote():
    with Zygote(SETUP) as zygote:
        yield zygote


def final(child):
    assert child.wait() == 0, child.output
    return next(x for x in child.output.splitlines() if x.startswith("end"))


@pytest.mark.parametrize("save_every", [None, 3])
def test_training_that_is_interrupted_again_and_again_ends_the_same(
    save_every, zygote, tmp_path
):
    steps = 24
    expected = final(zygote.start(f"train({str(tmp_path / 'whole')!r}, {steps})"))
    rng = random.Random(save_every)
    directory = str(tmp_path / "parts")
    code = f"train({directory!r}, {steps}, save_every={save_every})"
    starts = []
    for k in range(2):
        child = zygote.start(code)
        child.wait_for("start")
        child.wait_for(f"step {8 * (k + 1)}\n")
        time.sleep(rng.uniform(0, 0.02))
        child.send(signal.SIGTERM)
        if k % 2:
            child.send(signal.SIGTERM)
        assert child.wait() == 42, child.output
        last = child.output.splitlines()[-1].split()
        saved = newest(directory)
        assert saved["checkpointed_runs"] == saved["optimizer/iterations"]
        assert saved["checkpointed_runs"] - int(last[1]) in (0, 1)
        starts.append(saved["checkpointed_runs"])
    child = zygote.start(code)
    assert final(child) == expected
    assert f"start {starts[-1]}\n" in child.output
    assert starts == sorted(set(starts))


def test_a_signal_at_the_very_start(zygote, tmp_path):
    """Restored, but no step was made: the optimizer's state is not lost."""
    expected = final(zygote.start(f"train({str(tmp_path / 'whole')!r}, 12)"))
    code = f"train({str(tmp_path / 'parts')!r}, 12, pause=0.05)"
    child = zygote.start(code)
    child.wait_for("step 5\n")
    child.send(signal.SIGTERM)
    assert child.wait() == 42, child.output
    for _ in range(2):
        child = zygote.start(code)
        child.wait_for("start")
        child.send(signal.SIGTERM)
        assert child.wait() == 42, child.output
    assert final(zygote.start(code)) == expected


def test_a_program_that_is_killed_after_the_grace_period_has_saved(zygote, tmp_path):
    child = zygote.start(
        f"train({str(tmp_path)!r}, 10_000, pause=0.01, grace_period=30)"
    )
    child.wait_for("step 5\n")
    child.send(signal.SIGTERM)
    child.wait_for("step 9\n")
    child.kill()
    saved = newest(tmp_path)
    assert 5 <= saved["checkpointed_runs"] == saved["optimizer/iterations"] <= 9


def test_jax_is_unharmed_by_a_signal_in_a_compiled_step(tmp_path):
    t = Training(tmp_path)
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(SystemExit):
        while t.handler.total_run_calls < 100_000:
            t.handler.run(t.step)
    timer.join()
    doubled = t.strategy.run(mx.function(lambda: 2 * t.v.read_value()))
    assert parts(t.strategy, doubled) == [2 * newest(tmp_path)["v"]] * 2
    assert jnp.isfinite(t.v.read_value())
