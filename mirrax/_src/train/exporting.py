"""Weights for those who do not have mirrax: safetensors, and plain Orbax checkpoints."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.cluster.runtime import Cluster

Writer = Callable[[Path, Mapping[str, np.ndarray], Mapping[str, Any]], None]


def writer_for(format: str) -> Writer:
    """The function that writes a format.

    Raises:
        ValueError: If there is no such format.
        ModuleNotFoundError: If the library that it needs is not installed.
    """
    if format not in _WRITERS:
        raise ValueError(
            f"`format` must be one of {', '.join(map(repr, _WRITERS))}, got {format!r}."
        )
    if format == "safetensors":
        try:
            import safetensors  # pyright: ignore[reportMissingImports]  # noqa: F401
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "`export(..., format='safetensors')` needs safetensors, which is not "
                "installed. Type: pip install 'mirrax[safetensors]'",
                name="safetensors",
            ) from None
    return _WRITERS[format]


def export(
    write: Writer,
    path: Path,
    arrays: Mapping[str, Any],
    values: Mapping[str, Any],
    overwrite: bool,
    cluster: Cluster | None,
) -> None:
    """Has the first worker write; the others wait for it, and hear of its failure."""
    failure: Exception | None = None
    if cluster is None or cluster.worker == 0:
        simple = {k: v for k, v in values.items() if not isinstance(v, dict | list)}
        try:
            _export(write, path, arrays, simple, overwrite)
        except Exception as error:
            failure = error
    if cluster is not None:
        told = cluster.agree(
            "an export", failure and f"{type(failure).__name__}: {failure}"
        )
        if cluster.worker and told[0] is not None:
            raise OSError(f"{cluster.names[0]} could not export. {told[0]}")
    if failure is not None:
        raise failure


def _export(
    write: Writer,
    path: Path,
    arrays: Mapping[str, Any],
    values: Mapping[str, Any],
    overwrite: bool,
) -> None:
    """Writes under another name first, which then takes the place of `path`."""
    if not arrays and not values:
        raise ValueError(
            f"There is nothing to export to {path}: the checkpoint holds no variables, arrays "
            "or numbers."
        )
    path = Path(os.path.realpath(path))  # a link stays
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"There is already something at {path}; nothing has been exported. Choose "
            "another path, or pass `overwrite=True`."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.parent / f".{path.name}.tmp-{secrets.token_hex(4)}"
    try:
        write(hidden, {k: _as_numpy(v) for k, v in arrays.items()}, values)
        if path.is_dir():
            shutil.rmtree(path)  # a directory cannot be replaced
        os.replace(hidden, path)
    finally:
        if hidden.is_dir():
            shutil.rmtree(hidden, ignore_errors=True)
        else:
            hidden.unlink(missing_ok=True)


def _write_safetensors(
    path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
) -> None:
    from safetensors.numpy import (  # pyright: ignore[reportMissingImports]
        save_file,
    )

    # `ascontiguousarray` would make a number an array of one.
    packed = {
        name: np.require(array, requirements="C") for name, array in arrays.items()
    }
    texts = {name: json.dumps(value) for name, value in values.items()}
    save_file(packed, path, metadata=texts)


def _write_orbax(
    path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
) -> None:
    empty = [name for name, array in arrays.items() if not array.size]
    if empty:
        raise ValueError(
            f"Orbax cannot save empty arrays: {', '.join(empty)}. Leave them out, "
            "or export with `format='safetensors'`."
        )
    import orbax.checkpoint as ocp

    # Of several workers one writes, and must not wait for the others.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix=path.name,
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_compression=False, multiprocessing_options=alone
    )
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.CRITICAL)  # an error is raised, no need to print it as well
    try:
        ocp.Checkpointer(handler, multiprocessing_options=alone).save(
            path.absolute(), args=ocp.args.PyTreeSave(_nested({**arrays, **values}))
        )
    finally:
        log.setLevel(level)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts of what has names with slashes."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, last = name.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
            if not isinstance(inner, dict):
                break
        if not isinstance(inner, dict) or last in inner:
            raise ValueError(
                f"{name!r} and another array cannot be nested, because the path of one begins "
                "with that of the other. Rename one of them, or export with "
                "`format='safetensors'`."
            )
        inner[last] = value
    return tree


def _as_numpy(array: Any) -> np.ndarray:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.array(array)


_WRITERS: dict[str, Writer] = {
    "safetensors": _write_safetensors,
    "orbax": _write_orbax,
}
