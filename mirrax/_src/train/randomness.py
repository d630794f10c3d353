"""`mx.nn.example_keys`: random numbers that do not depend on the number of replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context


def example_keys(key: Any, examples: Any) -> jax.Array:
    """A key for each of this replica's examples, by its place in the global batch.

    >>> import jax
    >>> def noise(x):
    ...     keys = mx.nn.example_keys(jax.random.key(0), x)
    ...     return jax.vmap(jax.random.uniform)(keys)
    >>> strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> dataset = mx.data.Dataset.range(6).batch(6)
    >>> batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    >>> on_two = strategy.run(noise, args=(batch,))
    >>> bool((strategy.gather(on_two, axis=0) == noise(jnp.arange(6))).all())
    True

    What is drawn with these keys, for dropout or augmentation, is the same for an example
    on any number of replicas and workers, also where replicas have unequal parts. Give a
    new `key` to each step, `jax.random.fold_in(key, step)`, which is the same on all replicas.
    Replicas with unequal parts, and those of eager code, meet to count their examples.

    Args:
        key: A key of `jax.random`, or the older kind, an array of two numbers.
        examples: This replica's part of the batch, an array or a structure of arrays; or the
            number of its examples.
    """
    place = context.current()
    replica = place.replica
    if replica is None:
        raise RuntimeError(
            "`example_keys` is called outside of replicas, where no part of a batch has a "
            "place in it. Call it inside the function that `strategy.run` runs."
        )
    count = _count(examples)
    if replica.num_replicas_in_sync == 1:
        first: Any = 0
    elif context.in_program(place) and not context.is_uneven(place):
        first = replica.replica_id_in_sync_group * count
    else:
        counts = replica.all_gather(jnp.int32([count]), axis=0)
        is_before = jnp.arange(counts.size) < replica.replica_id_in_sync_group
        first = jnp.sum(jnp.where(is_before, counts, 0))
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return fold(key, first + jnp.arange(count))


def _count(examples: Any) -> int:
    if isinstance(examples, int) and not isinstance(examples, bool):
        return examples
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(examples)]
    lengths = {shape[0] for shape in shapes if shape}
    if len(lengths) != 1 or not all(shapes):
        raise ValueError(
            "`examples` must be arrays that have one and the same number of examples along "
            f"their first axes, or that number; got arrays of shapes {shapes}."
        )
    return lengths.pop()
