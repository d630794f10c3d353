"""What NNX does with models made in a scope, and what programs keep of others."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.engines import (
    both_engines,
    compile_if,
    parts,
    per_replica,
    replica_id,
)

import mirrax as mx

from .nnx_models import (
    Training,
    X,
    Y,
    assert_close,
    on_replicas,
    one_device,
    step,
)

# What NNX offers --------------------------------------------------------------------------


@both_engines
def test_split_and_merge_in_replicas(engine: str, two_cpus: Any) -> None:
    with two_cpus.scope():
        training = Training()
    model = training.model

    def fn(x: Any) -> Any:
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        scaled = jax.tree.map(lambda w: w * (1 + replica_id()), params)
        return nnx.merge(graph, scaled, rest)(x)

    found = parts(two_cpus, two_cpus.run(compile_if(engine, fn), (X,)))
    np.testing.assert_allclose(found[0], Training().model(X), atol=1e-6)
    assert found[0] != found[1]
    assert_close(training.weights(), Training().weights())


@both_engines
def test_update_in_replicas_and_outside(engine: str, two_cpus: Any) -> None:
    with two_cpus.scope():
        model = Training().model

    def halve() -> None:
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda w: w / 2, params))

    before = np.asarray(model.first.kernel[...])
    two_cpus.run(compile_if(engine, halve))
    np.testing.assert_allclose(model.first.kernel[...], before / 2)
    halve()
    with two_cpus.scope():
        halve()
    np.testing.assert_allclose(model.first.kernel[...], before / 8)


@both_engines
def test_a_state_as_argument_and_result(engine: str, two_cpus: Any) -> None:
    with two_cpus.scope():
        model = Training().model
    graph, state = nnx.split(model)

    def fn(state: Any) -> Any:
        copy = nnx.merge(graph, state)
        copy.first.bias[...] = copy.first.bias[...] + 1
        return nnx.state(copy, nnx.Param)

    result = two_cpus.run(compile_if(engine, fn), (state,))
    assert parts(two_cpus, result["first"]["bias"].get_raw_value())[1] == [1.0] * 8
    assert not np.any(model.first.bias[...])


def test_a_module_comes_back_as_itself(two_cpus: Any) -> None:
    with two_cpus.scope():
        model = Training().model
    assert two_cpus.run(lambda m: m, (model,)) is model
    assert two_cpus.run(mx.function(lambda m: m), (model,)) is model


def test_showing_a_model(two_cpus: Any, capsys: Any) -> None:
    with two_cpus.scope():
        model = Training(norm={}).model
        nnx.display(model)
    nnx.display(model)
    plain = Training(norm={}).model
    assert repr(model) == repr(plain)
    assert nnx.tabulate(model, X) == nnx.tabulate(plain, X)
    assert "BatchNorm" in capsys.readouterr().out


def test_a_model_made_outside_is_brought_in(two_cpus: Any) -> None:
    outside = Training()
    model = two_cpus.replicate(outside.model)
    with two_cpus.scope():
        optimizer = nnx.Optimizer(
            model,
            optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05)),
            wrt=nnx.Param,
        )
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    data = [per_replica(two_cpus, a[:4], a[4:]) for a in (X, Y)]
    two_cpus.run(mx.function(step), (model, optimizer, metrics, *data))
    np.testing.assert_allclose(
        model.last.kernel[...], one_device(1).model.last.kernel[...], atol=1e-6
    )
    assert_close(outside.weights(), Training().weights(), 0)


# What programs keep -----------------------------------------------------------------------


def test_a_plain_model_that_is_changed_outside_is_noticed(two_cpus: Any) -> None:
    teacher: Any = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    fn = mx.function(lambda: teacher(X))
    for scale in (1.0, 2.0, 3.0):
        teacher.kernel[...] = jnp.full((3, 1), scale)
        np.testing.assert_allclose(
            parts(two_cpus, two_cpus.run(fn))[1],
            X.sum(1, keepdims=True) * scale,
            rtol=1e-5,
        )
    assert fn.trace_count == 3


def test_counting_in_a_module_traces_once(two_cpus: Any) -> None:
    class Counting(nnx.Module):
        def __init__(self) -> None:
            self.calls: Any = None
            self.calls = 0

        def __call__(self, x: Any) -> Any:
            self.calls += 1
            return x

    with two_cpus.scope():
        model = Counting()
    fn = mx.function(lambda x: model(x))
    for _ in range(3):
        two_cpus.run(fn, (X,))
    assert (fn.trace_count, model.calls) == (1, 1)
    Counting()
    two_cpus.run(fn, (X,))
    assert fn.trace_count == 1


class Scaling(nnx.Module):
    def __init__(self) -> None:
        self.scale: Any = None
        self.scale = 1.0


def test_threads_may_change_models_of_their_own() -> None:
    failed: list[Exception] = []

    def change() -> None:
        try:
            for i in range(300):
                Scaling().scale = float(i)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=change) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_model_in_the_place_of_a_collected_one_is_noticed(two_cpus: Any) -> None:
    for _ in range(10):  # Python mostly gives a new one the place of the last
        fn = mx.function(lambda model, x: x * model.scale)
        gone = Scaling()
        gone.scale = 2.0
        del gone
        model = Scaling()
        for scale in (1.0, 2.0):
            if scale != 1.0:
                model.scale = scale
            found = parts(two_cpus, two_cpus.run(fn, (model, jnp.ones(2))))
            assert found == [[scale] * 2] * 2
        del model


def test_many_traces_name_the_attribute(two_cpus: Any) -> None:
    with two_cpus.scope():
        model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    fn = mx.function(lambda: model(jnp.ones(3)))
    with pytest.warns(UserWarning, match=r"because Dropout\.rate has changed"):
        for i in range(5):
            model.rate = i / 10
            two_cpus.run(fn)


def test_many_traces_tell_of_a_model_that_is_gone(two_cpus: Any) -> None:
    fn = mx.function(lambda: jnp.ones(3))
    models = [Scaling() for _ in range(3)]
    for model in models:
        model.scale = 2.0
        two_cpus.run(fn)
    del model
    with pytest.warns(
        UserWarning, match=r"a model whose Scaling\.scale had changed is"
    ):
        for _ in range(2):
            del models[0]
            gc.collect()
            two_cpus.run(fn)


@both_engines
def test_an_optimizer_made_outside(engine: str, two_cpus: Any) -> None:
    with two_cpus.scope():
        model = nnx.Dict(w=nnx.Param(jnp.float32(5.0)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def update() -> None:
        optimizer.update(model, nnx.grad(lambda m: m.w[...] * 1.0)(model))

    with pytest.raises(ValueError, match=r"nnx\.OptState 'Optimizer\.step'"):
        two_cpus.run(compile_if(engine, update))
    assert model.w[...] == 5.0


@both_engines
def test_an_average_of_weights(engine: str, two_cpus: Any) -> None:
    with two_cpus.scope():
        model = nnx.Dict(w=nnx.Param(jnp.float32(4.0)))
        average = nnx.EMA(model, decay=0.5, only=nnx.Param)

    def update() -> None:
        model.w[...] += 2.0
        average.update(model)

    for _ in range(2):
        two_cpus.run(compile_if(engine, update))
    plain = nnx.Dict(w=nnx.Param(jnp.float32(4.0)))
    alone = nnx.EMA(plain, decay=0.5, only=nnx.Param)
    for _ in range(2):
        plain.w[...] += 2.0
        alone.update(plain)
    found, expected = (nnx.to_pure_dict(nnx.state(e)) for e in (average, alone))
    assert_close(found, expected)


def test_a_module_made_in_a_replica_and_returned(two_cpus: Any) -> None:
    with two_cpus.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    made = two_cpus.run(mx.function(lambda: nnx.clone(model)))
    with pytest.raises(
        ValueError, match=r"nnx\.Param 'Linear\.kernel'.*Return the value"
    ):
        made(X)


@pytest.mark.slow
def test_by_closure_and_as_argument_in_turn(two_cpus: Any) -> None:
    with two_cpus.scope():
        training = Training()
    data = [per_replica(two_cpus, a[:4], a[4:]) for a in (X, Y)]
    compiled = mx.function(step)
    closing = mx.function(lambda x, y: step(*training.objects, x, y))
    for _ in range(2):
        two_cpus.run(closing, data)
        two_cpus.run(compiled, (*training.objects, *data))
    assert_close(training.weights(), one_device(4).weights())


@pytest.mark.slow
def test_two_strategies_in_two_threads(two_cpus: Any) -> None:
    strategies = [two_cpus, mx.MirroredStrategy(["CPU:2", "CPU:3"])]
    found: dict[int, Any] = {}

    def train(k: int) -> None:
        found[k] = on_replicas(strategies[k], 4, "compiled", "arguments").weights()

    threads = [threading.Thread(target=train, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(2):
        assert_close(found[k], one_device(4).weights())


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, nnx.clone, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "clone", "pickle"],
)
def test_copies_are_plain_models(duplicate: Any, two_cpus: Any) -> None:
    with two_cpus.scope():
        training = Training()
        copied = duplicate(training.model)
    before = training.weights()
    copied.last.bias[...] += 1.0
    assert_close(training.weights(), before)

    def double() -> None:
        copied.last.bias[...] *= 2

    with pytest.raises(ValueError, match=r"Linear\.bias.*strategy\.replicate"):
        two_cpus.run(double)
    copied = two_cpus.replicate(copied)
    two_cpus.run(double)
    np.testing.assert_allclose(copied.last.bias[...], before["last/bias"] * 2 + 2)


def test_a_model_made_outside_is_named_in_a_gradient(two_cpus: Any) -> None:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    @mx.function
    def step(x):
        return nnx.value_and_grad(lambda m: jnp.mean(m(x)))(model)

    with pytest.raises(
        ValueError,
        match=r"nnx\.Param 'Linear\.(bias|kernel)', of shape \(.*strategy\.scope",
    ):
        two_cpus.run(step, args=(jnp.ones((4, 3)),))
