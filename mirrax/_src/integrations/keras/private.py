"""Keras' private names, each of which a test knows (`tests/interop/test_keras_private.py`)."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from mirrax._src.base import context


def is_usable() -> bool:
    """Whether Keras runs on JAX, in the way that mirrax knows."""
    return keras.backend.backend() == "jax" and not _is_nnx()


def _is_nnx() -> bool:
    from keras.src.backend import config

    return config.is_nnx_enabled()


def refuse_variables() -> None:
    """Has each Keras variable that is made in a scope raise an error that says why."""
    backend = keras.backend.backend()
    cause = (
        f"Keras runs on its {backend!r} backend, whose variables mirrax cannot put on the "
        'devices of a strategy. Set `os.environ["KERAS_BACKEND"] = "jax"` before Keras is '
        "imported (or `export KERAS_BACKEND=jax`)"
        if backend != "jax"
        else "Keras keeps its variables as those of Flax NNX (KERAS_NNX_ENABLED), which mirrax "
        "does not support. Unset KERAS_NNX_ENABLED before Keras is imported"
    )

    def initialize(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any):
        if not context.is_default():
            raise RuntimeError(
                f"A Keras variable is made in the scope of {context.current().strategy!r}, but "
                f"{cause}; or make it outside the scope."
            )
        original(self, *args, **kwargs)

    wrap(keras.Variable, "__init__", initialize)


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replaces `owner.name` by `wrapper`, whose first argument is what was there."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.__signature__ = inspect.signature(
        original
    )  # Keras does not look through wraps
    setattr(owner, name, wrapped)


if is_usable():
    from keras.src.backend.common.stateless_scope import (
        in_stateless_scope as in_stateless_scope,
    )
    from keras.src.backend.jax import trainer as trainer_module
    from keras.src.backend.jax.core import JaxVariable as JaxVariable
    from keras.src.callbacks.backup_and_restore import (
        BackupAndRestore as BackupAndRestore,
    )
    from keras.src.legacy.saving import legacy_h5_format as legacy_h5_format
    from keras.src.optimizers.base_optimizer import BaseOptimizer as BaseOptimizer
    from keras.src.random import seed_generator as seed_generator
    from keras.src.saving import saving_lib as saving_lib
    from keras.src.trainers import data_adapters as data_adapters
    from keras.src.trainers.data_adapters.data_adapter import (
        DataAdapter as DataAdapter,
    )
    from keras.src.trainers.data_adapters.data_adapter_utils import (
        class_weight_to_sample_weights as class_weight_to_sample_weights,
    )
    from keras.src.trainers.trainer import Trainer as Trainer

    JAXTrainer = trainer_module.JAXTrainer
