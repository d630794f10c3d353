"""`mx.train.ExponentialMovingAverage` follows variables and values, wherever it is called."""

from __future__ import annotations

import gc

import jax.numpy as jnp
import numpy as np
import optax
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

import mirrax as mx

Average = mx.train.ExponentialMovingAverage


def make(strategy, *values, **kwargs):
    with strategy.scope():
        return [mx.Variable(jnp.asarray(value), **kwargs) for value in values]


def copies(variable):
    return [np.asarray(each).tolist() for each in variable.values]


@all_styles
def test_a_training_loop_with_averages(engine):
    strategy = mirrored(2)
    (w,) = make(strategy, [4.0, 8.0], name="w")
    optimizer = mx.train.Optimizer(optax.sgd(0.25))
    averages = Average(0.5)

    def step(x):
        _, gradient = mx.value_and_grad(lambda: jnp.sum(w * x), w)()
        optimizer.apply_gradients([(gradient, w)])
        averages.apply([w])

    x = per_replica(strategy, [1.0, 2.0], [3.0, 2.0])
    now = np.array([4.0, 8.0])
    # The first call makes the average; in a program it starts as before the step.
    expected = now - 1.0 if engine == "eager" else now
    for _ in range(3):
        run(strategy, step, x, engine=engine)
        now = now - 0.25 * np.array([4.0, 4.0])
        expected = 0.5 * expected + 0.5 * now
    average = averages.average(w)
    assert average.name == "w/ExponentialMovingAverage"
    np.testing.assert_allclose(copies(average), [expected, expected])
    np.testing.assert_allclose(copies(w), [now, now])


@pytest.mark.parametrize("debias", [False, True])
def test_a_step_is_one_program(debias):
    strategy = mirrored(2)
    variables = make(strategy, 1.0, [2.0])
    averages = Average(0.5, zero_debias=debias)

    @mx.function
    def step(x):
        averages.apply([*variables, x])
        return averages.average(x) + 0.0

    for _ in range(3):
        average = strategy.run(step, args=(per_replica(strategy, 1.0, 3.0),))
    assert step.trace_count == 1
    assert isinstance(average, mx.distribute.Mirrored)


@both_engines
def test_values_of_replicas_are_averaged_over_them(engine):
    strategy = mirrored(2)
    averages = Average(0.5)

    def replica_fn(loss):
        averages.apply([loss, 2 * loss])
        return averages.average(loss) + 0.0, averages.average_name(loss)

    step = compile_if(engine, replica_fn)
    for values, expected in (((1.0, 3.0), 1.0), ((4.0, 8.0), 3.5)):
        loss = per_replica(strategy, *values)
        average, name = strategy.run(step, args=(loss,))
        assert name == "value_0/ExponentialMovingAverage"
        assert parts(strategy, average) == [expected, expected]


@both_engines
def test_zero_debias_of_values_in_replicas(engine):
    strategy = mirrored(2)
    averages = Average(0.75, zero_debias=True)

    def replica_fn(loss):
        averages.apply([loss])
        return averages.average(loss) + 0.0

    step = compile_if(engine, replica_fn)
    biased = 0.0
    for t, values in enumerate(((1.0, 3.0), (4.0, 8.0), (0.0, 2.0)), 1):
        average = strategy.run(step, args=(per_replica(strategy, *values),))
        biased = 0.75 * biased + 0.25 * np.mean(values)
        expected = biased / (1 - 0.75**t)
        np.testing.assert_allclose(parts(strategy, average), [expected] * 2, rtol=1e-6)


def test_values_without_a_strategy():
    averages = Average(0.5, num_updates=mx.Variable(0))
    first, value = np.array([[10, 20], [30, 40]], "float32")
    averages.apply([first])
    averages.apply([value])
    average = averages.average(value)
    # decay is min(0.5, 1 / 10)
    np.testing.assert_allclose(average.numpy(), [27.9, 37.8], rtol=1e-6)
    assert averages.average(value.copy()) is None, "another array"


def test_per_replica_values_in_the_scope_go_part_by_part():
    strategy = mirrored(2)
    averages = Average(0.5)
    value = per_replica(strategy, 2.0, 4.0)
    with strategy.scope():
        averages.apply([value])
    average = averages.average(value)
    assert copies(average) == [1.0, 2.0]


def test_values_are_not_kept():
    averages = Average(0.5)
    value = jnp.ones(3) * 2
    averages.apply([value])
    assert averages.average(value) is not None
    before = len(gc.get_referrers(value))
    averages.apply([value])
    assert len(gc.get_referrers(value)) == before


def test_a_value_of_another_shape():
    averages = Average(0.5)
    averages.apply([jnp.ones(3)])
    with pytest.raises(
        ValueError, match=r"place 0 .*float32 of shape \(3,\).*shape \(2,\)"
    ):
        averages.apply([jnp.ones(2)])


@both_engines
def test_variables_and_values_together(engine):
    (v,) = make(mx.distribute.get_strategy(), 8.0, name="v")
    averages = Average(0.5)

    def step(loss):
        averages.apply([v, loss])
        return averages.average(loss) + 0.0

    step = compile_if(engine, step)
    assert float(step(jnp.float32(4.0))) == 2.0
    v.assign(0.0)
    assert float(step(jnp.float32(4.0))) == 3.0
    assert float(averages.average(v)) == 4.0
    assert repr(averages) == (
        "<mx.train.ExponentialMovingAverage 'ExponentialMovingAverage' of 2>"
    )


def test_a_variable_of_a_strategy_needs_no_scope():
    strategy = mirrored(2)
    (w,) = make(strategy, 1.0)
    averages = Average(0.5)
    averages.apply([w])
    w.assign(3.0)
    averages.apply([w])
    average = averages.average(w)
    assert average.strategy is strategy
    assert copies(average) == [2.0, 2.0]


@both_engines
def test_on_read_variables_start_with_what_is_read(engine):
    strategy = mirrored(2)
    (w,) = make(
        strategy,
        1.0,
        synchronization=mx.VariableSynchronization.ON_READ,
        aggregation=mx.VariableAggregation.SUM,
    )
    averages = Average(1.0)
    step = compile_if(engine, lambda: averages.apply([w]))
    with strategy.scope():
        step()
    assert copies(averages.average(w)) == [2.0, 2.0]


def test_an_on_read_variable_without_an_aggregation():
    strategy = mirrored(2)
    on_read = mx.VariableSynchronization.ON_READ
    (w,) = make(strategy, 1.0, name="w", synchronization=on_read)
    with strategy.scope(), pytest.raises(ValueError, match="'w' .*an aggregation"):
        Average(0.5).apply([w])


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("text", "got 'text'"),
        (0.5, "got 0.5"),
        (np.arange(3), "a value is int"),
    ],
)
def test_what_cannot_be_averaged(item, words):
    with pytest.raises(TypeError, match=words):
        Average(0.5).apply([item])


def test_integers_cannot_be_averaged():
    with pytest.raises(TypeError, match="v is int32"):
        Average(0.5).apply([mx.Variable(1, name="v")])


def test_a_copy_is_not_averaged_alone():
    (w,) = make(mirrored(2), 1.0)
    with pytest.raises(TypeError, match="pass the whole variable"):
        Average(0.5).apply([w.values[1]])
    assert Average(0.5).average(w.values[1]) is None


def test_a_list_is_needed():
    (v,) = make(mx.distribute.get_strategy(), 1.0)
    with pytest.raises(ValueError, match="needs `var_list`"):
        Average(0.5).apply()
    with pytest.raises(TypeError, match="must be a list"):
        Average(0.5).apply(v)


def test_an_ordinary_variable_in_a_scope():
    (v,) = make(mx.distribute.get_strategy(), 1.0, name="v")
    averages = Average(0.5)
    with mirrored(2).scope(), pytest.raises(ValueError, match=r"'v' was made outside"):
        averages.apply([v])
    assert averages.average(v) is None


def test_names_for_restoring():
    v, w = (mx.Variable(1.0, name=name) for name in "vw")
    averages = Average(0.5, name="slow")
    averages.apply([v])
    assert averages.variables_to_restore() == {"v/slow": v}
    assert list(averages.variables_to_restore([w, v])) == ["w/slow", "v/slow"]
    with pytest.raises(ValueError, match="no name before `apply`"):
        averages.average_name(jnp.ones(()))


def test_averages_are_restored(tmp_path):
    strategy = mirrored(2)

    def begin():
        (w,) = make(strategy, 1.0)
        averages = Average(0.5)
        averages.apply([w])
        average = averages.average(w)
        return w, averages, mx.train.Checkpoint(w=w, average=average)

    w, averages, checkpoint = begin()
    w.assign(9.0)
    averages.apply([w])
    path = checkpoint.save(str(tmp_path / "c"))
    checkpoint.sync()
    w, averages, checkpoint = begin()
    checkpoint.restore(path)
    averages.apply([w])
    assert copies(averages.average(w)) == [7.0, 7.0]
