"""The programs in `examples/`, started as a user starts them: they learn, and go on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.forking import Zygote
from helpers.programs import WARNINGS_ARE_ERRORS
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx

Run = Callable[..., list[str]]
ROOT = Path(__file__).parent.parent.parent


def start(name: str, **options: object) -> list[str]:
    """Runs an example in a process of its own; the lines that it prints."""
    command = [sys.executable, *WARNINGS_ARE_ERRORS, f"examples/{name}.py"]
    for option, value in options.items():
        command += [f"--{option}", str(value)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_TO_HANG, cwd=ROOT
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode() + (error.stderr or b"").decode()
        pytest.fail(f"{command} did not end in {SECONDS_TO_HANG} s:\n{printed}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def run(zygote: Zygote) -> Run:
    """Does what `start` does, in a process that has imported all libraries already."""

    def run(name: str, **options: object) -> list[str]:
        arguments = [f"--{option}={value}" for option, value in options.items()]
        path = ROOT / "examples" / f"{name}.py"
        printed, _ = zygote.run_program(path, *arguments)
        return printed.splitlines()

    return run


def losses_in(lines: list[str]) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", "\n".join(lines))]


def percentage_in(line: str) -> float:
    found = re.match(r"([0-9.]+)%", line)
    assert found is not None, line
    return float(found[1])


def saved(directory: Path) -> dict[str, np.ndarray]:
    """The arrays of the newest checkpoint in `directory`, by name."""
    path = mx.train.latest_checkpoint(directory)
    assert path is not None
    everything = mx.train.load_checkpoint(path)
    return {k: v for k, v in everything.items() if isinstance(v, np.ndarray)}


def test_custom_loop_learns_and_goes_on_to_the_same_weights(
    run: Run, tmp_path: Path
) -> None:
    lines = start("custom_loop", epochs=4, directory=tmp_path)
    assert lines[0] == "Starting from scratch."
    losses = losses_in(lines)
    assert len(losses) == 4 and losses[3] < losses[0] / 2
    assert percentage_in(lines[-1]) > 80

    expected = saved(tmp_path)
    shutil.rmtree(tmp_path / "ckpt-4")  # as if it had been stopped in the last epoch
    again = run("custom_loop", epochs=4, directory=tmp_path)
    assert again == [f"Restored {tmp_path}/ckpt-3.", *lines[-2:]]
    found = saved(tmp_path)
    assert found.keys() == expected.keys()
    assert [n for n in found if found[n].tobytes() != expected[n].tobytes()] == []


def test_functional_optax_goes_on_with_other_replicas(run: Run, tmp_path: Path) -> None:
    lines = run("functional_optax", steps=60, directory=tmp_path)
    assert [line.split(":")[0] for line in lines[:-1]] == ["step 50", "step 60"]
    lines = run("functional_optax", steps=120, directory=tmp_path, replicas=3)
    assert lines[0] == "Going on after step 60."
    assert [line.split(":")[0] for line in lines[1:-1]] == ["step 100", "step 120"]
    assert losses_in(lines)[-1] < 0.3
    assert percentage_in(lines[-1]) > 92
    assert saved(tmp_path)["state/1/0/count"] == 120  # Adam's


def test_flax_linen_learns_digits(run: Run) -> None:
    lines = run("flax_linen", epochs=4)
    assert lines[3].startswith("epoch 4, step 56: ")
    losses = losses_in(lines)
    assert losses[3] < losses[0] / 2
    assert percentage_in(lines[-1]) > 80


def test_nnx_training_learns_digits(run: Run) -> None:
    lines = run("nnx_training", epochs=3)
    losses = losses_in(lines)
    assert len(losses) == 3 and losses[2] < losses[0] / 2
    table = [line.split() for line in lines[4:14]]
    assert [row[0] for row in table] == list("0123456789")
    assert sum(int(row[1]) for row in table) == 360  # every test image, once
    assert percentage_in(lines[-1]) > 75


def test_char_transformer_learns_to_write(run: Run) -> None:
    lines = run("char_transformer", steps=30)
    losses = losses_in(lines[:2])
    assert (
        losses[1] < losses[0] < np.log(128)
    )  # chance, with more characters than it has
    assert lines[2] == 'The "assert" statement'  # the beginning is given
    assert len("\n".join(lines[2:])) == 300


def test_cycle_gan_moves_points_there_and_back(run: Run) -> None:
    last = run("cycle_gan", steps=300)[-1]
    numbers = re.findall(r"[0-9.]+\d", last)
    assert float(numbers[0]) < 1 and float(numbers[1]) < 0.3, (
        last
    )  # 3 and more at first


def test_saving_and_loading_agree(run: Run) -> None:
    lines = run("save_and_load")  # which compares the weights itself
    assert lines[2] == "3 replica(s): resumed at step 20"
    assert float(lines[-1].split()[-1]) < 0.01


def test_the_input_pipeline_feeds_every_image(run: Run) -> None:
    lines = run("input_pipeline", replicas=3, epochs=4)
    assert lines[0] == "1437 images in 8 files"
    losses = losses_in(lines)
    assert len(losses) == 4 and losses[-1] < losses[0] / 1.5
    assert percentage_in(lines[-1]) > 60


def test_the_notebook_runs_from_top_to_bottom() -> None:
    notebook = json.loads((ROOT / "examples" / "tour.ipynb").read_text())
    names: dict[str, Any] = {}
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        assert not cell["outputs"] and cell["execution_count"] is None
        code = compile(
            "".join(cell["source"]), f"tour.ipynb, code cell {number}", "exec"
        )
        exec(code, names)
    assert names["accuracy"] > 0.9 and names["train_step"].trace_count <= 2
    names.clear()
