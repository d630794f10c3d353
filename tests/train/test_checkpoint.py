"""What is saved comes back: every kind of variable and dtype, on any number of replicas."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import mirrored, parts, per_replica

import mirrax as mx
from mirrax.train import Checkpoint, CheckpointOptions, latest_checkpoint

WAITS = CheckpointOptions(experimental_enable_async_checkpoint=False)
DTYPES = """bool int2 int4 int8 int16 int32 uint2 uint4 uint8 uint16 uint32 float16
    bfloat16 float32 complex64 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz""".split()


def summed(aggregation="SUM"):
    """What makes a variable one that is combined when it is read."""
    return {
        "synchronization": mx.VariableSynchronization.ON_READ,
        "aggregation": mx.VariableAggregation[aggregation],
    }


def make(strategy: Any, value: Any = 0.0, **kwargs: Any) -> Any:
    with strategy.scope():
        return mx.Variable(value, **kwargs)


def with_copies(strategy, *values, dtype="float32", **kwargs):
    """A variable whose copies differ."""
    v = make(strategy, jnp.zeros((), dtype), **kwargs)
    own = per_replica(strategy, *values, dtype=dtype)
    strategy.run(lambda x: v.assign(x, read_value=False), (own,))
    return v


def bits(array):
    """What two arrays have in common when they are the same to the last bit."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return str(array.dtype), bits(jax.random.key_data(array))
    array = np.asarray(array)
    return array.dtype.name, array.shape, array.tobytes()


def sample(dtype, shape=(2, 3)):
    low, high = (0, 2) if dtype in ("bool", "int2", "uint2") else (0, 8)
    values = np.random.default_rng(0).integers(low, high, shape)
    return jnp.asarray(values.astype(jnp.dtype(dtype)))


# Kinds of variables, numbers of replicas ------------------------------------------------


@pytest.mark.parametrize(
    "before, after",
    [(2, n) for n in (0, 1, 2, 3, 4, 8)] + [(0, 2), (1, 3), (3, 1), (8, 4), (0, 0)],
)
def test_a_variable_on_another_number_of_replicas(before, after, tmp_path):
    def strategy(n):
        return mirrored(n) if n else mx.get_strategy()

    value = jnp.array([1.5, -2.0])
    path = Checkpoint(v=make(strategy(before), value)).save(tmp_path / "c")
    v = make(strategy(after), jnp.zeros(2))
    Checkpoint(v=v).restore(path).assert_consumed()
    assert parts(strategy(after), v) == [[1.5, -2.0]] * max(after, 1)


@pytest.mark.parametrize(
    "after, expected",
    [(1, [12.0]), (2, [6.0, 6.0]), (3, [4.0] * 3), (8, [1.5] * 8)],
)
def test_a_sum_is_shared_out_among_the_replicas_there_are(after, expected, tmp_path):
    v = with_copies(mirrored(2), 4.0, 8.0, **summed())
    path = Checkpoint(v=v).save(tmp_path / "c")
    w = make(mirrored(after), **summed())
    Checkpoint(v=w).restore(path).assert_consumed()
    assert parts(mirrored(after), w) == expected
    assert w.numpy() == 12.0


@pytest.mark.parametrize("aggregation, saved", [("MEAN", 6), ("ONLY_FIRST_REPLICA", 4)])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_mean_or_first_copy_is_given_to_all(aggregation, saved, after, tmp_path):
    v = with_copies(mirrored(2), 4.0, 8.0, **summed(aggregation))
    path = Checkpoint(v=v).save(tmp_path / "c")
    w = make(mirrored(after), **summed(aggregation))
    Checkpoint(v=w).restore(path).assert_consumed()
    assert parts(mirrored(after), w) == [saved] * after


def test_a_sum_restored_as_an_ordinary_variable_and_back(tmp_path):
    v = with_copies(mirrored(2), 4.0, 8.0, **summed())
    path = Checkpoint(v=v).save(tmp_path / "c")
    ordinary = mx.Variable(0.0)
    Checkpoint(v=ordinary).restore(path).assert_consumed()
    assert ordinary.numpy() == 12.0
    path = Checkpoint(v=ordinary).save(tmp_path / "d")
    Checkpoint(v=v).restore(path).assert_consumed()
    assert parts(mirrored(2), v) == [6.0, 6.0]


def test_an_integer_sum_is_divided_without_a_rest(tmp_path):
    v = with_copies(mirrored(2), 2, 3, dtype="int32", **summed())
    checkpoint = Checkpoint(v=v)
    path = checkpoint.save(tmp_path / "c")
    checkpoint.restore(path).assert_consumed()
    assert parts(mirrored(2), v) == [2, 2]  # as in TensorFlow


def test_copies_that_differ_are_saved_as_the_first(tmp_path):
    v = with_copies(mirrored(2), 1.0, 2.0)
    checkpoint = Checkpoint(v=v)
    checkpoint.restore(checkpoint.save(tmp_path / "c")).assert_consumed()
    assert parts(mirrored(2), v) == [1.0, 1.0]


def test_a_variable_without_a_value_of_its_own_cannot_be_saved(tmp_path):
    v = make(mirrored(2), **summed("NONE"))
    checkpoint = Checkpoint(a=mx.Variable(1.0), metric=v)
    with pytest.raises(ValueError, match="aggregation NONE") as caught:
        checkpoint.save(tmp_path / "c")
    assert "'metric'" in caught.value.__notes__[0]
    assert latest_checkpoint(tmp_path) is None
    assert checkpoint.save_counter.numpy() == 0


# Dtypes and shapes ----------------------------------------------------------------------


@pytest.mark.slow
def test_every_dtype_to_the_last_bit(tmp_path):
    strategy = mirrored(2)
    values = {dtype: sample(dtype) for dtype in DTYPES}

    def build(values):
        return Checkpoint(
            v={k: make(strategy, x) for k, x in values.items()},
            jax=values,
            numpy={k: np.asarray(x) for k, x in values.items()},
            scalar={k: np.asarray(x)[0, 0] for k, x in values.items()},
        )

    path = build(values).save(tmp_path / "c")
    again = build({k: jnp.zeros(x.shape, x.dtype) for k, x in values.items()})
    again.restore(path).assert_consumed()
    for dtype, value in values.items():
        copies = strategy.experimental_local_results(again.v[dtype])
        assert [bits(copy) for copy in copies] == [bits(value)] * 2
        assert bits(again.jax[dtype]) == bits(again.numpy[dtype]) == bits(value)
        assert bits(again.scalar[dtype]) == bits(np.asarray(value)[0, 0])
        assert isinstance(again.jax[dtype], jax.Array)
        assert type(again.numpy[dtype]) is np.ndarray
        assert isinstance(again.scalar[dtype], np.generic)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128", ">f4"])
def test_numpy_arrays_of_dtypes_that_jax_has_not(dtype, tmp_path):
    value = np.arange(5).astype(dtype)
    value[0] = 3
    checkpoint = Checkpoint(x=value)
    path = checkpoint.save(tmp_path / "c")
    checkpoint.x = np.zeros_like(value)
    checkpoint.restore(path).assert_consumed()
    assert checkpoint.x.dtype == value.dtype.newbyteorder("=")
    np.testing.assert_array_equal(checkpoint.x, value)
    np.testing.assert_array_equal(mx.train.load_checkpoint(path)["x"], value)


@pytest.mark.parametrize("dtype", ["O", "U3", "S3", "i4,f4"])
def test_arrays_that_hold_no_numbers_come_back_or_are_refused_by_name(dtype, tmp_path):
    value = np.zeros(2, dtype)
    try:
        checkpoint = Checkpoint(names=value)
        path = checkpoint.save(tmp_path / "c")
    except (TypeError, ValueError) as error:
        assert "names" in str(error)
        assert latest_checkpoint(tmp_path) is None
    else:
        checkpoint.restore(path).assert_consumed()
        assert checkpoint.names.dtype == value.dtype
        assert checkpoint.names.tolist() == value.tolist()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1)])
def test_empty_and_scalar_arrays(shape, tmp_path):
    value = jnp.full(shape, 3.0)
    v = make(mirrored(2), value)
    checkpoint = Checkpoint(v=v, x=value, n=np.asarray(value))
    path = checkpoint.save(tmp_path / "c")
    v.assign(jnp.zeros(shape))
    checkpoint.x, checkpoint.n = jnp.zeros(shape), np.zeros(shape, "float32")
    checkpoint.restore(path).assert_consumed()
    assert bits(v.numpy()) == bits(checkpoint.x) == bits(checkpoint.n) == bits(value)


def test_only_empty_arrays(tmp_path):
    checkpoint = Checkpoint(x=jnp.zeros((0, 3)))
    path = checkpoint.write(tmp_path / "c")
    checkpoint.read(path).assert_consumed()
    assert checkpoint.x.shape == (0, 3)


def test_special_floats(tmp_path):
    value = np.array([np.nan, -0.0, np.inf, -np.inf, 1e-45, 3.4e38], "float32")
    value.view("uint32")[0] = 0x7FC12345  # a NaN with a message in it
    checkpoint = Checkpoint(x=value, f=float("nan"), g=float("-inf"), h=-0.0, i=5e-324)
    path = checkpoint.save(tmp_path / "c")
    checkpoint.x, checkpoint.f, checkpoint.g = np.zeros(6, "float32"), 0.0, 0.0
    checkpoint.h, checkpoint.i = 1.0, 1.0
    checkpoint.restore(path).assert_consumed()
    assert bits(checkpoint.x) == bits(value)
    assert repr([checkpoint.f, checkpoint.g, checkpoint.h, checkpoint.i]) == (
        "[nan, -inf, -0.0, 5e-324]"
    )


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 5_000_000])
def test_arrays_below_and_above_the_size_that_is_packed(size, tmp_path):
    value = np.arange(size, dtype="float32")
    v = make(mirrored(2), value)
    checkpoint = Checkpoint(v=v, small=jnp.arange(3), n=value)
    path = checkpoint.save(tmp_path / "c")
    v.assign(jnp.zeros(size))
    checkpoint.n, checkpoint.small = np.zeros(size, "float32"), jnp.zeros(3, "int32")
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(v.numpy(), value)
    np.testing.assert_array_equal(checkpoint.n, value)
    assert checkpoint.small.tolist() == [0, 1, 2]


def test_arrays_that_are_not_contiguous(tmp_path):
    base = np.arange(24.0).reshape(4, 6)
    views = {"t": base.T, "s": base[::2, ::-1], "b": np.broadcast_to(base[0], (3, 6))}
    checkpoint = Checkpoint(**views)
    path = checkpoint.save(tmp_path / "c")
    loaded = mx.train.load_checkpoint(path)
    for name, view in views.items():
        np.testing.assert_array_equal(loaded[name], view)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_of_random_numbers(impl, tmp_path):
    key = jax.random.key(3, impl=impl)
    keys = jax.random.split(key, 3)
    strategy = mirrored(2)
    v = make(strategy, keys)
    checkpoint = Checkpoint(v=v, key=key, keys=keys, old=jax.random.PRNGKey(7))
    path = checkpoint.save(tmp_path / "c")
    other = jax.random.key(99, impl=impl)
    v.assign(jax.random.split(other, 3))
    checkpoint.key, checkpoint.keys = other, jax.random.split(other, 3)
    checkpoint.old = jax.random.PRNGKey(0)
    checkpoint.restore(path).assert_consumed()
    assert bits(checkpoint.key) == bits(key)
    assert bits(v.read_value()) == bits(checkpoint.keys) == bits(keys)
    assert bits(checkpoint.old) == bits(jax.random.PRNGKey(7))
    drawn = strategy.run(lambda: jax.random.uniform(v.read_value()[1]))
    assert parts(strategy, drawn) == [float(jax.random.uniform(keys[1]))] * 2


def test_a_restored_array_lies_where_the_one_it_replaces_lay(tmp_path):
    device = jax.devices()[3]
    checkpoint = Checkpoint(x=jax.device_put(jnp.ones(2), device))
    path = checkpoint.save(tmp_path / "c")
    checkpoint.x = jax.device_put(jnp.zeros(2), device)
    checkpoint.restore(path)
    assert checkpoint.x.devices() == {device}
    assert checkpoint.x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("device", ["CPU:0", "CPU:2"])
def test_a_restored_variable_stays_on_its_device(device, tmp_path):
    strategy = mx.OneDeviceStrategy(device)
    v = make(strategy, jnp.ones(2))
    devices = v.read_value().devices()
    checkpoint = Checkpoint(v=v)
    checkpoint.restore(checkpoint.save(tmp_path / "c")).assert_consumed()
    assert v.read_value().devices() == devices
    doubled = strategy.run(mx.function(lambda: 2 * v.read_value()))
    assert parts(strategy, doubled) == [[2.0, 2.0]]


def test_restored_variables_train_on_and_reuse_their_memory(tmp_path):
    strategy = mirrored(2)
    v, w = make(strategy, jnp.ones(1000)), make(strategy, jnp.ones(1000))
    checkpoint = Checkpoint(v=v, w=w, n=np.zeros(1000, "float32"))
    path = checkpoint.save(tmp_path / "c")
    checkpoint.restore(path)
    step = mx.function(lambda: v.assign_add(jnp.ones(1000), read_value=False))
    for _ in range(3):
        strategy.run(step)
    assert set(v.numpy()) == {4.0}
    assert set(w.numpy()) == {1.0}
    assert set(checkpoint.n) == {0.0}
    checkpoint.restore(path)
    assert set(v.numpy()) == {1.0}


# Names, paths, counting -----------------------------------------------------------------


def test_saves_are_counted(tmp_path):
    checkpoint = Checkpoint(v=mx.Variable(1.0))
    assert checkpoint.save_counter.numpy() == 0
    names = [os.path.basename(checkpoint.save(tmp_path / "ckpt")) for _ in range(3)]
    assert names == ["ckpt-1", "ckpt-2", "ckpt-3"]
    again = Checkpoint(v=mx.Variable(0.0))
    again.restore(tmp_path / "ckpt-2").assert_consumed()
    assert again.save_counter.numpy() == 2
    assert os.path.basename(again.save(tmp_path / "ckpt")) == "ckpt-3"


def test_write_and_read_do_not_count(tmp_path):
    v = mx.Variable(1.0)
    checkpoint = Checkpoint(v=v)
    assert checkpoint.write(tmp_path / "x") == str(tmp_path / "x")
    v.assign(2.0)
    assert checkpoint.write(tmp_path / "x") == str(tmp_path / "x")
    v.assign(3.0)
    checkpoint.read(tmp_path / "x").assert_consumed()
    assert v.numpy() == 2.0
    assert checkpoint.save_counter.numpy() == 0
    assert latest_checkpoint(tmp_path) is None  # it is not one of a series


def test_restoring_what_was_written_misses_the_counter(tmp_path):
    checkpoint = Checkpoint(v=mx.Variable(1.0))
    path = checkpoint.write(tmp_path / "x")
    status = checkpoint.restore(path).expect_partial()
    assert status.missing == ["save_counter"]
    with pytest.raises(AssertionError, match="not in the checkpoint.*save_counter"):
        status.assert_existing_objects_matched()


def test_reading_what_was_saved_leaves_the_counter(tmp_path):
    path = Checkpoint(v=mx.Variable(1.0)).save(tmp_path / "c")
    status = Checkpoint(v=mx.Variable(0.0)).read(path).expect_partial()
    assert status.unused == ["save_counter"]


def test_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    v = mx.Variable(1.0)
    checkpoint = Checkpoint(v=v)
    assert checkpoint.save("rel/c") == "rel/c-1"
    assert checkpoint.save(Path("a/b/deep")) == "a/b/deep-2"
    assert checkpoint.save("here") == "here-3"
    odd = checkpoint.save("odd näme %20 #?&/c c")
    checkpoint.sync()
    for path in ("rel/c-1", Path("a/b/deep-2"), "here-3", odd):
        v.assign(0.0)
        checkpoint.restore(path).assert_consumed()
        assert v.numpy() == 1.0
    assert latest_checkpoint("rel") == "rel/c-1"
    assert latest_checkpoint(tmp_path / "a/b") == str(tmp_path / "a/b/deep-2")


def test_saving_can_wait_until_all_is_on_the_disk(tmp_path):
    checkpoint = Checkpoint(v=mx.Variable(np.zeros(1_000_000, "float32")))
    manager = mx.train.CheckpointManager(checkpoint, tmp_path / "kept", max_to_keep=2)
    saved = [
        checkpoint.save(tmp_path / "c", wait=True),
        checkpoint.write(tmp_path / "w", wait=True),
        manager.save(wait=True),
    ]
    assert all(path is not None and os.path.exists(path) for path in saved)


def test_a_directory_can_be_moved(tmp_path):
    v = mx.Variable(4.0)
    Checkpoint(v=v).save(tmp_path / "old" / "c", WAITS)
    os.rename(tmp_path / "old", tmp_path / "new")
    v.assign(0.0)
    path = latest_checkpoint(tmp_path / "new")
    assert path == str(tmp_path / "new" / "c-1")
    Checkpoint(v=v).restore(path).assert_consumed()
    assert v.numpy() == 4.0


def test_latest_checkpoint_of_a_directory_without_any(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "file").write_text("x")
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None
    assert latest_checkpoint(tmp_path / "file") is None


def test_restoring_nothing(tmp_path):
    v = mx.Variable(1.0)
    checkpoint = Checkpoint(v=v)
    status = checkpoint.restore(None)
    assert status.expect_partial() is status
    assert v.numpy() == 1.0
    for check in (
        status.assert_consumed,
        status.assert_existing_objects_matched,
        status.assert_nontrivial_match,
    ):
        with pytest.raises(AssertionError, match="path was None"):
            check()


@pytest.mark.parametrize("name", ["missing", "file", "empty", "c-2", ""])
def test_restoring_what_is_no_checkpoint(name, tmp_path):
    checkpoint = Checkpoint(v=mx.Variable(1.0))
    checkpoint.save(tmp_path / "c", WAITS)
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at") as caught:
        checkpoint.restore(tmp_path / name if name else "")
    if name == "c-2":
        assert "has c-1" in str(caught.value)
    assert checkpoint.save_counter.numpy() == 1


def test_load_checkpoint_shows_everything_without_a_model(tmp_path):
    checkpoint = Checkpoint(v=mx.Variable([1.0, 2.0]), n=3, key=jax.random.key(1))
    loaded = mx.train.load_checkpoint(checkpoint.save(tmp_path / "c"))
    assert sorted(loaded) == ["key", "n", "save_counter", "v"]
    assert loaded["v"].tolist() == [1.0, 2.0] and loaded["n"] == 3
    assert bits(loaded["key"]) == bits(jax.random.key(1))
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at"):
        mx.train.load_checkpoint(tmp_path / "other")


# Attributes -----------------------------------------------------------------------------


def test_attributes_are_set_replaced_and_deleted(tmp_path):
    checkpoint = Checkpoint(a=1)
    checkpoint.b = mx.Variable(2.0)
    checkpoint.a = jnp.ones(2)
    assert checkpoint.a.tolist() == [1.0, 1.0]
    checkpoint.c = 5
    del checkpoint.c
    with pytest.raises(AttributeError, match="no part 'c'"):
        checkpoint.c  # noqa: B018
    assert not hasattr(checkpoint, "c")
    loaded = mx.train.load_checkpoint(checkpoint.write(tmp_path / "c"))
    assert sorted(loaded) == ["a", "b"]
    assert repr(checkpoint) == "<mx.train.Checkpoint of a, b>"


@pytest.mark.parametrize("name", ["save", "restore", "save_counter", "sync"])
def test_names_that_a_checkpoint_has_itself(name):
    with pytest.raises(AttributeError, match=f"{name!r} is an attribute of Checkpoint"):
        Checkpoint(**{name: mx.Variable(1.0)})


def test_names_that_begin_with_an_underscore():
    for name in ("_x", "_parts", "__y"):
        with pytest.raises((AttributeError, ValueError), match=name):
            Checkpoint(**{name: mx.Variable(1.0)})


@pytest.mark.parametrize(
    "value",
    [None, print, lambda: 1, os, int, b"abc", 1j, {1, 2}, np.random.default_rng(0)],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_saved_is_refused(value, tmp_path):
    with pytest.raises(ValueError, match="cannot save 'x', a "):
        Checkpoint(x=value)
    checkpoint = Checkpoint(v=mx.Variable(1.0))
    with pytest.raises(ValueError, match="cannot save 'x', a "):
        checkpoint.x = value
        checkpoint.save(tmp_path / "c")
    assert checkpoint.save_counter.numpy() == 0
    assert os.listdir(tmp_path) == []


def test_an_empty_checkpoint(tmp_path):
    path = Checkpoint().save(tmp_path / "c")
    again = Checkpoint()
    again.restore(path).assert_consumed()
    assert again.save_counter.numpy() == 1
    path = Checkpoint().write(tmp_path / "w")
    Checkpoint().read(path).assert_consumed().assert_nontrivial_match()


# Where it may be called -----------------------------------------------------------------


@pytest.mark.parametrize("what", ["save", "write", "restore", "read"])
@pytest.mark.parametrize("where", ["replica", "compiled", "caller", "jit", "function"])
def test_saving_and_restoring_happen_outside(what, where, tmp_path):
    strategy = mirrored(2)
    v = make(strategy, 1.0)
    checkpoint = Checkpoint(v=v)
    saved = checkpoint.save(tmp_path / "c", WAITS)
    path = saved if what in ("restore", "read") else tmp_path / "x"

    def act():
        getattr(checkpoint, what)(path)

    calls = {
        "replica": lambda: strategy.run(act),
        "compiled": lambda: strategy.run(mx.function(act)),
        "caller": mx.function(lambda: strategy.run(act)),
        "jit": jax.jit(act),
        "function": mx.function(act),
    }
    name = "(read|restore)" if what == "read" else what
    inside = "inside a replica" if where == "replica" else "inside a compiled function"
    with pytest.raises(RuntimeError, match=rf"`Checkpoint\.{name}` is called {inside}"):
        calls[where]()
    assert sorted(os.listdir(tmp_path)) == ["c-1"]
    assert checkpoint.save_counter.numpy() == 1
    assert v.numpy() == 1.0


def test_saving_and_restoring_in_a_scope(tmp_path):
    strategy = mirrored(2)
    v = make(strategy, 1.0)
    with strategy.scope():
        path = Checkpoint(v=v).save(tmp_path / "c")
        v.assign(0.0)
        Checkpoint(v=v).restore(path).assert_consumed()
    assert parts(strategy, v) == [1.0, 1.0]
