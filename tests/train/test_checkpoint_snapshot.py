"""A checkpoint is what was there when `save` was called; a thread writes it meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import both_engines, compile_if, mirrored, parts
from helpers.scripts import run_script
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx
from mirrax._src.train import array_files, storage
from mirrax.train import Checkpoint, CheckpointOptions, latest_checkpoint

FULL = (
    'RESOURCE_EXHAUSTED: Error writing "x/d/0": Error calling write: '
    "No space left on device [os_error_code='28']"
)


@contextlib.contextmanager
def slow_writer(monkeypatch):
    """Nothing is written inside the block; then all of it is."""
    go = threading.Event()
    write = storage._write_files

    def wait_and_write(*args):
        assert go.wait(SECONDS_TO_HANG)
        write(*args)

    monkeypatch.setattr(storage, "_write_files", wait_and_write)
    try:
        yield
    finally:
        go.set()
        monkeypatch.setattr(storage, "_write_files", write)


@contextlib.contextmanager
def broken_writer(monkeypatch, error):
    """What is written inside the block fails."""

    def fail(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(array_files, "saving", fail)
        yield
        mx.train.latest_checkpoint("/")  # waits, and keeps the error


def fails_like_a_full_disk(monkeypatch):
    return broken_writer(monkeypatch, ValueError(FULL))


def left(directory):
    """All that is in a directory, hidden or not."""
    return sorted(os.listdir(directory))


# Snapshots ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
@both_engines
def test_steps_while_it_is_written(n, engine, tmp_path, monkeypatch):
    strategy = mirrored(n)
    with strategy.scope():
        small = mx.Variable(jnp.zeros(4))
        large = mx.Variable(jnp.zeros(100_000))
        total = mx.Variable(
            0.0,
            synchronization=mx.VariableSynchronization.ON_READ,
            aggregation=mx.VariableAggregation.SUM,
        )
    alone = mx.Variable(0.0)
    variables = [small, large, total]

    def replica_step():
        for v in variables:
            v.assign_add(jnp.ones(v.shape), read_value=False)

    step = compile_if(engine, replica_step)
    checkpoint = Checkpoint(small=small, large=large, total=total, alone=alone)

    def train(count):
        for _ in range(count):
            strategy.run(step)
            alone.assign_add(1.0)

    train(3)
    paths = []
    with slow_writer(monkeypatch):
        paths.append(checkpoint.save(tmp_path / "c"))
        train(4)
    paths.append(checkpoint.save(tmp_path / "c"))
    train(2)
    for path, expected in zip(paths, (3, 7)):
        saved = mx.train.load_checkpoint(path)
        assert set(saved["small"]) == set(saved["large"]) == {expected}
        assert saved["total"] == expected * n
        assert saved["alone"] == expected
    assert set(large.numpy()) == {9.0}


def test_functional_state_that_is_donated_while_it_is_written(tmp_path, monkeypatch):
    strategy = mirrored(2)
    params = {"w": jnp.zeros(100_000), "b": jnp.zeros(3)}
    state = strategy.replicate((params, optax.adam(0.1).init(params)))
    step = mx.function(
        lambda s: jax.tree.map(lambda x: x + jnp.ones_like(x), s), donate_argnums=0
    )
    for _ in range(2):
        state = strategy.run(step, (state,))
    checkpoint = Checkpoint(state=state, alone=jnp.zeros(100_000))
    with slow_writer(monkeypatch):
        path = checkpoint.save(tmp_path / "c")
        alone = jax.jit(lambda x: x + 1, donate_argnums=0)(checkpoint.alone)
        for _ in range(3):
            state = strategy.run(step, (state,))
    saved = mx.train.load_checkpoint(path)
    assert {n: set(np.ravel(a)) for n, a in saved.items() if "state" in n} == {
        "state/0/b": {2.0},
        "state/0/w": {2.0},
        "state/1/0/count": {2},
        "state/1/0/mu/b": {2.0},
        "state/1/0/mu/w": {2.0},
        "state/1/0/nu/b": {2.0},
        "state/1/0/nu/w": {2.0},
    }
    assert set(saved["alone"]) == {0.0} and set(np.asarray(alone)) == {1.0}


def test_what_is_changed_in_place_while_it_is_written(tmp_path, monkeypatch):
    class Counter:
        def __init__(self):
            self.state = {"seen": [1]}

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state = state

    array, counter, numbers = np.zeros(4), Counter(), {"a": [1, 2]}
    iterator = iter(mx.data.Dataset.range(9))
    next(iterator)
    checkpoint = Checkpoint(x=array, counter=counter, n=numbers, it=iterator)
    with slow_writer(monkeypatch):
        path = checkpoint.save(tmp_path / "c")
        array += 7
        counter.state["seen"].append(2)
        numbers["a"][0] = 99
        numbers["a"].append(3)
        next(iterator)
        checkpoint.x = np.ones(4)
    saved = mx.train.load_checkpoint(path)
    assert saved["x"].tolist() == [0.0] * 4
    assert saved["counter"] == {"seen": [1]}
    assert saved["n/a/0"] == 1 and "n/a/2" not in saved
    iterator.set_state(saved["it"])
    assert next(iterator) == 1


def test_a_key_that_is_donated_while_it_is_written(tmp_path, monkeypatch):
    key = jax.random.key(5)
    expected = np.asarray(jax.random.key_data(key))
    checkpoint = Checkpoint(key=key)
    with slow_writer(monkeypatch):
        path = checkpoint.save(tmp_path / "c")
        jax.jit(lambda k: jax.random.split(k)[0], donate_argnums=0)(key)
    saved = mx.train.load_checkpoint(path)["key"]
    np.testing.assert_array_equal(jax.random.key_data(saved), expected)


def test_what_was_donated_already_cannot_be_saved(tmp_path):
    x = jnp.zeros(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    checkpoint = Checkpoint(v=mx.Variable(1.0), params=x)
    with pytest.raises(RuntimeError, match="deleted|donated") as caught:
        checkpoint.save(tmp_path / "c")
    assert "'params'; nothing was saved" in caught.value.__notes__[-1]
    assert left(tmp_path) == []


def test_an_optimizer_that_trains_on_while_it_is_written(tmp_path, monkeypatch):
    strategy = mirrored(2)
    with strategy.scope():
        w = mx.Variable(jnp.ones(3), name="w")
        optimizer = mx.train.Optimizer(
            optax.sgd(0.5, momentum=0.5), gradient_accumulation_steps=2
        )

    @mx.function
    def step():
        optimizer.apply_gradients([(jnp.ones(3), w)])

    for _ in range(3):
        strategy.run(step)
    checkpoint = Checkpoint(w=w, optimizer=optimizer)
    before = {v.name: parts(strategy, v) for v in optimizer.variables}
    with slow_writer(monkeypatch):
        path = checkpoint.save(tmp_path / "c")
        for _ in range(2):
            strategy.run(step)
    assert {v.name: parts(strategy, v) for v in optimizer.variables} != before
    checkpoint.restore(path).assert_consumed()
    assert {v.name: parts(strategy, v) for v in optimizer.variables} == before


# The thread -----------------------------------------------------------------------------


def test_save_returns_before_the_data_is_on_the_disk(tmp_path, monkeypatch):
    v = mx.Variable(1.0)
    checkpoint = Checkpoint(v=v)
    with slow_writer(monkeypatch):
        path = checkpoint.save(tmp_path / "c")
        assert not os.path.exists(path)
        assert checkpoint.save_counter.numpy() == 1
    checkpoint.sync()
    assert os.path.exists(path)
    assert left(tmp_path) == ["c-1"]


@pytest.mark.parametrize("what", ["save", "restore", "latest", "load", "manager"])
def test_what_needs_the_data_waits_for_it(what, tmp_path, monkeypatch):
    v = mx.Variable(1.0)
    checkpoint = Checkpoint(v=v)
    manager = mx.train.CheckpointManager(checkpoint, tmp_path, 3, checkpoint_name="c")
    waits = {
        "save": lambda: checkpoint.save(tmp_path / "c"),
        "restore": lambda: checkpoint.restore(tmp_path / "c-1"),
        "latest": lambda: latest_checkpoint(tmp_path),
        "load": lambda: mx.train.load_checkpoint(tmp_path / "c-1"),
        "manager": lambda: manager.checkpoints,
    }
    with slow_writer(monkeypatch):
        path = manager.save()
        waiting = threading.Thread(target=waits[what])
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
    waiting.join(SECONDS_TO_HANG)
    assert not waiting.is_alive()
    assert path is not None and os.path.exists(path)


def test_waiting_is_an_option(tmp_path):
    options = CheckpointOptions(experimental_enable_async_checkpoint=False)
    path = Checkpoint(v=mx.Variable(1.0)).save(tmp_path / "c", options)
    assert os.path.exists(path)
    path = Checkpoint(v=mx.Variable(1.0)).write(tmp_path / "w", options)
    assert os.path.exists(path)


def test_saving_from_many_threads(tmp_path):
    def save(k):
        Checkpoint(v=mx.Variable(float(k))).write(tmp_path / f"c{k}")

    threads = [threading.Thread(target=save, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS_TO_HANG)
    for k in range(6):
        assert mx.train.load_checkpoint(tmp_path / f"c{k}")["v"] == k


# A save that fails ----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["sync", "save"])
def test_an_error_of_the_thread_is_raised_once(what, tmp_path, monkeypatch):
    v = mx.Variable(1.0)
    checkpoint = Checkpoint(v=v)
    first = checkpoint.save(tmp_path / "c")
    checkpoint.sync()
    v.assign(2.0)
    with fails_like_a_full_disk(monkeypatch):
        failed = checkpoint.save(tmp_path / "c")
    act = {
        "sync": checkpoint.sync,
        "save": lambda: checkpoint.save(tmp_path / "c"),
        "restore": lambda: checkpoint.restore(first),
    }[what]
    with pytest.raises(OSError, match="c-2 could not be written") as caught:
        act()
    assert caught.value.errno == errno.ENOSPC
    assert "Earlier checkpoints are untouched; make room" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    checkpoint.sync()
    assert left(tmp_path) == ["c-1"]
    assert latest_checkpoint(tmp_path) == first
    with pytest.raises(FileNotFoundError):
        checkpoint.restore(failed)
    assert v.numpy() == 2.0
    v.assign_add(1.0)
    again = checkpoint.save(tmp_path / "c")
    checkpoint.sync()
    assert latest_checkpoint(tmp_path) == again
    assert mx.train.load_checkpoint(again)["v"] == 3.0
    assert mx.train.load_checkpoint(first)["v"] == 1.0


def test_an_error_that_is_no_systems_error_passes_through(tmp_path, monkeypatch):
    checkpoint = Checkpoint(v=mx.Variable(1.0))
    with broken_writer(monkeypatch, KeyError("odd")):
        checkpoint.save(tmp_path / "c")
    with pytest.raises(KeyError, match="odd"):
        checkpoint.sync()
    assert left(tmp_path) == []
    checkpoint.save(tmp_path / "c")
    checkpoint.sync()


def test_waiting_in_place_raises_at_once(tmp_path, monkeypatch):
    options = CheckpointOptions(experimental_enable_async_checkpoint=False)
    checkpoint = Checkpoint(v=mx.Variable(1.0))
    with fails_like_a_full_disk(monkeypatch):
        with pytest.raises(OSError, match="No space left on device"):
            checkpoint.save(tmp_path / "c", options)
    checkpoint.sync()
    assert left(tmp_path) == []


def test_training_goes_on_after_a_failed_save(tmp_path, monkeypatch):
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(jnp.zeros(3))
    step = mx.function(lambda: v.assign_add(jnp.ones(3), read_value=False))
    checkpoint = Checkpoint(v=v)
    strategy.run(step)
    with fails_like_a_full_disk(monkeypatch):
        checkpoint.save(tmp_path / "c")
        strategy.run(step)
    with pytest.raises(OSError, match="could not be written"):
        checkpoint.sync()
    strategy.run(step)
    assert parts(strategy, v) == [[3.0] * 3] * 2


@pytest.mark.parametrize("parent", ["file", "file/deeper", "link"])
def test_a_file_in_the_way(parent, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    checkpoint = Checkpoint(v=mx.Variable(1.0))
    with pytest.raises(OSError, match="c-1 cannot be written.*Nothing has been saved"):
        checkpoint.save(tmp_path / parent / "c")
    assert (tmp_path / "file").read_text() == "mine"
    assert checkpoint.save_counter.numpy() == 0
    assert checkpoint.save(tmp_path / "c").endswith("c-1")


@pytest.mark.parametrize("directory", ["/proc", "/sys", "/dev/null/x"])
def test_a_place_where_nothing_can_be_written(directory):
    checkpoint = Checkpoint(v=mx.Variable(1.0))
    with pytest.raises(OSError, match=f"{directory}/c-1 cannot be written"):
        checkpoint.save(f"{directory}/c")
    assert checkpoint.save_counter.numpy() == 0


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_no_checkpoint_is_not_overwritten(kind, tmp_path):
    place = tmp_path / "c-1"
    if kind == "file":
        place.write_text("mine")
    else:
        place.mkdir()
        (place / "mine").write_text("mine")
    checkpoint = Checkpoint(v=mx.Variable(1.0))
    with pytest.raises(OSError, match="no checkpoint|already something"):
        checkpoint.save(tmp_path / "c")
        checkpoint.sync()
    kept = place if kind == "file" else place / "mine"
    assert kept.read_text() == "mine"
    assert left(tmp_path) == ["c-1"]
    checkpoint.save(tmp_path / "d")
    checkpoint.sync()


def test_an_empty_directory_of_that_name_is_taken(tmp_path):
    (tmp_path / "c-1").mkdir()
    path = Checkpoint(v=mx.Variable(3.0)).save(tmp_path / "c")
    assert mx.train.load_checkpoint(path)["v"] == 3.0


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_directory_is_deleted_while_it_is_written(when, tmp_path, monkeypatch):
    checkpoint = Checkpoint(v=mx.Variable(1.0))
    write = storage._write_files

    def delete_and_write(*args):
        if when == "before":
            shutil.rmtree(tmp_path / "runs")
        write(*args)
        if when == "after":
            shutil.rmtree(tmp_path / "runs")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "_write_files", delete_and_write)
        path = checkpoint.save(tmp_path / "runs" / "c")
        latest_checkpoint(tmp_path)
    try:
        checkpoint.sync()
    except OSError as error:
        assert f"{path} could not be written" in str(error)
        assert not os.path.exists(path)
    else:
        assert mx.train.load_checkpoint(path)["v"] == 1.0
    again = checkpoint.save(tmp_path / "runs" / "c")
    assert mx.train.load_checkpoint(again)["v"] == 1.0
    assert not [name for name in left(tmp_path / "runs") if name.startswith(".")]


# Real limits, in processes of their own --------------------------------------------------

LIMITED = """
    import os, sys
    import mirrax as mx
    import jax.numpy as jnp

    directory = {directory!r}
    small, large = mx.Variable(jnp.ones(3)), mx.Variable(jnp.ones({size}))
    checkpoint = mx.train.Checkpoint(v=small)
    first = checkpoint.save(directory + "/c")
    checkpoint.sync()
    {before}
    checkpoint.large = large
    failed = checkpoint.save(directory + "/c")
    try:
        checkpoint.sync()
        print("NO ERROR")
    except OSError as error:
        print(type(error).__name__, error.errno, error)
    {after}
    del checkpoint.large
    assert mx.train.latest_checkpoint(directory) == first
    small.assign(2 * jnp.ones(3))
    again = checkpoint.save(directory + "/c")
    checkpoint.sync()
    assert mx.train.latest_checkpoint(directory) == again
    assert mx.train.load_checkpoint(again)["v"].tolist() == [2.0] * 3
    # TensorStore may still write into what was removed, later than anybody waits for it.
    print(sorted(x for x in os.listdir(directory) if not x.startswith(".c-2.tmp-")))
"""


def run_limited(directory, size=1_000_000, before="", after=""):
    body = LIMITED.format(directory=directory, size=size, before=before, after=after)
    done = run_script(body)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(tmp_path):
    out = run_limited(
        str(tmp_path),
        before="import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))",
    )
    assert f"OSError {errno.EFBIG} " in out
    assert f"{tmp_path}/c-2 could not be written: File too large" in out
    assert "['c-1', 'c-3']" in out


@pytest.mark.slow
def test_a_disk_that_is_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        out = run_limited(str(disk))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert f"OSError {errno.ENOSPC} " in out
    assert "No space left on device. Earlier checkpoints are untouched" in out
    assert "['c-1', 'c-3']" in out


@pytest.mark.slow
def test_a_directory_of_another_user(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    place = tmp_path / "mine"
    place.mkdir(mode=0o755)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        os.chmod(parent, 0o755)
    done = run_script(
        f"""
        import os
        import mirrax as mx

        v = mx.Variable(1.0)
        checkpoint = mx.train.Checkpoint(v=v)
        checkpoint.write({str(tmp_path / "first")!r})  # imports what it needs
        checkpoint.sync()
        os.setuid(65534)
        try:
            checkpoint.save({str(place)!r} + "/c")
        except PermissionError as error:
            print(error)
        v.assign_add(1.0)
        checkpoint.sync()
        print(checkpoint.save_counter.numpy(), v.numpy())
        """
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{place}/c-1 cannot be written: Permission denied" in done.stdout
    assert "0 2.0" in done.stdout
    assert os.listdir(place) == []
