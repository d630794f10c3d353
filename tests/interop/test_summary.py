"""`mx.summary`: TensorBoard's own reader finds what was written."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import mirrored, per_replica
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx
from interop import libraries
from mirrax.testing import run_workers
from tests import test_docs

libraries.tensorboard()


accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator"
)
tensor_util = pytest.importorskip("tensorboard.util.tensor_util")


def read(logdir) -> dict[str, list[Any]]:
    """The steps and values of each name."""
    found = accumulator.EventAccumulator(str(logdir), {"tensors": 0})
    found.Reload()
    return {
        name: [
            (event.step, tensor_util.make_ndarray(event.tensor_proto))
            for event in found.Tensors(name)
        ]
        for name in found.Tags()["tensors"]
    }


def test_all_kinds(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    pixels = np.linspace(0, 1, 2 * 4 * 5 * 3).reshape(2, 4, 5, 3)
    counter = mx.Variable(7)
    writer = mx.summary.create_file_writer(tmp_path)
    with writer.as_default():
        assert mx.summary.scalar("loss", jnp.float32(0.5), step=1)
        assert mx.summary.scalar("loss", 0.25, step=counter, description="the *loss*")
        assert mx.summary.text("note", "**bold**", step=2)
        assert mx.summary.image("pixels", pixels, step=3, max_outputs=1)
        assert mx.summary.image("grey", np.zeros((1, 2, 2, 1), np.uint8), step=3)
        assert mx.summary.histogram("w", mx.Variable(np.arange(9.0)), 4, buckets=3)
        mx.summary.flush()
    writer.close()
    found = read(tmp_path)
    assert [(step, float(x)) for step, x in found["loss"]] == [(1, 0.5), (7, 0.25)]
    assert found["note"][0][0] == 2 and found["note"][0][1].item() == b"**bold**"
    assert found["w"][0][1].tolist() == [
        [0, 8 / 3, 3],
        [8 / 3, 16 / 3, 3],
        [16 / 3, 8, 3],
    ]
    width, height, png = found["pixels"][0][1].tolist()
    assert (width, height) == (b"5", b"4") and len(found["grey"][0][1]) == 3
    shown = np.asarray(Image.open(io.BytesIO(png)))
    np.testing.assert_array_equal(shown, np.floor(pixels[0] * 255.5).clip(0, 255))


@pytest.mark.parametrize("values", [[2.0, 2.0], [1.0, 5.0, 2.0, 2.5, 4.99], []])
def test_histograms_are_those_of_tensorboard(values, tmp_path):
    summary = pytest.importorskip("tensorboard.plugins.histogram.summary_v2")
    writer = mx.summary.create_file_writer(tmp_path)
    with writer.as_default(step=0):
        mx.summary.histogram("w", np.array(values), buckets=4)
    writer.close()
    expected = summary.histogram_pb("w", np.array(values), buckets=4)
    np.testing.assert_allclose(
        read(tmp_path)["w"][0][1], tensor_util.make_ndarray(expected.value[0].tensor)
    )


def test_steps_and_conditions(tmp_path):
    writer = mx.summary.create_file_writer(tmp_path, filename_suffix=".mine")
    with writer.as_default(step=5):
        mx.summary.scalar("a", 1.0)
        mx.summary.experimental.set_step(6)
        mx.summary.scalar("a", 2.0)
        with mx.summary.record_if(lambda: mx.summary.experimental.get_step() > 6):
            assert not mx.summary.scalar("a", 3.0)
            mx.summary.experimental.set_step(7)
            assert mx.summary.scalar("a", 4.0)
    assert mx.summary.experimental.get_step() is None
    assert not mx.summary.scalar("a", 5.0, step=8)
    assert [(step, float(x)) for step, x in read(tmp_path)["a"]] == [
        *((5, 1.0), (6, 2.0), (7, 4.0))
    ]
    assert [path.name.endswith(".mine") for path in tmp_path.iterdir()] == [True]
    writer.close()


def test_of_several_replicas_the_first_one_writes(tmp_path):
    strategy = mirrored(2)
    writer = mx.summary.create_file_writer(tmp_path)
    with writer.as_default():
        x = per_replica(strategy, 1.0, 2.0)
        strategy.run(lambda x: mx.summary.scalar("x", x, step=1), (x,))
        with pytest.raises(ValueError, match=r"'x'.*strategy.reduce\('MEAN'"):
            mx.summary.scalar("x", x, step=1)
        step = mx.function(lambda x: mx.summary.scalar("x", x, step=1))
        with pytest.raises(
            RuntimeError, match="Return the value from the step, combine"
        ):
            strategy.run(step, (x,))
        constant = mx.function(lambda: mx.summary.scalar("x", 1.0, step=1))
        with pytest.raises(RuntimeError, match="is called in a function that is trac"):
            strategy.run(constant)
    writer.close()
    assert [float(x) for _, x in read(tmp_path)["x"]] == [1.0]


def write_on_workers(logdir):
    strategy = mx.distribute.MultiWorkerMirroredStrategy()
    writer = mx.summary.create_file_writer(logdir)
    with writer.as_default(step=0):
        number = strategy.cluster_resolver.task_id
        return mx.summary.scalar(
            "worker", float(number or 0)
        )  # no `close`: at the exit


def test_of_several_workers_the_first_one_writes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(libraries.NO_TENSORFLOW)  # also on that of the workers
    assert run_workers(write_on_workers, 2, args=(tmp_path,)) == [True, False]
    assert len(list(tmp_path.iterdir())) == 1
    assert [float(x) for _, x in read(tmp_path)["worker"]] == [0.0]


def test_what_waits_is_written_at_the_end_of_the_program(tmp_path):
    code = f"""
import mirrax as mx
mx.summary.create_file_writer({str(tmp_path)!r}).set_as_default(step=3)
mx.summary.scalar("last", 1.5)
"""
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=SECONDS_TO_HANG,
        env=libraries.without_tensorflow(),
    )
    assert [(step, float(x)) for step, x in read(tmp_path)["last"]] == [(3, 1.5)]


def test_errors(tmp_path):
    writer = mx.summary.create_file_writer(tmp_path)
    with writer.as_default():
        with pytest.raises(ValueError, match="'a'.* has no step. Pass `step=`"):
            mx.summary.scalar("a", 1.0)
        with pytest.raises(ValueError, match=r"one number, got .*\(2,\)"):
            mx.summary.scalar("a", [1.0, 2.0], step=0)
        with pytest.raises(ValueError, match=r"\(images, height.*got \(4, 4\)"):
            mx.summary.image("a", np.zeros((4, 4)), step=0)
    writer.close()
    with pytest.raises(RuntimeError, match=f"{tmp_path}.* is closed"):
        writer.set_as_default()


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    test_docs.test_examples_run(Path(test_docs.ROOT) / "docs" / "summaries.md")
    assert list(Path("logs").iterdir())
