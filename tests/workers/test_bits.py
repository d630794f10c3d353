"""Mirrored variables are the same on all workers to the last bit, whatever XLA fuses."""

from __future__ import annotations

from typing import Any


def digests_of_lone_scaled_gradients(
    strategy: Any, sizes: tuple[int, ...]
) -> list[str]:
    import hashlib

    import jax.numpy as jnp
    import numpy as np

    import mirrax as mx

    found = []
    for size in sizes:
        with strategy.scope():
            variable = mx.Variable(jnp.zeros(size))

        @mx.function
        def step(x: Any, variable: Any = variable) -> None:
            # The product could be fused into the sum of the workers' parts.
            replica = mx.distribute.get_replica_context()
            total = replica.all_reduce("sum", x * 0.3)
            variable.assign_sub(0.01 * total)

        random = np.random.default_rng(strategy.cluster_resolver.task_id)
        part = random.standard_normal(size).astype(np.float32)
        for _ in range(20):
            strategy.run(step, args=(mx.distribute.PerReplica([part]),))
        found.append(hashlib.sha256(variable.numpy().tobytes()).hexdigest())
    return found


def test_a_scaled_gradient_that_travels_alone(two_by_one: Any) -> None:
    first, second = two_by_one.run(digests_of_lone_scaled_gradients, (1000, 300_000))
    assert first == second
