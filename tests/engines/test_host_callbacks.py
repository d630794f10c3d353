"""Code that a running step calls on the host."""

from __future__ import annotations

import subprocess
import sys
import threading
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
REFUSED = "A host callback .* uses a variable or runs a function of mirrax"


def call_debug(see: Any, x: jax.Array) -> jax.Array:
    jax.debug.callback(see, x)
    return x


def call_io(see: Any, x: jax.Array) -> jax.Array:
    return io_callback(lambda y: (see(y), y)[1], FLOAT, x)


def call_pure(see: Any, x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda y: (see(y), y)[1], FLOAT, x)


every_callback = pytest.mark.parametrize("call", [call_debug, call_io, call_pure])


def variables(count: int = 2) -> tuple[Any, Any, Any]:
    strategy = mirrored(count)
    with strategy.scope():
        return strategy, mx.Variable(0.0, name="v"), mx.Variable(0.0, name="w")


@pytest.mark.parametrize("count", [1, 2])
@every_callback
@both_engines
def test_it_gets_what_the_step_has_read(engine, call, count) -> None:
    strategy, v, w = variables(count)
    seen: list[float] = []

    def replica_step() -> None:
        x = call(lambda x: seen.append(float(x)), w.read_value())
        w.assign(mx.get_replica_context().all_reduce("MEAN", x + 1.0))
        v.assign_add(1.0)

    step = compile_if(engine, replica_step)
    for _ in range(MANY):
        strategy.run(step)
    wait_for(w)
    assert (float(v), float(w)) == (MANY, MANY)
    assert sorted(seen) == [float(i) for i in range(MANY) for _ in range(count)]


def wait_for(variable: Any) -> None:
    jax.block_until_ready(variable.values)
    jax.effects_barrier()


def uses(strategy: Any, v: Any, path: Any) -> dict[str, Any]:
    program = mx.function(lambda: v + 1.0)
    program()
    values = per_replica(strategy, 1.0, 2.0)
    return {
        "reads": v.numpy,
        "assigns": lambda: v.assign_add(1.0),
        "runs": lambda: strategy.run(program),
        "runs plainly": lambda: strategy.run(lambda: 1.0),
        "reduces": lambda: strategy.reduce("MEAN", values, None),
        "saves": lambda: mx.train.Checkpoint(v=v).write(path),
    }


@every_callback
@pytest.mark.parametrize(
    "use", ["reads", "assigns", "runs", "runs plainly", "reduces", "saves"]
)
def test_it_may_not_wait_for_steps(call, use, tmp_path) -> None:
    strategy, v, w = variables()
    act = uses(strategy, v, tmp_path / "saved")[use]
    said: list[BaseException] = []

    def see(_: Any) -> None:
        try:
            act()
        except RuntimeError as error:
            said.append(error)

    step = mx.function(lambda: w.assign_add(call(see, jnp.float32(1.0))))
    for _ in range(MANY):  # none of them waits
        strategy.run(step)
    wait_for(w)
    assert len(said) == 2 * MANY and "as an argument" in str(said[0])
    assert (float(v), float(w)) == (0.0, MANY)


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_it_ends_in_uneven_steps_and_parts_of_eager_ones(engine) -> None:
    strategy, v, w = variables()
    rows = per_replica(strategy, jnp.ones(2), jnp.ones(1))
    read: list[float] = []
    said: list[BaseException] = []

    def see(_: Any) -> None:
        try:
            read.append(float(w))
        except RuntimeError as error:
            said.append(error)

    part = mx.function(lambda x: call_io(see, x[0]))
    step = compile_if(engine, lambda x: v.assign_add(part(x)))
    for _ in range(MANY):
        strategy.run(step, args=(rows,))
    wait_for(v)
    assert float(v) == MANY
    # On a thread of Python's, which waits for that replica alone, it may read.
    assert len(read) + len(said) == 2 * MANY and not any(read)
    assert all("as an argument" in str(error) for error in said)


def forget_errors(strategy: Any) -> None:
    """JAX raises an error of a callback again, until one on the same devices is without."""
    good = mx.function(lambda: call_pure(lambda _: None, jnp.float32(1.0)))
    jax.block_until_ready(strategy.experimental_local_results(strategy.run(good)))
    jax.effects_barrier()


def test_who_does_is_told_so() -> None:
    strategy, v, w = variables()

    @mx.function
    def step() -> None:
        v.assign_add(call_pure(lambda _: w.numpy(), jnp.float32(1.0)))

    with pytest.raises(Exception, match=REFUSED):
        strategy.run(step)
        v.numpy()
    v.assign(1.0)
    strategy.run(mx.function(lambda: v.assign_add(w + 1.0)))
    assert float(v) == 2.0
    forget_errors(strategy)


@pytest.mark.parametrize("count", [1, 2])
def test_one_that_fails_keeps_nothing_locked(count) -> None:
    strategy, v, w = variables(count)

    def fail(_: Any) -> None:
        raise KeyError("no such thing")

    step = mx.function(lambda: v.assign_add(call_pure(fail, jnp.float32(1.0))))
    with pytest.raises(Exception, match="no such thing"):
        strategy.run(step)
        v.numpy()
    thread = threading.Thread(target=lambda: w.assign(3.0), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and float(w) == 3.0
    forget_errors(strategy)


ALONE = """
import jax, jax.numpy as jnp, mirrax as mx

v, w = mx.Variable(0.0), mx.Variable(2.0)
jax.block_until_ready([v.read_value(), w.read_value()])
seen = []

@mx.function
def step():
    jax.debug.callback(lambda x: seen.append(float(x) + float(w)), v.read_value())
    v.assign_add(1.0)

for _ in range(50):
    step()
    jax.block_until_ready(v.read_value())
jax.effects_barrier()
print(float(v), sorted(seen) == [2.0 + i for i in range(50)])
"""


def test_on_one_cpu_it_may_read_where_the_step_runs_on_the_callers_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "50.0 True\n", done.stderr
