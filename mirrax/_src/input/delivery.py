"""Parts of a batch to the devices of their replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mirrax._src.base.jax_compat import uncommitted
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.values import PerReplica, Stacked
from mirrax._src.input.blocks import Block, value_of
from mirrax._src.input.splitting import Step
from mirrax._src.input.structure import PyTree, empty, flatten, show


class Delivery:
    """Brings steps to the devices of a mesh; without a mesh they stay NumPy arrays."""

    def __init__(self, mesh: ReplicaMesh | None, fetch_to_device: bool) -> None:
        self._mesh = mesh
        self._fetch = fetch_to_device and mesh is not None

    def __call__(self, step: Step) -> PyTree:
        """A step's parts as one value for each replica."""
        flat = [flatten(_own(part)) for part in step]
        tree = flat[0][1]
        for i, (_, other) in enumerate(flat):
            if other != tree:
                raise ValueError(
                    "The replicas of one step got elements of different structure: replica 0 "
                    f"{show(value_of(step[0]))}, replica {i} {show(value_of(step[i]))}. The "
                    "dataset must yield one structure."
                )
        columns = list(zip(*(leaves for leaves, _ in flat)))
        if not self._fetch:
            return jax.tree.unflatten(tree, [_regrouped(column) for column in columns])
        return jax.tree.unflatten(tree, self._put(columns))

    def _put(self, columns: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Each leaf's parts on the devices; all copies are started in one call."""
        assert self._mesh is not None
        devices = self._mesh.local_devices
        is_text = [_is_text(column[0]) for column in columns]
        arrays = [
            a for column, text in zip(columns, is_text) if not text for a in column
        ]
        where = list(devices) * (len(arrays) // len(devices))
        put = iter(jax.device_put(arrays, where))
        return [
            _regrouped(column) if text else self._joined([next(put) for _ in column])
            for column, text in zip(columns, is_text)
        ]

    def _joined(self, parts: list[jax.Array]) -> Any:
        mesh, first = self._mesh, parts[0]
        assert mesh is not None
        if mesh.size == 1:
            return uncommitted(first)
        if not first.ndim or any(p.shape != first.shape for p in parts):
            return PerReplica([uncommitted(part) for part in parts])
        return PerReplica.of(Stacked(mesh.join(parts, mirrored=False), mesh, False))


def _own(part: Any) -> PyTree:
    """A part's arrays in memory of their own, which a device may take over."""
    if not isinstance(part, Block):
        return value_of(part)
    value = part.value()
    if not isinstance(part.index, range):
        return value
    return jax.tree.map(_copy, value)  # a view of the user's array, or of a batch


def _copy(array: np.ndarray) -> np.ndarray:
    out = empty(array.shape, array.dtype)
    out[...] = array
    return out


def _is_text(leaf: Any) -> bool:
    return isinstance(leaf, bytes) or leaf.dtype.hasobject


def _regrouped(column: tuple[Any, ...]) -> Any:
    return column[0] if len(column) == 1 else PerReplica(column)
