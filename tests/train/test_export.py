"""`Checkpoint.export` with Orbax, which everybody has; tests/interop has safetensors."""

from __future__ import annotations

import importlib.util

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers.engines import mirrored

import mirrax as mx

pytestmark = pytest.mark.slow


def checkpoint():
    with mirrored(2).scope():
        w = mx.Variable(np.arange(6.0).reshape(2, 3), dtype="float32", name="w")
        half = mx.Variable(np.ones(2), dtype="bfloat16")
        mean = mx.metrics.Mean()
    data = iter(mx.data.Dataset.range(3))
    parts = {"dense.kernel": w, "layers": [half, {"b": np.float32(2.5)}]}
    return mx.train.Checkpoint(
        model=parts, epoch=7, name="mine", key=jax.random.key(3), mean=mean, data=data
    )


def test_orbax_reads_it_alone(tmp_path):
    made = checkpoint()
    made.save(tmp_path / "ckpt", wait=True)
    path = made.export(tmp_path / "new" / "plain", format="orbax")
    assert path == str(tmp_path / "new" / "plain")
    found = ocp.StandardCheckpointer().restore(path)
    assert found.keys() == {"model", "epoch", "name", "key", "mean"}
    model = found["model"]
    assert np.asarray(model["dense.kernel"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert model["layers"]["0"].dtype.name == "bfloat16"
    assert np.asarray(model["layers"]["1"]["b"]).item() == 2.5
    assert (found["epoch"], found["name"]) == (7, "mine")
    expected = jax.random.key_data(jax.random.key(3))
    assert np.asarray(found["key"]).tolist() == np.asarray(expected).tolist()
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["plain"]


def test_what_is_there_is_not_replaced_unasked(tmp_path):
    made = mx.train.Checkpoint(v=mx.Variable(1.0))
    made.export(tmp_path / "plain", format="orbax")
    made.v.assign(2.0)
    with pytest.raises(FileExistsError, match="plain; nothing has been exported"):
        made.export(tmp_path / "plain", format="orbax")
    made.export(tmp_path / "plain", format="orbax", overwrite=True)
    found = ocp.StandardCheckpointer().restore(tmp_path / "plain")
    assert float(found["v"]) == 2.0


def test_what_cannot_be_exported_is_named(tmp_path):
    empty = mx.train.Checkpoint(a=np.zeros((0, 3)))
    with pytest.raises(ValueError, match="empty arrays: a.*'safetensors'"):
        empty.export(tmp_path / "x", format="orbax")
    crossed = mx.train.Checkpoint(a={"b": np.ones(1), "b/c": np.ones(1)})
    with pytest.raises(ValueError, match="'a/b/c' and another array cannot be nested"):
        crossed.export(tmp_path / "x", format="orbax")
    with pytest.raises(ValueError, match="nothing to export"):
        mx.train.Checkpoint().export(tmp_path / "x", format="orbax")
    with pytest.raises(ValueError, match="'safetensors', 'orbax', got 'hdf5'"):
        empty.export(tmp_path / "x", format="hdf5")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is not None, reason="it is installed"
)
def test_a_library_that_is_missing_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"'mirrax\[safetensors\]'"):
        mx.train.Checkpoint(v=mx.Variable(1.0)).export("model.safetensors")


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is not None, reason="it is installed"
)
def test_tensorflow_is_named_where_it_is_missing():
    with pytest.raises(ModuleNotFoundError, match="pip install tensorflow-cpu"):
        mx.train.load_tensorflow_checkpoint("ckpt-1")
