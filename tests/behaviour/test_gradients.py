"""`mx.value_and_grad` and `mx.grad`: variables, aux values, assignments, nesting."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers.engines import (
    all_styles,
    all_sum,
    both_engines,
    mirrored,
    parts,
    per_replica,
    run,
)
from jax import lax

import mirrax as mx


@pytest.fixture
def strategy():
    return mirrored(2)


@all_styles
def test_each_replica_gets_the_gradient_of_its_own_loss(engine, strategy):
    with strategy.scope():
        w = mx.Variable([1.0, 2.0])
    x = per_replica(strategy, 3.0, 10.0)
    value, gradient = run(
        strategy, mx.value_and_grad(lambda x: jnp.sum(w * w) * x, w), x, engine=engine
    )
    assert parts(strategy, value) == [15.0, 50.0]
    assert parts(strategy, gradient) == [[6.0, 12.0], [20.0, 40.0]]


@all_styles
def test_gradients_have_the_structure_of_the_variables(engine, strategy):
    with strategy.scope():
        variables = {"a": mx.Variable(2.0), "b": [mx.Variable(3.0), mx.Variable(5.0)]}

    def replica_fn(x):
        def loss():
            return variables["a"] * variables["b"][0] * x

        return mx.grad(loss, variables)()

    x = per_replica(strategy, 1.0, 10.0)
    gradients = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, gradients["a"]) == [3.0, 30.0]
    assert parts(strategy, gradients["b"][0]) == [2.0, 20.0]
    assert parts(strategy, gradients["b"][1]) == [0.0, 0.0], "not used by the loss"


@all_styles
def test_aux_values_come_back_beside_the_value(engine, strategy):
    with strategy.scope():
        w = mx.Variable(2.0)

    def replica_fn(x):
        def loss(x):
            prediction = w * x
            return prediction**2, {"prediction": prediction, "size": 1, "none": None}

        (value, aux), gradient = mx.value_and_grad(loss, w, has_aux=True)(x)
        also, aux_again = mx.grad(loss, w, has_aux=True)(x)
        return value, aux, gradient, also, aux_again["prediction"]

    x = per_replica(strategy, 1.0, 3.0)
    value, aux, gradient, also, prediction = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, value) == [4.0, 36.0]
    assert parts(strategy, aux["prediction"]) == [2.0, 6.0]
    assert parts(strategy, aux["size"])[0] == 1
    assert aux["none"] is None
    assert parts(strategy, gradient) == parts(strategy, also) == [4.0, 36.0]
    assert parts(strategy, prediction) == [2.0, 6.0]


@pytest.mark.slow
@all_styles
def test_a_moving_average_assigned_inside_the_loss_is_kept(engine, strategy):
    with strategy.scope():
        w = mx.Variable(1.0)
        average = mx.Variable(
            0.0, trainable=False, aggregation=mx.VariableAggregation.MEAN
        )

    def replica_fn(x):
        def loss():
            mean = jnp.mean(w * x)
            average.assign(0.5 * average + 0.5 * mean)
            return mean * average.read_value()

        return mx.value_and_grad(loss, w)()

    x = per_replica(strategy, [1.0, 3.0], [5.0, 7.0])
    value, gradient = run(strategy, replica_fn, x, engine=engine)
    # The means are 2 and 6, so the average becomes (1 + 3) / 2.
    assert float(average) == 2.0
    assert parts(strategy, average) == [2.0, 2.0]
    assert parts(strategy, value) == [4.0, 12.0]


@all_styles
def test_a_replicas_own_variable_assigned_inside_the_loss(engine, strategy):
    with strategy.scope():
        w = mx.Variable(1.0)
        seen = mx.Variable(
            0.0,
            synchronization=mx.VariableSynchronization.ON_READ,
            aggregation=mx.VariableAggregation.SUM,
        )

    def replica_fn(x):
        def loss():
            seen.assign_add(x)
            return w * x * seen

        return mx.grad(loss, w)()

    x = per_replica(strategy, 2.0, 3.0)
    gradient = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, gradient) == [4.0, 9.0]
    assert parts(strategy, seen) == [2.0, 3.0]
    assert float(seen) == 5.0


@all_styles
def test_the_variable_itself_may_be_assigned_inside_the_loss(engine, strategy):
    with strategy.scope():
        w = mx.Variable(3.0)

    def replica_fn():
        def loss():
            before = w * w
            w.assign(2.0 * w)
            return before + w

        return mx.value_and_grad(loss, w)()

    value, gradient = run(strategy, replica_fn, engine=engine)
    # w^2 + 2w at 3: 15, and its derivative 2w + 2.
    assert parts(strategy, value) == [15.0, 15.0]
    assert parts(strategy, gradient) == [8.0, 8.0]
    assert parts(strategy, w) == [6.0, 6.0]


@all_styles
def test_nested_value_and_grad_gives_second_derivatives(engine, strategy):
    with strategy.scope():
        w = mx.Variable(2.0)

    def replica_fn(x):
        def slope():
            return mx.grad(lambda: x * w**3, w)()

        return mx.value_and_grad(slope, w)()

    x = per_replica(strategy, 1.0, 10.0)
    first, second = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, first) == [12.0, 120.0]
    assert parts(strategy, second) == [12.0, 120.0]


@all_styles
def test_mx_grad_and_jax_grad_nest_either_way(engine, strategy):
    with strategy.scope():
        w = mx.Variable(3.0)

    def replica_fn(x):
        outside = mx.grad(lambda: jax.grad(lambda a: w * a**2)(x), w)()
        inside = jax.grad(lambda a: mx.grad(lambda: w**2 * a, w)())(x)
        return outside, inside

    x = per_replica(strategy, 5.0, 7.0)
    outside, inside = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, outside) == [10.0, 14.0]
    assert parts(strategy, inside) == [6.0, 6.0]


@all_styles
def test_gradients_through_checkpoint_and_scan_that_read_a_variable(engine, strategy):
    with strategy.scope():
        w = mx.Variable(2.0)

    def replica_fn(x):
        @jax.checkpoint
        def layer(a):
            return a * w

        def loss():
            out, _ = lax.scan(lambda c, _: (layer(c), None), x, length=3)
            return out

        return mx.value_and_grad(loss, w)()

    x = per_replica(strategy, 1.0, 10.0)
    value, gradient = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, value) == [8.0, 80.0]
    assert parts(strategy, gradient) == [12.0, 120.0]


@both_engines
def test_a_collective_inside_the_loss(engine, strategy):
    with strategy.scope():
        w = mx.Variable(1.0)
    x = per_replica(strategy, 1.0, 2.0)

    def replica_fn(x):
        return mx.value_and_grad(lambda: all_sum(w * x) ** 2, w)()

    value, gradient = run(strategy, replica_fn, x, engine=engine)
    # 3^2 on both; each replica's own gradient is summed over both losses: 2 * 2 * 3 * x.
    assert parts(strategy, value) == [9.0, 9.0]
    assert parts(strategy, gradient) == [12.0, 24.0]


@both_engines
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_summed_rows_inside_the_loss(engine, n, op):
    strategy = mirrored(n)
    with strategy.scope():
        w = mx.Variable([1.0, 2.0])
    x = per_replica(strategy, *[3.0, 10.0][:n])

    def replica_fn(x):
        def loss():
            rows = mx.IndexedSlices(w[:, None] * x, jnp.array([0, 4]), (5, 1))
            context = mx.distribute.get_replica_context()
            rows, total = context.all_reduce(op, (rows, x * w[0]))
            return jnp.sum(rows.values**2) + total

        return mx.grad(loss, w)()

    gradient = run(strategy, replica_fn, x, engine=engine)
    # Of all replicas' losses: n * 2 * w * x**2 for the rows, n * x for the sum.
    scale = n if op == "sum" else 1
    rows = scale / (1 if op == "sum" else n)
    expected = [
        [2 * x * x * rows + x * scale, 4 * x * x * rows] for x in [3.0, 10.0][:n]
    ]
    assert parts(strategy, gradient) == expected


@both_engines
def test_summed_rows_of_unequal_number_inside_the_loss(engine, strategy):
    x = per_replica(strategy, [[1.0], [2.0]], [[10.0]])

    def replica_fn(x):
        def loss(x):
            rows = mx.IndexedSlices(x, jnp.arange(len(x)), (5, 1))
            rows = mx.distribute.get_replica_context().all_reduce("sum", rows)
            return jnp.sum(rows.values**2)

        return jax.grad(loss)(x)

    gradient = run(strategy, replica_fn, x, engine=engine)
    assert parts(strategy, gradient) == [[[4.0], [8.0]], [[40.0]]]


@both_engines
def test_a_merge_call_inside_a_gradient_of_one_replica(engine):
    def replica_fn(x):
        def loss(x):
            context = mx.distribute.get_replica_context()
            return context.merge_call(lambda strategy, value: value * 2.0, (x,))

        return jax.grad(loss)(x)

    assert run(mirrored(1), replica_fn, 3.0, engine=engine) == 2.0


@all_styles
def test_an_integer_argument_and_closure_do_not_disturb_gradients(engine, strategy):
    with strategy.scope():
        w = mx.Variable([1.0, 2.0, 4.0])
    index = per_replica(strategy, 0, 2)

    def replica_fn(i):
        return mx.grad(lambda: w[i] ** 2, w)()

    gradient = run(strategy, replica_fn, index, engine=engine)
    assert parts(strategy, gradient) == [[2.0, 0.0, 0.0], [0.0, 0.0, 8.0]]


def test_gradients_outside_run_are_those_of_the_variables_value(strategy):
    with strategy.scope():
        w = mx.Variable(3.0)
        assert float(mx.grad(lambda: w * w, w)()) == 6.0
    w.assign(4.0)
    assert float(mx.grad(lambda: w * w, w)()) == 8.0
    compiled = mx.function(lambda: mx.value_and_grad(lambda: w * w, w)())
    assert [float(x) for x in compiled()] == [16.0, 8.0]


def test_a_metric_read_outside_run_is_the_sum_of_its_copies_also_in_a_loss(strategy):
    with strategy.scope():
        w = mx.Variable(2.0)
        metric = mx.Variable(
            0.0,
            synchronization=mx.VariableSynchronization.ON_READ,
            aggregation=mx.VariableAggregation.SUM,
        )
    gradient = mx.grad(lambda: w * metric, w)
    strategy.run(lambda x: metric.assign(x), (per_replica(strategy, 1.0, 2.0),))
    assert float(gradient()) == 3.0
    strategy.run(lambda x: metric.assign(x), (per_replica(strategy, 10.0, 20.0),))
    assert float(gradient()) == 30.0


def test_a_loss_used_in_a_replica_can_be_used_outside_too(strategy):
    with strategy.scope():
        w = mx.Variable(2.0)
        metric = mx.Variable(
            0.0,
            synchronization=mx.VariableSynchronization.ON_READ,
            aggregation=mx.VariableAggregation.SUM,
        )
    gradient = mx.grad(lambda: w * metric, w)
    strategy.run(lambda x: metric.assign(x), (per_replica(strategy, 1.0, 2.0),))
    assert parts(strategy, strategy.run(gradient)) == [1.0, 2.0]
    with strategy.scope():
        assert float(gradient()) == 3.0


@both_engines
def test_value_and_grad_keeps_the_name_and_doc_of_the_loss(engine, strategy):
    with strategy.scope():
        w = mx.Variable(1.0)

    def loss():
        """How wrong we are."""
        return w * 1.0

    wrapped = mx.value_and_grad(loss, w)
    assert (wrapped.__name__, wrapped.__doc__) == ("loss", "How wrong we are.")
    value, _ = run(strategy, wrapped, engine=engine)
    assert parts(strategy, value) == [1.0, 1.0]


@both_engines
@pytest.mark.parametrize(
    "aggregation, sees", [("SUM", 4.0), ("MEAN", 2.5), ("ONLY_FIRST_REPLICA", 2.0)]
)
def test_a_loss_sees_what_it_has_assigned(engine, aggregation, sees, strategy):
    with strategy.scope():
        w = mx.Variable(1.0, aggregation=mx.VariableAggregation[aggregation])

    def loss(x):
        w.assign_add(x)  # which does not depend on `w`
        return w * 10.0

    x = per_replica(strategy, 1.0, 2.0)
    value, gradient = run(strategy, mx.value_and_grad(loss, w), x, engine=engine)
    assert parts(strategy, value) == [10 * sees] * 2
    assert parts(strategy, gradient) == [10.0, 10.0]
    assert parts(strategy, w) == [sees, sees]


@both_engines
def test_a_slice_that_a_loss_assigns_stays_each_replicas_own(engine, strategy):
    with strategy.scope():
        w = mx.Variable([1.0, 2.0, 3.0], aggregation=mx.VariableAggregation.SUM)

    def loss(x):
        w[1].assign(w[0] * x)
        w.scatter_add(mx.IndexedSlices(jnp.reshape(x, 1), jnp.array([2])))
        w[2].assign_sub(0.5)
        return jnp.sum(w.read_value())

    x = per_replica(strategy, 10.0, 20.0)
    value, gradient = run(strategy, mx.value_and_grad(loss, w), x, engine=engine)
    assert parts(strategy, value) == [43.5, 53.5]
    assert parts(strategy, gradient) == [[11.0, 0.0, 1.0], [21.0, 0.0, 1.0]]
    assert parts(strategy, w) == [[1.0, 10.0, 32.5], [1.0, 20.0, 32.5]]


@both_engines
def test_copies_that_differ_still_do_when_a_loss_adds_to_them(engine, strategy):
    with strategy.scope():
        w = mx.Variable(1.0)
        seen = mx.Variable(0.0, aggregation=mx.VariableAggregation.MEAN)
    seen.assign(per_replica(strategy, 1.0, 5.0))

    def inner():
        seen.assign_add(w * 2.0)
        return w * seen

    def outer():
        return mx.value_and_grad(inner, w)()[0]

    run(strategy, mx.value_and_grad(outer, w), engine=engine)
    assert parts(strategy, seen) == [3.0, 7.0]


@all_styles
def test_gradients_of_a_dict_keep_the_order_of_its_keys(engine):
    strategy = mirrored(2)
    with strategy.scope():
        layer = {"w": mx.Variable(2.0), "b": mx.Variable(3.0)}
    variables = {"second": [layer, (layer,)], "first": layer}

    def replica_fn():
        gradients = mx.grad(lambda: layer["w"] ** 2 + layer["b"], variables)()
        assert list(gradients) == ["second", "first"]
        assert list(gradients["second"][1][0]) == ["w", "b"]
        return tuple(gradients["first"].values())

    w, b = run(strategy, replica_fn, engine=engine)
    assert float(strategy.reduce("MEAN", w, axis=None)) == 4.0
    assert float(strategy.reduce("MEAN", b, axis=None)) == 1.0
