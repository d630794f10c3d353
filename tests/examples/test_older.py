"""The programs in `examples/older`: each learns, and the same on any number of replicas.

They are called here, with strategies of this process, and started as a user starts them.
Names that have become older warn, and the warnings say what to write.
"""

from __future__ import annotations

import functools
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers.forking import Zygote
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx

OLDER = Path(__file__).parents[2] / "examples" / "older"

# Messages of mirrax: "`experimental_run` is the older name of ..."
pytestmark = pytest.mark.filterwarnings("ignore:`:DeprecationWarning")


class Program(NamedTuple):
    """What one of the programs has to reach.

    Attributes:
        epochs: Enough of them to compare losses.
        last_line: What it prints in the end; the group is its quality.
        is_good: Whether the quality is good enough.
        renamed: Older names, and what their warnings tell to write.
    """

    epochs: int
    last_line: str
    is_good: Callable[[float], bool]
    renamed: dict[str, str]


PROGRAMS = {
    "r2_0_custom_training": Program(
        epochs=2,
        last_line=r"Accuracy after restoring .* without strategy: ([\d.]+)%",
        is_good=lambda percent: percent > 93,
        renamed={"experimental_run_v2": "run"},
    ),
    "r2_0_multi_worker": Program(
        epochs=3,
        last_line=r"1 replicas: error ([\d.]+) on unknown ratings, .*",
        is_good=lambda error: 0.25 < error < 0.29,
        renamed={
            "experimental_run_v2": "run",
            "experimental_distribute_datasets_from_function": "distribute_datasets_from_function",
        },
    ),
    "r2_0_numpy_evaluation": Program(
        epochs=2,
        last_line=r"([\d.]+)% on 2 replicas\.",
        is_good=lambda percent: percent > 94,
        renamed={"experimental_run_v2": "run"},
    ),
    "compat_v1_iterator_loop": Program(
        epochs=2,
        last_line=r"([\d.]+)% of the test images are right\.",
        is_good=lambda percent: percent > 94,
        renamed={
            "make_dataset_iterator": "experimental_distribute_dataset",
            "experimental_run": "run",
        },
    ),
    "compat_v1_own_optimizer": Program(
        epochs=2,
        last_line=r"The weights are true to ([\d.]+)\.",
        is_good=lambda distance: distance < 0.01,
        renamed={
            "make_input_fn_iterator": "distribute_datasets_from_function",
            "experimental_run": "run",
        },
    ),
    "compat_v1_estimator": Program(
        epochs=4,
        last_line=r"([\d.]+)% of the variation is explained\.",
        is_good=lambda percent: percent > 38,
        renamed={
            "experimental_run_steps_on_iterator": "run_steps",
            "experimental_run": "run",
        },
    ),
    "contrib_own_adam": Program(
        epochs=2,
        last_line=r"([\d.]+)% of the test images are right\.",
        is_good=lambda percent: percent > 93,
        renamed={
            "call_for_each_tower": "run",
            "batch_reduce": "extended.batch_reduce_to",
            "update_non_slot": "extended.update_non_slot",
        },
    ),
    "contrib_multi_step": Program(
        epochs=2,
        last_line=r"([\d.]+)% of the points are told right\.",
        is_good=lambda percent: percent > 98,
        renamed={"call_for_each_tower": "run", "run_steps_on_dataset": "run_steps"},
    ),
    "contrib_moving_averages": Program(
        epochs=2,
        last_line=r"([\d.]+)% of the variation is not explained\.",
        is_good=lambda percent: percent < 0.1,
        renamed={
            "broadcast": "extended.broadcast_to",
            "reduce": "extended.reduce_to",
        },
    ),
}


def make_strategy(name: str, replicas: int) -> Any:
    """A strategy of the generation that the example was written for."""
    devices = [f"CPU:{i}" for i in range(replicas)]
    if name.startswith("r2_0"):
        return mx.distribute.MirroredStrategy(devices)
    if name.startswith("compat_v1"):
        return mx.compat.v1.distribute.MirroredStrategy(devices)
    return mx.contrib.distribute.MirroredStrategy(devices)


def losses_and_quality(name: str, replicas: int, tmp_path: Path) -> Any:
    more = {"directory": str(tmp_path)} if name == "r2_0_custom_training" else {}
    train = runpy.run_path(str(OLDER / f"{name}.py"))["train"]
    return train(make_strategy(name, replicas), epochs=PROGRAMS[name].epochs, **more)


Run = Callable[[str], tuple[str, str]]


@pytest.fixture(scope="module")
def run(zygote: Zygote) -> Run:
    """Runs a program, once: what it prints, and what it warns of."""
    return functools.cache(
        lambda name: zygote.run_program(OLDER / f"{name}.py", warn="DeprecationWarning")
    )


def start(*command: str) -> tuple[str, str]:
    """What a command of Python prints, and what it warns of; other warnings are errors."""
    environment = os.environ | {"PYTHONPATH": str(OLDER.parents[1])}
    environment["PYTHONWARNINGS"] = "error,always::DeprecationWarning"
    try:
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_HANG,
            cwd=OLDER,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode() + (error.stderr or b"").decode()
        pytest.fail(f"{command} did not end in {SECONDS_TO_HANG} s:\n{printed}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def numbers(texts: Sequence[str]) -> list[float]:
    return [float(text) for text in texts]


@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_do_not_depend_on_the_number_of_replicas(
    name: str, tmp_path: Path
) -> None:
    losses, quality = losses_and_quality(name, 1, tmp_path)
    assert losses[-1] < losses[0] and len(losses) == PROGRAMS[name].epochs
    same_losses, same_quality = losses_and_quality(name, 2, tmp_path)
    np.testing.assert_allclose(same_losses, losses, rtol=2e-4)
    np.testing.assert_allclose(same_quality, quality, rtol=1e-2)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_learns_when_a_user_starts_it(name: str, run: Run) -> None:
    printed, warned = run(name)
    found = re.fullmatch(PROGRAMS[name].last_line, printed.splitlines()[-1])
    assert found is not None, printed
    assert PROGRAMS[name].is_good(float(found[1])), printed
    for old, new in PROGRAMS[name].renamed.items():
        told = rf"^.*{name}\.py:\d+: DeprecationWarning: `{old}` .*write `{new}`\.$"
        assert len(re.findall(told, warned, re.MULTILINE)) == 1, warned


def test_the_evaluation_counts_what_numpy_counts(run: Run) -> None:
    printed, _ = run("r2_0_numpy_evaluation")
    *_, counted, evaluated = printed.splitlines()
    right, rows = re.findall(r"\d+", counted)
    assert rows == "113" and evaluated == f"{int(right) / 113:.2%} on 2 replicas."


def test_two_workers_learn_what_one_learns(run: Run) -> None:
    alone, _ = run("r2_0_multi_worker")
    launch = ("-m", "mirrax", "run", "--workers", "2", "--devices-per-worker", "1")
    printed, _ = start(*launch, "r2_0_multi_worker.py")
    losses = re.findall(r"^epoch \d+: loss ([\d.]+)$", alone, re.MULTILINE)
    line = r"^worker (\d) \| epoch \d+: loss ([\d.]+)$"
    workers, same = zip(*re.findall(line, printed, re.MULTILINE))
    assert set(workers) == {"0"} and len(losses) == 8  # the first worker speaks for all
    np.testing.assert_allclose(numbers(same), numbers(losses), atol=2e-5)
    errors = re.findall(
        r"^worker \d \| 2 replicas: error ([\d.]+)", printed, re.MULTILINE
    )
    assert len(errors) == 2 and errors[0] == errors[1]


def test_the_table_names_every_program() -> None:
    table = (OLDER / "README.md").read_text()
    files = {path.name for path in OLDER.glob("*.py")}
    assert files == set(re.findall(r"\]\((\w+\.py)\)", table))
    assert files == {f"{name}.py" for name in PROGRAMS}
