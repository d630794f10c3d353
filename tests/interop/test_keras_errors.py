"""What goes wrong with Keras, and what is said of it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import both_engines, compile_if, mirrored
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx
from interop import libraries
from interop.keras_models import data, usual_model

keras = libraries.keras()
layers = keras.layers
ROOT = Path(mx.__file__).parent.parent


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def built(kind=layers.Dense, *args):
    layer = kind(*args)
    layer.build((None, 6))
    return layer


# Made outside ------------------------------------------------------------------------------


@both_engines
def test_a_layer_made_outside_is_written_in_a_replica(engine):
    with mirrored(2).scope():
        pass  # Keras is known from here on
    norm = built(layers.BatchNormalization)
    x = data(4, "float32")[0]
    step = compile_if(engine, lambda: norm(x, training=True))
    with pytest.raises(
        ValueError, match="'batch_normalization.*outside the scope.*strategy.scope"
    ):
        mirrored(2).run(step)


def test_gradients_of_a_model_made_outside():
    dense = built(layers.Dense, 2)
    with pytest.raises(TypeError, match="kernel.*made outside the scope"):
        mx.value_and_grad(lambda: 0.0, dense.trainable_variables)


@both_engines
def test_an_optimizer_made_outside_changes_nothing(engine):
    strategy = mirrored(2)
    optimizer = keras.optimizers.SGD(0.1)
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0], name="weight")
    optimizer.build([weight])

    def step():
        optimizer.apply([jnp.ones(2)], [weight])

    with pytest.raises(ValueError, match="'sgd.*/iteration' was made outside the scop"):
        strategy.run(compile_if(engine, step))
    np.testing.assert_array_equal(weight, [1.0, 2.0])


def test_a_model_that_would_be_built_in_a_replica():
    strategy = mirrored(2)
    with strategy.scope():
        dense = layers.Dense(2)
    with pytest.raises(RuntimeError, match="inside a replica.*model.build"):
        strategy.run(lambda: dense(jnp.ones((2, 3))))


def test_unseeded_random_numbers_in_a_replica():
    strategy = mirrored(2)
    with strategy.scope():
        keras.random.normal((2,))
    with pytest.raises(ValueError, match="seed_generator_state.*outside the scope"):
        strategy.run(lambda: keras.random.normal((2,)))


# Of another strategy -----------------------------------------------------------------------


def test_a_model_of_another_strategy():
    first, second = mirrored(2), mirrored(3)
    with first.scope():
        model = usual_model()
    x, y = data(4, "float32")
    with second.scope():
        with pytest.raises(RuntimeError, match=r"`fit` of 'seq.*in the scope of Mir"):
            model.fit(x, y, verbose=0)
        with pytest.raises(RuntimeError, match=r"`compile` of 'seq.*in the scope of"):
            model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="dense.*Mixing different"):
        second.run(lambda: model(x))
    model.fit(x, y, verbose=0)  # and nothing has happened to it


def test_a_layer_of_another_strategy_in_a_model():
    first, second = mirrored(2), mirrored(3)
    with first.scope():
        dense = built(layers.Dense, 2)
    with second.scope():
        model = keras.Sequential([layers.Input((6,)), dense])
        with pytest.raises(RuntimeError, match="dense.*/kernel.*Make the model in"):
            model.compile("sgd", "mse")


@both_engines
def test_fit_in_a_replica(engine):
    strategy = mirrored(2)
    with strategy.scope():
        model = usual_model()
    x, y = data(4, "float32")
    with pytest.raises(RuntimeError, match="`fit` is called inside a replica"):
        strategy.run(compile_if(engine, lambda: model.fit(x, y, verbose=0)))


def test_a_distribution_of_keras_beside_a_strategy():
    with mirrored(2).scope():
        model = usual_model()
    x, y = data(4, "float32")
    distribution = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    with distribution.scope():
        with pytest.raises(RuntimeError, match=r"set_distribution\(None\)"):
            model.fit(x, y, verbose=0)


def test_a_step_that_fails_leaves_the_model_as_it_was():
    with mirrored(2).scope():
        model = usual_model()
    x, y = data(4, "float32")
    model.fit(x, y, verbose=0)
    before = model.get_weights()
    with pytest.raises(TypeError, match="incompatible shapes"):
        model.fit(x, y[:, :2], verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        assert (old == new).all()


@pytest.mark.parametrize("parts", [1, 3])
def test_class_weights_for_elements_without_a_class_or_with_a_weight(parts):
    columns = (np.ones((4, 2)), np.zeros(4, "int32"), np.ones(4))
    dataset = mx.data.Dataset.from_tensor_slices(columns[:parts]).batch(2)
    with mirrored(2).scope():
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match=r"needs a dataset with elements `\(x, y\)`"):
        model.fit(dataset, class_weight={0: 1.0, 1: 2.0}, verbose=0)


def test_a_distributed_dataset_in_fit():
    strategy = mirrored(2)
    with strategy.scope():
        model = usual_model()
    dataset = mx.data.Dataset.from_tensor_slices(data(8, "float32")).batch(4)
    with pytest.raises(TypeError, match="pass the dataset"):
        model.fit(strategy.experimental_distribute_dataset(dataset), verbose=0)
    with pytest.raises(ValueError, match="`batch_size` is given beside"):
        model.fit(dataset, batch_size=4, verbose=0)


# Which Keras -------------------------------------------------------------------------------


def test_another_backend_is_named():
    code = """
        import mirrax as mx
        import keras
        keras.layers.Dense(2).build((None, 3))  # outside it is nobody's business
        with mx.MirroredStrategy(["CPU:0"]).scope():
            keras.layers.Dense(2).build((None, 3))
    """
    done = run_python(code, KERAS_BACKEND="tensorflow")
    assert "runs on its 'tensorflow' backend" in done.stderr
    assert "KERAS_BACKEND=jax" in done.stderr


def test_a_scope_that_is_entered_before_keras_is_imported_and_after():
    code = """
        import mirrax as mx
        mx.config.set_logical_device_configuration(cpu=2)
        strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            import keras
            first = keras.layers.Dense(2)
            first.build((None, 3))
        with strategy.scope():
            second = keras.layers.Dense(2)
            second.build((None, 3))
        for layer in (first, second):
            held = vars(layer.kernel)["_value"]
            assert isinstance(held, mx.distribute.MirroredVariable), held
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_keras_is_not_imported_by_mirrax():
    code = """
        import sys
        import mirrax as mx
        with mx.MirroredStrategy(["CPU:0"]).scope():
            mx.Variable(1.0)
        assert "keras" not in sys.modules
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr
