"""Keras on two workers with two replicas each: the numbers of one device, and one file."""

from __future__ import annotations

import functools
import re
import tempfile
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import mirrored
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx
from interop import libraries
from interop.keras_models import (
    data,
    double_precision,
    exact_model,
    farthest,
    train,
    usual_model,
)
from mirrax.testing import WorkerError, WorkerPool

keras = libraries.keras()


@pytest.fixture(scope="module")
def pool():
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(libraries.NO_TENSORFLOW)  # also on that of the workers
        workers = WorkerPool(workers=2, devices=2)
    with workers:
        yield workers


@pytest.fixture
def run(pool):
    """Calls a function with the strategy on both workers, which have five minutes."""
    return lambda fn, *args: pool.run(
        functools.partial(with_strategy, fn), args, timeout=SECONDS_TO_HANG
    )


def with_strategy(fn, *args):
    warnings.simplefilter("ignore")
    return fn(one_strategy(), *args)


@functools.cache
def one_strategy():
    return mx.distribute.MultiWorkerMirroredStrategy(step_timeout=60)


def fit_exact(strategy, rows):
    with double_precision():
        with strategy.scope():
            model = exact_model()
        return train(model, *data(rows))


@pytest.mark.parametrize("rows", [1, 7, 18])
def test_any_number_of_rows(run, rows):
    found = run(fit_exact, rows)
    with double_precision():
        expected = train(exact_model(), *data(rows))
    for each in found:
        assert farthest(each, expected) < 1e-12


def fit_usual(strategy, files):
    with strategy.scope():
        model = usual_model()
    kept = keras.callbacks.ModelCheckpoint(f"{files}/{{epoch}}.keras")
    backup = keras.callbacks.BackupAndRestore(f"{files}/backup")
    found = train(model, *data(dtype="float32"), callbacks=[kept, backup])
    model.save(f"{files}/model.keras")
    model.save_weights(f"{files}/model.weights.h5")
    with strategy.scope():
        again = keras.models.load_model(f"{files}/model.keras")
    again.load_weights(f"{files}/model.weights.h5")
    x = data(5, "float32")[0]
    assert farthest(again.predict(x, verbose=0), model.predict(x, verbose=0)) < 1e-6
    return found


def test_batch_norm_dropout_adam_and_files(run, tmp_path):
    expected = train(usual_model(), *data(dtype="float32"))
    for found in run(fit_usual, str(tmp_path)):
        assert farthest(found, expected) < 1e-4
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["1.keras", "2.keras", "model.keras", "model.weights.h5"]
    alone = keras.models.load_model(tmp_path / "2.keras")
    x = data(dtype="float32")[0]
    assert farthest(alone.predict(x, verbose=0), expected[-1]) < 1e-4


def fit_shuffled(strategy):
    """Without seeds: each worker draws other numbers."""
    worker = strategy.cluster_resolver.task_id
    np.random.seed(worker)
    with strategy.scope():
        model = exact_model()
    results = [model.fit(*data(40), batch_size=8, epochs=2, verbose=0).history]
    dataset = mx.data.Dataset.from_tensor_slices(data(40)).shuffle(40).batch(7)
    results.append(model.fit(dataset, epochs=2, verbose=0).history)
    return results, model.get_weights()


def test_shuffles_without_a_seed_give_all_workers_the_same_batches(run):
    first, second = run(fit_shuffled)
    assert farthest(first, second) == 0


def steps_of_ones_own(strategy, files):
    """Gradients, metrics, dropout and a checkpoint in a loop; unequal parts."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = keras.layers
        norm = layers.BatchNormalization(synchronized=True)
        model = keras.Sequential(
            [layers.Input((6,)), layers.Dense(4, use_bias=False), norm, layers.Dense(3)]
        )
        optimizer, mean = keras.optimizers.SGD(0.1), keras.metrics.Mean()
        dropout = layers.Dropout(0.5, seed=3)

    @mx.function
    def step(x, y):
        def loss():
            return jnp.sum((model(x, training=True) - y) ** 2) / 7

        value, gradients = mx.value_and_grad(loss, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        mean.update_state(jnp.ones(len(x)))
        mask = dropout(jnp.ones(8), training=True)
        return value, mx.get_replica_context().all_gather(mask[None], axis=0)

    x, y = data(28, "float32")
    batches = mx.data.Dataset.from_tensor_slices((x, y)).batch(7)
    losses, masks = [], []
    for batch in strategy.experimental_distribute_dataset(batches):
        loss, mask = strategy.run(step, batch)
        losses.append(float(strategy.reduce("SUM", loss, axis=None)))
        masks.append(np.asarray(strategy.experimental_local_results(mask)[0]))
    checkpoint = mx.train.Checkpoint(model=model, optimizer=optimizer)
    saved = checkpoint.save(f"{files}/ckpt")
    found = [losses, masks, model.get_weights(), float(mean.count.value)]
    model.set_weights([0 * w for w in found[2]])
    checkpoint.restore(saved).assert_consumed()
    model.predict(x, verbose=0)
    return [*found, model.get_weights()]


def test_loops_are_those_of_one_worker_with_as_many_replicas(run, tmp_path):
    for name in ("workers", "alone"):
        (tmp_path / name).mkdir()
    found = run(steps_of_ones_own, str(tmp_path / "workers"))
    expected = steps_of_ones_own(mirrored(4), str(tmp_path / "alone"))
    for each in found:
        assert farthest(each, expected) < 1e-5
        assert farthest(each[2], each[4]) == 0
    masks = expected[1]
    assert len({mask.tobytes() for step in masks for mask in step}) == 16
    assert expected[3] == 28


# Errors ------------------------------------------------------------------------------------


def fit_other_batches(strategy):
    with strategy.scope():
        model = exact_model()
    x, y = data(8)
    model.fit(x + strategy.cluster_resolver.task_id, y, shuffle=False, verbose=0)


def fit_other_rows(strategy):
    with strategy.scope():
        model = exact_model()
    model.fit(*data(8 + strategy.cluster_resolver.task_id), verbose=0)


def fit_more_layers(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3)])
        if strategy.cluster_resolver.task_id == 1:
            model.add(keras.layers.Dense(3))
        model.compile("sgd", "mse")
    model.fit(*data(8), verbose=0)


def fit_other_units(strategy):
    with strategy.scope():
        keras.layers.Dense(3 + strategy.cluster_resolver.task_id).build((None, 6))


def fit_with_a_backup_of_one(strategy):
    with strategy.scope():
        model = exact_model()
    with tempfile.TemporaryDirectory() as files:
        if strategy.cluster_resolver.task_id == 1:
            open(f"{files}/latest.weights.h5", "w").close()
        backup = keras.callbacks.BackupAndRestore(files)
        model.fit(*data(8), verbose=0, callbacks=[backup])


def write_into_nothing(strategy):
    with strategy.scope():
        model = exact_model()
    model.save("/proc/nowhere/model.keras")


def error_of(strategy, fn):
    with pytest.raises(Exception) as caught:  # noqa: B017
        fn(strategy)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (fit_other_batches, "Workers read different batches"),
        (fit_with_a_backup_of_one, "finds a backup on worker 1.*none on worker 0"),
        (fit_other_units, "Workers make different variables"),
        (write_into_nothing, "could not write a file|nowhere"),
    ],
)
def test_all_workers_raise_and_can_go_on(run, fn, message):
    for text in run(error_of, fn):
        assert re.search(message, text)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (fit_other_rows, "Workers do different things"),
        (fit_more_layers, "Workers (make|do|train) different"),
    ],
)
def test_workers_that_differ_are_named(run, fn, message):
    with pytest.raises(WorkerError, match=message):
        run(fn)
