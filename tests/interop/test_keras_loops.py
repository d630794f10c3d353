"""Keras' parts in loops of one's own, eager and compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import both_engines, compile_if, mirrored, per_replica

import mirrax as mx
from interop import libraries
from interop.keras_models import data, farthest, usual_model

keras = libraries.keras()
layers = keras.layers
sizes = pytest.mark.parametrize("sizes", [(4, 4), (4, 3)], ids=str)


def make(norm=None):
    """A model, its optimizer and two metrics."""
    keras.utils.set_random_seed(0)
    middle = [norm()] if norm else []
    model = keras.Sequential(
        [layers.Input((6,)), layers.Dense(5, "tanh"), *middle, layers.Dense(3)]
    )
    optimizer = keras.optimizers.Adam(0.01)
    return model, optimizer, keras.metrics.Mean(), keras.metrics.MeanSquaredError()


def step_of(parts, rows):
    """A step of which the sum over replicas is that of the whole batch."""
    model, optimizer, mean, error = parts

    def step(x, y):
        def loss():
            prediction = model(x, training=True)
            each = jnp.sum((prediction - y) ** 2, axis=-1)
            return jnp.sum(each) / rows, (prediction, each)

        run = mx.value_and_grad(loss, model.trainable_variables, has_aux=True)
        (value, (prediction, each)), gradients = run()
        optimizer.apply(gradients, model.trainable_variables)
        mean.update_state(each)
        error.update_state(y, prediction)
        return value

    return step


def alone(parts, rows, steps=3):
    """The same by Keras and JAX on one device."""
    model, optimizer, mean, error = parts
    optimizer.build(model.trainable_variables)
    x, y = data(rows, "float32")
    losses = []
    for _ in range(steps):

        def loss(weights, rest):
            prediction, rest = model.stateless_call(weights, rest, x, training=True)
            each = jnp.sum((prediction - y) ** 2, axis=-1)
            return jnp.sum(each) / rows, (rest, prediction, each)

        weights = [v.value for v in model.trainable_variables]
        rest = [v.value for v in model.non_trainable_variables]
        (value, (rest, prediction, each)), gradients = jax.value_and_grad(
            loss, has_aux=True
        )(weights, rest)
        for variable, new in zip(model.non_trainable_variables, rest):
            variable.assign(new)
        optimizer.apply(gradients, model.trainable_variables)
        mean.update_state(each)
        error.update_state(y, prediction)
        losses.append(value)
    return [np.asarray(losses), *results_of(parts)]


def results_of(parts):
    model, optimizer, mean, error = parts
    return [
        model.get_weights(),
        [np.asarray(v) for v in optimizer.variables],
        np.asarray(mean.result()),
        np.asarray(error.result()),
    ]


def in_replicas(strategy, parts, sizes, engine, steps=3):
    rows = sum(sizes)
    x, y = (
        per_replica(strategy, *np.split(each, np.cumsum(sizes)[:-1]))
        for each in data(rows, "float32")
    )
    step = compile_if(engine, step_of(parts, rows))
    losses = [strategy.run(step, (x, y)) for _ in range(steps)]
    summed = [strategy.reduce("SUM", loss, axis=None) for loss in losses]
    return [np.asarray(summed), *results_of(parts)]


@sizes
@both_engines
def test_gradients_are_summed_and_metrics_count_all(engine, sizes):
    strategy = mirrored(2)
    with strategy.scope():
        parts = make()
    found = in_replicas(strategy, parts, sizes, engine)
    assert farthest(found, alone(make(), sum(sizes))) < 2e-6


@sizes
@both_engines
def test_synchronised_batch_norm_is_that_of_the_whole_batch(engine, sizes):
    def norm():
        return layers.BatchNormalization(synchronized=True)

    strategy = mirrored(2)
    with strategy.scope():
        parts = make(norm)
    found = in_replicas(strategy, parts, sizes, engine)
    expected = alone(make(layers.BatchNormalization), sum(sizes))
    # A bias before a normalisation has no gradient but rounding, which Adam makes large.
    for each in (found, expected):
        each[1][1] = each[1][1] * 0
        each[2] = each[2][:2]
    assert farthest(found, expected) < 1e-5


@both_engines
def test_batch_norm_is_local_unless_synchronised(engine):
    strategy = mirrored(2)
    with strategy.scope():
        norm = layers.BatchNormalization(momentum=0.0, scale=False, center=False)
        norm.build((None, 2))
    x = per_replica(strategy, [[0, 1], [2, 3]], [[4, 5], [8, 9]], dtype="float32")

    def call(x):
        return norm(x, training=True)

    found = strategy.run(compile_if(engine, call), (x,))
    for each in strategy.experimental_local_results(found):
        np.testing.assert_allclose(np.mean(each, 0), 0, atol=1e-6)
    np.testing.assert_allclose(norm.moving_mean.value, [3.5, 4.5], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(norm.moving_variance), [2.5, 2.5], rtol=1e-6)


@both_engines
def test_seeds_differ_by_replica_and_by_call(engine):
    strategy = mirrored(2)
    with strategy.scope():
        dropout = layers.Dropout(0.5, seed=1)

    def call():
        return dropout(jnp.ones((4, 8)), training=True)

    call = compile_if(engine, call)
    masks = [
        np.asarray(part)
        for _ in range(2)
        for part in strategy.experimental_local_results(strategy.run(call))
    ]
    assert len({mask.tobytes() for mask in masks}) == 4


@both_engines
def test_fit_and_steps_of_ones_own_take_turns(engine):
    """fit, two steps, fit, evaluate: the losses of one device."""
    x, y = data(8, "float32")

    def losses_of(model, steps):
        keras.utils.set_random_seed(3)
        options = {"verbose": 0, "shuffle": False, "batch_size": 4}
        found = model.fit(x, y, epochs=2, **options).history["loss"]
        found += steps(model)
        found += model.fit(x, y, epochs=1, **options).history["loss"]
        return [*found, model.evaluate(x, y, verbose=0), *model.get_weights()]

    def plain():
        model = make()[0]
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def steps_alone(model):
        losses = []
        for _ in range(2):
            weights = [v.value for v in model.trainable_variables]

            def loss(weights):
                return jnp.mean((model.stateless_call(weights, [], x)[0] - y) ** 2)

            value, gradients = jax.value_and_grad(loss)(weights)
            model.optimizer.apply(gradients, model.trainable_variables)
            losses.append(float(value))
        return losses

    strategy = mirrored(2)

    def steps_in_replicas(model):
        def step(x, y):
            def loss():
                return jnp.sum((model(x) - y) ** 2) / 24

            value, gradients = mx.value_and_grad(loss, model.trainable_variables)()
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return value

        step = compile_if(engine, step)
        parts = [per_replica(strategy, *np.split(each, 2)) for each in (x, y)]
        found = [strategy.run(step, parts) for _ in range(2)]
        return [float(strategy.reduce("SUM", loss, axis=None)) for loss in found]

    with strategy.scope():
        model = plain()
    found = losses_of(model, steps_in_replicas)
    assert farthest(found, losses_of(plain(), steps_alone)) < 2e-6


def test_a_step_is_traced_once_and_updates_in_place():
    strategy = mirrored(2)
    with strategy.scope():
        parts = make()
    step = mx.function(step_of(parts, 8))
    x, y = (per_replica(strategy, *np.split(e, 2)) for e in data(8, "float32"))
    for _ in range(4):
        strategy.run(step, (x, y))
    assert step.trace_count == 1
    held = vars(parts[0].trainable_variables[0])["_value"]
    assert isinstance(held, mx.distribute.MirroredVariable)


def test_gradient_accumulation_averages_and_constraints():
    """What else an optimizer does with variables, in a compiled step."""

    def build():
        keras.utils.set_random_seed(0)
        layer = layers.Dense(3, kernel_constraint="non_neg")
        layer.build((None, 6))
        optimizer = keras.optimizers.SGD(
            0.1, gradient_accumulation_steps=2, use_ema=True, global_clipnorm=0.5
        )
        return layer, optimizer

    strategy = mirrored(2)
    with strategy.scope():
        layer, optimizer = build()
    x = data(8, "float32")[0]

    @mx.function
    def step(x):
        gradients = mx.grad(lambda: jnp.sum(layer(x) ** 2), layer.trainable_variables)()
        optimizer.apply(gradients, layer.trainable_variables)

    for _ in range(4):
        strategy.run(step, (per_replica(strategy, *np.split(x, 2)),))
    found = [np.asarray(v) for v in [*layer.variables, *optimizer.variables]]
    layer, optimizer = build()
    for _ in range(4):

        def loss(weights):
            return jnp.sum(layer.stateless_call(weights, [], x)[0] ** 2)

        gradients = jax.grad(loss)([v.value for v in layer.trainable_variables])
        optimizer.apply(gradients, layer.trainable_variables)
    expected = [np.asarray(v) for v in [*layer.variables, *optimizer.variables]]
    assert farthest(found, expected) < 1e-5


@both_engines
def test_a_count_that_does_not_divide_stays_whole(engine):
    class Rows(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.count = self.add_variable((), "zeros", "int32", aggregation="sum")

        def update_state(self, y, prediction=None, sample_weight=None):
            self.count.assign_add(len(y))

        def result(self):
            return self.count.value

    strategy = mirrored(3)
    with strategy.scope():
        rows = Rows()
    rows.update_state(np.ones(7))
    parts = per_replica(strategy, *map(np.ones, (1, 2, 2)))
    strategy.run(compile_if(engine, rows.update_state), (parts,))
    assert int(rows.result()) == 12
    rows.count.assign(5)
    strategy.run(compile_if(engine, rows.update_state), (parts,))
    assert int(rows.result()) == 10


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_what_is_summed_starts_with_its_value(dtype):
    strategy = mirrored(3)
    with strategy.scope():
        total = keras.Variable(5, dtype=dtype, trainable=False, aggregation="sum")
    assert float(total.value) == pytest.approx(5)
    strategy.run(lambda: total.assign_add(1))
    assert float(total.value) == pytest.approx(8)


@both_engines
@pytest.mark.parametrize("is_finite", [True, False])
def test_a_loss_scale_is_one_for_all_replicas(engine, is_finite):
    """Whether an update is left out is decided by the sum of all replicas' gradients."""
    strategy = mirrored(2)
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=2
        )
    second = 2.0 if is_finite else np.inf
    given = per_replica(strategy, 1.0, second)

    def step(x):
        def loss():
            return optimizer.scale_loss(jnp.sum(weight * x))

        optimizer.apply(mx.grad(loss, [weight])(), [weight])

    step = compile_if(engine, step)
    for _ in range(2):
        strategy.run(step, (given,))
    np.testing.assert_allclose(weight, [0.4, 1.4] if is_finite else [1, 2], rtol=1e-6)
    assert float(optimizer.dynamic_scale) == (16 if is_finite else 2)
    assert int(optimizer.iterations) == (2 if is_finite else 0)
    strategy.assert_in_sync([weight, *optimizer.variables])


@both_engines
def test_an_optimizer_of_optimizers(engine):
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    strategy = mirrored(2)
    with strategy.scope():
        weights = [keras.Variable([1.0], name=name) for name in "ab"]
        kinds = {"a": keras.optimizers.SGD(0.1), "b": keras.optimizers.SGD(0.2)}
        optimizer = keras.optimizers.MultiOptimizer(lambda v: kinds[v.name])

    def step(x):
        gradients = mx.grad(lambda: jnp.sum(weights[0] + weights[1]) * x, weights)()
        optimizer.apply(gradients, weights)

    strategy.run(compile_if(engine, step), (per_replica(strategy, 1.0, 2.0),))
    np.testing.assert_allclose(weights, [[0.7], [0.4]], rtol=1e-6)
    assert int(optimizer.iterations) == 1


# Checkpoints -------------------------------------------------------------------------------


def test_a_checkpoint_restores_in_place_at_another_number_of_replicas(tmp_path):
    x, y = data(13, "float32")
    with mirrored(2).scope():
        model = usual_model()
    model.fit(x, y, epochs=2, verbose=0)
    saved = mx.train.Checkpoint(model=model, optimizer=model.optimizer).save(
        tmp_path / "ckpt"
    )
    expected = [model.evaluate(x, y, verbose=0), *model.get_weights()]
    expected += [np.asarray(v) for v in model.optimizer.variables]
    for count in (3, None):
        if count is None:  # without a strategy
            again = usual_model()
        else:
            with mirrored(count).scope():
                again = usual_model()
        again.layers[0].kernel.assign(again.layers[0].kernel * 0)
        checkpoint = mx.train.Checkpoint(model=again, optimizer=again.optimizer)
        checkpoint.restore(saved).assert_consumed()
        found = [again.evaluate(x, y, verbose=0), *again.get_weights()]
        found += [np.asarray(v) for v in again.optimizer.variables]
        assert farthest(found, expected) < 1e-6


def test_metrics_and_single_variables_in_a_checkpoint(tmp_path):
    strategy = mirrored(2)
    with strategy.scope():
        mean, variable = keras.metrics.Mean(), keras.Variable(2.0)
    strategy.run(mx.function(lambda: mean.update_state(jnp.ones(3))))
    checkpoint = mx.train.Checkpoint(mean=mean, variable=variable)
    saved = checkpoint.save(tmp_path / "ckpt")
    mean.reset_state()
    variable.assign(0.0)
    checkpoint.restore(saved).assert_consumed()
    assert float(mean.result()) == 1.0 and float(mean.count.value) == 6.0
    assert float(variable.value) == 2.0


def test_what_is_not_built_yet_cannot_be_saved():
    with mirrored(2).scope():
        optimizer, model = keras.optimizers.Adam(), keras.Sequential([layers.Dense(2)])
    with pytest.raises(ValueError, match=r"'adam.*build\(model.trainable_variables\)"):
        mx.train.Checkpoint(optimizer=optimizer)
    with pytest.raises(ValueError, match=r"'sequential.*build\(input_shape\)"):
        mx.train.Checkpoint(model=model)


@both_engines
def test_optimizer_of_mirrax(engine):
    strategy = mirrored(2)
    optax = pytest.importorskip("optax")
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = mx.train.Optimizer(optax.sgd(0.1))
    optimizer.build([weight])

    def step(x):
        gradients = mx.grad(lambda: jnp.sum(weight * x), [weight])()
        optimizer.apply_gradients(zip(gradients, [weight]))

    strategy.run(compile_if(engine, step), (per_replica(strategy, 1.0, 2.0),))
    np.testing.assert_allclose(weight, [0.7, 1.7], rtol=1e-6)
