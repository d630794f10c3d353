"""One training step (forward, backward, SGD), hand-written in JAX and with mirrax.

Each maker returns a function without arguments that does a step and returns the
replicas' losses. Inputs lie on the devices already, so that only the step is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Devices, Step
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import Arrays, Model

import mirrax as mx

AXIS = "replica"
RATE = 0.01
SMALL_BYTES = 64 * 1024

Reduce = Callable[[Arrays], list[jax.Array]]
MakeStep = Callable[[Model, Devices], Step]


# Hand-written -------------------------------------------------------------------------


def one_by_one(gradients: Arrays) -> list[jax.Array]:
    """One psum for each tensor."""
    return [lax.psum(gradient, AXIS) for gradient in gradients]


def packed(gradients: Arrays) -> list[jax.Array]:
    """Tensors under 64 KiB in one psum for each dtype, larger ones each alone."""
    results: list[Any] = [None] * len(gradients)
    packs: dict[Any, list[int]] = {}
    for i, gradient in enumerate(gradients):
        if gradient.nbytes < SMALL_BYTES:
            packs.setdefault(gradient.dtype, []).append(i)
        else:
            results[i] = lax.psum(gradient, AXIS)
    for positions in packs.values():
        flat = jnp.concatenate([gradients[i].reshape(-1) for i in positions])
        total = lax.psum(lax.optimization_barrier(flat), AXIS)
        total = lax.optimization_barrier(total)
        ends = np.cumsum([gradients[i].size for i in positions])[:-1]
        for i, part in zip(positions, jnp.split(total, ends)):
            results[i] = part.reshape(gradients[i].shape)
    return results


def handwritten(model: Model, devices: Devices, reduce: Reduce = one_by_one) -> Step:
    """jit(shard_map) with replicated, donated parameters."""
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    copied, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
    total = model.batch_size

    def step(params: list[jax.Array], x: jax.Array, y: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(params, model, x, y, total)
        pairs = zip(params, reduce(gradients))
        return [p - RATE * g for p, g in pairs], loss.reshape(1)

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P(AXIS), P(AXIS)),
        out_specs=(P(), P(AXIS)),
        check_vma=False,
    )
    compiled = jax.jit(mapped, donate_argnums=0)
    params = jax.device_put(model.make_parameters(), copied)
    x, y = jax.device_put(model.make_batch(), split)

    def run() -> jax.Array:
        nonlocal params
        params, loss = compiled(params, x, y)
        return loss

    return run


def handwritten_packed(model: Model, devices: Devices) -> Step:
    return handwritten(model, devices, packed)


def plain_jit(model: Model, devices: Devices) -> Step:
    """What people write for one device."""
    total = model.batch_size

    def step(params: list[jax.Array], x: jax.Array, y: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(params, model, x, y, total)
        pairs = zip(params, gradients)
        return [p - RATE * g for p, g in pairs], loss.reshape(1)

    compiled = jax.jit(step, donate_argnums=0)
    params = jax.device_put(model.make_parameters(), devices[0])
    x, y = jax.device_put(model.make_batch(), devices[0])

    def run() -> jax.Array:
        nonlocal params
        params, loss = compiled(params, x, y)
        return loss

    return run


def limits(devices: Devices) -> dict[str, MakeStep]:
    """The hand-written steps; the fastest of them is the limit."""
    if len(devices) == 1:
        return {"jit": plain_jit, "psum": handwritten}
    return {"psum each": handwritten, "psum packed": handwritten_packed}


# With mirrax --------------------------------------------------------------------------


def with_variables(model: Model, devices: Devices) -> Step:
    """`mx.Variable`s that the step updates."""
    strategy = mx.distribute.MirroredStrategy(devices)
    step = variables_step(strategy, model)
    x, y = distribute(strategy, model.make_batch())
    return lambda: strategy.run(step, args=(x, y))


def with_state(model: Model, devices: Devices) -> Step:
    """State that goes in and comes out."""
    strategy = mx.distribute.MirroredStrategy(devices)
    step = state_step(model)
    x, y = distribute(strategy, model.make_batch())
    state = strategy.replicate([jnp.asarray(p) for p in model.make_parameters()])

    def run() -> Any:
        nonlocal state
        state, loss = strategy.run(step, args=(state, x, y))
        return loss

    return run


def variables_step(
    strategy: mx.distribute.Strategy, model: Model, total: int = 0
) -> mx.Function:
    """A step of (x, y) that trains variables of its own."""
    with strategy.scope():
        variables = [mx.Variable(p) for p in model.make_parameters()]
    total = total or model.batch_size

    @mx.function
    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn() -> jax.Array:
            params = [v.read_value() for v in variables]
            return mean_loss(params, model, x, y, total)

        loss, gradients = mx.value_and_grad(loss_fn, variables)()
        context = mx.distribute.get_replica_context()
        gradients = context.all_reduce("sum", gradients)
        for variable, gradient in zip(variables, gradients):
            variable.assign_sub(RATE * gradient)
        return loss.reshape(1)

    return step


def state_step(model: Model, total: int = 0) -> mx.Function:
    """A step of (state, x, y) that returns the new state."""
    total = total or model.batch_size

    @mx.function(donate_argnums=0)
    def step(state: list[jax.Array], x: jax.Array, y: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(state, model, x, y, total)
        context = mx.distribute.get_replica_context()
        gradients = context.all_reduce("sum", gradients)
        pairs = zip(state, gradients)
        return [p - RATE * g for p, g in pairs], loss.reshape(1)

    return step


def optimizer_step(
    strategy: mx.distribute.Strategy,
    model: Model,
    transformation: Any,
    shard_state: bool = False,
) -> tuple[mx.Function, list[mx.Variable], mx.train.Optimizer]:
    """A step of (x, y) that trains variables of its own, these, and their optimizer."""
    with strategy.scope():
        variables = [mx.Variable(p) for p in model.make_parameters()]
        optimizer = mx.train.Optimizer(transformation, shard_state=shard_state)
    optimizer.build(variables)

    @mx.function
    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn() -> jax.Array:
            params = [v.read_value() for v in variables]
            return mean_loss(params, model, x, y, model.batch_size)

        loss, gradients = mx.value_and_grad(loss_fn, variables)()
        optimizer.apply_gradients(zip(gradients, variables))
        return loss.reshape(1)

    return step, variables, optimizer


def adam_state_step(
    strategy: mx.distribute.Strategy, model: Model, shard_state: bool
) -> Step:
    """A step with Adam of parameters and a state that go in and come out."""
    optimizer = mx.train.Optimizer(optax.adam(1e-3), shard_state=shard_state)
    with strategy.scope():
        params = strategy.replicate([jnp.asarray(p) for p in model.make_parameters()])
        kept = params, optimizer.init(params)
    x, y = distribute(strategy, model.make_batch())

    @mx.function(donate_argnums=(0, 1))
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        total = model.batch_size
        loss, gradients = jax.value_and_grad(mean_loss)(params, model, x, y, total)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss.reshape(1)

    def run() -> Any:
        nonlocal kept
        *new, loss = strategy.run(step, args=(*kept, x, y))
        kept = tuple(new)
        return loss

    return run


MIRRAX: dict[str, MakeStep] = {
    "mirrax variables": with_variables,
    "mirrax state": with_state,
}


def distribute(
    strategy: mx.distribute.Strategy,
    batch: Sequence[np.ndarray],
    sizes: Sequence[int] = (),
    on_devices: bool = True,
) -> Any:
    """A global batch as per-replica values.

    Args:
        strategy: Whose replicas get the parts.
        batch: Inputs and labels.
        sizes: Rows for each replica; equally many by default.
        on_devices: Whether the parts go to the devices now, or stay NumPy arrays.
    """
    count = strategy.num_replicas_in_sync
    ends = np.cumsum(sizes)[:-1] if sizes else count
    parts = [np.split(array, ends) for array in batch]
    place = jnp.asarray if on_devices else np.asarray
    return strategy.experimental_distribute_values_from_function(
        lambda context: tuple(
            place(part[context.replica_id_in_sync_group]) for part in parts
        )
    )


def mean_loss(
    params: Arrays, model: Model, x: jax.Array, y: jax.Array, total: int
) -> jax.Array:
    """This replica's share of the mean loss of the global batch."""
    return jnp.sum(model.losses(params, x, y)) / total
