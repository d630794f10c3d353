"""The demo: what it says, what it draws, and that killing it changes nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mirrax as mx

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
KILLS = int(os.environ.get("MIRRAX_KILLS", "8"))  # `make kills`: 20
LIFE_SECONDS = 100


def command(directory: Path, *options: str) -> list[str]:
    return [
        *(sys.executable, str(DEMO), "--directory", str(directory / "saved")),
        *("--picture", str(directory / "demo.png"), *options),
    ]


def run(directory: Path, *options: str, seconds: float = 100) -> str:
    try:
        done = subprocess.run(
            command(directory, *options),
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"the demo hung; it had printed: {error.stdout!r}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights(directory: Path) -> dict[str, Any]:
    newest = mx.train.latest_checkpoint(directory / "saved")
    assert newest is not None
    saved = mx.train.load_checkpoint(newest)
    return {n: a for n, a in saved.items() if n.startswith("training/")}


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    for name, array in mine.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


@pytest.mark.slow
def test_it_learns_to_read_digits(tmp_path: Path) -> None:
    said = run(tmp_path, "--replicas", "3", "--epochs", "12")
    assert "replicas: 3" in said and "step 180/180" in said
    score = float(said.rpartition("%")[0].rpartition("\n")[2])
    assert score > 97
    assert (tmp_path / "demo.png").stat().st_size > 10_000


@pytest.mark.slow
def test_stopped_after_an_epoch_it_goes_on_with_the_next(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir()
    halves.mkdir()
    # The schedule depends on the number of epochs, so the run is cut off by a kill.
    options = ("--epochs", "4", "--save-every", "15")
    run(whole, *options)
    process = start(halves, *options)
    wait_for(halves, lambda: newest_step(halves) >= 15, process)
    process.kill()
    process.wait()
    said = run(halves, *options, "--resume")
    assert f"going on from {halves / 'saved' / 'ckpt-'}" in said
    assert_same(weights(halves), weights(whole))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_again_and_again_it_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    options = ("--epochs", str(max(16, 2 * KILLS)), "--save-every", "3")
    run(whole, *options, seconds=200)
    rng = random.Random(0)
    in_saves = 0
    for kill in range(KILLS):
        process = start(killed, *options, "--resume")
        before = newest_step(killed)
        if kill % 5 == 4:  # at any moment, the start included
            time.sleep(rng.uniform(0, 4))
        else:
            wait_for(killed, lambda b=before: newest_step(killed) > b, process)
            time.sleep(rng.uniform(0, 0.3))
            if kill % 2:
                wait_for(killed, lambda: is_saving(killed), process)
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=10) in (-signal.SIGKILL, 0)
        in_saves += is_saving(killed)
    assert in_saves > 0, "no kill was in the middle of a save"
    run(killed, *options, "--resume", seconds=200)
    assert_same(weights(killed), weights(whole))


def start(directory: Path, *options: str) -> subprocess.Popen[bytes]:
    with open(directory / "errors.txt", "wb") as errors:
        return subprocess.Popen(
            command(directory, *options), stdout=subprocess.DEVNULL, stderr=errors
        )


def wait_for(directory: Path, happens: Any, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LIFE_SECONDS
    while not happens():
        code = process.poll()
        if code == 0:
            return  # it has ended before
        if code is not None:
            pytest.fail(f"the demo failed: {(directory / 'errors.txt').read_text()}")
        assert time.monotonic() < end, f"the demo hung; {list(directory.rglob('*'))}"
        time.sleep(0.002)  # short enough to meet a save that is under way


def newest_step(directory: Path) -> int:
    found = (directory / "saved").glob("ckpt-*/mirrax.json")
    return max((int(f.parent.name.partition("-")[2]) for f in found), default=0)


def is_saving(directory: Path) -> bool:
    return any((directory / "saved").glob(".ckpt-*.tmp-*"))
