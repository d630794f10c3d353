"""`mx.metrics`: what replicas add on their own is right when it is read together."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import (
    all_styles,
    both_engines,
    compile_if,
    mirrored,
    parts,
    per_replica,
    run,
)
from helpers.hlo import compiled_text, count
from helpers.recovery import fails
from hypothesis import given
from hypothesis import strategies as st
from property.examples import examples

import mirrax as mx

from .training import STRATEGIES

pytestmark = pytest.mark.slow

numbers = st.integers(-16, 16).map(lambda k: k / 4)
weights = st.integers(0, 4).map(lambda k: k / 2)


def make(strategy, kind, **kwargs):
    with strategy.scope():
        return kind(**kwargs)


def weighted_mean(values, weights):
    """What `Mean` says: 0 without weight."""
    total = np.sum(weights)
    return np.sum(values * weights) / total if total else 0.0


@st.composite
def epochs(draw):
    """Steps of some replicas' values with weights; each part has its own length."""
    n = draw(st.integers(1, 3))
    part = st.lists(st.tuples(numbers, weights), max_size=3)
    step = st.lists(part, min_size=n, max_size=n)
    return n, draw(st.lists(step, min_size=1, max_size=2))


def columns(part):
    """The values and the weights of a part."""
    rows = np.array(part, "float32").reshape(-1, 2)
    return rows[:, 0], rows[:, 1]


# Means and sums --------------------------------------------------------------------------


@both_engines
@pytest.mark.parametrize("is_weighted", [False, True])
@examples(3)
@given(data=epochs())
def test_mean_and_sum_of_uneven_parts(engine, is_weighted, data):
    n, steps = data
    strategy = STRATEGIES[n]
    mean, total = (make(strategy, k) for k in (mx.metrics.Mean, mx.metrics.Sum))

    def replica_fn(values, weights):
        weights = weights if is_weighted else None
        mean.update_state(values, weights)
        total.update_state(values, sample_weight=weights)

    step = compile_if(engine, replica_fn)
    seen = [np.zeros(0, "f4")], [np.zeros(0, "f4")]
    for step_parts in steps:
        both = list(zip(*map(columns, step_parts)))
        strategy.run(step, tuple(per_replica(strategy, *b) for b in both))
        for kept, new in zip(seen, both):
            kept.extend(new)
        values, factors = (np.concatenate(kept) for kept in seen)
        factors = factors if is_weighted else np.ones_like(factors)
        np.testing.assert_allclose(
            mean.result(), weighted_mean(values, factors), rtol=1e-5, atol=1e-5
        )
        np.testing.assert_allclose(
            total.result(), np.sum(values * factors), rtol=1e-5, atol=1e-5
        )


@both_engines
@examples(3)
@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    is_weighted=st.booleans(),
)
def test_accuracies(engine, sizes, seed, is_weighted):
    strategy, rng = STRATEGIES[len(sizes)], np.random.default_rng(seed)
    labels = [rng.integers(0, 3, size) for size in sizes]
    scores = [rng.permuted(np.tile(np.arange(3.0), (s, 1)), axis=1) for s in sizes]
    factors = [rng.integers(0, 3, s).astype("f4") / 2 for s in sizes]
    plain = make(strategy, mx.metrics.Accuracy)
    sparse = make(strategy, mx.metrics.SparseCategoricalAccuracy)

    def replica_fn(labels, scores, factors):
        factors = factors if is_weighted else None
        plain.update_state(labels, jnp.argmax(scores, -1), factors)
        sparse.update_state(labels, scores, factors)

    args = [
        per_replica(strategy, *(np.asarray(part, dtype) for part in value))
        for value, dtype in [(labels, "int32"), (scores, "f4"), (factors, "f4")]
    ]
    run(strategy, replica_fn, *args, engine=engine)
    right = np.concatenate(labels) == np.concatenate(scores).argmax(-1)
    weight = np.concatenate(factors) if is_weighted else np.ones(len(right))
    expected = weighted_mean(right, weight)
    for metric in (plain, sparse):
        np.testing.assert_allclose(metric.result(), expected, rtol=1e-5, atol=1e-6)


def test_further_axes_are_averaged_and_rows_counted():
    metric = mx.metrics.Mean()
    metric.update_state([[1.0, 3.0], [4.0, 8.0]])
    assert (float(metric.total), float(metric.count)) == (8.0, 2.0)
    metric.reset_state()
    metric.update_state([[1.0, 3.0], [4.0, 8.0]], sample_weight=[1.0, 3.0])
    assert (float(metric.total), float(metric.count)) == (20.0, 4.0)
    metric.reset_state()
    metric.update_state([[1.0, 3.0], [4.0, 8.0]], [[1.0, 0.0], [0.0, 1.0]])
    assert (float(metric.total), float(metric.count)) == (4.5, 1.0)


def test_one_weight_makes_a_batch_one_example():
    metric = mx.metrics.Mean()
    metric.update_state([1.0, 2.0], sample_weight=2.0)
    assert (float(metric.total), float(metric.count)) == (3.0, 2.0)
    metric.update_state([1.0, 2.0], sample_weight=[2.0])
    assert (float(metric.total), float(metric.count)) == (9.0, 6.0)


@both_engines
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "bool"])
def test_values_are_added_in_the_type_of_the_metric(engine, dtype):
    strategy = STRATEGIES[2]
    metric = make(strategy, mx.metrics.Mean)
    values = per_replica(strategy, [1, 1], [0, 1], dtype=dtype)
    run(strategy, metric.update_state, values, engine=engine)
    assert float(metric.result()) == 0.75
    assert metric.result().dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_the_type_of_a_metric(dtype):
    metric = mx.metrics.Sum(dtype=dtype)
    metric.update_state([1.0, 2.0])
    assert metric.result().dtype == dtype
    assert float(metric.result()) == 3.0


# Where it is read and reset --------------------------------------------------------------


@all_styles
def test_epochs(engine):
    strategy = STRATEGIES[2]
    metric = make(strategy, mx.metrics.Mean)

    def replica_fn(x):
        metric.update_state(x)

    if engine == "caller":
        step = mx.function(lambda x: strategy.run(replica_fn, (x,)))
    else:
        fn = compile_if(engine, replica_fn)
        step = lambda x: strategy.run(fn, (x,))  # noqa: E731
    for epoch in range(3):
        assert float(metric.result()) == 0.0
        step(per_replica(strategy, [1.0, 2.0], [3.0, float(epoch)]))
        assert float(metric.result()) == (6.0 + epoch) / 4, "in the middle of an epoch"
        step(per_replica(strategy, [1.0, 2.0], [3.0, 4.0]))
        assert float(metric.result()) == (16.0 + epoch) / 8
        metric.reset_state()
        assert [parts(strategy, v) for v in metric.variables] == [[0.0, 0.0]] * 2


def test_a_whole_epoch_in_a_compiled_function():
    strategy = STRATEGIES[2]
    metric = make(strategy, mx.metrics.Mean)

    @mx.function
    def epoch(batches):
        metric.reset_state()
        seen = []
        for batch in batches:
            strategy.run(metric.update_state, (batch,))
            seen.append(metric.result())
        return seen

    batches = [
        per_replica(strategy, [1.0, 2.0], [3.0, 4.0]),
        per_replica(strategy, [5.0, 5.0], [5.0, 5.0]),
    ]
    for _ in range(2):
        assert [float(x) for x in epoch(batches)] == [2.5, 3.75]
    assert float(metric.result()) == 3.75
    assert epoch.trace_count == 1


@both_engines
def test_inside_a_replica_the_result_is_its_own(engine):
    strategy = STRATEGIES[2]
    metric = make(strategy, mx.metrics.Mean)
    x = per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    own = run(strategy, lambda x: metric(x), x, engine=engine)
    assert parts(strategy, own) == [1.5, 3.5]
    assert float(metric.result()) == 2.5
    with strategy.scope():
        assert float(metric.result()) == 2.5


@both_engines
def test_reset_inside_a_replica(engine):
    strategy = STRATEGIES[2]
    metric = make(strategy, mx.metrics.Mean)

    def replica_fn(x):
        metric.reset_state()
        metric.update_state(x)

    step = compile_if(engine, replica_fn)
    for _ in range(2):
        strategy.run(step, (per_replica(strategy, [1.0], [5.0]),))
        assert float(metric.result()) == 3.0


def test_only_one_replica_has_something_to_add():
    strategy = STRATEGIES[2]
    metric = make(strategy, mx.metrics.Mean)

    def replica_fn():
        if mx.get_replica_context().replica_id_in_sync_group == 0:
            metric.update_state([1.0, 2.0])

    strategy.run(replica_fn)
    assert parts(strategy, metric.total) == [3.0, 0.0]
    assert float(metric.result()) == 1.5


@both_engines
def test_updates_outside_of_replicas(engine):
    strategy = STRATEGIES[2]
    metric = make(strategy, mx.metrics.Mean)
    update = compile_if(engine, lambda x: metric.update_state(x))
    with strategy.scope():
        update(jnp.array([1.0, 2.0]))
    update(jnp.array([6.0, 7.0]))
    assert float(metric.result()) == 4.0


def test_updates_need_no_communication():
    strategy = STRATEGIES[2]
    metric = make(strategy, mx.metrics.SparseCategoricalAccuracy)
    args = (
        per_replica(strategy, [0, 1], [1, 1]),
        per_replica(strategy, *np.ones((2, 2, 3))),
    )
    step = mx.function(lambda *args: metric.update_state(*args))
    strategy.run(step, args)
    strategy.run(step, args)
    text = compiled_text(step, strategy, *args)
    assert [count(text, op) for op in ("all-reduce", "all-gather")] == [0, 0]
    assert step.trace_count == 1


def test_without_a_strategy():
    metric = mx.metrics.Accuracy()
    metric.update_state([1, 2, 3], [1, 2, 4], sample_weight=[1.0, 1.0, 2.0])
    assert float(metric.result()) == 0.5


# What it is made of ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, name, sums",
    [
        (mx.metrics.Sum, "sum", ["total"]),
        (mx.metrics.Mean, "mean", ["total", "count"]),
        (mx.metrics.Accuracy, "accuracy", ["total", "count"]),
        (
            mx.metrics.SparseCategoricalAccuracy,
            "sparse_categorical_accuracy",
            ["total", "count"],
        ),
    ],
)
def test_names_and_parts(kind, name, sums):
    metric = make(STRATEGIES[2], kind)
    assert metric.name == name
    assert repr(metric) == f"<{kind.__name__} name={name}>"
    assert [v.name for v in metric.variables] == [f"{name}/{s}" for s in sums]
    assert list(metric.saved_parts()) == sums
    for variable in metric.variables:
        assert isinstance(variable, mx.distribute.SyncOnReadVariable)
        assert (variable.shape, variable.trainable) == ((), False)
    assert make(STRATEGIES[2], kind, name="mine").variables[0].name == "mine/total"


def test_saved_parts_move_to_another_number_of_replicas():
    two, three = STRATEGIES[2], mirrored(3)
    metric = make(two, mx.metrics.Mean)
    two.run(metric.update_state, (per_replica(two, [1.0, 2.0], [9.0]),))
    other = make(three, mx.metrics.Mean)
    for name, copies in other.saved_parts().items():
        copies.put(metric.saved_parts()[name].take())
    assert float(other.result()) == 4.0
    three.run(other.update_state, (per_replica(three, [4.0], [8.0], [6.0]),))
    assert float(other.result()) == 5.0


@both_engines
def test_a_metric_of_ones_own(engine):
    class SquareSum(mx.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.total = self.add_sum("total")

        def update_state(self, values):
            squares = jnp.sum(values**2)
            self.total.assign(self.total.read_value() + squares)

        def result(self):
            return jnp.sqrt(self.total.read_value())

    strategy = STRATEGIES[2]
    metric = make(strategy, SquareSum)
    run(
        strategy,
        metric.update_state,
        per_replica(strategy, [2.0, 2.0], [2.0, 2.0]),
        engine=engine,
    )
    assert float(metric.result()) == 4.0
    assert metric.name == "square_sum"


def test_a_metric_without_a_meaning():
    metric = mx.metrics.Metric()
    with pytest.raises(
        NotImplementedError, match="Metric has to define `update_state`"
    ):
        metric.update_state(1.0)
    with pytest.raises(NotImplementedError, match="Metric has to define `result`"):
        metric.result()


# What cannot be added --------------------------------------------------------------------


@both_engines
@pytest.mark.parametrize(
    "kind, args, match",
    [
        (mx.metrics.Mean, (None,), "needs values to add, got None"),
        (mx.metrics.Sum, ({"a": 1.0},), "takes arrays of numbers, got dict"),
        (mx.metrics.Mean, ([1.0, 2.0], [1.0] * 3), r"\(3,\) does not fit.*\(2,\)"),
        (mx.metrics.Mean, (1.0, [1.0, 2.0]), r"\(2,\) does not fit.*\(\)"),
        (mx.metrics.Accuracy, ([1, 2], [1, 2, 3]), r"\(2,\) do not fit.*\(3,\)"),
        (
            mx.metrics.SparseCategoricalAccuracy,
            ([1, 2, 0], [[0.0, 1.0]]),
            r"\(3,\) do not fit scores of shape \(1, 2\)",
        ),
    ],
)
def test_what_cannot_be_added(engine, kind, args, match):
    strategy = STRATEGIES[2]
    metric = make(strategy, kind)
    with fails(strategy, ValueError, match):
        run(strategy, lambda: metric.update_state(*args), engine=engine)
    assert [parts(strategy, v) for v in metric.variables] == [[0.0, 0.0]] * len(
        metric.variables
    )
