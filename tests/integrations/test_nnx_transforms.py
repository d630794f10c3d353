"""NNX's own transformations, in replicas and around models made in a scope."""

from __future__ import annotations

import subprocess
import sys
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
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx

from .nnx_models import Net, Training, X, Y, assert_close, one_device, step

pytestmark = pytest.mark.slow


def test_nnx_jit_outside_replicas(two_cpus: Any) -> None:
    with two_cpus.scope():
        norm = nnx.BatchNorm(3, momentum=0.0, rngs=nnx.Rngs(0))

    @nnx.jit
    def call(norm: Any, x: Any) -> Any:
        return norm(x)

    call(norm, X)
    np.testing.assert_allclose(norm.mean[...], X.mean(0), atol=1e-6)
    with two_cpus.scope():
        call(norm, X + 1)
    np.testing.assert_allclose(norm.mean[...], X.mean(0) + 1, atol=1e-6)
    with pytest.raises(
        RuntimeError, match=r"'BatchNorm\.\w+' is read inside a function"
    ):
        nnx.jit(lambda: norm(X))()


@both_engines
def test_gradients_without_graphs(engine: str, two_cpus: Any) -> None:
    with two_cpus.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def fn(x: Any) -> Any:
        grad: Any = nnx.grad(lambda m, x: m(x).sum(), graph=False)
        gradients: Any = nnx.state(grad(model, x))
        return all_sum(gradients["kernel"].get_value())

    x = per_replica(two_cpus, X[:4], X[4:])
    found = parts(two_cpus, two_cpus.run(compile_if(engine, fn), (x,)))[1]
    np.testing.assert_allclose(found, X.sum(0)[:, None], atol=1e-5)


class Deep(nnx.Module):
    """Layers that are stacked, scanned and rematerialised."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs: Any) -> Any:
            return nnx.Linear(3, 3, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x: Any, layer: Any) -> Any:
            return jnp.tanh(layer(x))

        return run(x, self.layers)


def _step(model: Any, optimizer: Any, x: Any) -> None:
    grads = nnx.grad(lambda model: (model(x) ** 2).sum() / len(X))(model)
    optimizer.update(model, grads)


@both_engines
def test_layers_that_are_scanned(engine: str, two_cpus: Any) -> None:
    def make() -> tuple[Any, Any]:
        model = Deep(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)

    with two_cpus.scope():
        model, optimizer = make()
    alone = make()
    x = per_replica(two_cpus, X[:4], X[4:])
    fn = compile_if(engine, _step)
    for _ in range(2):
        two_cpus.run(fn, (model, optimizer, x))
        _step(*alone, X)
    found, expected = (nnx.to_pure_dict(nnx.state(m)) for m in (model, alone[0]))
    assert_close(found, expected)


def test_a_view_of_a_model(two_cpus: Any) -> None:
    with two_cpus.scope():
        model = Net(nnx.Rngs(0), rate=0.5)
    view = nnx.view(model, deterministic=True)
    fn = mx.function(lambda m: m(X))
    first, second = parts(two_cpus, two_cpus.run(fn, (view,)))
    assert first == second
    model.first.kernel[...] = jnp.zeros((3, 8))
    third = parts(two_cpus, two_cpus.run(fn, (view,)))[0]
    assert third == [[0.0]] * len(X)
    assert fn.trace_count == 1


@both_engines
def test_a_recurrent_layer(engine: str, two_cpus: Any) -> None:
    def make() -> Any:
        return nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)))

    with two_cpus.scope():
        model = make()
    x = np.stack([X[:6], X[1:]])
    found = two_cpus.run(compile_if(engine, lambda x: model(x)), (x,))
    np.testing.assert_allclose(parts(two_cpus, found)[1], make()(x), atol=1e-6)


def test_one_device_strategy() -> None:
    strategy, alone = mx.OneDeviceStrategy("CPU:1"), one_device(2)
    with strategy.scope():
        training = Training()
    fn = mx.function(step)
    for _ in range(2):
        strategy.run(fn, (*training.objects, X, Y))
    assert_close(training.weights(), alone.weights())


def test_adding_up_gradients_of_a_state(two_cpus: Any) -> None:
    with two_cpus.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    x = per_replica(two_cpus, X[:4], X[4:])
    fn = mx.function(lambda x: nnx.grad(lambda m: m(x).sum())(model))
    total = two_cpus.reduce("SUM", two_cpus.run(fn, (x,)), axis=None)
    np.testing.assert_allclose(total["kernel"].get_value()[:, 0], X.sum(0), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True])
def test_importing_nnx_after_mirrax(is_late: bool) -> None:
    """Also inside the scope."""
    code = f"""
import mirrax as mx
mx.config.set_logical_device_configuration(cpu=2)
strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
{"" if is_late else "from flax import nnx"}
with strategy.scope():
    from flax import nnx
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
def fn():
    model.bias[...] += 1.0
strategy.run(mx.function(fn))
print(float(model.bias[0]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
    )
    assert done.stdout.strip() == "1.0", done.stderr


def test_devices_of_another_number_of_replicas_do_not_mix() -> None:
    """Two strategies with models of their own, one after another."""
    for count in (2, 3):
        strategy = mirrored(count)
        with strategy.scope():
            model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        found = strategy.run(mx.function(lambda m: m(X)), (model,))
        assert len(parts(strategy, found)) == count
        assert len(jax.tree.leaves(nnx.state(model))) == 2
