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
from helpers.forking import Child, Zygote
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
KILLS = int(os.environ.get("MIRRAX_KILLS", "3"))  # `make kills`: 20
EPOCHS = max(12, 2 * KILLS)
OPTIONS = ("--replicas", "3", "--epochs", str(EPOCHS), "--save-every", "3")


def arguments(directory: Path, *options: str) -> tuple[str, ...]:
    places = ("--directory", directory / "saved", "--picture", directory / "demo.png")
    return *map(str, places), *options


def run(directory: Path, *options: str) -> str:
    try:
        done = subprocess.run(
            [sys.executable, str(DEMO), *arguments(directory, *options)],
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_HANG,
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that nobody disturbs: its directory, and what it printed."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, run(directory, *OPTIONS)


def test_it_learns_to_read_digits(whole: tuple[Path, str]) -> None:
    directory, said = whole
    assert "replicas: 3" in said and f"step {15 * EPOCHS}/{15 * EPOCHS}" in said
    score = float(said.rpartition("%")[0].rpartition("\n")[2])
    assert score > 97
    assert (directory / "demo.png").stat().st_size > 10_000


def test_killed_again_and_again_it_ends_with_the_same_weights(
    whole: tuple[Path, str], zygote: Zygote, tmp_path: Path
) -> None:
    program = (DEMO, *arguments(tmp_path, *OPTIONS, "--resume"))
    rng = random.Random(0)
    in_saves = 0
    for kill in range(KILLS):
        process = zygote.start_program(*program)
        before = newest_step(tmp_path)
        if kill % 3 == 2:  # at any moment, the start included
            time.sleep(rng.uniform(0, 1.5))
        else:
            wait_for(tmp_path, lambda b=before: newest_step(tmp_path) > b, process)
            time.sleep(rng.uniform(0, 0.3))
            if kill % 3:
                wait_for(
                    tmp_path,
                    lambda p=process: is_stopped_in_a_save(tmp_path, p),
                    process,
                )
        assert process.kill() in (-signal.SIGKILL, 0), process.errors
        in_saves += is_saving(tmp_path)
    assert in_saves > 0, "no kill was in the middle of a save"
    said, _ = zygote.run_program(*program)
    assert f"going on from {tmp_path / 'saved' / 'ckpt-'}" in said
    assert_same(weights(tmp_path), weights(whole[0]))


def wait_for(directory: Path, happens: Any, process: Child) -> None:
    end = time.monotonic() + SECONDS_TO_HANG
    while not happens():
        code = process.poll()
        if code == 0:
            return  # it has ended before
        if code is not None:
            pytest.fail(f"the demo failed with {code}: {process.errors}")
        assert time.monotonic() < end, f"the demo hung; {list(directory.rglob('*'))}"
        time.sleep(0.002)  # short enough to meet a save that is under way


def newest_step(directory: Path) -> int:
    found = (directory / "saved").glob("ckpt-*/mirrax.json")
    return max((int(f.parent.name.partition("-")[2]) for f in found), default=0)


def is_saving(directory: Path) -> bool:
    return any((directory / "saved").glob(".ckpt-*.tmp-*"))


def is_stopped_in_a_save(directory: Path, process: Child) -> bool:
    """Stops it if it is saving; a save may end before it does, and then it goes on."""
    if not is_saving(directory):
        return False
    process.send(signal.SIGSTOP)
    time.sleep(0.01)
    if not is_saving(directory):
        process.send(signal.SIGCONT)
        return False
    return True
