"""The names of Flax that are not documented and that mirrax relies on.

Each test says what falls when a name changes.
"""

from __future__ import annotations

import inspect
from typing import Any

import flax
import flax.linen.normalization
import flax.nnx.nn.normalization
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.nnx import pytreelib, tracers, variablelib

import mirrax as mx
from mirrax._src.base.structures import Atom, is_leaf
from mirrax._src.integrations import nnx_training
from mirrax._src.integrations import nnx_variables as ours
from mirrax._src.state import foreign


def test_a_flax_that_is_built_differently_is_named(monkeypatch: Any) -> None:
    monkeypatch.delattr(pytreelib.Pytree, "_setattr")
    with pytest.raises(ImportError, match=rf"Flax {flax.__version__}.* no _setattr\."):
        ours.check_names()


def test_the_array_of_a_variable_is_in_raw_value(monkeypatch: Any) -> None:
    """Without it nothing of NNX is in a strategy: `_RawValue` has no place."""
    assert "_raw_value" in nnx.Variable.__slots__
    assert isinstance(vars(nnx.Variable)["_raw_value"], foreign.Route)
    variable = nnx.Param(jnp.ones(2))
    ours.raw_value.hold(variable, "other")
    assert variable.get_raw_value() == "other"


def test_making_a_variable_calls_variable_meta_call(monkeypatch: Any) -> None:
    """Without it variables made in a scope are not adopted."""
    made = []
    plain = variablelib.VariableMeta._variable_meta_call
    monkeypatch.setattr(
        variablelib.VariableMeta,
        "_variable_meta_call",
        lambda cls, *args, **kwargs: made.append(cls) or plain(cls, *args, **kwargs),
    )
    nnx.Param(jnp.ones(2))
    assert made == [nnx.Param]
    # A copy, of which NNX makes many, is not a new variable.
    nnx.Param(jnp.ones(2)).replace(jnp.ones(3))
    assert made == [nnx.Param] * 2


def test_making_a_module_calls_pytree_meta_construct(monkeypatch: Any) -> None:
    """Without it variables have no names, and what `nnx.vmap` makes is not adopted."""
    made = []
    plain = pytreelib.PytreeMeta._pytree_meta_construct
    monkeypatch.setattr(
        pytreelib.PytreeMeta,
        "_pytree_meta_construct",
        lambda cls, self, *args, **kwargs: (
            made.append(cls) or plain(cls, self, *args, **kwargs)
        ),
    )
    nnx.Dropout(0.5)
    assert made == [nnx.Dropout]


def test_setting_an_attribute_calls_setattr(monkeypatch: Any) -> None:
    """Without it `model.eval()` is not noticed by compiled functions."""
    found = []
    plain = pytreelib.Pytree._setattr
    monkeypatch.setattr(
        pytreelib.Pytree,
        "_setattr",
        lambda self, name, value: found.append(name) or plain(self, name, value),
    )
    dropout = nnx.Dropout(0.5)
    found.clear()
    dropout.eval()
    assert found == ["deterministic"]


def test_traces_come_from_current_jax_trace(monkeypatch: Any) -> None:
    """Without it NNX refuses every change in a compiled function: "different trace level"."""
    monkeypatch.setattr(tracers, "current_jax_trace", lambda: "here")
    variable, module = nnx.Param(jnp.ones(2)), nnx.Dropout(0.5)
    assert variable._trace_state.jax_trace == "here"
    assert module._pytree__state.trace_state.jax_trace == "here"
    monkeypatch.setattr(tracers, "current_jax_trace", lambda: "there")
    assert not variable._can_update
    assert not variable._trace_state.is_valid()


def test_a_module_can_be_an_atom() -> None:
    """Without it a module in the arguments is a pytree, and what replicas change is lost."""
    assert Atom in nnx.Pytree.__bases__
    assert is_leaf(nnx.Dropout(0.5)) and is_leaf(nnx.List([])) and is_leaf(nnx.Rngs(0))
    assert not is_leaf(nnx.state(nnx.Rngs(0)))


@pytest.mark.parametrize(
    "module",
    [flax.nnx.nn.normalization, flax.linen.normalization],
    ids=["nnx", "linen"],
)
def test_statistics_come_from_compute_stats(module: Any) -> None:
    """Without it BatchNorm averages the means of unequal parts, which is silently wrong."""
    mx.MirroredStrategy(["CPU:0", "CPU:1"])
    plain = inspect.unwrap(module._compute_stats)
    names = [*inspect.signature(plain).parameters]
    assert plain is not module._compute_stats
    assert names[:8] == [
        *("x", "axes", "dtype", "axis_name", "axis_index_groups", "use_mean"),
        *("use_fast_variance", "mask"),
    ]
    assert set(names[8:]) <= {"force_float32_reductions"}
    assert "_compute_stats(" in inspect.getsource(module.BatchNorm.__call__)


def test_the_state_holds_the_variables_themselves() -> None:
    """Without it `mx.value_and_grad(loss, nnx.state(model, nnx.Param))` knows no variable."""
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert nnx.state(linear)["kernel"] is linear.kernel


def test_an_optimizer_calls_its_transformation() -> None:
    """Without `tx` and `step` gradients are not summed over replicas."""
    import optax

    strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    assert isinstance(optimizer.tx, mx.train.Optimizer)
    assert optimizer.tx in nnx_training._compiled
    assert ours.raw_value.held(optimizer.step).strategy is strategy


def test_streams_are_seeded_by_reseed() -> None:
    """Without it a replica that seeds its streams again would be ignored."""
    rngs = nnx.Rngs(0)
    nnx.reseed(rngs, default=1)
    assert rngs.default.key[...] == nnx.Rngs(1)()


def test_reading_a_key_is_enough_to_fold_it() -> None:
    """Without it all replicas drop the same: a stream draws from its key and its count."""
    stream = nnx.Rngs(0).default
    expected = jax.random.fold_in(stream.key[...], stream.count[...])
    assert stream() == expected


def test_a_transformation_asks_whether_it_can_update(monkeypatch: Any) -> None:
    """Without it one of a plain model, in a replica, fails after the model was emptied."""
    asked = []
    kept = property(lambda self: asked.append(self) or True)
    monkeypatch.setattr(nnx.Variable, "_can_update", kept)
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    nnx.grad(lambda model: jnp.sum(model(jnp.ones(3))))(model)
    assert any(each is model.kernel for each in asked)
