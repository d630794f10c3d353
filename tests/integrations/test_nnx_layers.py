"""BatchNorm of NNX and Linen, checkpoints of NNX, and what does not work in a scope."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.engines import both_engines, compile_if, mirrored, parts, per_replica

import mirrax as mx

from .nnx_models import Net, Training, X, Y, assert_close, on_replicas, one_device, step

pytestmark = pytest.mark.slow

SYNC: dict[str, Any] = {"axis_name": "replica"}
norms = pytest.mark.parametrize(
    "options",
    [{}, {"use_fast_variance": False}, {"momentum": 0.5, "use_bias": False}],
    ids=["fast", "slow", "momentum"],
)


# BatchNorm ------------------------------------------------------------------------------


@both_engines
@norms
def test_synchronised_norms_are_exact_over_unequal_parts(
    engine: str, options: dict, two_cpus: Any
) -> None:
    alone = one_device(3, norm=options)
    norm = SYNC | options
    training = on_replicas(two_cpus, 3, engine, "arguments", norm=norm)
    assert_close(training.weights(), alone.weights())


@both_engines
def test_local_norms_are_read_as_their_average(engine: str, two_cpus: Any) -> None:
    with two_cpus.scope():
        norm = nnx.BatchNorm(3, momentum=0.0, rngs=nnx.Rngs(0))
    x = per_replica(two_cpus, X[:4], X[4:])
    two_cpus.run(compile_if(engine, norm), (x,))
    means = X[:4].mean(0), X[4:].mean(0)
    np.testing.assert_allclose(norm.mean[...], np.mean(means, axis=0), atol=1e-6)
    own = parts(two_cpus, two_cpus.run(compile_if(engine, lambda: norm.mean[...] + 0)))
    np.testing.assert_allclose(own, means, atol=1e-6)


def test_synchronised_norms_outside_replicas(two_cpus: Any) -> None:
    with two_cpus.scope():
        norm = nnx.BatchNorm(3, momentum=0.0, rngs=nnx.Rngs(0), **SYNC)
        norm(X)
    np.testing.assert_allclose(norm.mean[...], X.mean(0), atol=1e-6)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("replica",), axis_types=auto)
    spec = jax.sharding.PartitionSpec("replica")
    alone = nnx.BatchNorm(
        3, momentum=0.0, use_running_average=False, rngs=nnx.Rngs(0), **SYNC
    )
    graph, state = nnx.split(alone)

    def fn(x: Any) -> Any:  # the user's own axis of that name
        return nnx.merge(graph, jax.tree.map(jnp.copy, state))(x)

    found = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)(X[:6])
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-6)


@both_engines
def test_a_mask_counts_rows(engine: str, two_cpus: Any) -> None:
    mask = np.array([1, 1, 0, 1, 0, 1, 1], bool)[:, None]
    with two_cpus.scope():
        norm = nnx.BatchNorm(3, momentum=0.0, rngs=nnx.Rngs(0), **SYNC)
    args = [per_replica(two_cpus, a[:4], a[4:]) for a in (X, mask)]
    two_cpus.run(compile_if(engine, lambda x, m: norm(x, mask=m)), args)
    rows = X[mask[:, 0]]
    np.testing.assert_allclose(norm.mean[...], rows.mean(0), atol=1e-6)
    np.testing.assert_allclose(norm.var[...], rows.var(0), atol=1e-6)


@both_engines
def test_linen_is_exact_over_unequal_parts(engine: str, two_cpus: Any) -> None:
    def loss(norm: nn.Module, variables: Any, x: Any) -> Any:
        y, state = norm.apply(variables, x, mutable=["batch_stats"])
        return jnp.sum(jnp.tanh(y) ** 2), state

    alone = nn.BatchNorm(use_running_average=False)
    spread = nn.BatchNorm(use_running_average=False, **SYNC)
    variables = alone.init(jax.random.key(0), X)

    def fn(variables: Any, x: Any) -> Any:
        grad = jax.grad(lambda v, x: loss(spread, v, x), argnums=(0, 1), has_aux=True)
        (own, rows), state = grad(variables, x)
        return mx.get_replica_context().all_reduce("SUM", own["params"]), rows, state

    x = per_replica(two_cpus, X[:4], X[4:])
    found = two_cpus.run(compile_if(engine, fn), (two_cpus.replicate(variables), x))
    grad = jax.grad(lambda v, x: loss(alone, v, x), argnums=(0, 1), has_aux=True)
    (own, rows), state = grad(variables, X)
    local = two_cpus.experimental_local_results
    got = [
        jax.tree.map(lambda leaf: local(leaf)[0], part, is_leaf=_is_value)
        for part in found
    ]
    assert_close(got[0], own["params"], 1e-5)
    assert_close(got[2], state, 1e-6)
    assert_close(np.concatenate(local(found[1])), rows, 1e-5)


def _is_value(x: Any) -> bool:
    return isinstance(x, mx.distribute.DistributedValues) or hasattr(x, "layout")


def test_groups_of_replicas_are_refused(two_cpus: Any) -> None:
    with two_cpus.scope():
        norm = nnx.BatchNorm(3, axis_index_groups=[[0], [1]], rngs=nnx.Rngs(0), **SYNC)
    x = per_replica(two_cpus, X[:3], X[3:6])
    with pytest.raises(ValueError, match="`axis_index_groups` must be None"):
        two_cpus.run(mx.function(norm), (x,))


# Checkpoints ----------------------------------------------------------------------------


def _spread(count: int, steps: int) -> tuple[Any, Training]:
    strategy = mirrored(count)
    with strategy.scope():
        training = Training(norm=SYNC, rate=0.5)
    data = [per_replica(strategy, *np.array_split(a, count)) for a in (X, Y)]
    fn = mx.function(step)
    for _ in range(steps):
        strategy.run(fn, (*training.objects, *data))
    return strategy, training


def _everything(training: Training) -> Any:
    states = nnx.to_pure_dict(nnx.state(training.objects))
    return jax.tree.map(
        lambda x: (
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else np.asarray(x)
        ),
        states,
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_checkpoint_at_another_number_of_replicas(count: int, tmp_path: Path) -> None:
    _, training = _spread(2, 2)
    model, optimizer, metrics = training.objects
    saver = mx.train.Checkpoint(model=model, optimizer=optimizer, metrics=metrics)
    path, before = saver.save(tmp_path / "ckpt"), _everything(training)

    strategy, other = _spread(count, 1)
    model, optimizer, metrics = other.objects
    kernel = model.first.kernel
    loader = mx.train.Checkpoint(model=model, optimizer=optimizer, metrics=metrics)
    loader.restore(path).assert_consumed()
    assert model.first.kernel is kernel
    assert_close(_everything(other), before)
    assert metrics.loss.count[...] == 14
    data = [per_replica(strategy, *np.array_split(a, count)) for a in (X, Y)]
    strategy.run(mx.function(step), (*other.objects, *data))
    assert metrics.loss.count[...] == 21


def test_names_in_a_checkpoint(two_cpus: Any, tmp_path: Path) -> None:
    with two_cpus.scope():
        model = Net(nnx.Rngs(0))
    path = mx.train.Checkpoint(model=model).write(tmp_path / "ckpt")
    found = mx.train.load_checkpoint(path)
    assert {"model/first/kernel", "model/dropout/rngs/count"} < found.keys()


def test_a_model_outside_scopes_is_saved_in_place(tmp_path: Path) -> None:
    mirrored(2)  # from here on mirrax knows NNX
    model = Net(nnx.Rngs(0))
    saver = mx.train.Checkpoint(model=model)
    path, before = saver.write(tmp_path / "ckpt"), model.first.kernel[...]
    kernel = model.first.kernel
    kernel[...] = jnp.zeros_like(before)
    saver.read(path).assert_consumed()
    assert model.first.kernel is kernel
    np.testing.assert_array_equal(kernel[...], before)


# What is refused ------------------------------------------------------------------------


@both_engines
def test_a_model_made_outside_is_named(engine: str, two_cpus: Any) -> None:
    outside = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    fn = compile_if(engine, lambda x: outside(x))
    with pytest.raises(
        ValueError, match=r"nnx\.BatchStat 'BatchNorm\.mean', of shape \(3,\)"
    ):
        two_cpus.run(fn, (X,))
    assert not np.any(outside.mean[...])


@both_engines
def test_gradients_of_a_model_made_outside_are_refused_before_it_is_taken_apart(
    engine: str, two_cpus: Any
) -> None:
    class Outer(nnx.Module):
        def __init__(self) -> None:
            self.inner = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    outside: Any = Outer()
    before = outside.inner(X)

    def step(x: Any) -> Any:
        return nnx.grad(lambda model: jnp.sum(model.inner(x)))(outside)

    with pytest.raises(
        ValueError, match=r"nnx\.Param 'Linear\.(bias|kernel)'.*outside"
    ):
        two_cpus.run(compile_if(engine, step), (X,))
    np.testing.assert_array_equal(outside.inner(X), before)


def test_a_model_made_outside_as_an_argument(two_cpus: Any) -> None:
    outside: Any = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"takes a Linear as an argument.*strategy\.replicate"
    ):
        two_cpus.run(mx.function(lambda m, x: m(x)), (outside, X))
    eager = parts(two_cpus, two_cpus.run(lambda m, x: m(x), (outside, X)))
    np.testing.assert_allclose(eager[1], outside(X), atol=1e-6)


def test_a_plain_model_in_a_compiled_function() -> None:
    mirrored(2)
    outside = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match="which a compiled function cannot change|replicas"
    ):
        mx.function(lambda x: outside(x))(X)
    assert not np.any(outside.mean[...])


@both_engines
def test_a_model_of_another_strategy(engine: str, two_cpus: Any) -> None:
    other = mx.MirroredStrategy(["CPU:2", "CPU:3"])
    with other.scope():
        model = Net(nnx.Rngs(0))
    with pytest.raises(
        RuntimeError, match=r"'Net\.first\.kernel'.*Mixing different strategies"
    ):
        two_cpus.run(compile_if(engine, lambda m: m(X)), (model,))


@both_engines
def test_what_is_captured_in_replicas(engine: str, two_cpus: Any) -> None:
    class Sowing(nnx.Module):
        def __call__(self, x: Any) -> Any:
            self.sow(nnx.Intermediate, "seen", x + 1)
            return x

    with two_cpus.scope():
        model = Sowing()

    def fn(x: Any) -> Any:
        capturing: Any = nnx.capture(model, nnx.Intermediate)
        _, found = capturing(x)
        return found["seen"].get_value()[0]

    x = per_replica(two_cpus, 1.0, 2.0)
    assert parts(two_cpus, two_cpus.run(compile_if(engine, fn), (x,))) == [2.0, 3.0]


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@both_engines
def test_what_is_sown_in_replicas(engine: str, two_cpus: Any) -> None:
    class Sowing(nnx.Module):
        def __call__(self, x: Any) -> None:
            self.sow(nnx.Intermediate, "seen", x)

    with two_cpus.scope():
        model = Sowing()
    with pytest.raises(
        ValueError, match=r"nnx\.Intermediate 'Sowing\.seen'.*Return the"
    ):
        two_cpus.run(compile_if(engine, model), (X,))
        nnx.to_pure_dict(nnx.state(model))


@pytest.mark.parametrize("option", ["hijax", "ref"])
def test_other_kinds_of_variables(option: str, two_cpus: Any) -> None:
    with (
        two_cpus.scope(),
        pytest.raises(NotImplementedError, match=f"nnx.Param.*{option}"),
    ):
        nnx.Param(jnp.ones(2), **{option: True})


@both_engines
def test_welford(engine: str, two_cpus: Any) -> None:
    with two_cpus.scope():
        metrics = nnx.MultiMetric(loss=nnx.metrics.Welford())
    fn = compile_if(engine, lambda x: metrics.update(values=x))
    with pytest.raises(NotImplementedError, match=r"nnx\.metrics\.Welford"):
        two_cpus.run(fn, (X,))
    metrics.update(values=X)
    np.testing.assert_allclose(metrics.compute()["loss"].mean, X.mean(), atol=1e-6)


@both_engines
def test_an_optimizer_of_mirrax_as_transformation(engine: str, two_cpus: Any) -> None:
    """It brings options along; gradients are summed once."""
    summing: Any = mx.train.Optimizer(optax.sgd(0.1), reduce_dtype="bfloat16")
    lazy: Any = mx.train.Optimizer(optax.sgd(0.1), gradient_accumulation_steps=2)
    with two_cpus.scope():
        model = nnx.Dict(w=nnx.Param(jnp.float32(5.0)))
        optimizer = nnx.Optimizer(model, summing, wrt=nnx.Param)
        with pytest.raises(ValueError, match=r"optax\.MultiSteps"):
            nnx.Optimizer(model, lazy, wrt=nnx.Param)

    def update(x: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: model.w[...] * x)(model))

    two_cpus.run(compile_if(engine, update), (per_replica(two_cpus, 1.0, 2.0),))
    np.testing.assert_allclose(model.w[...], 4.7)


@both_engines
def test_several_steps_for_an_update(engine: str, two_cpus: Any) -> None:
    with two_cpus.scope():
        model = nnx.Dict(w=nnx.Param(jnp.float32(5.0)))
        transformation: Any = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)
        optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

    def update(x: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: model.w[...] * x)(model))

    fn = compile_if(engine, update)
    for first in (1.0, 3.0):
        two_cpus.run(fn, (per_replica(two_cpus, first, 2.0),))
    np.testing.assert_allclose(model.w[...], 5 - 0.1 * 4, rtol=1e-6)


def test_another_shape_is_refused(two_cpus: Any) -> None:
    with two_cpus.scope():
        model = Net(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"'Net\.first\.bias' has shape \(8,\)"):
        model.first.bias.set_value(jnp.ones(9))


# Other libraries ------------------------------------------------------------------------


def test_replicate_passes_through_what_is_no_array(two_cpus: Any) -> None:
    tree = {"w": np.ones(2), "activation": jax.nn.relu, "name": "dense", "none": None}
    found = two_cpus.replicate(tree)
    assert found["activation"] is jax.nn.relu
    assert found["name"] == "dense"
    np.testing.assert_array_equal(found["w"] + 1, [2, 2])


def test_equinox(two_cpus: Any) -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 1, 8, 2, key=jax.random.key(0))

    def fn(model: Any, x: Any) -> Any:
        return jax.vmap(model)(x)

    found = two_cpus.run(mx.function(fn), (two_cpus.replicate(model), X))
    np.testing.assert_allclose(parts(two_cpus, found)[1], fn(model, X), atol=1e-6)


def test_equinox_norms_over_unequal_parts_are_refused(two_cpus: Any) -> None:
    eqx = pytest.importorskip("equinox")
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        3, axis_name=["batch", "replica"], mode="batch"
    )

    def fn(x: Any, state: Any) -> Any:
        out, _ = jax.vmap(
            norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )(x, state)
        return out

    even = per_replica(two_cpus, X[:3], X[3:6])
    found = np.concatenate(
        parts(two_cpus, two_cpus.run(mx.function(fn), (even, state)))
    )
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-6)
    uneven = per_replica(two_cpus, X[:4], X[4:])
    with pytest.raises(NotImplementedError, match=r"equinox\.nn\.BatchNorm"):
        two_cpus.run(mx.function(fn), (uneven, state))
