"""Code that a running step calls on the host, and what it may do with variables."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import both_engines, compile_if, mirrored, per_replica
from jax.experimental import io_callback

import mirrax as mx

# More than JAX lets wait for each other on a CPU.
MANY = 50
FLOAT = jax.ShapeDtypeStruct((), np.float32)


def call_debug(see: Any, x: jax.Array) -> jax.Array:
    jax.debug.callback(see, x)
    return x


def call_io(see: Any, x: jax.Array) -> jax.Array:
    return io_callback(lambda y: (see(y), y)[1], FLOAT, x)


def call_pure(see: Any, x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda y: (see(y), y)[1], FLOAT, x)


every_callback = pytest.mark.parametrize("call", [call_debug, call_io, call_pure])
replicas = pytest.mark.parametrize("count", [1, 2])


def variables(count: int) -> tuple[Any, Any, Any]:
    strategy = mirrored(count)
    with strategy.scope():
        return strategy, mx.Variable(0.0, name="v"), mx.Variable(0.0, name="w")


@replicas
@every_callback
@both_engines
def test_it_reads_variables_of_other_steps(engine, call, count) -> None:
    strategy, v, w = variables(count)
    seen: list[float] = []

    def see(_: Any) -> None:
        seen.append(float(w.read_value()))
        time.sleep(0.002)

    step = compile_if(engine, lambda: v.assign_add(call(see, jnp.float32(1.0))))
    other = compile_if(engine, lambda: w.assign_add(1.0))
    for _ in range(MANY):
        strategy.run(step)
        strategy.run(other)
    jax.effects_barrier()
    assert (float(v), float(w), len(seen)) == (MANY, MANY, MANY * count)
    if engine == "compiled":
        assert seen == [float(i) for i in range(MANY) for _ in range(count)]


@replicas
@every_callback
def test_it_assigns_variables_of_other_steps(call, count) -> None:
    strategy, v, w = variables(count)

    @mx.function
    def step() -> None:
        v.assign_add(call(lambda _: w.assign(7.0), jnp.float32(1.0)))

    for _ in range(MANY):
        strategy.run(step)
    jax.effects_barrier()
    assert (float(v), float(w)) == (MANY, 7.0)


@replicas
@every_callback
def test_it_may_not_read_what_the_step_updates(call, count) -> None:
    strategy, v, w = variables(count)

    @mx.function
    def step() -> None:
        w.assign_add(1.0)
        v.assign_add(call(lambda _: w.numpy(), jnp.float32(1.0)))

    with pytest.raises(Exception, match=r"'w' is read in a host callback"):
        strategy.run(step)
        jax.effects_barrier()
    v.assign(1.0)
    w.assign(2.0)
    other = mx.function(lambda: v.assign_add(call(lambda _: w.numpy(), w * 2.0)))
    strategy.run(other)
    assert (float(v), float(w)) == (5.0, 2.0)


@every_callback
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_it_reads_variables_in_uneven_steps_and_parts_of_eager_ones(
    engine, call
) -> None:
    strategy, v, w = variables(2)
    rows = per_replica(strategy, jnp.ones(2), jnp.ones(1))
    seen: list[float] = []

    def see(_: Any) -> None:
        seen.append(float(w.read_value()))
        time.sleep(0.002)

    part = mx.function(lambda x: call(see, x[0]))
    step = compile_if(engine, lambda x: v.assign_add(part(x)))
    other = compile_if(
        engine,
        lambda x: w.assign(
            mx.distribute.get_replica_context().all_reduce("MEAN", w + jnp.mean(x))
        ),
    )
    for _ in range(MANY):
        strategy.run(step, args=(rows,))
        strategy.run(other, args=(rows,))
    jax.effects_barrier()
    assert (float(v), float(w)) == (MANY, MANY)
    assert seen == [float(i) for i in range(MANY) for _ in range(2)]


@replicas
def test_one_that_fails_keeps_nothing_locked(count) -> None:
    strategy, v, w = variables(count)

    def fail(_: Any) -> None:
        raise KeyError("no such thing")

    step = mx.function(lambda: v.assign_add(call_io(fail, jnp.float32(1.0))))
    with pytest.raises(Exception, match="no such thing"):
        strategy.run(step)
    thread = threading.Thread(target=lambda: w.assign(3.0), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and float(w) == 3.0


def test_another_thread_reads_what_the_step_updates() -> None:
    strategy, v, _ = variables(2)
    called = threading.Event()
    found: list[float] = []

    def see(_: Any) -> None:
        called.set()
        time.sleep(0.1)

    def read() -> None:
        called.wait(30)
        found.append(float(v.read_value()))

    thread = threading.Thread(target=read)
    thread.start()
    step = mx.function(lambda: v.assign_add(call_io(see, jnp.float32(1.0))))
    strategy.run(step)
    thread.join()
    assert found == [1.0]
