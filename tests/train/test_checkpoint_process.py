"""The end of a program: what was saved is on the disk, whatever the end is like."""

from __future__ import annotations

import os
import random
import re
import signal
import time

import pytest
from helpers.forking import Zygote
from helpers.waiting import SECONDS_TO_HANG

from mirrax.errors import DataLossError
from mirrax.train import latest_checkpoint, load_checkpoint

pytestmark = pytest.mark.slow

SETUP = """
import asyncio, atexit, threading, time

def make(size=3):
    # Devices start here, in the process that was forked.
    mx.config.set_logical_device_configuration(cpu=2)
    strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variables = [mx.Variable(jnp.zeros(size)) for _ in range(4)]
    return strategy, mx.train.Checkpoint(variables=variables, step=0)

def slow(seconds):
    from mirrax._src.train import storage
    write = storage._write_files
    def late(*args):
        time.sleep(seconds)
        write(*args)
    storage._write_files = late

def by_manager(directory, max_to_keep=2, number=None):
    \"\"\"Saves by a manager, which goes on where the last one was killed.\"\"\"
    managers = []
    def save(checkpoint):
        if not managers:
            managers.append(mx.train.CheckpointManager(checkpoint, directory, max_to_keep))
        return managers[0].save(number)
    return save

def loop(save, size=3):
    \"\"\"Steps and saves without a pause; all variables have the number of the step.\"\"\"
    strategy, checkpoint = make(size)
    add = mx.function(
        lambda: [v.assign_add(jnp.ones(v.shape), read_value=False) for v in checkpoint.variables]
    )
    while True:
        strategy.run(add)
        checkpoint.step += 1
        path = save(checkpoint)
        if checkpoint.step % 5 == 0:
            checkpoint.sync()
            print("saved", checkpoint.step, flush=True)
"""


@pytest.fixture(scope="module")
def zygote():
    with Zygote(SETUP) as zygote:
        yield zygote


def run(zygote, directory, code, expected=0):
    """Runs the code, with `path` and a `checkpoint` whose writer is slow; its output."""
    lines = "\n".join(line[8:] for line in code.splitlines())
    child = zygote.start(
        f"path = {str(directory / 'c')!r}\n"
        "strategy, checkpoint = make()\n"
        f"slow(0.2)\n{lines}"
    )
    assert child.wait() == expected, child.output
    return child.output


def is_whole(directory, names=("c-1",)):
    assert sorted(os.listdir(directory)) == sorted(names)
    for name in names:
        assert load_checkpoint(directory / name)["step"] == 0
    return True


# The last line of a program -------------------------------------------------------------------


def test_a_save_in_the_last_line(zygote, tmp_path):
    out = run(zygote, tmp_path, "        checkpoint.save(path)")
    assert is_whole(tmp_path) and out == ""


def test_several_saves_in_the_last_lines(zygote, tmp_path):
    out = run(
        zygote,
        tmp_path,
        """
        for _ in range(3):
            checkpoint.save(path)
        """,
    )
    assert is_whole(tmp_path, ("c-1", "c-2", "c-3")) and out == ""


def test_a_program_that_ends_with_an_exception(zygote, tmp_path):
    out = run(
        zygote,
        tmp_path,
        """
        checkpoint.save(path)
        raise KeyError("boom")
        """,
        expected=1,
    )
    assert is_whole(tmp_path) and "KeyError: 'boom'" in out


def test_a_program_that_ends_with_sys_exit(zygote, tmp_path):
    code = """
        checkpoint.save(path)
        sys.exit(7)
        """
    assert run(zygote, tmp_path, code, expected=7) == ""
    assert is_whole(tmp_path)


def test_a_notebook_with_a_running_loop(zygote, tmp_path):
    out = run(
        zygote,
        tmp_path,
        """
        async def cell():
            checkpoint.save(path)
            checkpoint.sync()
            checkpoint.restore(path + "-1").assert_consumed()
            await asyncio.sleep(0.01)
            checkpoint.save(path)
        asyncio.run(cell())
        """,
    )
    assert is_whole(tmp_path, ("c-1", "c-2")) and out == ""


@pytest.mark.parametrize("daemon", [False, True])
def test_a_save_in_another_thread(daemon, zygote, tmp_path):
    out = run(
        zygote,
        tmp_path,
        f"""
        done = threading.Event()
        def work():
            checkpoint.save(path)
            done.set()
            time.sleep(0.1)
        threading.Thread(target=work, daemon={daemon}).start()
        done.wait()
        """,
    )
    assert is_whole(tmp_path) and out == ""


def test_a_thread_that_saves_when_the_main_thread_has_ended(zygote, tmp_path):
    """Python starts no more threads then: the save is done, or says clearly that it is not."""
    out = run(
        zygote,
        tmp_path,
        """
        def work():
            time.sleep(0.5)
            checkpoint.save(path)
        threading.Thread(target=work).start()
        """,
    )
    if "c-1" in os.listdir(tmp_path):
        assert is_whole(tmp_path)
    else:
        assert "program is ending" in out or "not saved" in out
        assert os.listdir(tmp_path) == []


def test_a_save_that_is_registered_for_the_end(zygote, tmp_path):
    out = run(
        zygote, tmp_path, "        atexit.register(lambda: checkpoint.save(path))"
    )
    if "c-1" in os.listdir(tmp_path):
        assert is_whole(tmp_path)
    else:
        assert "program is ending" in out or "not saved" in out
        assert os.listdir(tmp_path) == []


def test_a_last_save_that_fails_is_told(zygote, tmp_path):
    out = run(
        zygote,
        tmp_path,
        """
        from mirrax._src.train import array_files
        def fail(*args):
            raise ValueError("full [os_error_code='28']")
        array_files.saving = fail
        checkpoint.save(path)
        """,
    )
    (line,) = [line for line in out.splitlines() if line.startswith("mirrax: ")]
    assert line.startswith("mirrax: the last checkpoint was not saved: ")
    assert f"{tmp_path}/c-1 could not be written: No space left on device" in line
    assert "Traceback" not in out
    assert os.listdir(tmp_path) == []


def test_an_interrupt_at_the_keyboard(zygote, tmp_path):
    child = zygote.start(
        f"""
strategy, checkpoint = make()
signal = __import__("signal"); signal.signal(signal.SIGINT, signal.default_int_handler)
slow(0.5)
checkpoint.save({str(tmp_path / "c")!r})
print("saving", flush=True)
time.sleep(30)
"""
    )
    child.wait_for("saving")
    child.send(signal.SIGINT)
    assert child.wait() in (1, 130, -signal.SIGINT)
    assert "KeyboardInterrupt" in child.output
    assert is_whole(tmp_path)


# Killed at any moment ---------------------------------------------------------------------------


def consistent(path):
    """The step of a checkpoint, in which all variables are equal to it."""
    found = load_checkpoint(path)
    step = found["step"]
    for k in range(4):
        assert set(found[f"variables/{k}"].tolist()) == {step}
    return step


@pytest.mark.parametrize(
    "way, kills",
    [
        ("lambda c: c.save({path!r} + '/ckpt')", 3),
        ("by_manager({path!r})", 3),
        ("by_manager({path!r}, number=1)", 3),
        ("lambda c: c.write({path!r} + '/ckpt-1')", 3),
    ],
    ids=["save", "manager", "overwrite", "write"],
)
def test_killed_at_any_moment(way, kills, zygote, tmp_path):
    rng = random.Random(0)
    for k in range(kills):
        directory = tmp_path / str(k)
        size = 100_000 if k % 2 else 3
        child = zygote.start(f"loop({way.format(path=str(directory))}, {size})")
        child.wait_for("saved 5")
        time.sleep(rng.uniform(0, 0.3))
        assert child.kill() == -signal.SIGKILL
        printed = map(int, re.findall(r"saved (\d+)\n", child.output))
        newest = latest_checkpoint(directory)
        if "write" in way:  # not one of a series, so its name must be known
            newest = directory / "ckpt-1"
        assert newest is not None
        assert consistent(newest) >= max(printed)
        for name in os.listdir(directory):
            if not name.startswith("."):
                assert consistent(directory / name) >= 1


def test_a_killed_manager_is_followed_by_one_that_cleans_up(zygote, tmp_path):
    rng = random.Random(1)
    code = f"""
strategy, checkpoint = make(100_000)
manager = mx.train.CheckpointManager(checkpoint, {str(tmp_path)!r}, 2)
manager.restore_or_initialize()
for _ in range(1000):
    for v in checkpoint.variables:
        v.assign_add(jnp.ones(v.shape))
    checkpoint.step += 1
    manager.save()
    print("saved", flush=True)
"""
    last = 0
    for _ in range(4):
        child = zygote.start(code)
        child.wait_for("saved\nsaved\n")
        time.sleep(rng.uniform(0, 0.2))
        child.kill()
        newest = latest_checkpoint(tmp_path)
        assert newest is not None
        assert consistent(newest) > last
        last = consistent(newest)
        hidden = [n for n in os.listdir(tmp_path) if n.startswith(".")]
        assert len(hidden) <= 2, hidden


def test_another_process_that_looks_on_always_finds_a_checkpoint(zygote, tmp_path):
    """An evaluation beside a training that keeps one checkpoint."""
    child = zygote.start(f"loop(by_manager({str(tmp_path)!r}, 1))")
    child.wait_for("saved 5\n")
    steps = []
    deadline = time.monotonic() + SECONDS_TO_HANG
    while len(set(steps)) < 12:  # it was saved again and again meanwhile
        assert time.monotonic() < deadline, steps
        newest = latest_checkpoint(tmp_path)
        assert newest is not None
        try:
            steps.append(consistent(newest))
        except (FileNotFoundError, DataLossError):
            continue  # replaced meanwhile
    child.kill()
    assert steps == sorted(steps)
