"""NNX's variables under an optimizer whose state lies in parts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.engines import mirrored
from train.sharding import live_bytes

import mirrax as mx
from mirrax._src.integrations import nnx_variables
from mirrax._src.integrations.nnx_variables import raw_value


def train(kind: str, shard_state: bool) -> tuple[np.ndarray, Any]:
    strategy = mirrored(2)
    with strategy.scope():
        model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        own = mx.train.Optimizer(optax.adam(0.1), shard_state=shard_state)
        tx: Any = own
        wrapped = nnx.Optimizer(model, tx, wrt=nnx.Param) if kind == "nnx" else None

    @mx.function
    def step(x: jax.Array) -> None:
        gradients = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)
        if wrapped is not None:
            wrapped.update(model, gradients)
        else:
            kernel, bias = gradients["kernel"][...], gradients["bias"][...]
            own.apply_gradients([(kernel, model.kernel), (bias, model.bias)])

    for _ in range(3):
        strategy.run(step, (jnp.ones((2, 8)),))
    return np.asarray(model.kernel[...]), wrapped


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mirrax", "nnx"])
def test_the_same_weights(kind: str) -> None:
    expected, _ = train(kind, False)
    found, optimizer = train(kind, True)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    if optimizer is not None:
        slots = slots_of(optimizer)
        assert all(slot.is_slot for slot in slots)
        arrays = [slot.in_one_array()[0] for slot in slots]
        in_parts = [a.shape for a in arrays if not a.is_fully_replicated]
        assert sorted(in_parts) == [(4,), (4,), (8, 4), (8, 4)]


def slots_of(optimizer: Any) -> list[Any]:
    leaves = jax.tree.leaves(
        optimizer.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return [raw_value.held(leaf) for leaf in leaves]


def test_no_device_ever_has_the_whole_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not while NNX makes its variables of it."""
    strategy, seen = mirrored(4), []
    make = nnx_variables.ShardedVariable

    def watched(*args: Any) -> Any:
        seen.append(max(live_bytes().values()))
        return make(*args)

    with strategy.scope():
        model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        before = max(live_bytes().values())
        monkeypatch.setattr(nnx_variables, "ShardedVariable", watched)
        tx: Any = mx.train.Optimizer(optax.adam(0.1), shard_state=True)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert len(seen) == 4
    assert (
        max(seen) - before < 64 * 64 * 4
    )  # both moments of the kernel take half of it
    assert len(slots_of(optimizer)) == 5
