"""Mirrored variables are the same on all workers to the last bit, whatever XLA fuses."""

from __future__ import annotations

from typing import Any

import mirrax as mx


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


def digest_of_many_small_variables(strategy: Any) -> str:
    import hashlib
    from unittest import mock

    import jax.numpy as jnp
    import numpy as np
    import optax

    import mirrax as mx
    from mirrax._src.engines import packs

    with strategy.scope():
        variables = [mx.Variable(jnp.full(5, 0.1 * i)) for i in range(60)]
        optimizer = mx.train.Optimizer(optax.sgd(0.01, momentum=0.9))

    @mx.function
    def step(x: Any) -> None:
        def loss() -> Any:
            return sum(jnp.sum((x - v) ** 2) for v in variables)

        _, gradients = mx.value_and_grad(loss, variables)()
        optimizer.apply_gradients(zip(gradients, variables))

    def rows(ctx: Any) -> Any:
        random = np.random.default_rng(ctx.replica_id_in_sync_group)
        return random.standard_normal((4, 5)).astype(np.float32)

    batch = strategy.experimental_distribute_values_from_function(rows)
    resolver = strategy.cluster_resolver
    with mock.patch.object(packs, "_MANY_ON_CPUS", 96):
        for i in range(10):
            strategy.run(step, args=(batch,))
            if i == 5 and (resolver is None or resolver.task_id == 0):
                assert variables[0].numpy().shape == (5,)  # nobody else reads it
    assert all(v.lives_at[2] is not None for v in variables)
    every = np.stack([v.numpy() for v in variables])
    return hashlib.sha256(every.tobytes()).hexdigest()


def test_many_small_variables_however_replicas_are_spread(two_by_one: Any) -> None:
    first, second = two_by_one.run(digest_of_many_small_variables)
    strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert first == second == digest_of_many_small_variables(strategy)
