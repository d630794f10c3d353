"""Typical mistakes: the message says what to do, at the user's line alone."""

from __future__ import annotations

import json
import traceback
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import mirrored

import mirrax as mx


def shown(mistake) -> tuple[BaseException, list[str]]:
    """The exception of a mistake, and the files of its traceback."""
    with pytest.raises(Exception) as caught:
        mistake()
    error = caught.value
    return error, [f.filename for f in traceback.extract_tb(error.__traceback__)]


def assert_brief(mistake, *words) -> None:
    error, files = shown(mistake)
    assert error.__context__ is None or error.__suppress_context__
    assert files[-1] == __file__, files
    assert not any("mirrax/_src" in file for file in files)
    for word in words:
        assert word in str(error)


def parts() -> Any:
    return mx.distribute.PerReplica([jnp.ones(2), jnp.ones(3)])


def wide():
    return mx.distribute.PerReplica([jnp.ones((2, 3)), jnp.ones((2, 4))])


def variable(value: Any = 0.0):
    with mirrored(2).scope():
        return mx.Variable(value, name="w")


def read_rows(row_fn, **kwargs):
    dataset = mx.data.Dataset.range(8).map(row_fn, **kwargs).batch(4)
    list(mirrored(2).experimental_distribute_dataset(dataset))


def bad_row(x):
    if x == 5:
        raise KeyError("row 5")
    return x


def bad_batches():
    yield np.ones((4, 2))
    raise OSError("disk gone")


@pytest.mark.parametrize(
    "mistake, word",
    [
        (lambda: mirrored(2).reduce("SUM", parts(), axis=None), "Pass `axis=0`"),
        (lambda: mirrored(2).reduce("AVG", parts(), axis=0), "got 'AVG'"),
        (lambda: mirrored(2).gather(wide(), axis=0), "agree on all other axes"),
        (lambda: mirrored(2).run(bad_row, args=parts()), "`args=(x,)`"),
        (
            lambda: mirrored(2).run_steps(bad_row, parts(), steps=2),
            "pass `iter(dataset)`",
        ),
        (lambda: mx.distribute.MirroredStrategy(["CPU0"]), "'CPU0' is not a device"),
        (lambda: variable().assign(jnp.ones(4)), "a value of shape (4,)"),
        (lambda: variable(jnp.ones(3)).assign("hello"), "Variable 'w' needs an array"),
        (lambda: variable().assign_add(None), "Variable 'w' needs an array"),
        (lambda: mx.Variable(["xy", "z"], name="w"), "got ['xy', 'z']"),
        (lambda: mx.Variable(name="w"), "Variable 'w' needs an `initial_value`"),
        (lambda: mx.Variable(0.0, aggregation="sum"), "got 'sum'"),
        (lambda: mx.data.Dataset.range(4).batch(0), "`batch_size` must be positive"),
        (lambda: mx.metrics.Accuracy().update_state([1, 2], [1, 2, 3]), "do not fit"),
        (lambda: mx.train.Checkpoint(f=print), "cannot save 'f'"),
        (lambda: mx.io.decode_example(b"abc"), "3 bytes is not a `tf.train.Example`"),
        (lambda: mx.train.load_checkpoint("no/such"), "no checkpoint at"),
        (lambda: mx.nn.compute_average_loss(1.0), "a loss for each example"),
        (lambda: read_rows(bad_row), "row 5"),
        (lambda: read_rows(bad_row, num_parallel_calls=2), "row 5"),
    ],
)
def test_the_inside_of_mirrax_is_left_out(mistake, word):
    error, files = shown(mistake)
    assert word in str(error)
    assert not any("mirrax/_src" in file for file in files)
    assert "/enum.py" not in files[-1]
    text = "".join(traceback.format_exception(error))
    assert "During handling" not in text and "direct cause" not in text


def test_a_generator_that_raises_is_shown_alone():
    data = mx.data.Dataset.from_generator(bad_batches)
    assert_brief(lambda: list(mirrored(2).experimental_distribute_dataset(data)))


def test_frames_of_a_program_given_with_c_are_kept():
    code = compile("def fail(x): raise KeyError('mine')", "<string>", "exec")
    names: dict = {"__name__": "__main__"}
    exec(code, names)
    _, files = shown(lambda: mirrored(2).run(names["fail"], args=(1.0,)))
    assert files[-1] == "<string>"


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: 1 / x,
        lambda x: jnp.ones(2) * x,
        lambda x: np.ones(2) - x,
        lambda x: x > 3,
        lambda x: -x,
        lambda x: x[0],
        lambda x: list(x),
        lambda x: float(x),
        lambda x: np.asarray(x),
        lambda x: f"{x:.3f}",
        lambda x: x.mean(),
        lambda x: x.shape,
    ],
)
def test_a_per_replica_value_used_as_one_array_says_how_to_combine_it(use):
    with pytest.raises((TypeError, AttributeError), match=r"2 here.*strategy\.reduce"):
        use(parts())


def test_a_per_replica_value_is_no_collection_and_compares_by_identity():
    value = parts()
    assert value and value == value and value != parts()
    assert f"{value}" == str(value) and not hasattr(value, "weights")


def test_python_assignments_to_a_variable_are_refused():
    for w in (variable(jnp.ones(3)), mx.Variable(jnp.ones(3), name="w")):
        with pytest.raises(TypeError, match=r"Variable 'w' .*`variable\[1\] = value`"):
            w[1] = 2.0
        with pytest.raises(RuntimeError, match=r"Variable 'w' .*assign_add\(value\)"):
            w += 1.0
        with pytest.raises(RuntimeError, match="assign_sub"):
            w -= 1.0
        np.testing.assert_array_equal(w.numpy(), np.ones(3))


def test_a_loss_that_returns_more_needs_has_aux():
    w = variable(1.0)
    for make in (mx.value_and_grad, mx.grad):
        assert_brief(make(lambda: (w * w, w), w), "got a tuple", "`has_aux=True`")
        assert_brief(make(lambda: None, w), "got a NoneType")


def test_a_gpu_that_jax_does_not_see():
    with pytest.raises(ValueError, match=r"'GPU:7'.*JAX sees no GPU.*'CPU:0', 'CPU:1'"):
        mx.distribute.MirroredStrategy(["GPU:7"])


def test_a_dataset_fn_that_returns_nothing():
    with pytest.raises(TypeError, match="What `dataset_fn` returned is not a dataset"):
        mirrored(2).distribute_datasets_from_function(lambda context: None)


def test_the_learning_rate_has_one_name_and_is_a_number():
    optimizer = mx.train.Optimizer("adam", learning_rate=0.1)
    for use in (lambda: optimizer.lr, lambda: setattr(optimizer, "lr", 1.0)):
        assert_brief(use, "`optimizer.learning_rate`")
    assert "lr" not in dir(optimizer)
    for value in ("0.1", None):
        with pytest.raises(TypeError, match=f"must be a number, got {value!r}"):
            optimizer.learning_rate = value
    with pytest.raises(TypeError, match="got <function adam"):
        mx.train.Optimizer(optax.adam, learning_rate=0.1)


def test_checkpoints_say_what_is_there(tmp_path):
    w = mx.Variable(1.0)
    path = mx.train.Checkpoint(w=w).save(tmp_path / "ckpt")
    for wrong in (tmp_path, tmp_path / "ckpt-7"):
        with pytest.raises(FileNotFoundError, match=r"has ckpt-1: .*latest_checkpoint"):
            mx.train.Checkpoint(w=w).restore(wrong)
    status = mx.train.Checkpoint(u=w).restore(path).expect_partial()
    assert repr(status) == f"RestoreStatus({path!r}, missing=['u'], unused=['w'])"
    assert repr(mx.train.Checkpoint(w=w).restore(None)) == "RestoreStatus(None)"
    with pytest.raises(TypeError, match="`max_to_keep` must be an integer.*got '3'"):
        mx.train.CheckpointManager(mx.train.Checkpoint(w=w), tmp_path, max_to_keep="3")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "job, workers, is_told",
    [("worker", 2, True), ("chief", 1, True), ("evaluator", 2, False)],
)
def test_a_mirrored_strategy_in_a_job_of_several_workers(
    monkeypatch, job, workers, is_told
):
    cluster = {"worker": [f"host:{i}" for i in range(workers)], "chief": ["a:1"]}
    config = {"cluster": cluster, "task": {"type": job, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        mx.distribute.MirroredStrategy(["CPU:0"])
    found = [str(w.message) for w in told]
    assert len(found) == is_told
    if is_told:
        assert f"{workers + 1} workers" in found[0]
        assert "`mx.distribute.MultiWorkerMirroredStrategy()`" in found[0]


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"cluster": {"worker": []}}'])
def test_a_tf_config_that_describes_no_job_is_nothing_to_a_mirrored_strategy(
    monkeypatch, text
):
    monkeypatch.setenv("TF_CONFIG", text)
    assert mx.distribute.MirroredStrategy(["CPU:0"]).num_replicas_in_sync == 1
