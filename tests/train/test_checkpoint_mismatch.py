"""What does not fit is named and changes nothing; what is missing is told by name."""

from __future__ import annotations

import gc
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import mirrored, parts

import mirrax as mx
from mirrax.errors import DataLossError
from mirrax.train import Checkpoint


def make(strategy, value):
    with strategy.scope():
        return mx.Variable(value)


def quietly(action):
    """Does it, and no warning may be heard, also not when what it returns is gone."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        action()
        gc.collect()


# What does not fit ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 2])
def test_everything_that_does_not_fit_is_named_and_nothing_changes(n, tmp_path):
    strategy = mirrored(n) if n else mx.get_strategy()
    first = Checkpoint(
        a=make(strategy, 1.0),
        shape=make(strategy, jnp.zeros(2)),
        dtype=make(strategy, jnp.zeros(2)),
        array=jnp.zeros(3),
        number=5,
        tree={"x": np.zeros(2), "y": 1},
        key=jax.random.key(0),
        z=make(strategy, 1.0),
    )
    for _ in range(4):
        path = first.save(tmp_path / "c")
    a, z = make(strategy, 7.0), make(strategy, 8.0)
    again = Checkpoint(
        a=a,
        shape=make(strategy, jnp.zeros(3)),
        dtype=make(strategy, jnp.zeros(2, "int32")),
        array=3,
        number=jnp.zeros(()),
        tree={"x": np.zeros((2, 1)), "y": 9},
        key=jax.random.key(0, impl="rbg"),
        z=z,
    )
    with pytest.raises(
        ValueError, match="c-4 does not fit. Nothing has been"
    ) as caught:
        again.restore(path)
    message = str(caught.value)
    for line in (
        "\n  shape: its shape is (3,) here, (2,) in the checkpoint",
        "\n  dtype: its dtype is int32 here, float32 in the checkpoint",
        "\n  array: an array on one side",
        "\n  number: an array on one side",
        "\n  tree/x: its shape is (2, 1) here, (2,) in the checkpoint",
        "\n  key: its dtype is key<rbg> here, key<fry> in the checkpoint",
    ):
        assert line in message
    assert message.count("\n") == 6
    assert parts(strategy, a) == [7.0] * max(n, 1) and z.numpy() == 8.0
    assert again.array == 3 and again.tree["y"] == 9
    assert again.save_counter.numpy() == 0
    again.late = mx.Variable(1.0)  # nothing is left of the failed restore
    assert again.late.numpy() == 1.0


@pytest.mark.parametrize("saved, here", [("float32", "float16"), ("int32", "float32")])
def test_dtypes_are_not_converted(saved, here, tmp_path):
    path = Checkpoint(v=mx.Variable(jnp.ones(2, saved))).write(tmp_path / "c")
    v = mx.Variable(jnp.zeros(2, here))
    with pytest.raises(ValueError, match=f"v: its dtype is {here} here, {saved} in"):
        Checkpoint(v=v).read(path)
    assert v.numpy().tolist() == [0.0, 0.0]


def test_a_state_where_a_number_was(tmp_path):
    iterator = iter(mx.data.Dataset.range(5))
    path = Checkpoint(x=5, v=mx.Variable(1.0)).write(tmp_path / "c")
    v = mx.Variable(0.0)
    with pytest.raises(ValueError, match="5") as caught:
        Checkpoint(x=iterator, v=v).read(path)
    assert "'x'" in " ".join([str(caught.value), *caught.value.__notes__])
    assert v.numpy() == 0.0
    assert next(iterator) == 0
    path = Checkpoint(x=iterator).write(tmp_path / "d")
    checkpoint = Checkpoint(x=5)
    with pytest.raises(ValueError, match="x: it is a int here, the checkpoint has"):
        checkpoint.read(path)
    assert checkpoint.x == 5


def test_an_iterator_that_refuses_its_state_changes_nothing(tmp_path):
    def iterators(batch):
        a = iter(mx.data.Dataset.range(5))
        b = iter(mx.data.Dataset.range(5).batch(batch))
        return a, b

    a, b = iterators(1)
    for iterator in (a, a, b):
        next(iterator)
    first = Checkpoint(a=a, b=b, n=4, v=mx.Variable(1.0))
    path = first.save(tmp_path / "c")
    a, b = iterators(2)
    again = Checkpoint(a=a, b=b, n=0, v=mx.Variable(0.0))
    with pytest.raises(ValueError, match="another pipeline"):
        again.restore(path)
    assert next(a) == 0
    assert next(b).tolist() == [0, 1]
    assert again.n == 0 and again.v.numpy() == 0.0
    assert again.save_counter.numpy() == 0


def test_slots_of_another_shape(tmp_path):
    def make(shape):
        w = mx.Variable(jnp.ones(shape), name="w")
        optimizer = mx.train.Optimizer(optax.adam(0.1))
        optimizer.build([w])
        return optimizer

    path = Checkpoint(optimizer=make(2)).write(tmp_path / "c")
    with pytest.raises(
        ValueError, match=r"optimizer/state/0/mu/w: its shape is \(3,\)"
    ):
        Checkpoint(optimizer=make(3)).read(path)


def test_numbers_may_become_other_numbers(tmp_path):
    path = Checkpoint(a=3, b=True, c="text").write(tmp_path / "c")
    checkpoint = Checkpoint(a=0.5, b=0, c="")
    checkpoint.read(path).assert_consumed()
    assert (checkpoint.a, checkpoint.b, checkpoint.c) == (3, True, "text")


# What is missing, what is left over ------------------------------------------------------


def files(tmp_path):
    return Checkpoint(a=mx.Variable(1.0), b=mx.Variable(2.0)).save(tmp_path / "c")


def test_all_matches(tmp_path):
    path = files(tmp_path)
    checkpoint = Checkpoint(a=mx.Variable(0.0), b=mx.Variable(0.0))

    def check():
        status = checkpoint.restore(path)
        assert status.assert_consumed() is status
        assert status.assert_existing_objects_matched() is status
        assert status.assert_nontrivial_match() is status
        assert status.missing == status.unused == []

    quietly(check)
    quietly(lambda: checkpoint.restore(path))
    assert checkpoint.a.numpy() == 1.0 and checkpoint.b.numpy() == 2.0


def test_what_is_only_here(tmp_path):
    a, new = mx.Variable(0.0), mx.Variable(9.0)
    checkpoint = Checkpoint(a=a, b=mx.Variable(0.0), new=new)
    status = checkpoint.restore(files(tmp_path)).expect_partial()
    assert status.missing == ["new"] and status.unused == []
    with pytest.raises(
        AssertionError, match=r"not in the checkpoint \(unchanged\): new"
    ):
        status.assert_consumed()
    with pytest.raises(AssertionError, match="restored in part"):
        status.assert_existing_objects_matched()
    status.assert_nontrivial_match()
    assert a.numpy() == 1.0 and new.numpy() == 9.0


def test_what_is_only_in_the_checkpoint(tmp_path):
    a = mx.Variable(0.0)
    status = Checkpoint(a=a).restore(files(tmp_path)).expect_partial()
    assert status.missing == [] and status.unused == ["b"]
    with pytest.raises(AssertionError, match="In the checkpoint, but not here: b"):
        status.assert_consumed()
    status.assert_existing_objects_matched()
    status.assert_nontrivial_match()
    assert a.numpy() == 1.0


def test_nothing_in_common(tmp_path):
    other = mx.Variable(9.0)
    status = Checkpoint(other=other).restore(files(tmp_path)).expect_partial()
    assert status.missing == ["other"] and status.unused == ["a", "b"]
    for check in (status.assert_consumed, status.assert_existing_objects_matched):
        with pytest.raises(AssertionError, match="restored in part"):
            check()
    status.assert_nontrivial_match()  # the counter of saves matches, as in TensorFlow
    assert other.numpy() == 9.0


def test_nothing_at_all_in_common(tmp_path):
    path = Checkpoint(a=mx.Variable(1.0)).write(tmp_path / "c")
    status = Checkpoint(other=mx.Variable(9.0)).read(path).expect_partial()
    with pytest.raises(AssertionError, match="restored in part"):
        status.assert_nontrivial_match()


def test_an_empty_checkpoint_restores_anything(tmp_path):
    status = Checkpoint().restore(files(tmp_path)).expect_partial()
    status.assert_existing_objects_matched().assert_nontrivial_match()
    with pytest.raises(AssertionError, match="not here: a, b"):
        status.assert_consumed()


def test_many_names_are_cut_short(tmp_path):
    checkpoint = Checkpoint(**{f"v{i:02}": i for i in range(30)})
    path = checkpoint.write(tmp_path / "c")
    status = Checkpoint().read(path)
    with pytest.raises(AssertionError, match="v18, v19 and 10 more"):
        status.assert_consumed()


def test_a_status_that_nobody_looked_at_warns_by_name(tmp_path):
    path = files(tmp_path)
    with pytest.warns(UserWarning) as caught:
        Checkpoint(a=mx.Variable(0.0), new=mx.Variable(0.0)).restore(path)
        gc.collect()
    (warning,) = caught
    text = str(warning.message)
    assert f"The checkpoint {path} was restored in part" in text
    assert "Here, but not in the checkpoint (unchanged): new." in text
    assert "In the checkpoint, but not here: b." in text
    assert "Call `expect_partial()`" in text


@pytest.mark.parametrize(
    "look",
    [
        "expect_partial",
        "assert_consumed",
        "assert_existing_objects_matched",
        "assert_nontrivial_match",
    ],
)
def test_a_status_that_was_looked_at_is_silent(look, tmp_path):
    path = files(tmp_path)

    def restore():
        status = Checkpoint(a=mx.Variable(0.0), new=mx.Variable(0.0)).restore(path)
        try:
            getattr(status, look)()
        except AssertionError as error:
            assert "new" in str(error)
        del status

    quietly(restore)


# Attributes that come later --------------------------------------------------------------


def test_an_attribute_that_is_set_later_is_restored_then(tmp_path):
    strategy = mirrored(2)
    first = Checkpoint(
        a=mx.Variable(1.0), b=make(strategy, 2.0), tree={"x": jnp.ones(2)}
    )
    path = first.save(tmp_path / "c")
    checkpoint = Checkpoint()
    status = checkpoint.restore(path).expect_partial()
    assert status.unused == ["a", "b", "tree/x"]
    b = make(strategy, 0.0)
    checkpoint.b = b
    assert parts(strategy, b) == [2.0, 2.0]
    checkpoint.a = mx.Variable(0.0)
    assert checkpoint.a.numpy() == 1.0
    with pytest.raises(AssertionError, match="not here: tree/x"):
        status.assert_consumed()
    checkpoint.tree = {"x": jnp.zeros(2)}
    assert checkpoint.tree["x"].tolist() == [1.0, 1.0]
    status.assert_consumed()
    checkpoint.a = mx.Variable(5.0)  # once is enough
    assert checkpoint.a.numpy() == 5.0
    checkpoint.new = mx.Variable(6.0)
    assert checkpoint.new.numpy() == 6.0
    assert status.missing == ["new"]


def test_an_attribute_that_does_not_fit_later(tmp_path):
    path = Checkpoint(a=mx.Variable(1.0), b=mx.Variable(1.0)).write(tmp_path / "c")
    checkpoint = Checkpoint()
    checkpoint.read(path).expect_partial()
    with pytest.raises(ValueError, match=r"a: its shape is \(2,\) here, \(\) in"):
        checkpoint.a = mx.Variable(jnp.zeros(2))
    checkpoint.b = mx.Variable(0.0)
    assert checkpoint.b.numpy() == 1.0


def test_the_last_of_two_restores_is_the_one_that_counts(tmp_path):
    paths = [
        Checkpoint(a=mx.Variable(float(k))).write(tmp_path / f"c{k}") for k in (1, 2)
    ]
    checkpoint = Checkpoint()
    for path in paths:
        checkpoint.read(path).expect_partial()
    checkpoint.a = mx.Variable(0.0)
    assert checkpoint.a.numpy() == 2.0


def test_an_optimizer_that_comes_later(tmp_path):
    w = mx.Variable(1.0, name="w")
    optimizer = mx.train.Optimizer(optax.sgd(0.1, momentum=0.9))
    optimizer.apply_gradients([(jnp.float32(2.0), w)])
    path = Checkpoint(optimizer=optimizer).write(tmp_path / "c")
    checkpoint = Checkpoint()
    status = checkpoint.read(path).expect_partial()
    checkpoint.optimizer = mx.train.Optimizer(optax.sgd(0.1, momentum=0.9))
    status.assert_consumed()
    assert checkpoint.optimizer.iterations.numpy() == 1
    checkpoint.optimizer.build([w])
    assert checkpoint.optimizer.state[0].trace["w"].numpy() == 2.0


def test_an_attribute_that_comes_after_the_file_has_been_deleted(tmp_path):
    path = Checkpoint(a=mx.Variable(1.0), b=mx.Variable(2.0)).write(tmp_path / "c")
    checkpoint = Checkpoint(a=mx.Variable(0.0))
    checkpoint.read(path).expect_partial()
    shutil.rmtree(path)
    v = mx.Variable(0.0)
    try:
        checkpoint.b = v
    except (FileNotFoundError, DataLossError) as error:
        assert str(path) in str(error)
        assert v.numpy() == 0.0
    else:
        assert v.numpy() in (0.0, 2.0)


@pytest.mark.parametrize("size", [1, 70_000])
def test_an_attribute_that_comes_after_the_file_has_been_overwritten(size, tmp_path):
    """Never the values of another checkpoint."""

    def make(value):
        return mx.Variable(jnp.full(size, value))

    path = Checkpoint(a=make(1.0), b=make(2.0)).write(tmp_path / "c")
    checkpoint = Checkpoint(a=make(0.0))
    checkpoint.read(path).expect_partial()
    Checkpoint(a=make(6.0), b=make(7.0)).write(path)
    checkpoint.sync()
    v = make(0.0)
    with pytest.raises(ValueError, match=f"{path} was replaced"):
        checkpoint.b = v
    assert set(v.numpy()) == {0.0}
