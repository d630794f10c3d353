"""What a user of `mirrax run` meets when all goes well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waiting import SECONDS_TO_HANG

from .launching import Launcher, command_without_jax


def test_every_line_comes_with_its_worker(launcher: Launcher, temporary: Path) -> None:
    done = launcher(
        """
        print(me, "of", size, sys.argv[1:], __name__, os.path.basename(__file__))
        print("to stderr", file=sys.stderr)
        """,
        workers=3,
        arguments=("--lr", "0.1", "-m"),
    )
    assert done.code == 0 and done.err == ""
    for worker in range(3):
        assert done.lines_of(worker) == [
            f"{worker} of 3 ['--lr', '0.1', '-m'] __main__ train.py",
            "to stderr",
        ]
    assert len(done.out.splitlines()) == 6
    left = [path for path in temporary.rglob("*") if not path.is_dir()]
    assert left == []  # nothing failed: no logs are left


def test_workers_find_their_cluster_in_the_environment(
    launcher: Launcher, tmp_path: Path
) -> None:
    names = ["MIRRAX_LOG", "MIRRAX_FAILURE", "MIRRAX_ATTEMPT", "JAX_NUM_CPU_DEVICES"]
    names += ["PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "TF_CONFIG"]
    done = launcher(
        f"print(json.dumps([os.environ[name] for name in {names}]))",
        devices=3,
        log_dir=tmp_path / "logs",
    )
    found = [json.loads(done.lines_of(worker)[0]) for worker in range(2)]
    for worker, (*values, config) in enumerate(found):
        assert values == [
            str(tmp_path / f"logs/worker-{worker}.log"),
            str(tmp_path / f"logs/worker-{worker}.failure.json"),
            *("0", "3", "1", "1"),
        ]
        assert json.loads(config)["task"] == {"type": "worker", "index": worker}
    clusters = [json.loads(config)["cluster"] for *_, config in found]
    assert clusters[0] == clusters[1]
    assert len(set(clusters[0]["worker"])) == 2
    assert all(address.startswith("127.0.0.1:") for address in clusters[0]["worker"])


def test_without_devices_the_environment_decides(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "5")
    done = launcher("print(os.environ['JAX_NUM_CPU_DEVICES'])", workers=1)
    assert done.lines_of(0) == ["5"]


def test_a_cluster_of_the_environment_is_not_joined(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    done = launcher("print(size)")
    assert done.lines_of(1) == ["2"]
    assert "mirrax: TF_CONFIG is set, but not used" in done.err


def test_a_worker_that_is_done_early_is_no_failure(launcher: Launcher) -> None:
    done = launcher("time.sleep(0.6 * me); print('done', flush=True)")
    assert done.code == 0
    assert done.lines_of(1) == ["done"]


def test_logs_are_kept_and_a_second_run_adds_to_them(
    launcher: Launcher, tmp_path: Path
) -> None:
    logs = tmp_path / "new" / "logs"
    for text in ("first", "second"):
        done = launcher(f"print('{text}', me)", log_dir=logs)
        assert done.lines_of(1) == [f"{text} 1"]
    first, between, second = (logs / "worker-1.log").read_text().splitlines()
    assert (first, second) == ("first 1", "second 1")
    assert between.startswith("=== a new run, ")


def test_workers_have_no_input(launcher: Launcher) -> None:
    done = launcher("print(repr(sys.stdin.read()))")
    assert done.lines_of(0) == ["''"]


def test_what_workers_leave_behind_is_ended(launcher: Launcher, tmp_path: Path) -> None:
    done = launcher(
        """
        child = subprocess.Popen(["sleep", "100"], start_new_session=True)
        print(child.pid)
        """
    )
    assert done.code == 0
    for worker in range(2):
        assert not Path(f"/proc/{done.lines_of(worker)[0]}").exists()


# The command --------------------------------------------------------------------------------


def test_a_module_runs_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        "import sys; print(__name__, __spec__.name, sys.argv[1:])"
    )
    done = subprocess.run(
        command_without_jax(
            *("run", "--workers", "2", "-m", "package.train", "--workers", "7")
        ),
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"worker {worker} | __main__ package.train ['--workers', '7']"
        for worker in range(2)
    ]


def test_the_installed_command_and_its_help() -> None:
    tool = Path(sys.executable).with_name("mirrax")
    done = subprocess.run(
        [tool, "run", "--help"], capture_output=True, text=True, timeout=SECONDS_TO_HANG
    )
    assert done.returncode == 0, done.stderr
    for option in ("--workers", "--devices-per-worker", "--max-restarts", "--log-dir"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "2", "nowhere.py"], "There is no script 'nowhere.py' in"),
        (["--workers", "4:2", "x.py"], "MIN at most MAX, such as 2:4"),
        (["--workers", "two", "x.py"], "'two' is neither a number nor MIN:MAX"),
        (["--workers", "0", "x.py"], "at least 1"),
        (
            ["--workers", "2", "--min-workers", "3", __file__],
            "is more than --workers 2",
        ),
        (["--workers", "1:2", "--min-workers", "1", __file__], "Give one of them"),
        (["--workers", "2", "--min-workers", "1", __file__], "--max-restarts of at"),
        (["--workers", "1:2", "--max-restarts", "1", __file__], "at least 2, got 1"),
        ([], "Missing argument 'SCRIPT'"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(arguments: list[str], message: str) -> None:
    from click.testing import CliRunner

    from mirrax._src.command_line.commands import commands

    done = CliRunner().invoke(commands, ["run", *arguments])
    assert done.exit_code == 2
    assert message in done.output


def test_one_worker_has_the_whole_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from mirrax._src.command_line import gpus
    from mirrax._src.command_line import run as running
    from mirrax._src.command_line.commands import commands

    asked = []
    monkeypatch.setattr(running, "launch", lambda options: asked.append(options) or 0)
    assert CliRunner().invoke(commands, ["run", __file__]).exit_code == 0
    assert (asked[0].minimum, asked[0].maximum, asked[0].nodes) == (1, 1, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    [variables] = gpus.environments(1, None, "gpu")
    assert variables["CUDA_VISIBLE_DEVICES"] == "0,1,2"
