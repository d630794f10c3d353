"""What needs a process of its own: restoring after a restart, and what gets imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.engines import mirrored
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx
from interop import libraries
from interop.comparing import take
from interop.restarting import PIPELINES, rest_of, start

ROOT = Path(mx.__file__).parent.parent


def run_python(*arguments: str, given: str = "") -> str:
    """The output of a new Python, which has a minute."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def need_libraries() -> None:
    for library in (libraries.torch, libraries.grain, libraries.hugging_face):
        library()


# Restoring -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def restarted():
    """What is left of each pipeline here, and what a new process gives of it."""
    need_libraries()
    strategy = mirrored(2)
    states, left = {}, {}
    for name in PIPELINES:
        iterator = start(name, strategy, is_new=False)
        take(iterator, 2)
        states[name] = iterator.get_state()
        left[name] = rest_of(iterator, strategy)
    output = run_python("-m", "interop.restarting", given=json.dumps(states))
    return left, json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("name", PIPELINES)
def test_a_new_process_goes_on_with_exactly_the_rest(name, restarted):
    left, found = restarted
    assert len(sum(left[name], [])) == 14
    assert found[name] == left[name]


# Imports ---------------------------------------------------------------------------------

OPTIONAL = """
import sys

def optional():
    names = {"tensorflow", "torch", "grain", "datasets", "keras", "pyarrow", "pandas"}
    return names & set(sys.modules)
"""


def test_nothing_optional_is_imported_unless_used():
    pytest.importorskip("google_crc32c")
    code = """
        import tempfile
        import numpy as np
        import mirrax as mx

        strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
        dataset = mx.data.Dataset.from_tensor_slices((np.arange(9), np.eye(9)))
        dataset = dataset.map(lambda x, y: (x + 1, y)).shuffle(9).batch(4).prefetch(1)
        distributed = strategy.experimental_distribute_dataset(dataset)
        iterator = iter(distributed)
        next(iterator)
        iterator.set_state(iterator.get_state())
        assert len(list(iterator)) == 2
        for source in ([np.arange(3)], np.eye(3), iter([np.arange(3)]), lambda: [[1, 2]]):
            assert list(mx.data.as_dataset(source))
            assert strategy.experimental_distribute_dataset(source)
        with tempfile.TemporaryDirectory() as folder:
            with mx.io.TFRecordWriter(folder + "/a", "GZIP") as writer:
                writer.write(mx.io.encode_example({"x": [1, 2]}))
            (record,) = mx.data.TFRecordDataset(folder + "/a", "GZIP")
            assert mx.io.decode_example(record)["x"].tolist() == [1, 2]
        try:
            mx.data.as_dataset(5)
        except TypeError:
            pass
        print(sorted(optional()))
    """
    assert run_python("-c", OPTIONAL + textwrap.dedent(code)).strip() == "[]"


def test_a_dataset_of_one_library_imports_no_other():
    need_libraries()
    code = """
        import mirrax as mx

        def adds_nothing(source):
            before = optional()
            assert list(mx.data.as_dataset(source))
            assert optional() == before, optional() - before

        from torch.utils.data import DataLoader
        loader = DataLoader([1, 2, 3], batch_size=2)
        list(loader)
        adds_nothing(loader)

        import grain.python as grain
        batches = grain.MapDataset.range(3).batch(2)
        list(batches)
        adds_nothing(batches)

        import datasets
        rows = datasets.Dataset.from_dict({"x": [1, 2, 3]})
        list(rows.with_format("numpy"))
        adds_nothing(rows)
        adds_nothing(rows.to_iterable_dataset())
        print("tensorflow" in optional(), "keras" in optional())
    """
    output = run_python("-c", OPTIONAL + textwrap.dedent(code))
    assert output.split() == ["False", "False"]
