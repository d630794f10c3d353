"""`mirrax info`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import jax
import pytest
from click.testing import CliRunner, Result
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx
from mirrax._src.command_line import info, measuring, tables
from mirrax._src.command_line.commands import commands

from .launching import ROOT


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures little: these tests are not about speed."""
    monkeypatch.setattr(measuring, "SIZES", (4, 65536))
    monkeypatch.setattr(measuring, "_SECONDS_FOR_EACH", 0.0)
    monkeypatch.setattr(measuring, "_ROUNDS", 1)


def invoke(*arguments: str) -> Result:
    done = CliRunner().invoke(commands, ["info", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def as_json(*arguments: str) -> dict[str, Any]:
    return json.loads(invoke("--json", *arguments).output)


def test_what_it_finds(quick: None) -> None:
    found = as_json()
    assert found["versions"]["jax"] == jax.__version__
    assert "python" in found["versions"] and "tensorflow" not in found["versions"]
    assert [d["name"] for d in found["devices"]] == [f"CPU:{i}" for i in range(8)]
    assert found["cluster"] is None
    assert found["threads"]["cores"]["usable"] >= 1
    measured = found["all_reduce"]
    assert (measured["workers"], measured["replicas"]) == (1, 8)
    assert [row["bytes"] for row in measured["all_reduce"]] == [4, 65536]
    for row in measured["all_reduce"]:
        assert row["seconds"] > 0
        assert row["bytes_per_second"] == row["bytes"] / row["seconds"]


def test_tables(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "16")
    text = invoke().output
    for expected in ("Versions", "jaxlib", "CPU:7", "none", "TF_CONFIG is not set"):
        assert expected in text
    for expected in ("NPROC", "16", "8 replicas on 1 worker", "64 KiB"):
        assert expected in text
    assert " µs" in text and " GB/s" in text


def test_it_fits_on_one_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    sizes = [{"bytes": 2**i, "seconds": 1.5, "bytes_per_second": 2e9} for i in range(4)]
    gpus = [{"name": f"GPU:{i}", "kind": "H200", "bytes": 2**37} for i in range(8)]
    tables.show(
        {
            "versions": {f"package-{i}": f"1.{i}.0rc1" for i in range(20)},
            "devices": [*gpus, {"name": "CPU:0", "kind": "cpu", "bytes": None}],
            "cluster": {
                "source": "Slurm",
                "workers": {f"worker {i}": f"node{i}:8888" for i in range(500)},
                "this": "worker 7",
            },
            "threads": {
                "cores": {"usable": 8, "machine": 64},
                "environment": {name: "-x=y " * 99 for name in info._VARIABLES},
            },
            "all_reduce": {"workers": 500, "replicas": 4000, "all_reduce": sizes},
        }
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 100
    assert any("GPU:0 to GPU:7: H200, 128.0 GiB each" in line for line in lines)
    assert any("and 494 more" in line for line in lines)


def test_the_cluster_of_the_environment(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = {"chief": ["a:1"], "worker": ["b:2"]}
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    assert info.collect()["cluster"] == {
        "source": "TF_CONFIG",
        "workers": {"chief 0": "a:1", "worker 0": "b:2"},
        "this": "worker 0",
    }
    assert "chief 0" in invoke().output


def test_a_broken_cluster_is_shown_and_not_raised(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    found = info.collect()["cluster"]
    assert found is not None and found["source"] == "TF_CONFIG"
    assert "TF_CONFIG is not JSON" in found["error"]
    assert "TF_CONFIG is not JSON" in invoke().output


def test_slurm(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    found = info.collect()["cluster"]
    assert found is not None and found["source"] == "Slurm"
    assert found["this"] == "worker 1"
    assert list(found["workers"].values()) == ["n1:8888", "n2:8888"]
    assert "SlurmClusterResolver()" in invoke().output


def test_what_fails_is_shown_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(info, "all_local_devices", fail)
    monkeypatch.setattr(measuring, "measure", fail)
    found = as_json()
    assert found["devices"] == {"error": "RuntimeError: no driver"}
    assert found["all_reduce"] == {"error": "RuntimeError: no driver"}
    assert invoke().output.count("RuntimeError: no driver") == 2


@pytest.mark.usefixtures("forked")
def test_between_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []  # this process has its devices
    name = "set_logical_device_configuration"
    monkeypatch.setattr(mx.config, name, lambda cpu: asked.append(cpu))
    done = invoke("--json", "--workers", "2", "--devices", "1")
    assert asked == [1]
    measured = json.loads(done.stdout)["all_reduce"]
    assert (measured["workers"], measured["replicas"]) == (2, 2)
    assert [row["bytes"] for row in measured["all_reduce"]] == list(measuring.SIZES)


def test_one_device_is_not_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mirrax", "info", "--devices", "1"],
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "one device only; --devices 2" in done.stdout
