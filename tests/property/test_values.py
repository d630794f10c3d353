"""`run`, `reduce`, `gather` and collectives on random values, beside NumPy."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from helpers.engines import both_engines, mirrored, per_replica, replica_id, run
from hypothesis import given, settings
from hypothesis import strategies as st

import mirrax as mx

from . import numpy_model as model

quick = settings(deadline=None, max_examples=25, derandomize=True, database=None)
STRATEGIES = {n: mirrored(n) for n in range(1, 5)}
operations = st.sampled_from(["SUM", "MEAN"])
dtypes = st.sampled_from(["float32", "int32"])


@st.composite
def batches(draw, uneven=True):
    """One array for each replica: equal shapes, or lengths that differ on the first axis."""
    n = draw(st.integers(1, 4))
    rest = draw(st.sampled_from([(), (2,), (1, 3)]))
    if uneven and draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    else:
        lengths = [draw(st.integers(1, 3))] * n
    dtype = draw(dtypes)
    # Small whole numbers and halves: every sum is exact in any order.
    seed = draw(st.integers(0, 1000))
    rng = np.random.default_rng(seed)
    step = 2 if dtype == "float32" else 1
    return [
        (rng.integers(-8, 9, size=(length, *rest)) / step).astype(dtype)
        for length in lengths
    ]


def local(strategy, value):
    return [np.asarray(part) for part in strategy.experimental_local_results(value)]


def assert_same(actual, expected):
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@both_engines
@quick
@given(parts=batches())
def test_run_gives_every_replica_its_part_and_its_id(engine, parts):
    strategy = STRATEGIES[len(parts)]

    def replica_fn(x, tree):
        i = replica_id().astype(x.dtype)
        return {"y": x * 2 + i, "z": [tree["x"] - tree["one"], x.sum()]}

    x = per_replica(strategy, *parts)
    out = run(strategy, replica_fn, x, {"x": x, "one": 1}, engine=engine)
    for i, part in enumerate(parts):
        assert_same(local(strategy, out["y"])[i], part * 2 + np.asarray(i, part.dtype))
        assert_same(local(strategy, out["z"][0])[i], part - np.asarray(1, part.dtype))
        assert_same(local(strategy, out["z"][1])[i], part.sum(dtype=part.dtype))


@both_engines
@quick
@given(parts=batches(), op=operations, axis=st.sampled_from([0, -1, 1, (0, 1)]))
def test_reduce_along_axes(engine, parts, op, axis):
    strategy = STRATEGIES[len(parts)]
    ndim = parts[0].ndim
    if ndim == 1 and axis in (1, (0, 1)):
        axis = 0
    out = run(strategy, lambda x: {"x": [x + x]}, per_replica(strategy, *parts), engine=engine)
    reduced = strategy.reduce(op, out, axis=axis)["x"][0]
    expected = model.reduce(op, [p + p for p in parts], axis)
    assert_same(reduced, expected.astype("float32" if op == "MEAN" else parts[0].dtype))


@both_engines
@quick
@given(parts=batches(uneven=False), op=operations)
def test_reduce_over_replicas(engine, parts, op):
    strategy = STRATEGIES[len(parts)]
    out = run(strategy, lambda x: (x, x * 3), per_replica(strategy, *parts), engine=engine)
    first, second = strategy.reduce(op, out, axis=None)
    dtype = "float32" if op == "MEAN" else parts[0].dtype
    if len(parts) == 1:
        dtype = parts[0].dtype
    assert_same(first, model.reduce(op, parts, None).astype(dtype))
    assert_same(second, model.reduce(op, [3 * p for p in parts], None).astype(dtype))


@both_engines
@quick
@given(parts=batches(), axis=st.sampled_from([0, -1, -2]))
def test_gather(engine, parts, axis):
    strategy = STRATEGIES[len(parts)]
    if len({p.shape for p in parts}) > 1 or parts[0].ndim == 1:
        axis = 0
    out = run(strategy, lambda x: [x, -x], per_replica(strategy, *parts), engine=engine)
    gathered = strategy.gather(out, axis=axis)
    assert_same(gathered[0], model.gather(parts, axis))
    assert_same(gathered[1], -model.gather(parts, axis))


@both_engines
@quick
@given(parts=batches(uneven=False), op=operations)
def test_all_reduce_in_replicas(engine, parts, op):
    strategy = STRATEGIES[len(parts)]

    def replica_fn(x):
        context = mx.get_replica_context()
        return context.all_reduce(op, {"a": x, "b": (x.sum(), [x * 2])})

    out = run(strategy, replica_fn, per_replica(strategy, *parts), engine=engine)
    dtype = "float32" if op == "MEAN" and len(parts) > 1 else parts[0].dtype
    for of, result in [
        (lambda p: p, out["a"]),
        (lambda p: p.sum(dtype=p.dtype), out["b"][0]),
        (lambda p: p * 2, out["b"][1][0]),
    ]:
        expected = model.reduce(op, [of(p) for p in parts], None).astype(dtype)
        for part in local(strategy, result):
            assert_same(part, expected)


@both_engines
@quick
@given(parts=batches())
def test_all_gather_in_replicas(engine, parts):
    strategy = STRATEGIES[len(parts)]

    def replica_fn(x):
        return mx.get_replica_context().all_gather([x, x + 1], axis=0)

    out = run(strategy, replica_fn, per_replica(strategy, *parts), engine=engine)
    expected = model.gather(parts, 0)
    for plain, plus in zip(local(strategy, out[0]), local(strategy, out[1])):
        assert_same(plain, expected)
        assert_same(plus, expected + np.asarray(1, expected.dtype))


@both_engines
@quick
@given(parts=batches(), data=st.data())
def test_the_gradient_of_a_mean_over_all_examples(engine, parts, data):
    parts = [p.astype("float32") for p in parts]
    total = sum(len(p) for p in parts)
    if total == 0:
        return
    strategy = STRATEGIES[len(parts)]
    start = data.draw(st.sampled_from([-1.0, 0.0, 0.5]))
    with strategy.scope():
        w = mx.Variable(start)

    def replica_fn(x):
        def loss():
            return ((w * x - 1) ** 2).sum() / total

        value, gradient = mx.value_and_grad(loss, w)()
        return mx.get_replica_context().all_reduce("SUM", (value, gradient))

    value, gradient = run(strategy, replica_fn, per_replica(strategy, *parts), engine=engine)
    every = np.concatenate([p.reshape(-1) for p in parts])
    expected = ((start * every - 1) ** 2).sum() / total
    slope = (2 * every * (start * every - 1)).sum() / total
    for i in range(len(parts)):
        np.testing.assert_allclose(local(strategy, value)[i], expected, rtol=1e-5)
        np.testing.assert_allclose(
            local(strategy, gradient)[i], slope, rtol=1e-5, atol=1e-6
        )


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


@pytest.mark.parametrize("engine", ["eager", "compiled", "caller"])
@quick
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
    out = run(strategy, lambda tree: tree, arguments, engine=engine)
    names, tree = jax.tree.flatten(shape)

    def check(name, value):
        found = strategy.experimental_local_results(value)
        found = found * n if len(found) == 1 else found
        found = [x if name in ("text", "none") else np.asarray(x).tolist() for x in found]
        assert found == expected[name]

    values = tree.flatten_up_to(out)
    for name, value in zip(names, values):
        check(name, value)
