"""What people bring from TensorFlow, Optax and Flax, and how it goes on after a stop."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrax as mx
from mirrax.train import Checkpoint, CheckpointManager, Optimizer

pytestmark = pytest.mark.slow


def strategy_of(count: int) -> mx.MirroredStrategy:
    return mx.MirroredStrategy([f"CPU:{i}" for i in range(count)])


def parts(*values: Any) -> mx.distribute.PerReplica:
    return mx.distribute.PerReplica([jnp.asarray(v, "float32") for v in values])


@pytest.mark.parametrize("is_in_scope", [True, False])
def test_the_counter_that_a_manager_holds_goes_on_counting(
    is_in_scope, tmp_path
) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        w = mx.Variable(0.0)
    if is_in_scope:
        with strategy.scope():
            optimizer = Optimizer(optax.sgd(0.1))
    else:
        optimizer = Optimizer(optax.sgd(0.1))
    counter = optimizer.iterations
    manager = CheckpointManager(
        Checkpoint(w=w, optimizer=optimizer),
        tmp_path,
        max_to_keep=2,
        step_counter=counter,
        checkpoint_interval=3,
    )
    step = mx.function(lambda: optimizer.apply_gradients([(jnp.ones(()), w)]))
    saved = []
    for _ in range(7):
        strategy.run(step)
        saved.append(manager.save() is not None)
    assert counter is optimizer.iterations and int(counter.numpy()) == 7
    assert saved == [True, False, False, True, False, False, True]


@pytest.mark.parametrize(
    "name", ["skip_gradients_aggregation", "experimental_aggregate_gradients"]
)
def test_keras_name_for_gradients_that_are_summed_is_an_error(name) -> None:
    w = mx.Variable(0.0)
    chain = optax.chain(optax.clip(1.0), optax.sgd(0.1))
    with pytest.raises(TypeError, match="aggregate=False"):
        Optimizer(chain).apply_gradients([(jnp.ones(()), w)], **{name: True})
    assert float(w) == 0


def test_an_argument_that_nobody_takes_is_an_error() -> None:
    w = mx.Variable(0.0)
    plain = optax.GradientTransformation(*optax.sgd(0.1)[:2])
    with pytest.raises(TypeError, match="no argument 'agregate'"):
        Optimizer(plain).apply_gradients([(jnp.ones(()), w)], agregate=False)
    assert float(w) == 0


def _is_weight(params: Any) -> dict[str, bool]:
    return {name: name == "w" for name in params}


def test_masks_by_name_are_plain_dicts() -> None:
    w, b = mx.Variable(1.0, name="w"), mx.Variable(1.0, name="b")
    decay = optax.add_decayed_weights(0.5, mask=_is_weight)
    optimizer = Optimizer(optax.chain(decay, optax.sgd(1.0)))
    optimizer.apply_gradients([(jnp.zeros(()), v) for v in (w, b)])
    assert (float(w), float(b)) == (0.5, 1.0)


def test_accumulation_in_uneven_compiled_steps_stays_compiled() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        w = mx.Variable(jnp.zeros(2))
    optimizer = Optimizer(optax.sgd(1.0), gradient_accumulation_steps=2)

    @mx.function
    def step(x):
        gradient = mx.grad(lambda: jnp.sum(x @ w), [w])()
        optimizer.apply_gradients(zip(gradient, [w]))

    for rows in [(2, 2), (2, 1), (2, 2), (1, 0)]:
        strategy.run(step, args=(parts(*(np.ones((n, 2)) for n in rows)),))
    np.testing.assert_allclose(w.numpy(), -(4 + 3 + 4 + 1) / 2 * np.ones(2))
    assert int(optimizer.iterations.numpy()) == 2
    assert not isinstance(w.stored, mx.distribute.PerReplica)
    assert step.trace_count == 4  # even; 2, 1 and 0 rows in uneven ones


def functional_run(strategy: Any, steps: int, path: Any = None) -> tuple[Any, Any]:
    """Params after so many steps of accumulating Adam, and what was saved half-way."""
    optimizer = Optimizer(optax.adam(0.1), gradient_accumulation_steps=2)
    params = {"w": jnp.ones(2)}
    state = strategy.replicate((params, optimizer.init(params)))
    checkpoint = Checkpoint(state=state, step=0)
    if path is not None:
        checkpoint.restore(path).assert_existing_objects_matched()
        state = checkpoint.state

    @mx.function
    def step(state, x):
        params, slots = state
        gradients = jax.grad(lambda p: jnp.sum((x * p["w"]) ** 2))(params)
        updates, slots = optimizer.update(gradients, slots, params)
        return optax.apply_updates(params, updates), slots

    for i in range(checkpoint.step, steps):
        x = parts([1.0, i], [i, 2.0])
        state = strategy.run(step, args=(state, x))
        checkpoint.step, checkpoint.state = i + 1, state
    return np.asarray(state[0]["w"]), checkpoint


def test_a_functional_state_halfway_to_an_update_comes_back(tmp_path) -> None:
    strategy = strategy_of(2)
    whole, _ = functional_run(strategy, 6)
    _, checkpoint = functional_run(strategy, 3)
    path = checkpoint.save(tmp_path / "c")
    resumed, _ = functional_run(strategy, 6, path=path)
    np.testing.assert_array_equal(resumed, whole)


def test_a_functional_state_halfway_does_not_fit_other_replicas(tmp_path) -> None:
    _, checkpoint = functional_run(strategy_of(2), 3)
    path = checkpoint.save(tmp_path / "c")
    with pytest.raises(
        ValueError, match="state/1/accumulated/w: it differs between the 2"
    ):
        functional_run(strategy_of(3), 6, path=path)
    _, checkpoint = functional_run(
        strategy_of(2), 4
    )  # after an update: nothing is open
    path = checkpoint.save(tmp_path / "c")
    assert functional_run(strategy_of(3), 4, path=path)[1].step == 4


@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize("after", [1, 3, 7])
def test_a_metric_is_restored_to_the_last_count(dtype, after, tmp_path) -> None:
    def make(count: int) -> tuple[Any, Any]:
        strategy = strategy_of(count)
        with strategy.scope():
            return strategy, mx.metrics.Sum(dtype=dtype)

    strategy, metric = make(3)
    strategy.run(metric.update_state, args=(parts([1, 2], [4], [7, 0]),))
    with strategy.scope():
        metric.update_state([1])
    path = Checkpoint(metric=metric).save(tmp_path / "c")
    _, again = make(after)
    Checkpoint(metric=again).restore(path)
    assert int(again.result()) == int(metric.result()) == 15


def test_a_relative_path_is_that_of_the_moment(tmp_path, monkeypatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    checkpoint = Checkpoint(v=mx.Variable(1.0))
    manager = CheckpointManager(checkpoint, "kept", max_to_keep=1)
    assert checkpoint.save("c") == "c-1"
    monkeypatch.chdir(there)
    assert manager.save() == os.path.join("kept", "ckpt-2")
    manager.save()
    manager.sync()
    assert sorted(os.listdir(here)) == ["c-1", "kept"] and os.listdir(there) == []
    assert os.listdir(here / "kept") == ["ckpt-3"]


def test_an_error_of_one_checkpoint_is_not_anothers(tmp_path, monkeypatch) -> None:
    from mirrax._src.train import array_files

    v = mx.Variable(1.0)
    mine, other = Checkpoint(v=v), Checkpoint(v=v)
    with monkeypatch.context() as patch:

        def fail(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(array_files, "saving", fail)
        mine.save(tmp_path / "mine")
        mx.train.latest_checkpoint(tmp_path)  # waits
    path = other.save(tmp_path / "other")
    other.sync()
    assert mx.train.latest_checkpoint(tmp_path) == path
    with pytest.raises(OSError, match="mine-1 could not be written"):
        mine.sync()


def test_objects_that_hold_each_other_are_saved_once(tmp_path) -> None:
    class Layer:
        def __init__(self, value: float) -> None:
            self.v = mx.Variable(value)

    layers: list[Any] = [Layer(float(i)) for i in range(10)]
    for layer in layers:
        layer.all = layers
    path = Checkpoint(layers=layers).save(tmp_path / "c")
    assert len(mx.train.load_checkpoint(path)) == 10 + 1


def test_functions_in_a_pytree_are_no_state(tmp_path) -> None:
    tree = {"f": jnp.tanh, "g": np.add, "w": jnp.ones(2)}
    checkpoint = Checkpoint(tree=tree)
    path = checkpoint.save(tmp_path / "c")
    checkpoint.tree = {**tree, "w": jnp.zeros(2)}
    checkpoint.restore(path).assert_consumed()
    assert checkpoint.tree["f"] is jnp.tanh
    assert checkpoint.tree["w"].tolist() == [1, 1]


def test_unnamed_variables_in_another_order_keep_their_slots(tmp_path) -> None:
    def train(optimizer: Any, gradients: dict[Any, float]) -> None:
        optimizer.apply_gradients([(jnp.float32(g), v) for v, g in gradients.items()])

    def make() -> tuple[Any, Any, Any, Any]:
        a, b = mx.Variable(0.0), mx.Variable(0.0)
        optimizer = Optimizer(optax.sgd(0.1, momentum=0.9))
        return a, b, optimizer, Checkpoint(a=a, b=b, optimizer=optimizer)

    a, b, optimizer, checkpoint = make()
    train(optimizer, {a: 1.0, b: 10.0})
    path = checkpoint.save(tmp_path / "c")
    train(optimizer, {a: 0.0, b: 0.0})
    for is_built in (False, True):
        a2, b2, optimizer, checkpoint = make()
        if is_built:
            optimizer.build([b2, a2])
        checkpoint.restore(path).assert_consumed()
        train(optimizer, {b2: 0.0, a2: 0.0})
        assert (float(a2), float(b2)) == (float(a), float(b))
