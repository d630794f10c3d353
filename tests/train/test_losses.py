"""`mx.nn`: shares of replicas that add up to the loss, and the gradient, of the whole batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import all_styles, both_engines, parts, per_replica, run
from helpers.hlo import compiled_text, count
from hypothesis import given
from hypothesis import strategies as st
from property.examples import examples

import mirrax as mx

from .training import STRATEGIES

pytestmark = pytest.mark.slow

numbers = st.integers(-16, 16).map(lambda k: k / 4)
batches = st.lists(st.lists(numbers, max_size=3), min_size=1, max_size=4)


def average(*args, **kwargs):
    return mx.nn.compute_average_loss(*args, **kwargs)


def whole(strategy, shares):
    return float(strategy.reduce("SUM", shares, axis=None))


# compute_average_loss --------------------------------------------------------------------


@both_engines
@examples(5)
@given(losses=batches)
def test_shares_add_up_to_the_mean(engine, losses):
    """Also with fewer examples on some replicas, or none anywhere."""
    strategy = STRATEGIES[len(losses)]
    value = per_replica(strategy, *(np.array(part, "float32") for part in losses))
    shares = run(strategy, average, value, engine=engine)
    every = np.concatenate([np.array(part, "float32") for part in losses])
    expected = every.mean() if every.size else 0.0
    np.testing.assert_allclose(whole(strategy, shares), expected, rtol=1e-5, atol=1e-6)
    for share, part in zip(parts(strategy, shares), losses):
        own = np.array(part, "float32").sum() / max(every.size, 1)
        np.testing.assert_allclose(share, own, rtol=1e-5, atol=1e-6)


@both_engines
@examples(3)
@given(
    losses=batches,
    size=st.integers(0, 9),
    weight=st.sampled_from(["none", "one number", "each", "column"]),
)
def test_weights_and_a_given_batch_size(engine, losses, size, weight):
    strategy = STRATEGIES[len(losses)]
    losses = [np.array(part, "float32") for part in losses]
    weights = {
        "none": [None] * len(losses),
        "one number": [np.float32(0.5)] * len(losses),
        "each": [np.arange(len(part), dtype="float32") for part in losses],
        "column": [np.arange(len(part), dtype="float32")[:, None] for part in losses],
    }[weight]
    args = [per_replica(strategy, *losses)]
    if weight != "none":
        args.append(per_replica(strategy, *weights))
    shares = run(
        strategy,
        lambda *args: average(*args, global_batch_size=size),
        *args,
        engine=engine,
    )
    for share, loss, factor in zip(parts(strategy, shares), losses, weights):
        factor = np.ravel(1.0 if factor is None else factor)
        expected = np.sum(loss * factor) / size if size else 0.0
        np.testing.assert_allclose(share, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@examples(3)
@given(
    sizes=st.lists(st.integers(0, 3), min_size=2, max_size=3),
    seed=st.integers(0, 99),
    is_weighted=st.booleans(),
)
def test_gradients_add_up_to_that_of_the_whole_batch(engine, sizes, seed, is_weighted):
    strategy, rng = STRATEGIES[len(sizes)], np.random.default_rng(seed)
    x = [rng.integers(-4, 5, (size, 2)).astype("float32") / 2 for size in sizes]
    weights = [rng.integers(0, 3, size).astype("float32") for size in sizes]
    with strategy.scope():
        w = mx.Variable([0.5, -1.0])

    def replica_fn(x, weights):
        weights = weights if is_weighted else None
        return mx.value_and_grad(lambda: average((x @ w) ** 2, weights), w)()

    args = per_replica(strategy, *x), per_replica(strategy, *weights)
    loss, gradient = run(strategy, replica_fn, *args, engine=engine)
    every, factors = np.concatenate(x), np.concatenate(weights)
    factors = factors if is_weighted else np.ones_like(factors)

    def of_all(w):
        return jnp.sum(factors * (every @ w) ** 2) / max(len(every), 1)

    expected = jax.value_and_grad(of_all)(jnp.float32([0.5, -1.0]))
    total = strategy.reduce("SUM", (loss, gradient), axis=None)
    for mine, theirs in zip(total, expected):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@all_styles
def test_further_axes_are_summed_and_only_examples_counted(engine):
    strategy = STRATEGIES[2]
    losses = per_replica(strategy, np.ones((2, 3), "float32"), np.ones((2, 3), "f4"))
    assert parts(strategy, run(strategy, average, losses, engine=engine)) == [1.5, 1.5]


@both_engines
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_result_has_the_type_of_the_losses(engine, dtype):
    strategy = STRATEGIES[2]
    losses = per_replica(strategy, [1.0, 2.0], [3.0, 6.0], dtype=dtype)
    weights = per_replica(strategy, [1.0, 0.5], [1.0, 0.5])
    shares = run(strategy, average, losses, weights, engine=engine)
    for part in strategy.experimental_local_results(shares):
        assert part.dtype == dtype
    assert parts(strategy, shares) == [0.5, 1.5]


@both_engines
def test_a_nan_stays_with_its_replica(engine):
    strategy = STRATEGIES[2]
    losses = per_replica(strategy, [1.0, np.nan], [3.0, 1.0])
    shares = parts(strategy, run(strategy, average, losses, engine=engine))
    np.testing.assert_array_equal(shares, [np.nan, 1.0])


@pytest.mark.parametrize("size", [4, np.int32(4), jnp.int32(4)], ids=repr)
@both_engines
def test_the_batch_size_may_be_any_integer(engine, size):
    strategy = STRATEGIES[2]
    losses = per_replica(strategy, [1.0, 2.0], [3.0, 6.0])
    shares = run(
        strategy, lambda x: average(x, global_batch_size=size), losses, engine=engine
    )
    assert parts(strategy, shares) == [0.75, 2.25]


def test_a_batch_size_that_is_an_argument_is_not_traced_again():
    strategy = STRATEGIES[2]
    losses = per_replica(strategy, [1.0, 2.0], [3.0, 6.0])
    fn = mx.function(lambda x, size: average(x, global_batch_size=size))
    for size in (1, 2, 4):
        assert whole(strategy, strategy.run(fn, (losses, size))) == 12 / size
    assert fn.trace_count == 1


def test_even_batches_are_counted_without_communication():
    strategy = STRATEGIES[2]
    losses = per_replica(strategy, [1.0, 2.0], [3.0, 6.0])
    fn = mx.function(average)
    strategy.run(fn, (losses,))
    assert count(compiled_text(fn, strategy, losses), "all-reduce") == 0


def test_without_a_strategy():
    assert float(average([1.0, 2.0, 6.0])) == 3.0
    assert float(average([1.0, 2.0, 6.0], global_batch_size=9)) == 1.0
    assert float(average([])) == 0.0


def test_in_cross_replica_context_the_size_must_be_given():
    with STRATEGIES[2].scope():
        assert float(average([1.0, 2.0], global_batch_size=4)) == 0.75
        with pytest.raises(RuntimeError, match="Pass `global_batch_size`"):
            average([1.0, 2.0])


@both_engines
@pytest.mark.parametrize(
    "args, kwargs, error, match",
    [
        ((1.0,), {}, ValueError, "a loss for each example"),
        ((1.0,), {"global_batch_size": 2}, ValueError, "a loss for each example"),
        (([True, False],), {}, TypeError, "must be numbers, got bool"),
        (([1.0],), {"global_batch_size": 2.0}, TypeError, "must be an integer"),
        (([1.0],), {"global_batch_size": True}, TypeError, "must be an integer"),
        (([1.0],), {"global_batch_size": [2]}, ValueError, r"shape \(1,\)"),
        (([1.0],), {"global_batch_size": -1}, ValueError, "not be negative, got -1"),
        (([1.0, 2.0], [1.0] * 3), {}, ValueError, r"shape \(3,\) does not fit.*\(2,\)"),
        (([1.0, 2.0], [[1.0] * 2]), {}, ValueError, r"shape \(1, 2\) does not fit"),
    ],
)
def test_what_cannot_be_averaged(engine, args, kwargs, error, match):
    with pytest.raises(error, match=match):
        run(STRATEGIES[2], lambda: average(*args, **kwargs), engine=engine)


# scale_regularization_loss ---------------------------------------------------------------


@both_engines
@examples(3)
@given(n=st.integers(1, 4), values=st.lists(numbers, max_size=4))
def test_regularization_counts_once(engine, n, values):
    strategy = STRATEGIES[n]

    def replica_fn(values):
        return mx.nn.scale_regularization_loss(values)

    shares = run(strategy, replica_fn, np.array(values, "float32"), engine=engine)
    np.testing.assert_allclose(
        whole(strategy, shares), np.sum(values), rtol=1e-5, atol=1e-5
    )


@both_engines
def test_regularization_of_several_variables_and_its_gradient(engine):
    strategy = STRATEGIES[2]
    with strategy.scope():
        a, b = mx.Variable([1.0, 2.0]), mx.Variable(3.0)

    def replica_fn():
        return mx.value_and_grad(
            lambda: mx.nn.scale_regularization_loss([jnp.sum(a**2), b**2]), [a, b]
        )()

    loss, gradients = run(strategy, replica_fn, engine=engine)
    assert whole(strategy, loss) == 14.0
    total = strategy.reduce("SUM", gradients, axis=None)
    assert [x.tolist() for x in total] == [[2.0, 4.0], 6.0]


def test_regularization_outside_of_replicas():
    assert float(mx.nn.scale_regularization_loss(4.0)) == 4.0
    with (
        STRATEGIES[2].scope(),
        pytest.raises(RuntimeError, match="outside of replicas.*strategy.run"),
    ):
        mx.nn.scale_regularization_loss(4.0)


@both_engines
def test_a_regularization_that_is_no_number(engine):
    def replica_fn():
        return mx.nn.scale_regularization_loss(jnp.array(True))

    with pytest.raises(TypeError, match="must be numbers, got bool"):
        run(STRATEGIES[2], replica_fn, engine=engine)
