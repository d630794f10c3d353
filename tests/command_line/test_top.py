"""`mirrax top`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mirrax._src.command_line import jobs, top
from mirrax._src.command_line.commands import commands

from .launching import ROOT, Launcher

# Worker 0 looks at the job in the middle of it, without the secret that a worker has.
JOB = f"""
sys.path.insert(0, {str(ROOT)!r})
import jax.numpy as jnp
import mirrax as mx
strategy = mx.distribute.MultiWorkerMirroredStrategy(heartbeat=100, step_timeout=200)
with strategy.scope():
    v = mx.Variable(0.0, aggregation=mx.VariableAggregation.SUM)
add = mx.function(lambda: v.assign_add(jnp.float32(1.0), read_value=False))
for step in range(3):
    strategy.run(add)
checkpoint = mx.train.Checkpoint(v=v)
manager = mx.train.CheckpointManager(checkpoint, sys.argv[1], max_to_keep=1)
manager.save()
manager.sync()
if me == 0:
    from click.testing import CliRunner
    from mirrax._src.command_line.commands import commands
    secret, address = os.environ.pop("MIRRAX_SECRET"), config["cluster"]["worker"][0]
    def top(*arguments, **variables):
        print("RAN", json.dumps(CliRunner().invoke(
            commands, ["top", *arguments], env=variables).output), flush=True)
    end = time.monotonic() + 100
    while time.monotonic() < end:  # until both have said where they are: worker 1 waits
        found = json.loads(CliRunner().invoke(commands, ["top", "--json"]).output)
        rows = found["workers"]
        steps = [row.get("step") for row in rows if row.get("memory")]
        if steps == [3, 4] and rows[1]["waits_in"] and not rows[0]["waits_in"]:
            break
        time.sleep(0.2)
    top("--once")
    top(address, "--once")
    top("--json")
    elsewhere = {{"XDG_STATE_HOME": sys.argv[1]}}
    top("--once", **elsewhere)
    top(address, "--once", **elsewhere)
    top(address, "--once", MIRRAX_SECRET="x" * 20, **elsewhere)
    top(address, "--once", MIRRAX_SECRET=secret, **elsewhere)
strategy.run(add)
print("value", float(v.numpy()))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_running_job_is_found_and_shown(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    done = launcher(JOB, arguments=(str(folder),))
    assert done.code == 0, done.out + done.err
    assert "value 8.0" in done.lines_of(1)  # nothing was disturbed
    lines = [line for line in done.lines_of(0) if line.startswith("RAN ")]
    found = [json.loads(line.removeprefix("RAN ")) for line in lines]
    once, by_address, as_json, none, no_secret, wrong, known = found
    for shown in (once, by_address):
        rows = [line for line in shown.splitlines() if line.rstrip().endswith("MiB")]
        assert len(rows) == 2, shown
        assert "train.py:" in shown and "MiB" in shown and "train.py" in shown
        assert "Last checkpoint:" in shown and "step 3" in shown
        assert str(folder) in shown.replace("\n", "")
    workers = json.loads(as_json)["workers"]
    assert [row["step"] for row in workers] == [3, 4]
    assert workers[0]["waits_in"] == "" and "lambda" in workers[1]["waits_in"]
    assert all(row["memory"] > 2**20 and 0 <= row["occupied"] <= 1 for row in workers)
    assert all("mark" not in row for row in workers)
    assert "No job of yours" in none
    assert "worker 0 has a secret, but this process has none" in no_secret
    assert "worker 0 has a different secret from this process" in wrong
    assert "MiB" in known and "Error" not in known


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "mirrax" / "jobs"


def a_job(address: str = "127.0.0.1:1", pid: int = 0) -> jobs.Job:
    return jobs.Job(address, "secret", "train.py --fast", "/logs", pid or os.getpid())


def test_only_its_user_can_read_a_job_and_it_is_gone_at_the_end(state: Path) -> None:
    with jobs.announced(a_job()):
        (path,) = state.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        assert state.stat().st_mode & 0o777 == 0o700
        assert jobs.running_jobs() == [a_job()]
    assert not list(state.iterdir()) and jobs.running_jobs() == []


def test_what_a_killed_job_has_left_is_no_job(state: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    state.mkdir(parents=True)
    left = state / f"{socket.gethostname()}-{ended.pid}.json"
    left.write_text("{}")
    (state / f"another-host-{ended.pid}.json").write_text("{}")
    (state / f"{socket.gethostname()}-{os.getpid()}.json").write_text("nonsense")
    assert jobs.running_jobs() == []
    assert not left.exists()
    assert (state / f"another-host-{ended.pid}.json").exists()


def test_a_state_directory_that_cannot_be_written_stops_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with jobs.announced(a_job()):
        assert jobs.running_jobs() == []


def run_top(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(commands, ["top", *arguments])
    return done.exit_code, done.output


@pytest.mark.usefixtures("state")
def test_errors_say_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run_top("--once")
    assert code == 1 and "mirrax top HOST:PORT" in text.replace("\n", " ")
    code, text = run_top("nowhere")
    assert code == 2 and "'nowhere' is not an address such as 10.0.0.5:12345" in text
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    for arguments in (["--once"], []):
        code, text = run_top(address, *arguments)
        assert code == 1 and f"No roster answers at {address}" in text
    monkeypatch.setenv("MIRRAX_SECRET", "short")
    code, text = run_top(address, "--once")
    assert code == 1 and "MIRRAX_SECRET has 5 characters" in text


@pytest.mark.usefixtures("state")
def test_several_jobs_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [a_job("127.0.0.1:1"), a_job("127.0.0.1:2", pid=os.getppid())]
    with jobs.announced(both[0]), jobs.announced(both[1]):
        code, text = run_top("--once")
        assert code == 1
        for job in both:
            assert f"mirrax top {job.address}   train.py --fast" in text
        assert top.find_job("127.0.0.1:2") == both[1]
    with jobs.announced(both[0]):
        code, text = run_top("--once")
    assert code == 1 and "The job's workers are starting" in text


def picture(**of_worker_1: Any) -> dict[str, Any]:
    row = {"state": "joined", "silent": 0.1, "doing": "train.py:3", "rate": 2.0}
    row |= {"occupied": 0.5, "process": "process 1 on a", "memory": 3 << 30}
    rows = [{**row, "worker": k, "address": f"a:{k}", "step": 1200} for k in range(2)]
    rows[1] |= of_worker_1
    return {"workers": rows, "has_started": True, "failure": None, "saved": None}


def shown(content: dict[str, Any], width: int = 200) -> str:
    from rich.console import Console

    console = Console(width=width)
    with console.capture() as captured:
        console.print(top.table_of(a_job(), content))
    return captured.get()


def test_a_row_says_what_a_worker_does() -> None:
    text = shown(picture(step=1190, waits_in="train_step(float32[256, 784])"))
    assert "train_step(float32[256, 784])" in text and "3.0 GiB" in text
    first, second = (line.split() for line in text.splitlines() if "train.py:3" in line)
    assert first[:5] == ["0", "1", "1,200", "2", "0"]
    assert second[:5] == ["1", "1", "1,190", "2", "10"]
    text = shown(picture(process="process 1 on b"))
    assert "1 on a" in text and "1 on b" in text
    assert "°C" not in text and "device memory" not in text and "No checkpoint" in text
    text = shown(picture(celsius=71, device_memory=5 << 30, device_limit=80 << 30))
    assert "71" in text and "5.0 GiB of 80.0 GiB" in text
    assert "silent for 30 s" in shown(picture(silent=30.0))
    assert "process gone" in shown(picture(state="gone"))
    failed = picture() | {"failure": "worker 1 is gone"}
    failed["saved"] = {"path": "/c/ckpt-3", "step": 30, "seconds": 150.0}
    text = shown(failed)
    assert "Last checkpoint: /c/ckpt-3, written at step 30, 2 min ago" in text
    assert "Failed: worker 1 is gone" in text


def test_on_a_narrow_terminal_only_the_program_is_cut() -> None:
    text = shown(picture(waits_in="train_step(float32[256, 784], int32[256])"), 80)
    assert len(text.splitlines()) == 6, text  # no row is broken
    assert "train.py:3" in text and "1,200" in text and "train_…" in text


def test_who_has_not_joined_is_shown() -> None:
    content = picture()
    content["workers"][1] = {"worker": 1, "address": "b:1", "state": "missing"}
    assert "has not joined yet" in shown(content)


def test_live_ends_with_the_job(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    announced = jobs.announced(a_job())
    announced.__enter__()

    def look(job: jobs.Job) -> dict[str, Any] | None:
        looks.append(job)
        if len(looks) == 3:
            announced.__exit__(None, None, None)
        return picture() if len(looks) == 2 else None

    monkeypatch.setattr(top, "look", look)
    monkeypatch.setattr(top, "_PAUSE_SECONDS", 0.0)
    code, text = run_top()
    assert code == 0 and text.endswith("The job has ended.\n")
    assert len(looks) == 3 and not list(state.iterdir())
