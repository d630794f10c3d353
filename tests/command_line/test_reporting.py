"""What a worker writes down about its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.waiting import SECONDS_TO_HANG

from mirrax._src.cluster import reporting
from mirrax.errors import UnavailableError

from .launching import ROOT, Launcher

Report = Callable[[BaseException], dict[str, Any] | None]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    """What is reported of an exception that ends this process."""
    path = tmp_path / "failure.json"
    config = {"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]}}
    config["task"] = {"type": "worker", "index": 1}  # pyright: ignore
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.setenv("MIRRAX_FAILURE", str(path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(reporting, "_path", None)
    reporting.install()

    def end_by(error: BaseException) -> dict[str, Any] | None:
        try:
            raise error
        except BaseException:
            sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
        return json.loads(path.read_text()) if path.exists() else None

    yield end_by


def test_an_exception(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    error = ValueError("boom")
    error.add_note("in the third step")
    found = report(error)
    assert found is not None
    assert found.pop("time") > 1.7e9
    trace = found.pop("traceback")
    assert trace.startswith("Traceback") and trace.endswith("boom\nin the third step\n")
    assert found == {
        "worker": 2,  # after the chief and worker 0
        "type": "ValueError",
        "message": "boom",
        "is_consequence": False,
        "lost": [],
    }
    assert "ValueError: boom" in capsys.readouterr().err  # as ever


def test_a_lost_worker_makes_it_a_consequence(report: Report) -> None:
    found = report(UnavailableError("worker 0 is gone", workers=(0,)))
    assert found is not None
    assert found["is_consequence"] and found["lost"] == [0]


@pytest.mark.parametrize("is_cause", [True, False])
def test_also_what_came_of_it(report: Report, is_cause: bool) -> None:
    error = RuntimeError("could not save")
    lost = UnavailableError("worker 0 is gone", workers=(0,))
    if is_cause:
        error.__cause__ = lost
    else:
        error.__context__ = lost
    found = report(error)
    assert found is not None
    assert found["is_consequence"] and found["lost"] == [0]


def test_but_not_what_was_set_aside(report: Report) -> None:
    error = RuntimeError("of its own")
    error.__context__, error.__suppress_context__ = UnavailableError("x"), True
    found = report(error)
    assert found is not None and not found["is_consequence"]


def test_nor_where_this_worker_is_the_one(report: Report) -> None:
    found = report(UnavailableError("worker 2 is behind", workers=(2,)))
    assert found is not None and not found["is_consequence"]


def test_the_traceback_is_shown_also_when_nothing_can_be_written(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o500)
    (tmp_path / "failure.json.partial").mkdir()
    assert report(ValueError("boom")) is None
    err = capsys.readouterr().err
    assert "ValueError: boom" in err and "cannot be written" in err
    tmp_path.chmod(0o700)


def test_a_hook_of_before_is_called_and_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise KeyError("the hook's own")

    path = tmp_path / "failure.json"
    monkeypatch.setenv("MIRRAX_FAILURE", str(path))
    monkeypatch.setattr(sys, "excepthook", broken)
    monkeypatch.setattr(reporting, "_path", None)
    reporting.install()
    error = ValueError("boom")
    with pytest.raises(KeyError):
        sys.excepthook(ValueError, error, None)
    assert json.loads(path.read_text())["message"] == "boom"


def test_an_end_without_an_exception(report: Report, tmp_path: Path) -> None:
    reporting.write_report(
        UnavailableError("worker 0 is gone", workers=(0,)), where="  File x, line 3\n"
    )
    found = json.loads((tmp_path / "failure.json").read_text())
    assert found["is_consequence"] and found["lost"] == [0] and found["time"] > 1.7e9
    assert found["traceback"].endswith("gone\nIt was here:\n  File x, line 3\n")


def test_nobody_wants_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_path", None)
    reporting.write_report(ValueError("x"))  # and nothing is written anywhere
    assert reporting._path is None


def test_a_message_that_cannot_be_made(report: Report) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    found = report(Odd())
    assert found is not None and found["message"] == "(its text cannot be made)"


@pytest.mark.parametrize("config", [None, "{", "[]", '{"cluster": {}}'])
def test_without_a_cluster_there_is_no_number(
    config: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("TF_CONFIG", config)
    assert reporting.report_of(ValueError("x"), 0.0)["worker"] is None


def test_children_do_not_report_for_their_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIRRAX_FAILURE", str(tmp_path / "failure.json"))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(reporting, "_path", None)
    reporting.install()
    assert "MIRRAX_FAILURE" not in os.environ


def test_without_the_variable_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MIRRAX_FAILURE", raising=False)
    before, before_threads = sys.excepthook, threading.excepthook
    reporting.install()
    assert sys.excepthook is before and threading.excepthook is before_threads


# In real workers ----------------------------------------------------------------------------


def test_a_worker_reports_and_its_launcher_shows_it(
    launcher: Launcher, tmp_path: Path
) -> None:
    done = launcher(
        f"""
        sys.path.insert(0, {str(ROOT)!r})
        import mirrax as mx
        if me == 0:
            raise mx.errors.UnavailableError("worker 1 is gone", workers=(1,))
        time.sleep(0.3)
        raise KeyError("lr")
        """,
        grace_after_failure=20.0,
        log_dir=tmp_path / "logs",
    )
    assert done.code == 1
    failures = [f"logs/worker-{worker}.failure.json" for worker in range(2)]
    reports = [json.loads((tmp_path / name).read_text()) for name in failures]
    assert [found["is_consequence"] for found in reports] == [True, False]
    assert "Worker 1 failed first" in done.err and "KeyError: 'lr'." in done.err
    assert "Worker 0: ended because another was lost (UnavailableError)" in done.err
    for worker in range(2):
        assert "Traceback (most recent call last):" in done.lines_of(worker)


def test_a_system_exit_is_no_report(tmp_path: Path) -> None:
    path = tmp_path / "failure.json"
    done = subprocess.run(
        [sys.executable, "-c", "import mirrax, sys; sys.exit(3)"],
        env=os.environ | {"MIRRAX_FAILURE": str(path)},
        timeout=SECONDS_TO_HANG,
    )
    assert done.returncode == 3
    assert not path.exists()
