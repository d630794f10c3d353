"""`reduce_dtype`: the type in which gradients travel and are summed."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import both_engines, compile_if, parts, per_replica
from helpers.hlo import last_programs
from hypothesis import given
from hypothesis import strategies as st
from property.examples import examples

import mirrax as mx
from mirrax._src.engines.arguments import sort_arguments

from .training import STRATEGIES, assert_in_step, make_variables, step_of

pytestmark = pytest.mark.slow


def types_that_travel(strategy, function, *args):
    """The types of the all-reduces in what XLA is asked to compile.

    XLA's own text would not do: for CPUs it sums half precision in float32.
    """
    arrays = sort_arguments(args, {}, strategy.replica_mesh).arrays
    text = last_programs(function)[strategy].lower(arrays).as_text()
    return re.findall(r"all_reduce.*?\}\) : \(tensor<(?:\d+x)*(\w+)>\)", text, re.S)


def applied(engine, parts_of_gradient, dtype, value: Any = 0.0, n=2, **kwargs):
    """A variable after one step of SGD with rate 1, and the types that travelled."""
    strategy = STRATEGIES[n]
    variables = make_variables(strategy, {"v": jnp.asarray(value, dtype)})
    optimizer = mx.train.Optimizer(optax.sgd(1.0), **kwargs)
    step = step_of(engine, optimizer, variables)
    gradients = {"v": per_replica(strategy, *parts_of_gradient, dtype=dtype)}
    strategy.run(step, (gradients,))
    travelled = None
    if engine == "compiled":
        travelled = types_that_travel(strategy, step, gradients)
    assert_in_step(variables["v"])
    assert variables["v"].dtype == dtype
    return variables["v"], travelled


@both_engines
@pytest.mark.parametrize(
    "dtype, reduce_dtype, travels",
    [
        ("float32", None, "f32"),
        ("float32", "bfloat16", "bf16"),
        ("float32", jnp.float16, "f16"),
        ("float32", np.dtype("float32"), "f32"),
        ("bfloat16", None, "bf16"),
        ("bfloat16", jnp.float32, "f32"),
        ("float16", "float32", "f32"),
    ],
)
def test_the_type_that_travels(engine, dtype, reduce_dtype, travels):
    gradients = [1.0, 2.0], [3.0, 0.5]
    v, travelled = applied(
        engine, gradients, dtype, [0.0, 0.0], reduce_dtype=reduce_dtype
    )
    assert parts(STRATEGIES[2], v) == [[-4.0, -2.5]] * 2
    assert travelled in (None, [travels])


@both_engines
@examples(2)
@given(
    gradients=st.lists(
        st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3),
        min_size=2,
        max_size=2,
    )
)
def test_bfloat16_gives_exactly_the_rounded_sum(engine, gradients):
    v, _ = applied(engine, gradients, "float32", [0.0] * 3, reduce_dtype="bfloat16")
    rounded = [np.float32(g).astype(jnp.bfloat16) for g in gradients]
    expected = -(rounded[0] + rounded[1]).astype("float32")
    np.testing.assert_array_equal(v.numpy(), expected)


@both_engines
def test_float32_keeps_what_bfloat16_would_round_away(engine):
    v, _ = applied(engine, [256.0, 1.0, 1.0], "bfloat16", n=3, reduce_dtype=jnp.float32)
    assert parts(STRATEGIES[3], v) == [-258.0] * 3


@both_engines
def test_gradients_of_different_types_keep_their_own_without_it(engine):
    strategy = STRATEGIES[2]
    with strategy.scope():
        single = mx.Variable(0.0, name="single")
        half = mx.Variable(jnp.bfloat16(0), name="half")
    optimizer = mx.train.Optimizer(optax.sgd(1.0))

    def replica_fn(x):
        given = [(x, single), (x.astype(jnp.bfloat16), half)]
        optimizer.apply_gradients(given)

    step = compile_if(engine, replica_fn)
    x = per_replica(strategy, 1.0, 2.0)
    strategy.run(step, (x,))
    assert parts(strategy, single) == parts(strategy, half) == [-3.0, -3.0]
    if engine == "compiled":
        assert sorted(types_that_travel(strategy, step, x)) == ["bf16", "f32"]


def test_accumulation_adds_in_the_gradients_own_type():
    strategy = STRATEGIES[2]
    variables = make_variables(strategy, {"v": np.zeros((), "float32")})
    optimizer = mx.train.Optimizer(
        optax.sgd(1.0), gradient_accumulation_steps=2, reduce_dtype="bfloat16"
    )
    step = step_of("compiled", optimizer, variables)
    for parts_of_gradient in ([256.0, 0.0], [2.0, 0.0]):
        gradients = {"v": per_replica(strategy, *parts_of_gradient)}
        strategy.run(step, (gradients,))
    assert types_that_travel(strategy, step, gradients) == ["bf16"]
    assert float(variables["v"]) == -129.0, "(256 + 2) / 2: only the sum is rounded"


def test_in_functional_style():
    strategy = STRATEGIES[2]
    optimizer = mx.train.Optimizer(optax.sgd(1.0), reduce_dtype="bfloat16")

    @mx.function
    def replica_fn(gradient):
        return optimizer.update(gradient, optimizer.init(gradient))[0]

    gradient = per_replica(strategy, 257.0, 2.0)
    update = strategy.run(replica_fn, (gradient,))
    assert parts(strategy, update) == [-258.0, -258.0], "257 travels as 256"
    assert types_that_travel(strategy, replica_fn, gradient) == ["bf16"]
    assert jax.tree.leaves(update)[0].dtype == jnp.float32
