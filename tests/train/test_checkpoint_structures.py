"""Pytrees, nested objects and checkpoints in checkpoints keep their structure."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import mirrored, parts, per_replica
from hypothesis import given
from hypothesis import strategies as st
from property.examples import examples

import mirrax as mx
from mirrax.train import Checkpoint, load_checkpoint

pytestmark = pytest.mark.slow


class Point(NamedTuple):
    x: Any
    y: Any


@flax.struct.dataclass
class Model:
    params: Any
    step: Any
    name: str = flax.struct.field(pytree_node=False, default="model")


class Holder:
    """An object of the user's."""

    def __init__(self, **kwargs: Any) -> None:
        vars(self).update(kwargs)


def zeros_like(tree):
    """The same structure with other values."""

    def other(leaf):
        if isinstance(leaf, str):
            return "other"
        if isinstance(leaf, bool | int | float):
            return type(leaf)(0)
        if isinstance(leaf, np.generic):
            return type(leaf)(0)
        if isinstance(leaf, np.ndarray):
            return np.zeros_like(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(99)
        return jnp.zeros_like(leaf)

    return jax.tree.map(other, tree)


def leaf_bits(leaf):
    """A leaf's type and bits."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return "key", str(leaf.dtype), leaf_bits(jax.random.key_data(leaf))
        return "jax", str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()
    if isinstance(leaf, np.ndarray | np.generic):
        return type(leaf), leaf.dtype, leaf.shape, leaf.tobytes()
    return type(leaf), repr(leaf)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert leaf_bits(a) == leaf_bits(b)


def assert_comes_back(tree, directory):
    checkpoint = Checkpoint(tree=tree)
    path = checkpoint.write(directory / "c")
    checkpoint.tree = zeros_like(tree)
    checkpoint.read(path).assert_consumed()
    assert_same(checkpoint.tree, tree)


PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, "bfloat16")}
TREES = {
    "array": jnp.arange(3),
    "int": 7,
    "float": 0.1,
    "str": "ünïcode \n \udc80",
    "bool": True,
    "large int": 10**40,
    "dict": {"b": jnp.ones(2), "a": {"c": 1}},
    "dict with int keys": {2: jnp.ones(2), 1: 5, 10: "x"},
    "ordered": collections.OrderedDict(z=jnp.ones(1), a=2.5),
    "list": [jnp.ones(2), 3, [4.5, "x"]],
    "tuple": (jnp.ones(2), (), (False,)),
    "with nothing in it": {"a": [], "b": {}, "c": None, "d": jnp.ones(1)},
    "namedtuple": Point(jnp.ones(2), Point(1, None)),
    "flax struct": Model(PARAMS, jnp.int32(3)),
    "adam": optax.adam(optax.linear_schedule(1.0, 0.1, 9)).init(PARAMS),
    "chain": optax.chain(optax.clip(1.0), optax.sgd(0.1, 0.9)).init(PARAMS),
    "injected": optax.inject_hyperparams(optax.adamw)(0.1).init(PARAMS),
    "masked": optax.masked(optax.adam(0.1), {"w": True, "b": False}).init(PARAMS),
    "numpy": {"scalar": np.float64(0.1), "bool": np.True_, "array": np.ones((2, 2))},
    "odd keys": {"a.b": jnp.ones(1), "": jnp.ones(2), "..": 1, " ": 2, "é\n": 3},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_structure_comes_back_as_it_was(tree, tmp_path):
    assert_comes_back(tree, tmp_path)


def test_odd_keys_of_large_arrays(tmp_path):
    big = np.arange(70_000.0)
    names = ["a.b", "..", "", " ", "%2F", "é", "x" * 300, "packed small arrays", "0"]
    tree = {name: big + i for i, name in enumerate(names)}
    assert_comes_back({"tree": tree, "small": 1, "s": np.ones(2)}, tmp_path)


@pytest.mark.parametrize("name", ["packed small arrays", "0", "arrays", "mirrax.json"])
def test_a_part_may_have_any_name(name, tmp_path):
    big = np.arange(70_000.0)
    checkpoint = Checkpoint(**{name: big, "small": np.ones(2)})
    path = checkpoint.write(tmp_path / "c")
    setattr(checkpoint, name, np.zeros_like(big))
    checkpoint.read(path).assert_consumed()
    np.testing.assert_array_equal(getattr(checkpoint, name), big)


def test_two_things_of_one_name_are_refused(tmp_path):
    checkpoint = Checkpoint(tree=1)
    checkpoint.tree = {"a/b": jnp.ones(1), "a": {"b": jnp.zeros(1)}}
    with pytest.raises(ValueError, match="under the name 'tree/a/b'; rename"):
        checkpoint.save(tmp_path / "c")
    assert checkpoint.save_counter.numpy() == 0


dtypes = st.sampled_from(
    "bool int8 uint8 int32 uint32 int64 float16 bfloat16 float32 float64 complex64".split()
)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def arrays(draw):
    dtype, shape = jnp.dtype(draw(dtypes)), draw(shapes)
    count = int(np.prod(shape)) * dtype.itemsize
    data = random.Random(draw(st.integers(0, 2**32))).randbytes(count)
    if dtype.kind == "b":
        data = bytes(byte % 2 for byte in data)
    array = np.frombuffer(data, dtype).reshape(shape)
    is_wide = dtype.itemsize == 8 and dtype != "complex64"
    return array.copy() if is_wide or draw(st.booleans()) else jnp.asarray(array)


leaves = st.one_of(
    arrays(),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(),
    st.none(),
    st.integers(0, 9).map(jax.random.key),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("ab.-_é ", max_size=3), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
    ),
    max_leaves=12,
)


@examples(30)
@given(tree=trees)
def test_any_structure_comes_back_to_the_last_bit(tree, tmp_path_factory):
    assert_comes_back({"tree": tree}, tmp_path_factory.mktemp("c"))


# Structures that hold variables, and distributed values ----------------------------------


def test_variables_inside_of_structures_are_restored_in_place(tmp_path):
    strategy = mirrored(2)
    with strategy.scope():
        v, w = mx.Variable(1.0), mx.Variable(2.0)
    checkpoint = Checkpoint(layers=[{"v": v, "n": 5}, (w, jnp.ones(1))])
    path = checkpoint.save(tmp_path / "c")
    assert {"layers/0/v", "layers/0/n", "layers/1/0"} < load_checkpoint(path).keys()
    v.assign(0.0)
    w.assign(0.0)
    checkpoint.layers = [{"v": v, "n": 0}, (w, jnp.zeros(1))]
    checkpoint.restore(path).assert_consumed()
    assert checkpoint.layers[0] == {"v": v, "n": 5}
    assert checkpoint.layers[1][0] is w
    assert checkpoint.layers[1][1].tolist() == [1.0]
    assert parts(strategy, v) == [1.0, 1.0] and parts(strategy, w) == [2.0, 2.0]


def test_a_list_that_grows_is_saved_as_it_is_then(tmp_path):
    layers = [mx.Variable(1.0)]
    checkpoint = Checkpoint(layers=layers)
    layers.append(mx.Variable(2.0))
    loaded = load_checkpoint(checkpoint.write(tmp_path / "c"))
    assert sorted(loaded) == ["layers/0", "layers/1"]


@pytest.mark.parametrize("after", [1, 2, 3, 8])
def test_replicated_state_on_another_number_of_replicas(after, tmp_path):
    optimizer = optax.adam(0.1)
    state = mirrored(2).replicate((PARAMS, optimizer.init(PARAMS)))
    path = Checkpoint(state=state).save(tmp_path / "c")
    strategy = mirrored(after)
    zeros = zeros_like(PARAMS)
    checkpoint = Checkpoint(state=strategy.replicate((zeros, optimizer.init(zeros))))
    checkpoint.restore(path).assert_consumed()
    assert isinstance(checkpoint.state[1][0], optax.ScaleByAdamState)
    w = checkpoint.state[0]["w"]
    assert parts(strategy, w) == [PARAMS["w"].tolist()] * after
    step = mx.function(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = strategy.run(step, (checkpoint.state,))
    assert parts(strategy, state[0]["w"]) == [(PARAMS["w"] + 1).tolist()] * after


def test_replicated_state_of_eager_steps(tmp_path):
    strategy = mirrored(2)
    state = strategy.run(lambda s: s + 1, (strategy.replicate(jnp.ones(2)),))
    checkpoint = Checkpoint(state=state)
    path = checkpoint.save(tmp_path / "c")
    checkpoint.state = strategy.replicate(jnp.zeros(2))
    checkpoint.restore(path).expect_partial()
    loaded = load_checkpoint(path)
    assert all(loaded[k].tolist() == [2.0, 2.0] for k in loaded if "state" in k)


def test_a_per_replica_value(tmp_path):
    strategy = mirrored(2)
    checkpoint = Checkpoint(x=per_replica(strategy, [1.0, 2.0], [3.0, 4.0]))
    path = checkpoint.save(tmp_path / "c")
    checkpoint.x = per_replica(strategy, [0.0, 0.0], [0.0, 0.0])
    devices = [part.devices() for part in checkpoint.x.values]
    checkpoint.restore(path).assert_consumed()
    assert isinstance(checkpoint.x, mx.distribute.PerReplica)
    assert parts(strategy, checkpoint.x) == [[1.0, 2.0], [3.0, 4.0]]
    assert [part.devices() for part in checkpoint.x.values] == devices
    doubled = strategy.run(mx.function(lambda x: 2 * x), (checkpoint.x,))
    assert parts(strategy, doubled) == [[2.0, 4.0], [6.0, 8.0]]


# Objects --------------------------------------------------------------------------------


def test_variables_and_arrays_of_an_object(tmp_path):
    inner: Any = Holder(v=mx.Variable(1.0), table=[jnp.ones(2)], lr=0.1, fn=print)
    model: Any = Holder(inner=inner, w=mx.Variable(2.0), parent=None)
    inner.parent = model  # a cycle
    checkpoint = Checkpoint(model=model)
    path = checkpoint.write(tmp_path / "c")
    names = ["model/inner/table/0", "model/inner/v", "model/w"]
    assert sorted(load_checkpoint(path)) == names
    inner.v.assign(0.0)
    model.w.assign(0.0)
    inner.table = [jnp.zeros(2)]
    checkpoint.read(path).assert_consumed()
    assert inner.v.numpy() == 1.0 and model.w.numpy() == 2.0
    assert inner.table[0].tolist() == [1.0, 1.0]
    assert inner.lr == 0.1 and inner.parent is model


def test_one_object_in_two_places(tmp_path):
    shared: Any = Holder(v=mx.Variable(1.0), x=jnp.ones(1))
    checkpoint = Checkpoint(a=shared, b=Holder(deep=shared))
    path = checkpoint.write(tmp_path / "c")
    shared.v.assign(0.0)
    shared.x = jnp.zeros(1)
    checkpoint.read(path).assert_consumed()
    assert shared.v.numpy() == 1.0 and shared.x.tolist() == [1.0]


def test_a_frozen_object_with_an_array_changes_nothing_when_it_cannot_be_restored(
    tmp_path,
):
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        x: Any

    v = mx.Variable(1.0)
    checkpoint = Checkpoint(v=v, frozen=Frozen(jnp.ones(1)))
    try:
        path = checkpoint.write(tmp_path / "c")
        v.assign(2.0)
        checkpoint.frozen = Frozen(jnp.zeros(1))
        checkpoint.read(path)
    except (ValueError, AttributeError) as error:
        assert "frozen" in str(error)
        assert v.numpy() in (1.0, 2.0)
        assert checkpoint.frozen.x.tolist() == [v.numpy() == 1.0]
    else:
        assert v.numpy() == 1.0 and checkpoint.frozen.x.tolist() == [1.0]


def test_an_object_with_a_state_of_its_own(tmp_path):
    class Counter:
        def __init__(self):
            self.state = {"n": 1, "seen": [1, 2]}

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state = state

    counter = Counter()
    checkpoint = Checkpoint(counter=counter)
    path = checkpoint.write(tmp_path / "c")
    counter.state = {}
    checkpoint.read(path).assert_consumed()
    assert counter.state == {"n": 1, "seen": [1, 2]}


def test_a_state_that_cannot_be_written_is_named_at_once(tmp_path):
    checkpoint = Checkpoint(v=mx.Variable(1.0), rng=np.random.RandomState(0))
    with pytest.raises((TypeError, ValueError)) as caught:
        checkpoint.save(tmp_path / "c")
    assert "rng" in " ".join([str(caught.value), *caught.value.__notes__])
    checkpoint.sync()
    assert mx.train.latest_checkpoint(tmp_path) is None
    assert checkpoint.save_counter.numpy() == 0


# Checkpoints in checkpoints, and roots ---------------------------------------------------


def test_a_checkpoint_in_a_checkpoint(tmp_path):
    v = mx.Variable(1.0)
    inner = Checkpoint(v=v, params={"w": jnp.ones(2)}, epoch=3)
    outer = Checkpoint(inner=inner, step=5)
    path = outer.save(tmp_path / "c")
    names = {"inner/v", "inner/params/w", "inner/epoch", "step", "save_counter"}
    assert load_checkpoint(path).keys() == names
    v.assign(0.0)
    inner.params, inner.epoch, outer.step = {"w": jnp.zeros(2)}, 0, 0
    outer.restore(path).assert_consumed()
    assert v.numpy() == 1.0
    assert inner.params["w"].tolist() == [1.0, 1.0]
    assert inner.epoch == 3 and outer.step == 5
    assert inner.save_counter.numpy() == 0


def test_checkpoints_in_a_circle(tmp_path):
    a, b = Checkpoint(v=mx.Variable(1.0)), Checkpoint(w=mx.Variable(2.0))
    a.other, b.other = b, a
    path = a.write(tmp_path / "c")
    a.v.assign(0.0)
    b.w.assign(0.0)
    a.read(path).assert_consumed()
    assert a.v.numpy() == 1.0 and b.w.numpy() == 2.0


def test_the_attributes_of_a_root(tmp_path):
    root: Any = Holder(
        v=mx.Variable(1.0), inner=Holder(w=mx.Variable(2.0)), x=jnp.ones(1)
    )
    path = Checkpoint(root, extra=4).write(tmp_path / "c")
    assert load_checkpoint(path).keys() == {"v", "inner/w", "x", "extra"}
    again: Any = Holder(
        v=mx.Variable(0.0), inner=Holder(w=mx.Variable(0.0)), x=jnp.zeros(1)
    )
    checkpoint = Checkpoint(root=again, extra=0)
    checkpoint.read(path).assert_consumed()
    assert again.v.numpy() == 1.0 and again.inner.w.numpy() == 2.0
    assert again.x.tolist() == [1.0] and checkpoint.extra == 4


def test_a_root_and_its_attributes_as_keywords_have_the_same_names(tmp_path):
    path = Checkpoint(Holder(v=mx.Variable(1.0))).write(tmp_path / "c")
    v = mx.Variable(0.0)
    Checkpoint(v=v).read(path).assert_consumed()
    assert v.numpy() == 1.0


def test_a_keyword_of_the_name_of_an_attribute_of_the_root(tmp_path):
    with pytest.raises(ValueError, match="under the name 'v'; rename"):
        checkpoint = Checkpoint(Holder(v=mx.Variable(1.0)), v=mx.Variable(2.0))
        checkpoint.save(tmp_path / "c")


def test_an_optimizer_as_root(tmp_path):
    w = mx.Variable(1.0, name="w")
    optimizer = mx.train.Optimizer(optax.sgd(0.1, momentum=0.9))
    optimizer.apply_gradients([(jnp.float32(1.0), w)])
    path = Checkpoint(optimizer, w=w).write(tmp_path / "c")
    assert "iterations" in load_checkpoint(path)
    optimizer.iterations.assign(0)
    Checkpoint(optimizer, w=w).read(path).assert_consumed()
    assert optimizer.iterations.numpy() == 1


@pytest.mark.parametrize(
    "root",
    [{"a": jnp.ones(2)}, [jnp.ones(2)], jnp.ones(2), 5, "path"],
    ids=lambda root: type(root).__name__,
)
def test_a_root_is_saved_or_refused(root, tmp_path):
    try:
        checkpoint = Checkpoint(root, epoch=3)
        path = checkpoint.write(tmp_path / "c")
    except (TypeError, ValueError) as error:
        assert "root" in str(error)
    else:
        assert len(load_checkpoint(path)) == 2
        checkpoint.read(path).assert_consumed()
        assert checkpoint.epoch == 3
