"""`tf.data.Dataset`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import base64
from typing import Any

from mirrax._src.input.adapters.external import External, Pass
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.options import AutoShardPolicy, Options
from mirrax._src.input.structure import PyTree, TensorSpec, to_element

_READERS = (b"TFRecordDataset", b"TextLineDataset", b"FixedLengthRecordDataset")


def adapt(source: Any) -> Dataset | None:
    """A `tf.data.Dataset` as ours, with its sharding policy.

    The origin of a pass is TensorFlow's own state of its iterator, taken at the start: it
    holds the seeds of shuffles, and no data.
    """
    import tensorflow as tf

    if not isinstance(source, tf.data.Dataset):
        return None

    def spec() -> PyTree:
        return tf.nest.map_structure(_spec, source.element_spec)

    spec()  # to complain about sparse and ragged tensors now
    policy = source.options().experimental_distribute.auto_shard_policy
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy.name]

    def begin(origin: Any) -> Pass:
        iterator = iter(source)
        resource = iterator._iterator_resource
        try:
            if origin is None:
                saved = tf.raw_ops.SerializeIterator(
                    resource_handle=resource, external_state_policy=1
                )
                text = tf.io.serialize_tensor(saved).numpy()
                origin = base64.b64encode(text).decode()
            else:
                saved = tf.io.parse_tensor(base64.b64decode(origin), tf.variant)
                tf.raw_ops.DeserializeIterator(
                    resource_handle=resource, serialized=saved
                )
        except tf.errors.OpError:  # a generator, say: it has no state, and begins anew
            origin = None
        return Pass(iterator, origin)

    def convert(element: Any) -> PyTree:
        return to_element(tf.nest.map_structure(lambda t: t.numpy(), element))

    variant = source._variant_tensor
    rows = int(tf.raw_ops.ComputeBatchSize(input_dataset=variant))
    graph = source._as_serialized_graph().numpy()
    return Dataset(
        External(
            begin,
            "tf.data.Dataset",
            convert,
            int(source.cardinality()),
            spec,
            rows if rows > 0 else None,
            any(name in graph for name in _READERS),
        ),
        options,
    )


def _spec(spec: Any) -> TensorSpec:
    if type(spec).__name__ != "TensorSpec":
        raise TypeError(
            f"A tf.data.Dataset with {type(spec).__name__} cannot be read as arrays. Make its "
            "elements dense (`.to_tensor()`, `tf.sparse.to_dense`) in a `map`."
        )
    shape = None if spec.shape.rank is None else spec.shape.as_list()
    return TensorSpec(shape, spec.dtype.name)
