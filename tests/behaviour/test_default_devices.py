"""The devices that a strategy takes by itself: all accelerators, or all CPUs.

On a machine with GPUs these are the tests that run there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx

both_engines = pytest.mark.parametrize(
    "wrap", [lambda f: f, mx.function], ids=["eager", "compiled"]
)


@pytest.fixture
def strategy() -> mx.MirroredStrategy:
    return mx.MirroredStrategy()


def test_all_devices_of_the_best_kind_are_taken(strategy) -> None:
    assert list(strategy.mesh.devices.flat) == jax.local_devices()
    kind = mx.config.list_logical_devices()[0].device_type
    assert len(mx.config.list_logical_devices(kind)) == strategy.num_replicas_in_sync
    assert f"{kind}:0" in repr(strategy)


def test_devices_can_be_named(strategy) -> None:
    kind = mx.config.list_logical_devices()[0].device_type
    named = mx.MirroredStrategy([f"/{kind.lower()}:0"])
    assert list(named.mesh.devices.flat) == jax.local_devices()[:1]


@pytest.mark.slow
@both_engines
def test_a_training_loop_ends_where_numpy_does(strategy, wrap) -> None:
    n = strategy.num_replicas_in_sync
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4 * n, 3)).astype("float32")
    y = x @ np.array([1.0, -2.0, 0.5], "float32")
    with strategy.scope():
        w = mx.Variable(jnp.zeros(3))
        seen = mx.Variable(
            0.0,
            synchronization=mx.VariableSynchronization.ON_READ,
            aggregation=mx.VariableAggregation.SUM,
        )

    @wrap
    def step(x, y):
        loss, gradient = mx.value_and_grad(lambda: jnp.sum((x @ w - y) ** 2), w)()
        w.assign_sub(0.01 * mx.get_replica_context().all_reduce("sum", gradient))
        seen.assign_add(jnp.float32(len(x)))
        return loss

    parts = [
        mx.distribute.PerReplica(np.split(rows, n)) if n > 1 else rows
        for rows in (x, y)
    ]
    expected = np.zeros(3, "float32")
    for _ in range(5):
        losses = strategy.run(step, args=tuple(parts))
        total = strategy.reduce("SUM", losses, axis=None)
        error = x @ expected - y
        np.testing.assert_allclose(total, np.sum(error**2), rtol=1e-4)
        expected -= 0.01 * 2 * x.T @ error
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert float(seen) == 5 * len(x)
    assert [copy.read_value().devices() for copy in w.values] == [
        {device} for device in jax.local_devices()
    ]


@both_engines
@pytest.mark.parametrize(
    "ops",
    [
        mx.distribute.NcclAllReduce(),
        mx.distribute.HierarchicalCopyAllReduce(),
        mx.distribute.ReductionToOneDevice(),
    ],
    ids=repr,
)
def test_every_algorithm_reduces(ops, wrap) -> None:
    strategy = mx.MirroredStrategy(cross_device_ops=ops)
    n = strategy.num_replicas_in_sync
    value = {"a": jnp.arange(3.0), "b": jnp.float32(2)}
    reduce = wrap(lambda v: mx.get_replica_context().all_reduce("sum", v))
    result = strategy.run(reduce, args=(value,))
    np.testing.assert_allclose(result["a"], n * np.arange(3.0))
    np.testing.assert_allclose(result["b"], 2.0 * n)


def test_state_can_be_donated(strategy) -> None:
    state = strategy.replicate({"w": jnp.ones(4)})
    step = mx.function(lambda s: {"w": s["w"] * 2}, donate_argnums=0)
    for _ in range(3):
        state = strategy.run(step, args=(state,))
    np.testing.assert_allclose(np.asarray(state["w"]), np.full(4, 8.0))


def test_the_caller_of_run_can_be_compiled(strategy) -> None:
    @mx.function
    def total(x):
        return strategy.reduce(
            "SUM", strategy.run(lambda y: y * 2, args=(x,)), axis=None
        )

    value = strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.float32(ctx.replica_id_in_sync_group)
    )
    n = strategy.num_replicas_in_sync
    assert float(total(value)) == n * (n - 1)
