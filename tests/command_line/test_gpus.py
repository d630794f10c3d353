"""GPUs are divided among workers."""

from __future__ import annotations

import pytest

from mirrax._src.command_line import gpus

from .launching import Launcher


@pytest.mark.parametrize(
    ("found", "workers", "devices", "shares"),
    [
        (["0", "1", "2", "3"], 2, None, [["0", "1"], ["2", "3"]]),
        (["0", "1", "2", "3"], 2, 1, [["0"], ["1"]]),
        (["0", "1", "2"], 2, None, [["0"], ["1"]]),
        (["GPU-a", "GPU-b"], 1, None, [["GPU-a", "GPU-b"]]),
    ],
)
def test_shares(
    found: list[str], workers: int, devices: int | None, shares: list[list[str]]
) -> None:
    assert gpus.divide(found, workers, devices) == shares


@pytest.mark.parametrize(
    ("value", "found"),
    [("0,1", ["0", "1"]), ("2, GPU-x", ["2", "GPU-x"]), ("0,-1,1", ["0"]), ("", [])],
)
def test_visible_ones(
    value: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert gpus.visible_gpus() == found


def test_each_worker_sees_its_own(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    body = "print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['JAX_PLATFORMS'])"
    done = launcher(body, platform="gpu")
    assert done.lines_of(0) == ["4,5 cuda,cpu"]
    assert done.lines_of(1) == ["6,7 cuda,cpu"]


def test_too_few_are_an_error_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from click.testing import CliRunner

    from mirrax._src.command_line.commands import commands

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    arguments = ["run", "--workers", "2", "--devices-per-worker", "2", __file__]
    done = CliRunner().invoke(commands, arguments)
    assert done.exit_code == 1
    assert "2 workers with 2 GPUs each need 4 GPUs, but 3 can be seen (0, 1, 2)" in (
        done.output
    )
    assert "--platform cpu" in done.output


def test_on_a_cpu_nothing_is_divided(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    body = "print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['JAX_PLATFORMS'])"
    assert launcher(body, platform="cpu").lines_of(1) == ["0 cpu"]
