"""`load_tensorflow_checkpoint`: the arrays of TensorFlow's checkpoints, by name."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mirrax._src.base.hiding import brief
from mirrax._src.state.variable import Variable

# What TensorFlow appends to the path of a variable; other keys are not variables.
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_SAVED_MODEL = os.path.join("variables", "variables")


@brief
def load_tensorflow_checkpoint(
    path: str | os.PathLike[str], assign_to: Mapping[str, Variable] | None = None
) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint that TensorFlow has written, by name.

        arrays = mx.train.load_tensorflow_checkpoint("run/ckpt-3")
        arrays["model/dense/kernel"]

    Names are the paths of `tf.train.Checkpoint`'s objects, or the variables' names in a
    checkpoint of TensorFlow 1. TensorFlow has to be installed.

    Args:
        path: The prefix that `save` returned; a directory, of which the latest checkpoint is
            read; or the directory of a SavedModel.
        assign_to: Variables to assign, by names in the checkpoint. Only these arrays are then
            read and returned. All is checked before anything is assigned.

    Raises:
        ModuleNotFoundError: If TensorFlow is not installed.
        FileNotFoundError: If there is no checkpoint.
        ValueError: If a name of `assign_to` is not in the checkpoint, or a shape or dtype does
            not fit.
    """
    reader, place = _open(os.fspath(path))
    kinds = reader.get_variable_to_dtype_map()
    keys = {
        key.removesuffix(_VALUE): key
        for key, kind in kinds.items()
        if kind.is_numpy_compatible and kind.name not in ("string", "resource")
    }
    wanted = keys if assign_to is None else assign_to
    missing = [name for name in wanted if name not in keys]
    if missing:
        raise ValueError(_not_there(place, missing, keys))
    arrays = {name: reader.get_tensor(keys[name]) for name in sorted(wanted)}
    if assign_to is not None:
        _assign(place, arrays, assign_to)
    return arrays


def _open(path: str) -> tuple[Any, str]:
    try:
        import tensorflow as tf  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "`mx.train.load_tensorflow_checkpoint` reads with TensorFlow, which is not "
            "installed. Type: pip install tensorflow-cpu",
            name="tensorflow",
        ) from None
    if os.path.exists(os.path.join(path, f"{_SAVED_MODEL}.index")):
        path = os.path.join(path, _SAVED_MODEL)
    elif os.path.isdir(path):
        latest = tf.train.latest_checkpoint(path)
        if latest is None:
            raise FileNotFoundError(
                f"There is no TensorFlow checkpoint in {path}: neither a file "
                "`checkpoint` that names the latest one, nor a SavedModel. Give the prefix "
                "that `save` returned."
            )
        path = latest
    if not tf.io.gfile.exists(f"{path}.index"):
        raise FileNotFoundError(
            f"There is no TensorFlow checkpoint at {path}: {path}.index does not exist. "
            "Give the prefix that `save` returned, without .index or .data."
        )
    return tf.train.load_checkpoint(path), path


def _assign(
    path: str, arrays: Mapping[str, np.ndarray], variables: Mapping[str, Variable]
) -> None:
    converted, wrong = {}, []
    for name, variable in variables.items():
        if not isinstance(variable, Variable):
            raise TypeError(
                f"`assign_to` maps names to variables, but {name!r} to a "
                f"{type(variable).__name__}. Assign anything else from the arrays that are "
                "returned without `assign_to`."
            )
        try:
            converted[name] = variable.convert(arrays[name])
        except ValueError as error:
            wrong.append(f"{name}: {error}")
    if wrong:
        lines = "\n  ".join(wrong)
        raise ValueError(f"{path} does not fit; nothing has been assigned.\n  {lines}")
    for name, variable in variables.items():
        variable.assign(converted[name])


def _not_there(path: str, missing: Iterable[str], names: Iterable[str]) -> str:
    lines = []
    for name in missing:
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.3)
        lines.append(name + (f" (did you mean {close[0]}?)" if close else ""))
    shown = sorted(names)
    more = f" and {len(shown) - 20} more" if len(shown) > 20 else ""
    return (
        f"{path} has no {', '.join(lines)}; nothing has been assigned. It has "
        f"{', '.join(shown[:20]) or 'no variables'}{more}."
    )
