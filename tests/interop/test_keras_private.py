"""The private names of Keras that mirrax uses: what falls when one of them changes."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest
from helpers.engines import mirrored

from interop import libraries

keras = libraries.keras()
Model = keras.Model
with mirrored(2).scope():
    pass  # mirrax has done what it does to Keras


def found(module: str, path: str = "") -> Any:
    """What is under a private name; an error if nothing is."""
    value: Any = importlib.import_module(f"keras.src.{module}")
    for name in path.split(".") if path else ():
        value = getattr(value, name)
    return value


def parameters(fn) -> list[str]:
    return list(inspect.signature(fn).parameters)


def source(value) -> str:
    return inspect.getsource(inspect.unwrap(value))


def test_a_variable_keeps_its_array_in_value():
    """Else variables of a scope are plain arrays: nothing is mirrored, `run` loses updates."""
    kind = found("backend.jax.core", "JaxVariable")
    assert issubclass(keras.Variable, kind)
    variable = keras.Variable([1.0, 2.0])
    assert isinstance(variable._value, type(variable.value))
    assert "self._value" in source(kind._direct_assign)
    assert "_value = None" in source(
        found("backend.jax.trainer", "JAXTrainer._purge_model_variables")
    )
    for name in ("aggregation", "trainable", "path"):
        assert hasattr(variable, name)


def test_stateless_scopes_are_known():
    """Else layers cannot be built symbolically in a scope, and `apply` sums in `fit`, too."""
    inside = found("backend.common.stateless_scope", "in_stateless_scope")
    assert not inside()
    with keras.StatelessScope():
        assert inside()


@pytest.mark.parametrize(
    "name", ["make_train_function", "make_test_function", "make_predict_function"]
)
def test_steps_are_compiled_by_the_trainers_jit(name):
    """Else `fit` runs on one device, or fails on a batch that does not divide."""
    module = found("backend.jax.trainer")
    text = source(getattr(module.JAXTrainer, name))
    assert "jit(" in text and "donate_argnums=0" in text
    assert "self._make_function(" in text
    assert parameters(inspect.unwrap(module.JAXTrainer._make_function))[:2] == [
        "self",
        "step_function",
    ]


def test_batches_are_put_on_a_device_by_one_function():
    """Else each batch goes to the first accelerator, and from there to the others."""
    module = found("backend.jax.trainer")
    assert parameters(inspect.unwrap(module._distribute_data)) == ["data", "layouts"]
    text = inspect.getsource(module)
    assert "batch = _distribute_data(batch)" in text
    assert "tree.map_structure(jax.device_put, data)" in text
    assert text.count("device_put") == 1


def test_the_concatenation_of_predictions_donates_nothing():
    """Else it is taken for a step."""
    text = source(found("backend.jax.trainer", "JAXTrainer._make_function"))
    assert "concatenate = jit(concatenate)" in text


@pytest.mark.parametrize(
    "name",
    [
        *("fit", "evaluate", "train_on_batch", "test_on_batch"),
        *("predict", "predict_on_batch"),
    ],
)
def test_methods_collect_their_state_in_one_place(name):
    """Else a step gets one replica's copies in place of arrays on all devices."""
    trainer = found("backend.jax.trainer", "JAXTrainer")
    assert issubclass(Model, trainer)
    assert "self._get_jax_state(" in source(getattr(trainer, name))
    assert "v.value for v in" in source(trainer._get_jax_state)


def test_compile_and_init_are_the_trainers():
    """Else a model forgets in whose scope it was made; `load_model` does not compile."""
    base = found("trainers.trainer", "Trainer")
    assert Model.compile is base.compile
    assert "__init__" in vars(found("backend.jax.trainer", "JAXTrainer"))
    with mirrored(2).scope():
        model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.fit(np.ones((3, 2)), np.ones((3, 2)), verbose=0)
    held = vars(model.layers[0].kernel)["_value"]
    assert held.strategy.num_replicas_in_sync == 2


def test_adapters_come_from_one_function():
    """Else `fit` does not take an `mx.data.Dataset`."""
    module = found("trainers.data_adapters")
    assert parameters(module.get_data_adapter) == [
        *("x", "y", "sample_weight", "batch_size"),
        *("steps_per_epoch", "shuffle", "class_weight"),
    ]
    text = source(found("trainers.epoch_iterator", "EpochIterator.__init__"))
    assert "data_adapters.get_data_adapter(" in text
    adapter = found("trainers.data_adapters.data_adapter", "DataAdapter")
    assert {"get_jax_iterator", "num_batches", "on_epoch_end"} <= set(vars(adapter))
    utils = found("trainers.data_adapters.data_adapter_utils")
    assert parameters(utils.class_weight_to_sample_weights) == ["y", "class_weight"]


def test_shuffles_draw_from_the_processes_generators():
    """Else workers shuffle differently: `agree_on_randomness` sets these two."""
    arrays = found("trainers.data_adapters.array_data_adapter")
    assert "np.random.permutation" in inspect.getsource(arrays)
    batches = found("trainers.data_adapters.py_dataset_adapter")
    assert "random.shuffle(" in inspect.getsource(batches)


def test_an_optimizer_applies_by_apply():
    """Else gradients are not summed over replicas."""
    kind = found("optimizers.base_optimizer", "BaseOptimizer")
    assert issubclass(keras.optimizers.SGD, kind)
    assert parameters(kind.apply) == ["self", "grads", "trainable_variables"]
    assert "self.apply(" in source(kind.apply_gradients)
    scaled = keras.optimizers.LossScaleOptimizer
    assert parameters(scaled.apply) == parameters(kind.apply)
    assert "self._trainable_variables" in source(scaled._stateful_handle_finite_grads)


def test_seeds_are_two_numbers_that_jax_takes_for_a_key():
    """Else replicas draw the same numbers, or `fold_in` fails."""
    seed = keras.random.SeedGenerator(1).next()
    assert seed.shape == (2,) and seed.dtype == "uint32"
    module = found("random.seed_generator")
    assert "global_seed_generator()" in source(module.draw_seed)


def test_batch_normalisation_computes_its_moments_in_one_place():
    """Else `synchronized=True` normalises by a replica's own part."""
    kind = keras.layers.BatchNormalization
    assert parameters(kind._moments) == ["self", "inputs", "mask"]
    assert "self._moments(" in source(kind.call)
    assert "trainable=False" in source(kind.build)
    layer = kind()
    layer.build((None, 4, 3))
    assert layer._reduction_axes == [0, 1]
    assert {v.aggregation for v in layer.non_trainable_variables} == {"mean"}


def test_files_are_written_by_a_few_functions():
    """Else every worker writes the file, all at the same time."""
    api = inspect.getsource(found("saving.saving_api"))
    for name in ("saving_lib.save_model(", "saving_lib.save_weights_only("):
        assert name in api
    assert "legacy_h5_format.save_model_to_hdf5(" in api
    for owner, name in (
        ("saving.saving_lib", "save_model"),
        ("saving.saving_lib", "save_weights_only"),
        ("legacy.saving.legacy_h5_format", "save_model_to_hdf5"),
    ):
        assert parameters(found(owner, name))[0] == "model"
    backup = found("callbacks.backup_and_restore", "BackupAndRestore")
    assert "rmtree" in source(backup.on_train_end)
    assert "save_weights(" in source(backup._save_model)
    assert "exists(self._weights_path)" in source(backup._load_model)


def test_whether_variables_are_nnx_is_known():
    """Else `KERAS_NNX_ENABLED` is not refused."""
    assert found("backend.config", "is_nnx_enabled")() is False
