"""What needs a process of its own: before JAX starts, and what could hang or crash."""

from __future__ import annotations

import pytest
from helpers.scripts import run_script


@pytest.mark.slow
def test_a_collective_in_a_finally_block_does_not_hang_when_another_replica_raises():
    done = run_script(
        """
        import mirrax as mx

        strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])

        def replica_fn():
            context = mx.get_replica_context()
            if context.replica_id_in_sync_group == 1:
                raise KeyError("boom")
            try:
                context.all_reduce("SUM", 1.0)
            finally:
                context.all_reduce("SUM", 2.0)

        try:
            strategy.run(replica_fn)
        except KeyError as error:
            print(error, error.__notes__)
        """
    )
    assert done.returncode == 0, done.stderr
    assert "boom" in done.stdout
    assert "replica 1 (CPU:1)" in done.stdout


@pytest.mark.slow
def test_passing_a_donated_value_on_does_not_crash_the_process():
    done = run_script(
        """
        import jax.numpy as jnp
        import mirrax as mx

        strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
        state = strategy.replicate(jnp.ones(2))
        step = mx.function(lambda s: s + 1, donate_argnums=0)
        look = mx.function(lambda s: s * 2)
        strategy.run(look, (state,))
        strategy.run(step, (state,))
        for fn in (step, look, look.fn):
            try:
                strategy.run(fn, (state,))
            except RuntimeError as error:
                print(error)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("was donated") == 3, done.stdout


@pytest.mark.slow
def test_nothing_leaks_by_jaxs_own_check():
    done = run_script(
        """
        import jax
        import jax.numpy as jnp
        import mirrax as mx

        strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            v = mx.Variable(1.0, aggregation=mx.VariableAggregation.SUM)

        def replica_fn(x):
            v.assign_add(x)
            return mx.grad(lambda: v * x, v)()

        x = jnp.float32(2.0)
        around = mx.function(lambda x: strategy.run(replica_fn, (x,)))
        for style in (
            lambda: strategy.run(replica_fn, (x,)),
            lambda: strategy.run(mx.function(replica_fn), (x,)),
            lambda: around(x),
        ):
            try:
                with jax.checking_leaks():
                    style()
                print("ok", float(v))
            except Exception as error:
                print(str(error)[:60])
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["ok 5.0", "ok 9.0", "ok 13.0"]


@pytest.mark.slow
def test_asking_for_cpu_devices_makes_them_and_asking_for_more_later_says_how():
    done = run_script(
        """
        import mirrax as mx

        strategy = mx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
        print(len(mx.config.list_logical_devices("CPU")))
        for ask in (
            lambda: mx.MirroredStrategy(["CPU:3"]),
            lambda: mx.config.set_logical_device_configuration(cpu=4),
        ):
            try:
                ask()
            except (ValueError, RuntimeError) as error:
                print(type(error).__name__, error)
        """
    )
    assert done.returncode == 0, done.stderr
    count, unknown, late = done.stdout.splitlines()
    assert count == "3"
    assert unknown.startswith("ValueError There is no device 'CPU:3'")
    assert "set_logical_device_configuration(cpu=4)" in unknown
    assert late.startswith("RuntimeError JAX has already started with 3 CPU device(s)")
