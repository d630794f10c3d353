"""`shard_state=True`: the same weights, with 1/n of the optimizer's state on each device."""

from __future__ import annotations

import copy
import gc
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import compile_if, mirrored, per_replica
from helpers.hlo import compiled_text, count

import mirrax as mx

from .sharding import (
    SHAPES,
    STEPS,
    TRANSFORMATIONS,
    assert_close,
    by_optax,
    distribute,
    gradients_of,
    initial_values,
    live_bytes,
    state_bytes,
    train_functionally,
    train_variables,
    transformations,
    variables_in,
)

# The same weights -----------------------------------------------------------------------


@transformations(0)
def test_variables(name: str) -> None:
    optimizer = mx.train.Optimizer(TRANSFORMATIONS[name](), shard_state=True)
    found = train_variables(mirrored(4), optimizer)
    assert_close(found, by_optax(4, name))
    assert any(type(v).__name__ == "ShardedVariable" for v in optimizer.variables)


@transformations(1)
def test_functional_style(name: str) -> None:
    optimizer = mx.train.Optimizer(TRANSFORMATIONS[name](), shard_state=True)
    found, state = train_functionally(mirrored(2), optimizer)
    assert_close(found, by_optax(2, name))
    leaves = jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "layout"))
    for leaf in leaves:  # in parts, also after a step
        whole = not any(d % 2 == 0 and d for d in leaf.shape)
        assert leaf.array.is_fully_replicated is whole


@pytest.mark.parametrize(
    "name",
    ["clip", *(pytest.param(n, marks=pytest.mark.slow) for n in ("lamb", "multi"))],
)
def test_eager_replicas(name: str) -> None:
    expected = by_optax(2, name)
    optimizer = mx.train.Optimizer(TRANSFORMATIONS[name](), shard_state=True)
    assert_close(train_variables(mirrored(2), optimizer, "eager"), expected)
    optimizer = mx.train.Optimizer(TRANSFORMATIONS[name](), shard_state=True)
    found, state = train_functionally(mirrored(2), optimizer, "eager")
    assert_close(found, expected)
    kinds = {
        type(x) for x in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "layout"))
    }
    assert {kind.__name__ for kind in kinds} == {"Sharded", "Mirrored"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_accumulation(engine: str) -> None:
    """Five calls, two of which update; the fifth is on its way."""
    optimizer = mx.train.Optimizer(
        TRANSFORMATIONS["clip"](), shard_state=True, gradient_accumulation_steps=2
    )
    found = train_variables(mirrored(4), optimizer, engine, range(5))
    assert_close(found, by_optax(4, "clip", 5, calls=2))
    assert optimizer.iterations.numpy() == 2
    optimizer = mx.train.Optimizer(
        TRANSFORMATIONS["clip"](), shard_state=True, gradient_accumulation_steps=2
    )
    found, _ = train_functionally(mirrored(2), optimizer, engine)
    assert_close(found, by_optax(2, "clip", 4, calls=2))


@pytest.mark.slow
def test_fifty_steps_in_float64_on_eight_replicas() -> None:
    with jax.enable_x64(True):
        optimizer = mx.train.Optimizer(TRANSFORMATIONS["clip"](), shard_state=True)
        known: dict[str, Any] = {"steps": range(50), "dtype": "float64"}
        found = train_variables(mirrored(8), optimizer, **known)
        assert found["a"].dtype == np.float64
        assert_close(found, by_optax(8, "clip", 50, dtype="float64"), 1e-12)
    del optimizer
    gc.collect()  # a later trace, without 64 bits, would look at variables that still live


def test_other_ways_to_reduce() -> None:
    """A strategy's own algorithm sums the gradients, and the sum is cut into parts."""
    strategy = mirrored(2, cross_device_ops=mx.distribute.ReductionToOneDevice())
    optimizer = mx.train.Optimizer(
        TRANSFORMATIONS["adam"](), shard_state=True, reduce_dtype="float32"
    )
    assert_close(train_variables(strategy, optimizer), by_optax(2, "adam"))


def test_gradients_that_are_summed_already() -> None:
    strategy, optimizer = (
        mirrored(2),
        mx.train.Optimizer(optax.adam(1e-2), shard_state=True),
    )
    variables = variables_in(strategy)

    @mx.function
    def step(gradients: Any) -> None:
        total = mx.get_replica_context().all_reduce("SUM", gradients)
        pairs = [(total[k], variables[k]) for k in SHAPES]
        optimizer.apply_gradients(pairs, aggregate=False)

    for i in range(STEPS):
        strategy.run(step, (distribute(strategy, gradients_of(2, i)),))
    assert_close({k: v.numpy() for k, v in variables.items()}, by_optax(2, "adam"))


# In loops, uneven steps, and around `run` -----------------------------------------------


def train_on_rows(shard_state: bool, how: str) -> tuple[list[np.ndarray], Any]:
    strategy = mirrored(4)
    with strategy.scope():
        w = mx.Variable(np.linspace(-1, 1, 32, dtype="float32").reshape(8, 4))
        b = mx.Variable(np.zeros(4, "float32"))
    optimizer = mx.train.Optimizer(TRANSFORMATIONS["clip"](), shard_state=shard_state)
    rng, rows = np.random.default_rng(0), 22 if how == "uneven" else 32
    x, y = (rng.normal(size=(rows, n)).astype("float32") for n in (8, 4))
    data = mx.data.Dataset.from_tensor_slices((x, y)).batch(8)

    def replica_fn(batch: Any) -> jax.Array:
        x, y = batch
        gradients = mx.grad(lambda: jnp.sum((x @ w + b - y) ** 2) / 8, [w, b])()
        optimizer.apply_gradients(zip(gradients, [w, b]))
        return jnp.sum(w.read_value())  # the new one, in the same step

    distributed = strategy.experimental_distribute_dataset(data)
    seen: list[Any] = []
    if how == "run_steps":
        seen.append(strategy.run_steps(replica_fn, iter(distributed), 4))
    else:
        caller = mx.function(lambda batch: strategy.run(replica_fn, (batch,)))
        compiled = mx.function(replica_fn)
        for batch in distributed:
            is_outer = how == "caller"
            seen.append(caller(batch) if is_outer else strategy.run(compiled, (batch,)))
    last = np.asarray(strategy.experimental_local_results(seen[-1])[0]).ravel()[-1]
    np.testing.assert_allclose(last, np.sum(w.numpy()), rtol=1e-5)
    return [w.numpy(), b.numpy()], optimizer


@pytest.mark.slow
@pytest.mark.parametrize("how", ["uneven", "run_steps", "caller"])
def test_steps_of_all_kinds(how: str) -> None:
    found, optimizer = train_on_rows(True, how)
    expected, whole = train_on_rows(False, how)
    for mine, theirs in zip(found, expected):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    assert max(state_bytes(optimizer).values()) < 0.3 * max(state_bytes(whole).values())


def test_in_a_loop_of_a_replica_all_compute_it_by_themselves() -> None:
    """Inside `lax.scan` replicas cannot stop for a computation of all; nothing else changes."""
    strategy, optimizer = (
        mirrored(2),
        mx.train.Optimizer(optax.adam(1e-2), shard_state=True),
    )
    with strategy.scope():
        params: Any = {k: jnp.asarray(v) for k, v in initial_values().items()}
        state = optimizer.init(params)

    @mx.function
    def replica_fn(params: Any, state: Any, gradients: Any) -> Any:
        def turn(carry: Any, gradients: Any) -> Any:
            updates, state = optimizer.update(gradients, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), ()

        return jax.lax.scan(turn, (params, state), gradients)[0]

    every = [gradients_of(2, i) for i in range(STEPS)]
    parts = [{k: np.stack([e[r][k] for e in every]) for k in SHAPES} for r in range(2)]
    params, state = strategy.run(
        replica_fn, (params, state, distribute(strategy, parts))
    )
    assert_close({k: np.asarray(v) for k, v in params.items()}, by_optax(2, "adam"))


# Memory and messages --------------------------------------------------------------------


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_bytes_on_each_device(num_replicas: int) -> None:
    """Counted from all live arrays: nothing whole is left anywhere."""
    strategy, sizes = mirrored(num_replicas), (784, 128, 128, 10)
    with strategy.scope():
        shapes = [s for pair in zip(sizes, sizes[1:]) for s in (pair, pair[1:])]
        variables = [mx.Variable(jnp.zeros(shape)) for shape in shapes]
    before = live_bytes()
    optimizer = mx.train.Optimizer(optax.adam(1e-3), shard_state=True)
    optimizer.build(variables)
    after = live_bytes()
    whole = 2 * sum(v.numpy().nbytes for v in variables)
    for device in strategy.replica_mesh.devices:
        grown = after[device] - before[device]
        assert grown <= 1.05 * whole / num_replicas


def test_one_reduce_scatter_and_one_gather_a_pack() -> None:
    strategy, optimizer = (
        mirrored(4),
        mx.train.Optimizer(optax.adam(1e-2), shard_state=True),
    )
    variables = variables_in(strategy)

    @mx.function
    def step(gradients: Any) -> None:
        optimizer.apply_gradients([(gradients[k], variables[k]) for k in SHAPES])

    gradients = distribute(strategy, gradients_of(4, 0))
    strategy.run(step, (gradients,))
    text = compiled_text(step, strategy, gradients)
    assert count(text, "reduce-scatter") == 1
    assert count(text, "all-gather") == 1
    assert count(text, "all-reduce") == 1  # what no axis divides


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("uses", [1, 2])
def test_parameters_are_updated_in_parts(dtype: str, uses: int) -> None:
    """In functional style too; updates that somebody else needs are gathered themselves."""
    strategy = mirrored(4)
    optimizer = mx.train.Optimizer(optax.sgd(0.5, momentum=0.9), shard_state=True)
    gradient = jnp.full((16, 8), 0.25, dtype)
    with strategy.scope():
        params = strategy.replicate(jnp.ones((16, 8), dtype))
        state = optimizer.init(params)

    @mx.function
    def step(params: Any, state: Any, gradient: Any) -> Any:
        wide = gradient.astype(jnp.float32)
        updates, state = optimizer.update(wide, state, params)
        more = jnp.sum(updates) if uses == 2 else 0.0
        return optax.apply_updates(params, updates), state, more

    given = params, state, gradient
    new, _, more = strategy.run(step, given)
    assert new.dtype == dtype  # 1 - 0.5 * 4 * 0.25
    np.testing.assert_array_equal(new, np.full((16, 8), 0.5))
    assert float(more) == (-64.0 if uses == 2 else 0.0)
    text = compiled_text(step, strategy, *given)
    assert count(text, "all-gather") == 1
    whole = [s for s in text.splitlines() if "f32[16,8]" in s and " add(" in s]
    assert bool(whole) is (uses == 2)


def test_narrow_updates_are_gathered_as_they_are() -> None:
    strategy = mirrored(4)
    momentum = optax.sgd(0.5, momentum=0.9, accumulator_dtype=jnp.float16)
    optimizer = mx.train.Optimizer(momentum, shard_state=True)
    with strategy.scope():
        params = strategy.replicate(jnp.ones((16, 8)))
        state = optimizer.init(params)

    @mx.function
    def step(params: Any, state: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    given = params, state, jnp.full((16, 8), 0.25, "float16")
    new, _ = strategy.run(step, given)
    np.testing.assert_array_equal(new, np.full((16, 8), 0.5, np.float32))
    text = compiled_text(step, strategy, *given)
    (gather,) = (line for line in text.splitlines() if " all-gather(" in line)
    assert "f16[" in gather and "f32[" not in gather


# Slots ------------------------------------------------------------------------------------


def test_slots_are_read_and_assigned_as_a_whole() -> None:
    strategy, optimizer = (
        mirrored(4),
        mx.train.Optimizer(optax.adam(1e-2), shard_state=True),
    )
    variables = variables_in(strategy)
    train_variables(strategy, optimizer, variables=variables)
    slot = optimizer.state[0].mu["k"]
    value = slot.numpy()
    assert value.shape == slot.shape == (16, 8) and np.any(value)
    for engine in ("eager", "compiled"):
        seen = strategy.run(compile_if(engine, lambda: slot * 1.0))
        for own in strategy.experimental_local_results(seen):
            np.testing.assert_array_equal(own, value)
    assert "ShardedVariable" in repr(slot)
    slot.assign(jnp.ones((16, 8)))
    slot.assign_add(jnp.ones((16, 8)))
    np.testing.assert_array_equal(slot.numpy(), np.full((16, 8), 2.0))
    twin = copy.deepcopy(slot)
    strategy.run(mx.function(lambda: slot.assign(slot * 2)))
    np.testing.assert_array_equal(slot.numpy(), np.full((16, 8), 4.0))
    np.testing.assert_array_equal(twin.numpy(), np.full((16, 8), 2.0))
    for each in (slot, twin):
        assert each.in_one_array()[0].sharding.shard_shape((16, 8)) == (4, 8)


# Checkpoints --------------------------------------------------------------------------------


def continued(
    path: Path, num_replicas: int, shard_state: bool, calls: int, is_built: bool
) -> dict[str, np.ndarray]:
    """Restores, and makes three more steps, on any number of replicas."""
    strategy = mirrored(num_replicas)
    variables = variables_in(strategy)
    optimizer = mx.train.Optimizer(
        optax.adam(1e-2), shard_state=shard_state, gradient_accumulation_steps=calls
    )
    if is_built:
        optimizer.build(list(variables.values()))
    checkpoint = mx.train.Checkpoint(variables=variables, optimizer=optimizer)
    checkpoint.read(path).assert_existing_objects_matched()
    step = mx.function(
        lambda g: optimizer.apply_gradients([(g[k], variables[k]) for k in SHAPES])
    )
    for i in range(3, 6):
        mean = gradients_of(1, i)[0]
        parts = [{k: v / num_replicas for k, v in mean.items()}] * num_replicas
        strategy.run(step, (distribute(strategy, parts),))
    return {k: v.numpy() for k, v in variables.items()}


@pytest.mark.slow
@pytest.mark.parametrize("shard_state", [True, False])
@pytest.mark.parametrize("calls", [1, 2])
def test_checkpoints(shard_state: bool, calls: int, tmp_path: Path) -> None:
    """Restored with and without, on as many replicas and on others, before and after a build."""
    strategy, path = mirrored(4), tmp_path / "c"
    variables = variables_in(strategy)
    optimizer = mx.train.Optimizer(
        optax.adam(1e-2), shard_state=shard_state, gradient_accumulation_steps=calls
    )
    train_variables(strategy, optimizer, steps=range(3), variables=variables)
    checkpoint = mx.train.Checkpoint(variables=variables, optimizer=optimizer)
    checkpoint.write(path, wait=True)
    expected = continued(path, 4, shard_state, calls, is_built=True)
    assert_close(continued(path, 2, not shard_state, calls, is_built=True), expected)
    assert_close(continued(path, 2, not shard_state, calls, is_built=False), expected)
    assert_close(continued(path, 1, True, calls, is_built=False), expected)


def test_a_state_in_functional_style_is_saved_as_a_whole(tmp_path: Path) -> None:
    strategy, optimizer = (
        mirrored(2),
        mx.train.Optimizer(optax.adam(1e-2), shard_state=True),
    )
    with strategy.scope():
        state = optimizer.init({"w": jnp.ones((8, 3))})
    state = jax.tree.map(lambda x: x + 1, state)
    mx.train.Checkpoint(state=state).write(tmp_path / "c", wait=True)
    with strategy.scope():
        checkpoint = mx.train.Checkpoint(state=optimizer.init({"w": jnp.ones((8, 3))}))
    checkpoint.read(tmp_path / "c").assert_consumed()
    mu = checkpoint.state[0].mu["w"]
    np.testing.assert_array_equal(np.asarray(mu), np.ones((8, 3)))
    assert mu.array.sharding.shard_shape((8, 3)) == (4, 3)


# Where there is nothing to share, and what cannot be --------------------------------------


@pytest.mark.parametrize("kind", ["default", "one device", "one replica"])
def test_one_replica_has_all(kind: str) -> None:
    strategy = {
        "default": mx.get_strategy,
        "one device": lambda: mx.OneDeviceStrategy("CPU:0"),
        "one replica": lambda: mirrored(1),
    }[kind]()
    optimizer = mx.train.Optimizer(optax.adam(1e-2), shard_state=True)
    assert_close(train_variables(strategy, optimizer), by_optax(1, "adam"))
    optimizer = mx.train.Optimizer(optax.adam(1e-2), shard_state=True)
    assert_close(train_functionally(strategy, optimizer)[0], by_optax(1, "adam"))


def peeking() -> optax.GradientTransformation:
    """Looks at the values of parameters when its state is made."""

    def init_fn(params: Any) -> Any:
        return {"is_large": jnp.asarray(float(params["a"][0, 0]) > 1), "m": params}

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, state

    return optax.GradientTransformation(init_fn, update_fn)


def test_a_state_that_cannot_be_made_in_parts() -> None:
    strategy, optimizer = mirrored(2), mx.train.Optimizer(peeking(), shard_state=True)
    variables = variables_in(strategy)
    with pytest.raises(ValueError, match=r"'optimizer' cannot be sharded: `peeking`"):
        optimizer.build(list(variables.values()))
    with (
        strategy.scope(),
        pytest.raises(ValueError, match="`peeking` cannot be traced"),
    ):
        optimizer.init({k: jnp.asarray(v) for k, v in initial_values().items()})
    with pytest.raises(
        ValueError, match=r"can be neither planned from shapes nor sharded.*`peeking`"
    ):
        optimizer.explain(variables)


@pytest.mark.parametrize("params", ["w", {"w": 3}])
def test_what_has_no_shape_cannot_be_explained(params: Any) -> None:
    optimizer = mx.train.Optimizer(optax.adam(1e-2), shard_state=True)
    with pytest.raises(TypeError, match="`explain` takes variables, or a pytree"):
        optimizer.explain(params)


@pytest.mark.parametrize("style", ["variables", "state"])
def test_a_large_state_that_no_axis_divides(style: str) -> None:
    """A warning names it; small odd arrays beside divided ones are no matter."""
    strategy = mirrored(4)

    def begin(**shapes: tuple[int, ...]) -> None:
        optimizer = mx.train.Optimizer(optax.adam(1e-2), shard_state=True)
        with strategy.scope():
            if style == "state":
                optimizer.init({k: jnp.zeros(s) for k, s in shapes.items()})
            else:
                each = [mx.Variable(jnp.zeros(s), name=k) for k, s in shapes.items()]
                optimizer.build(each)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin(w=(1024, 1024), odd=(1001,))
        begin(odd=(1001,))
    with pytest.warns(
        UserWarning, match="saves little: of the state of 'optim"
    ) as told:
        begin(w=(4, 4), words=(50257, 3))
    (warning,) = told
    assert "0/mu/words, [50257, 3]" in str(warning.message)
    assert "a little larger, [50260, 3]" in str(warning.message)
    assert "each of 4 devices holds 1.2 MiB, without it 1.2 MiB" in str(warning.message)


# Looking at it --------------------------------------------------------------------------


def test_what_lies_where_before_and_after_a_build() -> None:
    strategy = mirrored(4)
    optimizer = mx.train.Optimizer(optax.adam(1e-2), shard_state=True)
    with pytest.raises(ValueError, match="'optimizer' is not built yet: pass"):
        optimizer.explain()
    shapes = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}
    with strategy.scope():
        plan = optimizer.explain(shapes)
    whole = 4 + 2 * 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert plan.bytes_if_mirrored == whole
    assert "axis 1 over 4 devices" in str(plan)
    assert "a copy on each device" in str(plan)
    variables = variables_in(strategy)
    optimizer.build(list(variables.values()))
    assert optimizer.explain() == plan
    held = state_bytes(optimizer).values()
    assert set(held) == {plan.bytes_per_device + 4}  # and the number of iterations
    plain = mx.train.Optimizer(optax.adam(1e-2)).explain(shapes)
    assert plain.bytes_per_device == plain.bytes_if_mirrored == whole


def test_live_bytes_by_variable_slot_and_batch() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v = mx.Variable(jnp.zeros((64, 64)), name="memory_v")
    optimizer = mx.train.Optimizer(optax.adam(1e-2), shard_state=True)
    optimizer.build([v])
    batch = per_replica(strategy, np.zeros(1000, "float32"), np.zeros(1000, "float32"))
    strategy.run(mx.function(lambda x: x * 1.0), (batch,))  # now in one array
    report = strategy.memory()
    assert list(report.devices) == ["CPU:0", "CPU:1"]
    for held in report.devices.values():
        assert held["variables"] == 64 * 64 * 4
        assert held["slots"] == 2 * 64 * 64 * 4 // 2 + 4 + 4  # two counters
        assert held["batches"] >= 4000
    assert report.variables["memory_v"] == 64 * 64 * 4
    assert report.variables["optimizer/0/mu/memory_v"] == 64 * 64 * 4 // 2
    assert "memory_v" in str(report)
