"""Keras' files, and Keras' objects in an `mx.train.Checkpoint`.

Of several workers the first one writes, and the others wait for it.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import keras

from mirrax._src.integrations.keras.data import cluster_of
from mirrax._src.integrations.keras.private import (
    BackupAndRestore,
    BaseOptimizer,
    JaxVariable,
    legacy_h5_format,
    saving_lib,
    wrap,
)
from mirrax._src.integrations.keras.training import strategy_of, trained_by
from mirrax._src.integrations.keras.variables import doing, held_variable, whole

_Original = Callable[..., Any]
_here = threading.local()


def install() -> None:
    for owner, name in (
        (saving_lib, "save_model"),
        (saving_lib, "save_weights_only"),
        (legacy_h5_format, "save_model_to_hdf5"),
    ):
        wrap(owner, name, _save)
    for name in ("_save_model", "on_train_end"):
        wrap(BackupAndRestore, name, _back_up)
    wrap(BackupAndRestore, "on_train_begin", _go_on)
    for kind in (keras.layers.Layer, BaseOptimizer, keras.metrics.Metric):
        kind.saved_parts = _saved_parts
        kind.replace_parts = _replace_parts
    JaxVariable.saved_parts = lambda self: {"value": _saved(self)}
    JaxVariable.replace_parts = lambda self, new: _restore(self, new["value"])


# Files -------------------------------------------------------------------------------------


def _save(original: _Original, model: Any, *args: Any, **kwargs: Any) -> Any:
    return _write_once(model, lambda: original(model, *args, **kwargs))


def _back_up(original: _Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    return _write_once(self.model, lambda: original(self, *args, **kwargs))


def _go_on(original: _Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Has all workers go on from a backup, or none: each reads it by itself."""
    cluster = cluster_of(strategy_of(self.model))
    if cluster is not None:
        found = cluster.agree("a backup of Keras", os.path.exists(self._weights_path))
        if len(set(found)) > 1:
            here, missing = (
                ", ".join(
                    n for n, is_there in zip(cluster.names, found) if is_there is k
                )
                for k in (True, False)
            )
            raise ValueError(
                f"`BackupAndRestore({self.backup_dir!r})` finds a backup on {here}, and none "
                f"on {missing}. Give it a directory that all workers share."
            )
    return original(self, *args, **kwargs)


def _write_once(model: Any, write: Callable[[], Any]) -> Any:
    """`write()` on the first worker; the others wait until it is done."""
    is_model = isinstance(model, keras.Model)
    cluster = cluster_of(strategy_of(model)) if is_model else None
    if cluster is None or getattr(_here, "is_writing", False):
        return write()
    for variable in _variables_of(model):  # what all workers have to combine
        held = held_variable(variable)
        if held is not None:
            whole(held)
    error: Exception | None = None
    result = None
    if cluster.worker == 0:
        _here.is_writing = True
        try:
            with doing(adopts=False):  # Keras makes variables to write them down
                result = write()
        except Exception as caught:
            error = caught
        finally:
            _here.is_writing = False
    told = cluster.agree(
        "a file of Keras", error and f"{type(error).__name__}: {error}"
    )
    if error is not None:
        raise error
    if told[0]:
        raise RuntimeError(f"{cluster.names[0]} could not write a file: {told[0]}")
    return result


def _variables_of(obj: Any) -> list[Any]:
    found = list(obj.variables)
    optimizer = getattr(obj, "optimizer", None)
    return [*found, *(optimizer.variables if optimizer is not None else ())]


# Checkpoints -------------------------------------------------------------------------------


def _saved_parts(self: Any) -> dict[str, Any]:
    """The variables of a model, layer, optimizer or metric, by their place."""
    _build(self)
    return {name: _saved(variable) for name, variable in _named(self)}


def _named(obj: Any) -> list[tuple[str, Any]]:
    """Names that do not depend on how many models the process has made before."""
    if isinstance(obj, BaseOptimizer):
        return [(str(i), v) for i, v in enumerate(obj.variables)]
    left_out = set(map(id, getattr(obj, "metrics_variables", ())))  # of `compile`
    kept = [v for v in obj.variables if id(v) not in left_out]
    return [(f"{i}_{v.name}", v) for i, v in enumerate(kept)]


def _build(obj: Any) -> None:
    """Raises if it is not known yet which variables there are."""
    if isinstance(obj, keras.metrics.Metric) or obj.built:
        return
    model = trained_by.get(obj, lambda: None)()
    if isinstance(obj, BaseOptimizer) and model is not None and model.built:
        strategy = strategy_of(model)
        if strategy is None:
            obj.build(model.trainable_variables)
        else:
            with strategy.entered("building an optimizer"):
                obj.build(model.trainable_variables)
        return
    is_optimizer = isinstance(obj, BaseOptimizer)
    how = "model.trainable_variables" if is_optimizer else "input_shape"
    raise ValueError(
        f"A checkpoint is given {obj.name!r}, a {type(obj).__name__} without variables, since "
        f"it was not built yet. Call its `build({how})` before, in the scope."
    )


def _saved(variable: Any) -> Any:
    held = held_variable(variable)
    return variable.value if held is None else held


def _replace_parts(self: Any, new: Mapping[str, Any]) -> None:
    for name, variable in _named(self):
        _restore(variable, new[name])


def _restore(variable: Any, value: Any) -> None:
    if held_variable(variable) is None:
        variable.assign(value)
