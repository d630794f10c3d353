"""The examples with Keras, started as a user starts them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx
from interop import libraries

libraries.keras()
ROOT = Path(mx.__file__).parent.parent


def start(*arguments: str, environment: dict[str, str] | None = None) -> list[str]:
    """The lines that an example prints; without TensorFlow, unless `environment` has it."""
    command = [sys.executable, "-W", "ignore", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_HANG,
            cwd=ROOT,
            env=environment or libraries.without_tensorflow(),
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode() + (error.stderr or b"").decode()
        pytest.fail(f"{command} did not end in {SECONDS_TO_HANG} s:\n{printed}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def losses_in(lines: list[str]) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", "\n".join(lines))]


def percentage_in(line: str) -> float:
    found = re.search(r"([0-9.]+)%", line)
    assert found is not None, line
    return float(found[1])


def test_fit_learns_the_same_on_replicas_and_on_workers():
    replicas = start("examples/keras_fit.py", "--replicas", "2", "--epochs", "25")
    assert replicas[0] == "2 replicas"
    assert percentage_in(replicas[-1]) > 85
    run = ("-m", "mirrax", "run", "--workers", "2")
    workers = losses_in(start(*run, "examples/keras_fit.py", "--epochs", "6"))
    # Those of all six epochs; of 25 it prints the first, the sixth and so on.
    assert workers[::5] == pytest.approx(losses_in(replicas)[:2], abs=2e-3)


def test_the_gan_learns_a_distribution():
    lines = start("examples/keras_gan.py", "--steps", "600")
    assert percentage_in(lines[-1]) > 50


def test_the_readmes_block_runs(tmp_path):
    blocks = re.findall(
        r"^```py\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert len(blocks) == 1
    assert blocks[0].count("\n\nstrategy = ") == 1
    text = blocks[0].replace(
        "\n\nstrategy", "\nkeras.utils.set_random_seed(0)\nstrategy"
    )
    script = tmp_path / "fit.py"
    script.write_text(
        text + "for x in model.history.history['loss']: print('loss', x)\n"
    )
    first, last = losses_in(start(str(script))[-2:])
    assert last < first
