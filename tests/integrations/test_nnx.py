"""NNX models made in a scope train on replicas as on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.engines import (
    all_sum,
    both_engines,
    compile_if,
    mirrored,
    parts,
    per_replica,
)

import mirrax as mx

from .nnx_models import (
    ROWS,
    Net,
    Training,
    X,
    Y,
    assert_close,
    on_replicas,
    one_device,
    step,
)

both_styles = pytest.mark.parametrize("style", ["closure", "arguments"])


# Training -------------------------------------------------------------------------------


@both_engines
@both_styles
def test_uneven_parts_train_as_one_device(
    engine: str, style: str, two_cpus: Any
) -> None:
    alone = one_device(3)
    training = on_replicas(two_cpus, 3, engine, style)
    assert_close(training.weights(), alone.weights())
    assert_close(training.metrics.compute(), alone.metrics.compute())
    assert training.optimizer.step[...] == 3


@both_engines
def test_optimizer_state_is_that_of_one_device(engine: str, two_cpus: Any) -> None:
    def slots(training: Training) -> Any:
        return nnx.to_pure_dict(nnx.state(training.optimizer))

    alone = one_device(3)
    training = on_replicas(two_cpus, 3, engine, "arguments")
    assert_close(slots(training), slots(alone))


@both_engines
def test_the_copies_stay_in_step(engine: str, two_cpus: Any) -> None:
    model = on_replicas(two_cpus, 3, engine, "arguments").model
    read = compile_if(engine, lambda: model.first.kernel[...] + 0)
    first, second = parts(two_cpus, two_cpus.run(read))
    assert first == second


@both_engines
def test_an_average_counts_every_row_once(engine: str, two_cpus: Any) -> None:
    metrics = on_replicas(two_cpus, 2, engine, "arguments").metrics
    assert metrics.loss.count[...] == 2 * ROWS
    metrics.reset()
    assert metrics.loss.count[...] == 0


def test_a_metric_is_updated_outside_too(two_cpus: Any) -> None:
    with two_cpus.scope():
        average = nnx.metrics.Average()
        average.update(values=jnp.arange(7.0))
    average.update(values=jnp.arange(7.0, 12.0))
    assert average.count[...] == 12
    np.testing.assert_allclose(average.compute(), np.arange(12).mean())


def test_a_metric_is_updated_in_compiled_code_outside_replicas(two_cpus: Any) -> None:
    with two_cpus.scope():
        average = nnx.metrics.Average()

    @mx.function
    def update(x: Any) -> None:
        average.update(values=x)

    update(jnp.arange(7.0))
    assert average.count[...] == 7
    np.testing.assert_allclose(average.compute(), 3.0)


@both_engines
def test_accuracy_of_unequal_parts(engine: str, two_cpus: Any) -> None:
    labels, logits = np.array([0, 1, 1, 0, 1, 1, 0], "int32"), np.eye(2)[[1] * ROWS]
    with two_cpus.scope():
        accuracy = nnx.metrics.Accuracy()

    def update(logits: Any, labels: Any) -> None:
        accuracy.update(logits=logits, labels=labels)

    args = [per_replica(two_cpus, a[:4], a[4:]) for a in (logits, labels)]
    two_cpus.run(compile_if(engine, update), args)
    np.testing.assert_allclose(accuracy.compute(), 4 / 7)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_other_numbers_of_replicas(count: int) -> None:
    strategy, alone = mirrored(count), one_device(2)
    with strategy.scope():
        training = Training()
    data = [per_replica(strategy, *np.array_split(a, count)) for a in (X, Y)]
    compiled = mx.function(step)
    for _ in range(2):
        strategy.run(compiled, (*training.objects, *data))
    assert_close(training.weights(), alone.weights())


def test_a_caller_that_is_compiled(two_cpus: Any) -> None:
    with two_cpus.scope():
        training = Training()
    x, y = (per_replica(two_cpus, a[:3], a[3:6]) for a in (X, Y))

    @mx.function
    def twice(x: Any, y: Any) -> None:
        for _ in range(2):
            two_cpus.run(step, (*training.objects, x, y))

    twice(x, y)
    alone = Training()
    for _ in range(2):
        step(*alone.objects, X[:6], Y[:6])
    assert_close(training.weights(), alone.weights())


def test_many_steps_in_one_program(two_cpus: Any) -> None:
    with two_cpus.scope():
        training = Training()
    data = mx.data.Dataset.from_tensor_slices((X[:6], Y[:6])).repeat(4).batch(6)
    iterator = iter(two_cpus.experimental_distribute_dataset(data))
    fn = mx.function(lambda batch: step(*training.objects, *batch))
    two_cpus.run_steps(fn, iterator, 4)
    alone = Training()
    for _ in range(4):
        step(*alone.objects, X[:6], Y[:6])
    assert_close(training.weights(), alone.weights())


@both_engines
def test_one_trace_for_one_shape(engine: str, two_cpus: Any) -> None:
    with two_cpus.scope():
        training = Training(norm={}, rate=0.5)
    x, y = (per_replica(two_cpus, a[:3], a[3:6]) for a in (X, Y))
    fn = mx.function(step)
    for _ in range(3):
        two_cpus.run(fn, (*training.objects, x, y))
    assert fn.trace_count == 1


# Gradients and updates --------------------------------------------------------------------


@both_engines
def test_gradients_are_this_replicas_until_they_are_applied(
    engine: str, two_cpus: Any
) -> None:
    with two_cpus.scope():
        w = nnx.Param(jnp.float32(5.0))
    x = per_replica(two_cpus, 1.0, 2.0)
    fn = compile_if(engine, lambda x: nnx.grad(lambda w: w[...] * x)(w).get_value())
    assert parts(two_cpus, two_cpus.run(fn, (x,))) == [1.0, 2.0]


@both_engines
def test_updates_sum_once(engine: str, two_cpus: Any) -> None:
    with two_cpus.scope():
        model = nnx.Dict(w=nnx.Param(jnp.float32(5.0)))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def update(x: Any, is_summed: bool) -> None:
        grads = nnx.grad(lambda model: model.w[...] * x)(model)
        if is_summed:
            optimizer.update(model, all_sum(grads), aggregate=False)
        else:
            optimizer.update(model, grads)

    fn, x = compile_if(engine, update), per_replica(two_cpus, 1.0, 2.0)
    two_cpus.run(fn, (x, False))
    np.testing.assert_allclose(model.w[...], 5 - 0.1 * 3)
    two_cpus.run(fn, (x, True))
    np.testing.assert_allclose(model.w[...], 5 - 0.1 * 6, rtol=1e-6)


def test_updates_outside_replicas(two_cpus: Any) -> None:
    with two_cpus.scope():
        model = nnx.Dict(w=nnx.Param(jnp.float32(5.0)))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        optimizer.update(model, nnx.grad(lambda model: 3.0 * model.w[...])(model))
        np.testing.assert_allclose(model.w[...], 4.7)
    x = per_replica(two_cpus, 1.0, 2.0)
    grads = two_cpus.run(lambda x: nnx.grad(lambda m: m.w[...] * x)(model), (x,))
    optimizer.update(model, grads)
    np.testing.assert_allclose(model.w[...], 4.4, rtol=1e-6)


@both_engines
def test_value_and_grad_of_mirrax(engine: str, two_cpus: Any) -> None:
    alone = one_device(3)
    with two_cpus.scope():
        training = Training()

    def step(x: Any, y: Any) -> None:
        model, optimizer, metrics = training.objects

        def loss() -> Any:
            errors = (model(x) - y) ** 2
            metrics.update(loss=errors)
            return errors.sum() / ROWS

        params = nnx.state(model, nnx.Param)
        _, grads = mx.value_and_grad(loss, params)()
        optimizer.update(model, grads)

    data = [per_replica(two_cpus, a[:4], a[4:]) for a in (X, Y)]
    fn = compile_if(engine, step)
    for _ in range(3):
        two_cpus.run(fn, data)
    assert_close(training.weights(), alone.weights())
    assert training.metrics.loss.count[...] == 3 * ROWS


def test_gradients_of_a_variable_made_outside(two_cpus: Any) -> None:
    outside = nnx.Param(jnp.float32(5.0))
    with pytest.raises(TypeError, match=r"Param\(.*was made outside the scope"):
        two_cpus.run(lambda: mx.grad(lambda: outside * 2, outside)())


def test_a_model_and_its_optimizer_in_one(two_cpus: Any) -> None:
    with two_cpus.scope():
        both = nnx.ModelAndOptimizer(
            nnx.Dict(w=nnx.Param(jnp.float32(5.0))), optax.sgd(0.1)
        )

    def update(x: Any) -> None:
        both.update(nnx.grad(lambda model: model.w[...] * x)(both.model))

    two_cpus.run(mx.function(update), (per_replica(two_cpus, 1.0, 2.0),))
    np.testing.assert_allclose(both.model.w[...], 4.7)


def test_a_learning_rate_that_is_injected(two_cpus: Any) -> None:
    make = optax.inject_hyperparams(optax.sgd)
    with two_cpus.scope():
        model = nnx.Dict(w=nnx.Param(jnp.float32(5.0)))
        optimizer = nnx.Optimizer(model, make(learning_rate=0.1), wrt=nnx.Param)
    fn = mx.function(
        lambda: optimizer.update(model, nnx.grad(lambda m: m.w[...])(model))
    )
    two_cpus.run(fn)
    optimizer.opt_state.hyperparams["learning_rate"][...] = 1.0
    two_cpus.run(fn)
    np.testing.assert_allclose(model.w[...], 5 - 0.2 - 2.0, rtol=1e-6)
    assert fn.trace_count == 1


@both_engines
def test_an_nnx_jit_inside(engine: str, two_cpus: Any) -> None:
    alone = one_device(2)
    with two_cpus.scope():
        training = Training()
    data = [per_replica(two_cpus, a[:4], a[4:]) for a in (X, Y)]

    @nnx.jit
    def gradients(model: Any, x: Any, y: Any) -> Any:
        return nnx.grad(lambda model: ((model(x) - y) ** 2).sum() / ROWS)(model)

    def step(x: Any, y: Any) -> None:
        grads = gradients(training.model, x, y)
        training.optimizer.update(training.model, grads)

    fn = compile_if(engine, step)
    for _ in range(2):
        two_cpus.run(fn, data)
    assert_close(training.weights(), alone.weights())


# Random numbers ---------------------------------------------------------------------------


@both_engines
def test_dropout_differs_between_replicas_and_steps(engine: str, two_cpus: Any) -> None:
    with two_cpus.scope():
        dropout: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    fn = compile_if(engine, lambda: dropout(jnp.ones(64)))
    masks = [m for _ in range(2) for m in parts(two_cpus, two_cpus.run(fn))]
    assert len({tuple(mask) for mask in masks}) == 4
    assert dropout.rngs.count[...] == 2


def test_both_engines_draw_the_same(two_cpus: Any) -> None:
    drawn = []
    for engine in ("eager", "compiled"):
        with two_cpus.scope():
            rngs = nnx.Rngs(3)
        draw = compile_if(engine, lambda rngs=rngs: rngs.uniform())
        drawn.append([parts(two_cpus, two_cpus.run(draw)) for _ in range(3)])
    assert drawn[0] == drawn[1]


@both_engines
def test_reseeding(engine: str, two_cpus: Any) -> None:
    with two_cpus.scope():
        rngs = nnx.Rngs(3)
    draw = compile_if(engine, lambda: rngs.uniform())
    first = parts(two_cpus, two_cpus.run(draw))
    assert parts(two_cpus, two_cpus.run(draw)) != first
    nnx.reseed(rngs, default=rngs.default.key[...])
    expected = nnx.Rngs(3)
    nnx.reseed(expected, default=expected.default.key[...])
    assert rngs.default.key[...] == expected.default.key[...]
    with pytest.raises(RuntimeError, match=r"`nnx\.reseed` is called in a replica"):
        two_cpus.run(compile_if(engine, lambda: nnx.reseed(rngs, default=1)))


def test_one_replica_draws_as_nnx_alone() -> None:
    strategy = mirrored(1)
    with strategy.scope():
        rngs = nnx.Rngs(3)
    run = [strategy.run(mx.function(lambda: rngs.normal())) for _ in range(2)]
    alone = nnx.Rngs(3)
    np.testing.assert_allclose(np.ravel(run), [alone.normal() for _ in range(2)])


@both_engines
def test_stacked_layers_with_dropout(engine: str, two_cpus: Any) -> None:
    """`nnx.split_rngs` gives keys another shape for a while."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs: Any) -> Any:
        return nnx.Dropout(0.5, rngs=rngs)

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.layers = make(rngs)
            self.rngs = rngs

        def __call__(self, x: Any) -> Any:
            @nnx.vmap(in_axes=(0, 0, None))
            def call(layer: Any, rngs: Any, x: Any) -> Any:
                return layer(x) + 0 * rngs.uniform()

            with nnx.split_rngs(self.rngs, splits=3):
                return call(self.layers, self.rngs, x)

    with two_cpus.scope():
        model = Model(nnx.Rngs(0))
    fn = compile_if(engine, lambda: model(jnp.ones(64)))
    one, two = parts(two_cpus, two_cpus.run(fn))
    assert len({tuple(mask) for mask in (*one, *two)}) == 6
    assert model.rngs.default.key.shape == ()
    two_cpus.run(fn)


# Modes ------------------------------------------------------------------------------------


@both_styles
def test_modes_are_noticed_and_traced_once(style: str, two_cpus: Any) -> None:
    with two_cpus.scope():
        model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    fn = mx.function(lambda model: model(jnp.ones(32)))
    if style == "closure":
        fn = mx.function(lambda _: model(jnp.ones(32)))
    args = (0.0,) if style == "closure" else (model,)

    def ones() -> bool:
        return all(x == [1.0] * 32 for x in parts(two_cpus, two_cpus.run(fn, args)))

    assert not ones()
    for _ in range(3):
        model.eval()
        assert ones()
        model.train()
        assert not ones()
    assert fn.trace_count == 2


def test_modes_are_noticed_in_uneven_steps(two_cpus: Any) -> None:
    with two_cpus.scope():
        model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    fn = mx.function(lambda x: model(x))
    x = per_replica(two_cpus, np.ones(40, "float32"), np.ones(30, "float32"))
    for is_training in (True, False, True, False):
        (model.train if is_training else model.eval)()
        found = parts(two_cpus, two_cpus.run(fn, (x,)))
        assert (0.0 in found[0]) == (0.0 in found[1]) == is_training
    assert fn.trace_count == 4  # two shapes, two modes


def test_another_part_of_a_model_is_noticed(two_cpus: Any) -> None:
    with two_cpus.scope():
        model = Net(nnx.Rngs(0))
        other = nnx.Linear(
            8, 1, rngs=nnx.Rngs(1), kernel_init=jax.nn.initializers.zeros
        )
    fn = mx.function(lambda: model(X))
    before = parts(two_cpus, two_cpus.run(fn))
    model.last = other
    assert parts(two_cpus, two_cpus.run(fn))[0] == np.zeros((ROWS, 1)).tolist()
    assert parts(two_cpus, two_cpus.run(fn)) != before


# Mirrax's optimizer ------------------------------------------------------------------------


@both_engines
@pytest.mark.parametrize("kind", ["arrays", "variables"])
def test_optimizer_of_mirrax(engine: str, kind: str, two_cpus: Any) -> None:
    def make() -> Any:
        return nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    with two_cpus.scope():
        model = make()
        optimizer = mx.train.Optimizer(optax.adam(0.1))
    variables = [model.kernel, model.bias]
    optimizer.build(variables)

    def train(x: Any, y: Any) -> None:
        def loss() -> Any:
            return ((model(x) - y) ** 2).sum() / ROWS

        gradients = mx.grad(loss, variables)()
        if kind == "arrays":
            gradients = [g[...] for g in gradients]
        optimizer.apply_gradients(zip(gradients, variables))

    data = [per_replica(two_cpus, a[:4], a[4:]) for a in (X, Y)]
    fn = compile_if(engine, train)
    for _ in range(3):
        two_cpus.run(fn, data)
    alone = make()
    theirs = nnx.Optimizer(alone, optax.adam(0.1), wrt=nnx.Param)
    for _ in range(3):
        theirs.update(alone, nnx.grad(lambda m: ((m(X) - Y) ** 2).mean())(alone))
    assert_close(model.kernel[...], alone.kernel[...])
    assert_close(model.bias[...], alone.bias[...])


def test_optimizer_of_mirrax_outside_replicas(two_cpus: Any) -> None:
    with two_cpus.scope():
        weight = nnx.Param(jnp.zeros(2))
        optimizer = mx.train.Optimizer(optax.sgd(1.0))
        gradient = two_cpus.run(lambda: weight.replace(jnp.ones(2)))
        optimizer.apply_gradients([(gradient, weight)])
        np.testing.assert_array_equal(weight[...], [-2, -2])
        optimizer.apply_gradients([(jnp.ones(2), weight)])
        np.testing.assert_array_equal(weight[...], [-3, -3])


def test_optimizer_of_mirrax_with_a_plain_variable(two_cpus: Any) -> None:
    optimizer = mx.train.Optimizer(optax.sgd(1.0))
    with pytest.raises(TypeError, match="Param.*was made outside the scope"):
        optimizer.build([nnx.Param(jnp.zeros(2))])


# Values that are no arrays -----------------------------------------------------------------


@both_engines
@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.int16(1), 1 + 0j])
def test_numbers(engine: str, value: Any, two_cpus: Any) -> None:
    with two_cpus.scope():
        count = nnx.Variable(value)

    def increase() -> Any:
        count[...] += 1
        return count[...] * 2

    results = parts(two_cpus, two_cpus.run(compile_if(engine, increase)))
    assert results == [4, 4]
    assert count.get_value() == 2
    assert count[...].dtype == jnp.asarray(value).dtype
