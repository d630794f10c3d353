"""TensorFlow's checkpoints in mirrax's variables, and mirrax's weights for others."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from helpers.engines import mirrored

import mirrax as mx
from interop import libraries
from interop.test_keras_examples import percentage_in, start

tf = libraries.tensorflow()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with a checkpoint of variables, of a slot and of other things."""
    kernel = tf.Variable(np.arange(6.0, dtype="f4").reshape(2, 3))
    half = tf.Variable(tf.cast([1.5, 2.5], tf.bfloat16))
    model = tf.Module()
    model.dense, model.half = {"kernel": kernel}, half
    words = tf.Variable(["a", "b"])
    checkpoint = tf.train.Checkpoint(model=model, step=tf.Variable(5), words=words)
    directory = tmp_path_factory.mktemp("saved")
    checkpoint.save(directory / "ckpt")
    kernel.assign_add(tf.ones((2, 3)))
    return directory, checkpoint.save(directory / "ckpt")


def test_arrays_by_name(saved):
    directory, prefix = saved
    arrays = mx.train.load_tensorflow_checkpoint(prefix)
    assert list(arrays) == ["model/dense/kernel", "model/half", "save_counter", "step"]
    assert arrays["model/dense/kernel"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert arrays["model/half"].astype("f4").tolist() == [1.5, 2.5]
    assert arrays["step"].dtype == np.int32 and int(arrays["step"]) == 5
    latest = mx.train.load_tensorflow_checkpoint(directory)
    assert latest["model/dense/kernel"].tolist() == [[1, 2, 3], [4, 5, 6]]
    first = mx.train.load_tensorflow_checkpoint(directory / "ckpt-1")
    assert first["model/dense/kernel"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_saved_model(tmp_path):
    model = tf.Module()
    model.w = tf.Variable([1.0, 2.0])
    tf.saved_model.save(model, str(tmp_path / "model"))
    arrays = mx.train.load_tensorflow_checkpoint(tmp_path / "model")
    assert arrays["w"].tolist() == [1.0, 2.0]


def test_variables_are_assigned(saved):
    strategy = mirrored(2)
    with strategy.scope():
        kernel, half = mx.Variable(np.zeros((2, 3), "f4")), mx.Variable([0.0, 0.0])
    read = mx.train.load_tensorflow_checkpoint(
        saved[1], assign_to={"model/dense/kernel": kernel, "model/half": half}
    )
    assert read.keys() == {"model/dense/kernel", "model/half"}
    for copy in strategy.experimental_local_results(kernel):
        assert np.asarray(copy).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert half.numpy().tolist() == [1.5, 2.5] and half.dtype == np.float32


def test_what_does_not_fit_is_named_and_nothing_is_assigned(saved, tmp_path):
    kernel, other = mx.Variable(np.zeros((2, 3), "f4")), mx.Variable(np.zeros(4, "i4"))
    load = mx.train.load_tensorflow_checkpoint
    with pytest.raises(ValueError, match="(?s)model/half: .* dtype int32; .*step: .*"):
        load(
            saved[1],
            {"model/dense/kernel": kernel, "model/half": other, "step": other},
        )
    message = "no model/dense/kernl .did you mean model/dense/kernel.*It has model/den"
    with pytest.raises(ValueError, match=message):
        load(saved[1], {"model/dense/kernl": kernel})
    with pytest.raises(TypeError, match="'step' to a ndarray"):
        load(saved[1], {"step": np.zeros(())})  # type: ignore[dict-item]
    assert not kernel.numpy().any()
    with pytest.raises(FileNotFoundError, match="ckpt-9.index does not exist"):
        load(saved[0] / "ckpt-9")
    with pytest.raises(FileNotFoundError, match="neither a file `checkpoint`"):
        load(tmp_path)


def test_safetensors_for_others(tmp_path):
    safe_open = libraries.safetensors().safe_open
    load_file = pytest.importorskip("safetensors.torch").load_file
    with mirrored(2).scope():
        half = mx.Variable([1.5, 2.5], dtype="bfloat16")
        w = mx.Variable(np.arange(6.0, dtype="f4").reshape(2, 3))
    made = mx.train.Checkpoint(model={"w": w, "half": half, "n": np.int32(3)}, epoch=7)
    path = made.export(tmp_path / "model.safetensors")
    with safe_open(path, "np") as file:
        assert json.loads(file.metadata()["epoch"]) == 7
        assert file.get_tensor("model/w").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert file.get_tensor("model/n").shape == ()
    tensors = load_file(path)
    assert str(tensors["model/half"].dtype) == "torch.bfloat16"
    assert tensors["model/half"].float().tolist() == [1.5, 2.5]
    with pytest.raises(FileExistsError, match="model.safetensors; nothing has been"):
        made.export(path)
    w.assign(w + 1)
    made.export(path, overwrite=True)
    assert load_file(path)["model/w"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_example_learns_and_exports(tmp_path):
    path = tmp_path / "weights"
    command = "examples/transfer_from_tensorflow.py", "--export", str(path)
    lines = start(*command, environment={**os.environ})
    assert lines[0] == "Read from TensorFlow: model/w1, model/w2."
    new, whole = map(percentage_in, lines[1:3])
    assert 60 < new <= whole + 5 and whole > 70
    import orbax.checkpoint as ocp

    found = ocp.StandardCheckpointer().restore(path)
    assert {k: v.shape for k, v in found.items()} == {
        **{"w1": (64, 64), "w2": (64, 64), "head": (64, 10)}
    }
