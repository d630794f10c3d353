"""Keras on two workers with two replicas each: the numbers of one device, and one file."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
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
    with WorkerPool(workers=2, devices=2) as workers:
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


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (fit_other_batches, "Workers read different batches"),
        (fit_other_rows, "Workers do different things"),
        (fit_more_layers, "Workers (make|do|train) different"),
        (fit_other_units, "Workers make different variables"),
    ],
)
def test_workers_that_differ_are_named(run, fn, message):
    with pytest.raises(WorkerError, match=message):
        run(fn)


def write_into_nothing(strategy):
    with strategy.scope():
        model = exact_model()
    model.save("/proc/nowhere/model.keras")


def test_a_file_that_cannot_be_written_is_an_error_on_all_workers(run):
    with pytest.raises(WorkerError) as caught:
        run(write_into_nothing)
    assert "could not write a file" in str(caught.value) or "nowhere" in str(
        caught.value
    )
