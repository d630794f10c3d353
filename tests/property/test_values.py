"""`run`, `reduce`, `gather` and collectives on random values, beside NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from helpers.engines import all_styles, both_engines, mirrored, per_replica, replica_id
from hypothesis import assume, given
from hypothesis import strategies as st

import mirrax as mx

from . import numpy_model as model
from .examples import examples

STRATEGIES = {n: mirrored(n) for n in range(1, 5)}
operations = st.sampled_from(["SUM", "MEAN"])


@st.composite
def batches(draw, uneven=True):
    """One array for each replica: equal shapes, or lengths that differ on the first axis."""
    n = draw(st.integers(1, 4))
    # Each shape compiles, so that a dtype has a shape of its own.
    rest, dtype = draw(st.sampled_from([((), "float32"), ((2,), "int32")]))
    if uneven and draw(st.booleans()):
        lengths = draw(st.lists(st.sampled_from([0, 2]), min_size=n, max_size=n))
    else:
        lengths = [2] * n
    # Small whole numbers and halves: every sum is exact in any order.
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    step = 2 if dtype == "float32" else 1
    return [
        (rng.integers(-8, 9, size=(length, *rest)) / step).astype(dtype)
        for length in lengths
    ]


@functools.cache
def _compiled(fn, *key):
    return mx.function(fn)


def run(fn, parts, engine, *args):
    """`fn` of every replica's part; the same shapes find the same compiled function."""
    strategy = STRATEGIES[len(parts)]
    if engine == "compiled":
        key = [(part.shape, str(part.dtype)) for part in parts]
        fn = _compiled(fn, tuple(key), *args)
    x = per_replica(strategy, *parts)
    return strategy, strategy.run(fn, (x, *args))


def local(strategy, value):
    return [np.asarray(part) for part in strategy.experimental_local_results(value)]


def assert_same(actual, expected):
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def mean_dtype(op, parts):
    """An integer mean is a float, except where one replica has nothing to combine."""
    is_mean = op == "MEAN" and len(parts) > 1
    return np.dtype("float32") if is_mean else parts[0].dtype


def nested(x):
    i = replica_id().astype(x.dtype)
    return {"y": x + i, "z": [jnp.sum(x)]}


@both_engines
@examples(25)
@given(parts=batches())
def test_run_gives_every_replica_its_part_and_its_id(engine, parts):
    strategy, out = run(nested, parts, engine)
    for i, part in enumerate(parts):
        assert_same(local(strategy, out["y"])[i], part + np.asarray(i, part.dtype))
        assert_same(local(strategy, out["z"][0])[i], part.sum(dtype=part.dtype))


def doubled(x):
    return {"x": [x + x]}


@both_engines
@examples(25)
@given(parts=batches(), op=operations, axis=st.sampled_from([0, -1, 1, (0, 1)]))
def test_reduce_along_axes(engine, parts, op, axis):
    is_uneven = len({part.shape for part in parts}) > 1
    axes = {a % 2 for a in (axis if isinstance(axis, tuple) else (axis,))}
    assume(parts[0].ndim == 2 or axis in (0, -1))
    assume(not is_uneven or parts[0].ndim == 1 or 0 in axes)
    strategy, out = run(doubled, parts, engine)
    reduced = strategy.reduce(op, out, axis=axis)["x"][0]
    expected = model.reduce(op, [p + p for p in parts], axis)
    assert_same(reduced, expected.astype("float32" if op == "MEAN" else parts[0].dtype))


def plain_and_tripled(x):
    return x, x * 3


@both_engines
@examples(25)
@given(parts=batches(uneven=False), op=operations)
def test_reduce_over_replicas(engine, parts, op):
    strategy, out = run(plain_and_tripled, parts, engine)
    reduced = strategy.reduce(op, out, axis=None)
    for factor, value in zip((1, 3), reduced):
        expected = model.reduce(op, [factor * p for p in parts], None)
        assert_same(value, expected.astype(mean_dtype(op, parts)))


def plain_and_negative(x):
    return [x, -x]


@both_engines
@examples(25)
@given(parts=batches(), axis=st.sampled_from([0, -1, -2]))
def test_gather(engine, parts, axis):
    is_uneven = len({part.shape for part in parts}) > 1
    assume(parts[0].ndim == 2 or axis != -2)
    assume(not is_uneven or axis % parts[0].ndim == 0)
    strategy, out = run(plain_and_negative, parts, engine)
    gathered = strategy.gather(out, axis=axis)
    assert_same(gathered[0], model.gather(parts, axis))
    assert_same(gathered[1], -model.gather(parts, axis))


def reduced_everywhere(x, op):
    context = mx.get_replica_context()
    return context.all_reduce(op, {"a": x, "b": (jnp.sum(x), [x * 2])})


@both_engines
@examples(25)
@given(parts=batches(uneven=False), op=operations)
def test_all_reduce_in_replicas(engine, parts, op):
    strategy, out = run(reduced_everywhere, parts, engine, op)
    for of, result in [
        (lambda p: p, out["a"]),
        (lambda p: p.sum(dtype=p.dtype), out["b"][0]),
        (lambda p: p * 2, out["b"][1][0]),
    ]:
        expected = model.reduce(op, [of(p) for p in parts], None)
        for part in local(strategy, result):
            assert_same(part, expected.astype(mean_dtype(op, parts)))


def gathered_everywhere(x):
    return mx.get_replica_context().all_gather([x, x + 1], axis=0)


@both_engines
@examples(25)
@given(parts=batches())
def test_all_gather_in_replicas(engine, parts):
    strategy, out = run(gathered_everywhere, parts, engine)
    expected = model.gather(parts, 0)
    for plain, plus in zip(local(strategy, out[0]), local(strategy, out[1])):
        assert_same(plain, expected)
        assert_same(plus, expected + np.asarray(1, expected.dtype))


leaves = st.sampled_from(["per replica", "mirrored", "array", "number", "text", "none"])
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2),
    ),
    max_leaves=5,
)


@all_styles
@examples(25)
@given(shape=trees, n=st.integers(1, 3))
def test_nested_arguments_pass_through_a_replica_unchanged(engine, shape, n):
    strategy = STRATEGIES[n]
    make = {
        "per replica": lambda: per_replica(strategy, *(float(i) for i in range(n))),
        "mirrored": lambda: strategy.replicate(np.float32(7.0)),
        "array": lambda: np.array([1.0, 2.0], np.float32),
        "number": lambda: 3,
        "text": lambda: "text",
        "none": lambda: None,
    }
    expected = {
        "per replica": [float(i) for i in range(n)],
        "mirrored": [7.0] * n,
        "array": [[1.0, 2.0]] * n,
        "number": [3] * n,
        "text": ["text"] * n,
        "none": [None] * n,
    }
    arguments = jax.tree.map(lambda name: make[name](), shape)
    if engine == "caller":
        out = mx.function(lambda t: strategy.run(lambda t: t, (t,)))(arguments)
    else:
        fn = (lambda t: t) if engine == "eager" else mx.function(lambda t: t)
        out = strategy.run(fn, (arguments,))
    names, tree = jax.tree.flatten(shape)
    for name, value in zip(names, tree.flatten_up_to(out)):
        found = strategy.experimental_local_results(value)
        found = found * n if len(found) == 1 else found
        if name not in ("text", "none"):
            found = tuple(np.asarray(x).tolist() for x in found)
        assert list(found) == expected[name]
