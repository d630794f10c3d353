"""Is a checkpoint with mirrax saved and restored as fast as one with TensorFlow?

100 MB of variables, large ones and of mixed sizes, and 1000 tiny ones (on accelerators 1.2 GB): the time until
`save` returns, until everything is on the disk, and to restore it, and what a save and a
restore leave to the step that follows. Beside mirrax: Orbax as it is usually called and
`tf.train.Checkpoint`, of the interpreter that `--tensorflow PYTHON` names. Libraries run
in processes of their own, and their checkpoints take turns.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import (
    Devices,
    Ratio,
    Report,
    Rival,
    find_devices,
    in_turns,
    is_installed,
    parser,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rivals.saving import LARGE, LAYOUTS, MakeWay, Way, answer

import mirrax as mx

RIVAL = Path(__file__).parent / "rivals" / "tensorflow_checkpoint.py"
# DESIGN.md, "Numbers to reach".
SAVE_MS = 100.0
RESTORE_AGAINST_TENSORFLOW = 1.0

TENSORFLOW = ("TensorFlow", "TensorFlow, asynchronous", "TensorFlow, no strategy")
PARTS = ("step", "save", "next step", "on disk", "restore", "step after")
HEADER = (
    "ms",
    "a step",
    "save returns",
    "next step",
    "on the disk",
    "restored",
    "next step",
    "its restore / mirrax's",
    "first save returns",
)

Figures = dict[str, np.ndarray]  # of each part, in ms, the first checkpoint's included


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layouts", nargs="+", choices=LAYOUTS)
    options.add_argument(
        "--folder", default=tempfile.gettempdir(), help="on which disk"
    )
    options.add_argument("--tensorflow", metavar="PYTHON", default=sys.executable)
    options.add_argument("--side", help="answer for one library, in this process")
    given = options.parse_args()
    devices = find_devices(given.replicas)
    usual = [LARGE] if devices[0].platform != "cpu" else [*LAYOUTS][:-1]
    if given.side:
        answer({given.side: SIDES[given.side](devices)})
        return
    report = Report("checkpoints", given)
    with contextlib.ExitStack() as stack:
        libraries = start(given.tensorflow, len(devices), stack)
        for layout in given.layouts or usual:
            compare(layout, libraries, len(devices), report)
    report.finish(devices)


# Libraries ----------------------------------------------------------------------------


def with_mirrax(devices: Devices) -> MakeWay:
    strategy = mx.distribute.MirroredStrategy(devices)

    def make(values: Sequence[np.ndarray]) -> Way:
        with strategy.scope():
            variables = [mx.Variable(value) for value in values]
        checkpoint = mx.train.Checkpoint(model=variables)

        @mx.function
        def add() -> jax.Array:
            for variable in variables:
                variable.assign_add(np.ones(variable.shape, variable.dtype))
            return variables[0].read_value().reshape(-1)[:1]

        def restore(path: Any) -> None:
            checkpoint.restore(path)
            # Not `read_value`: what somebody may hold, the next step has to copy.
            jax.block_until_ready([variable.stored for variable in variables])

        return Way(
            step=lambda: jax.block_until_ready(strategy.run(add)),
            save=lambda folder: checkpoint.save(f"{folder}/ckpt"),
            wait=checkpoint.sync,
            restore=restore,
            read=lambda: [variable.numpy() for variable in variables],
        )

    return make


def with_orbax(devices: Devices) -> MakeWay:
    """The usual way: replicated arrays, given and asked for as they are."""
    import orbax.checkpoint as ocp

    mesh = Mesh(np.array(devices), ("replica",))
    add = jax.jit(lambda arrays: [array + 1 for array in arrays], donate_argnums=0)

    def make(values: Sequence[np.ndarray]) -> Way:
        arrays = jax.device_put(list(values), NamedSharding(mesh, PartitionSpec()))
        checkpointer = ocp.StandardCheckpointer()

        def step() -> None:
            nonlocal arrays
            arrays = jax.block_until_ready(add(arrays))

        def save(folder: str) -> str:
            path = f"{folder}/state"
            checkpointer.save(path, arrays)
            return path

        def restore(path: str) -> None:
            nonlocal arrays
            wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays)
            arrays = jax.block_until_ready(checkpointer.restore(path, wanted))

        return Way(
            step=step,
            save=save,
            wait=checkpointer.wait_until_finished,
            restore=restore,
            read=lambda: [np.asarray(array) for array in arrays],
        )

    return make


SIDES = {"mirrax": with_mirrax, "Orbax": with_orbax}


def start(
    tensorflow: str, replicas: int, stack: contextlib.ExitStack
) -> dict[str, Rival]:
    """The process that answers for each way."""
    libraries = {
        side: Rival([__file__, "--side", side, "--replicas", str(replicas)])
        for side in SIDES
    }
    if is_installed(tensorflow, "tensorflow"):
        rival = Rival([str(RIVAL), str(replicas)], tensorflow)
        libraries |= dict.fromkeys(TENSORFLOW, rival)
    for rival in set(libraries.values()):
        stack.callback(rival.close)
    return libraries


# Figures ------------------------------------------------------------------------------


def compare(
    layout: str, libraries: dict[str, Rival], replicas: int, report: Report
) -> None:
    """Measures all ways of saving variables of one layout."""
    figures = measure(layout, libraries, report)
    ours = figures["mirrax"]["restore"][1:]
    rows: list[list[object]] = []
    for name, parts in figures.items():
        medians = [float(np.median(parts[part][1:])) for part in PARTS]
        ratio = str(Ratio.of(parts["restore"][1:], ours)) if name != "mirrax" else ""
        rows.append([name, *medians, ratio, float(parts["save"][0])])
    for name in TENSORFLOW:
        if name not in libraries:
            rows.append([name, "not installed", *[""] * (len(HEADER) - 2)])
    report.table(f"{layout}, {replicas} replicas", HEADER, rows)
    save = float(np.median(figures["mirrax"]["save"][1:]))
    report.check(f"{layout}, save returns", save, SAVE_MS, unit="ms")
    if "TensorFlow" in figures:
        ratio = Ratio.of(ours, figures["TensorFlow"]["restore"][1:])
        name = f"{layout}, restore / TensorFlow's"
        report.check(name, ratio.median, RESTORE_AGAINST_TENSORFLOW)


def measure(
    layout: str, libraries: dict[str, Rival], report: Report
) -> dict[str, Figures]:
    """Checkpoints of all ways in turn; the first of each is not compared."""

    def measure_one(name: str) -> dict[str, float]:
        return libraries[name].ask(json.dumps([name, layout, report.options.folder]))

    rounds = 1 + (3 if report.options.quick else 15)
    answers = in_turns(libraries, rounds, measure_one, at_least=2)
    return {
        name: {part: np.array([found[part] for found in every]) for part in PARTS}
        for name, every in answers.items()
    }


if __name__ == "__main__":
    main()
