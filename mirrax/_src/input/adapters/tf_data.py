"""`tf.data.Dataset`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import jax

from mirrax._src.input.adapters.external import External
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.options import AutoShardPolicy, Options
from mirrax._src.input.structure import PyTree, TensorSpec, to_element


def adapt(source: Any) -> Dataset | None:
    """A `tf.data.Dataset` as ours, with its sharding policy."""
    import tensorflow as tf

    if not isinstance(source, tf.data.Dataset):
        return None

    def spec() -> PyTree:
        return jax.tree.map(_spec, source.element_spec)

    spec()  # to complain about sparse and ragged tensors now
    policy = source.options().experimental_distribute.auto_shard_policy
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy.name]

    node = External(
        lambda path, state: (source.as_numpy_iterator(), None),
        "tf.data.Dataset",
        to_element,
        int(source.cardinality()),
        spec,
    )
    return Dataset(node, options)


def _spec(spec: Any) -> TensorSpec:
    if type(spec).__name__ != "TensorSpec":
        raise TypeError(
            f"A tf.data.Dataset with {type(spec).__name__} cannot be read as arrays. Make its "
            "elements dense (`.to_tensor()`, `tf.sparse.to_dense`) in a `map`."
        )
    shape = None if spec.shape.rank is None else spec.shape.as_list()
    return TensorSpec(shape, spec.dtype.name)
