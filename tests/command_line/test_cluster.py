"""`mirrax run` with workers that train together."""

from __future__ import annotations

from pathlib import Path

import pytest

from .launching import ROOT, Launcher

TRAINING = f"""
sys.path.insert(0, {str(ROOT)!r})
import jax.numpy as jnp
import mirrax as mx
strategy = mx.distribute.MultiWorkerMirroredStrategy(heartbeat=60, step_timeout=100)
with strategy.scope():
    v = mx.Variable(0.0, aggregation=mx.VariableAggregation.SUM)
add = mx.function(lambda: v.assign_add(1.0 * jnp.float32(1.0), read_value=False))

def train(steps):
    for step in range(steps):
        strategy.run(add)
        end(step)
        print("step", step, float(v.numpy()), flush=True)

def end(step):
    pass
"""


@pytest.mark.usefixtures("forked")
def test_workers_train_together(launcher: Launcher) -> None:
    done = launcher(TRAINING + "train(2)\n", devices=2)
    assert done.code == 0, done.err
    for worker in range(2):
        assert done.lines_of(worker)[-2:] == ["step 0 4.0", "step 1 8.0"]


def test_each_job_has_a_secret_that_nobody_sees(
    launcher: Launcher, tmp_path: Path
) -> None:
    body = f"""
from pathlib import Path
Path({str(tmp_path)!r}, f"found-{{me}}").write_text(os.environ["MIRRAX_SECRET"])
lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
print("processes", len(lines))
assert not any(os.environ["MIRRAX_SECRET"].encode() in line for line in lines)
"""
    found = set()
    for before in (TRAINING + "train(1)", ""):  # JAX is needed once
        done = launcher(before + body)
        assert done.code == 0, done.err
        first, second = ((tmp_path / f"found-{k}").read_text() for k in range(2))
        assert first == second and len(first) == 64
        assert first not in done.out + done.err
        found.add(first)
    assert len(found) == 2


@pytest.mark.usefixtures("forked")
def test_the_worker_that_raised_is_shown(launcher: Launcher) -> None:
    body = """
def end(step):
    if step == 2 and me == 1:
        raise KeyError("lr")
train(100)
"""
    done = launcher(TRAINING + body, grace_after_failure=30.0)
    assert done.code == 1
    assert "Worker 1 failed first" in done.err and "KeyError: 'lr'" in done.err
    assert 'raise KeyError("lr")' in done.err
    assert "Worker 0: ended because another was lost" in done.err
    assert "killed" not in done.err  # it ended by itself


@pytest.mark.usefixtures("forked")
def test_a_killed_worker_is_shown(launcher: Launcher) -> None:
    body = """
def end(step):
    if step == 2 and me == 0:
        os.kill(os.getpid(), signal.SIGKILL)
train(100)
"""
    done = launcher(TRAINING + body, grace_after_failure=30.0)
    assert done.code == 137
    assert "Worker 0 failed first" in done.err
    assert "Worker 1: ended because another was lost" in done.err


@pytest.mark.usefixtures("forked")
def test_a_restart_goes_on_from_the_last_checkpoint(launcher: Launcher) -> None:
    body = """
checkpoint = mx.train.Checkpoint(v=v)
manager = mx.train.CheckpointManager(checkpoint, "checkpoints", max_to_keep=2)
manager.restore_or_initialize()
print("starts with", float(v.numpy()), "on", size, flush=True)

def end(step):
    manager.save()
    manager.sync()
    if step == 1 and attempt == 0 and me == 1:
        sys.exit(9)

train(3 if attempt else 100)
"""
    done = launcher(
        TRAINING + body.replace('"checkpoints"', repr(str(launcher.folder / "saved"))),
        max_restarts=1,
        grace_after_failure=30.0,
    )
    assert done.code == 0, done.err
    starts = [line for line in done.lines_of(0) if line.startswith("starts")]
    assert starts == ["starts with 0.0 on 2", "starts with 4.0 on 2"], done.err
    assert done.lines_of(0)[-1] == "step 2 10.0"
