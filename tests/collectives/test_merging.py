"""Independent all-reduces of one step are one message, whoever asks for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers.hlo import last_programs
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import mirrax as mx
from mirrax._src.engines.arguments import sort_arguments

ROWS = np.arange(8, dtype=np.float32).reshape(4, 2) / 8


def rows_of(strategy: mx.MirroredStrategy) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda context: ROWS[2 * int(context.replica_id_in_sync_group) :][:2]
    )


def messages(function: mx.Function, strategy: Any, *args: Any) -> int:
    """How many all-reduces mirrax asks XLA for; XLA may join some more."""
    (program,) = last_programs(function).values()
    arrays = sort_arguments(args, {}, strategy.replica_mesh).arrays
    return program.lower(arrays).as_text().count("stablehlo.all_reduce")


def test_gradients_loss_and_metrics_are_one(two_cpus) -> None:
    with two_cpus.scope():
        w, b = mx.Variable(np.ones((2, 3), "f")), mx.Variable(np.zeros(3, "f"))
        metrics = [mx.metrics.Mean(), mx.metrics.Mean()]
        optimizer = mx.train.Optimizer("sgd", learning_rate=0.1)

    def step(x: Any) -> jax.Array:
        def loss_fn() -> jax.Array:
            return jnp.sum((x @ w.read_value() + b.read_value()) ** 2)

        loss, gradients = mx.value_and_grad(loss_fn, [w, b])()
        optimizer.apply_gradients(zip(gradients, [w, b]))
        metrics[0].update_state(loss)
        metrics[1].update_state(x)
        return loss

    @mx.function
    def train(x: Any) -> Any:
        losses = two_cpus.run(step, args=(x,))
        total = two_cpus.reduce("sum", losses, axis=None)
        return total, [metric.result() for metric in metrics]

    x = rows_of(two_cpus)
    total, (mean_loss, mean_x) = train(x)
    assert messages(train, two_cpus, x) == 1
    out = ROWS @ np.ones((2, 3), "f")
    np.testing.assert_allclose(total, (out**2).sum(), rtol=1e-6)
    np.testing.assert_allclose(mean_loss, (out**2).sum() / 2, rtol=1e-6)
    np.testing.assert_allclose(mean_x, ROWS.mean(), rtol=1e-6)
    np.testing.assert_allclose(w, 1 - 0.1 * (ROWS.T @ (2 * out)), rtol=1e-5)
    np.testing.assert_allclose(b, -0.1 * (2 * out).sum(0), rtol=1e-5)


def test_a_sum_of_sums_is_a_second_message(two_cpus) -> None:
    @mx.function
    def step(x: Any) -> Any:
        replica = mx.get_replica_context()
        early = replica.all_reduce("sum", x.sum())
        own = lax.psum(x, "replica")  # hand-written ones travel along
        after = replica.all_reduce("mean", x - early)
        late = replica.all_reduce("sum", x.max())
        return early, own, after, late, replica.all_reduce("sum", jnp.int32(1))

    x = rows_of(two_cpus)
    early, own, after, late, count = two_cpus.run(step, args=(x,))
    assert messages(step, two_cpus, x) == 3  # one of them for the other dtype
    np.testing.assert_allclose(early, ROWS.sum())
    np.testing.assert_allclose(own, ROWS[:2] + ROWS[2:])
    np.testing.assert_allclose(after, (ROWS[:2] + ROWS[2:]) / 2 - ROWS.sum())
    np.testing.assert_allclose(late, ROWS[:2].max() + ROWS[2:].max())
    assert int(count) == 2


def test_sums_in_calls_loops_and_branches(two_cpus) -> None:
    def both(x: jax.Array) -> jax.Array:
        replica = mx.get_replica_context()
        return replica.all_reduce("sum", x.sum()) + replica.all_reduce("sum", x.max())

    @mx.function
    def step(x: Any) -> Any:
        called = jax.jit(both)(x)
        recomputed = jax.value_and_grad(lambda y: jax.checkpoint(both)(y) ** 2)(x)
        branched = lax.cond(jnp.array(True), both, lambda y: jnp.float32(0), x)
        _, looped = lax.scan(lambda c, row: (c + both(row), both(row)), 0.0, x)
        return called, recomputed, branched, looped

    x = rows_of(two_cpus)
    called, (value, gradient), branched, looped = two_cpus.run(step, args=(x,))
    parts = ROWS[:2], ROWS[2:]

    def expected(parts: Any) -> Any:
        return sum(p.sum() for p in parts) + sum(p.max() for p in parts)

    for result in (called, branched):
        np.testing.assert_allclose(result, expected(parts), rtol=1e-6)
    np.testing.assert_allclose(value, expected(parts) ** 2, rtol=1e-6)
    rows = [expected([p[i] for p in parts]) for i in range(2)]
    np.testing.assert_allclose(looped, rows, rtol=1e-6)
    # The gradient of a sum over replicas is the sum of the replicas' gradients.
    is_max = np.array([[0, 0], [0, 1]])
    each = 2 * 2 * expected(parts) * (1 + is_max)
    np.testing.assert_allclose(np.asarray(gradient.values[0]), each, rtol=1e-6)
    # In the call and, apart, in each of the others: a call with its gradient is two.
    assert messages(step, two_cpus, x) <= 6


def test_sums_that_nobody_uses_do_not_travel(two_cpus) -> None:
    @mx.function
    def step(x: Any) -> Any:
        mx.get_replica_context().all_reduce("sum", jnp.sin(x))
        return x

    x = rows_of(two_cpus)
    two_cpus.run(step, args=(x,))
    assert messages(step, two_cpus, x) == 0


def test_effects_are_kept(two_cpus) -> None:
    seen: list[str] = []

    @mx.function
    def step(x: Any) -> Any:
        total = mx.get_replica_context().all_reduce("sum", x.sum())
        jax.debug.callback(lambda _: seen.append("of a sum"), total)
        jax.debug.callback(lambda _: seen.append("of rows"), x[0])
        return mx.get_replica_context().all_reduce("sum", x[0])

    two_cpus.run(step, args=(rows_of(two_cpus),))
    jax.effects_barrier()
    assert sorted(seen) == ["of a sum", "of a sum", "of rows", "of rows"]


def test_two_runs_and_code_between_them(two_cpus) -> None:
    with two_cpus.scope():
        v = mx.Variable(np.float32(1))

    def add(x: Any) -> jax.Array:
        v.assign_add(mx.get_replica_context().all_reduce("sum", x.sum()))
        return x * v.read_value()

    @mx.function
    def twice(x: Any) -> Any:
        first = two_cpus.reduce("sum", two_cpus.run(add, args=(x,)), axis=0)
        second = two_cpus.run(add, args=(x,))
        return first, two_cpus.reduce("mean", second, axis=0) + first.sum()

    first, second = twice(rows_of(two_cpus))
    total = ROWS.sum()
    np.testing.assert_allclose(first, ROWS.sum(0) * (1 + total), rtol=1e-6)
    expected = ROWS.mean(0) * (1 + 2 * total) + first.sum()
    np.testing.assert_allclose(second, expected, rtol=1e-6)
    np.testing.assert_allclose(v, 1 + 2 * total)


def test_own_gradients_of_sums_are_kept_for_who_differentiates_a_run(two_cpus) -> None:
    @jax.custom_vjp
    def total(x: jax.Array) -> jax.Array:
        return lax.psum(x, "replica")

    total.defvjp(lambda x: (total(x), None), lambda _, cotangent: (100 * cotangent,))

    @mx.function
    def step(x: jax.Array) -> jax.Array:
        return total(x)

    def summed(x: jax.Array) -> jax.Array:
        return two_cpus.reduce("sum", two_cpus.run(step, args=(x,)), axis=None)

    for gradient in (jax.grad(summed), jax.grad(mx.function(summed))):
        np.testing.assert_allclose(gradient(jnp.float32(3)), 200)


def test_a_shard_map_of_the_users_own_stays_as_it_is(two_cpus) -> None:
    devices = two_cpus.replica_mesh.devices
    mesh = Mesh(np.array(devices), ("replica",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("replica")

    @mx.function
    def call(x: Any) -> Any:
        own = jax.shard_map(
            lambda part: lax.psum(part, "replica"),
            mesh=mesh,
            in_specs=split,
            out_specs=PartitionSpec(),
        )(x)
        doubled = two_cpus.run(lambda part: 2 * part, args=(x,))
        return own, two_cpus.reduce("sum", doubled, axis=None)

    own, total = call(ROWS)
    np.testing.assert_allclose(own, ROWS[:2] + ROWS[2:])
    np.testing.assert_allclose(total, 4 * ROWS)
