"""What the tests of corners share: scopes, values and variables of two replicas."""

from __future__ import annotations

import contextlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mirrax as mx
from helpers.engines import mirrored
from mirrax._src.base.jax_compat import Tracer

PerReplica = mx.distribute.PerReplica

in_and_out = pytest.mark.parametrize("where", ["outside", "inside"])


def per(*values: float) -> PerReplica:
    """A per-replica value made by hand, with all parts on the default device."""
    return PerReplica([jnp.float32(value) for value in values])


def scope_if(where: str, strategy: Any) -> contextlib.AbstractContextManager[Any]:
    """The strategy's scope, or none: see `in_and_out`."""
    return strategy.scope() if where == "inside" else contextlib.nullcontext()


def make(strategy: Any, value: Any = 0.0, **kwargs: Any) -> Any:
    """A variable of that strategy."""
    with strategy.scope():
        return mx.Variable(value, **kwargs)


def mirrored_value(strategy: Any, *values: float) -> Any:
    """The sum of `values`, with a copy on each device."""
    with strategy.scope():
        return strategy.extended.reduce_to("SUM", per(*values), mx.Variable(0.0))


def numbers(values: Any) -> list[Any]:
    """Concrete numbers; a tracer that has leaked is an error."""
    assert not any(isinstance(value, Tracer) for value in values), "a tracer has leaked"
    return [np.asarray(value).tolist() for value in values]


def copies(variable: Any) -> list[Any]:
    """The copies of a variable, as numbers."""
    return numbers(variable.values)


def devices(value: Any) -> list[int]:
    """The devices of the parts of a distributed value, by their numbers."""
    return [device.id for part in value.values for device in part.devices()]


def make_one_replica(kind: str) -> Any:
    """A strategy with one replica."""
    return {
        "mirrored": lambda: mirrored(1),
        "one device": lambda: mx.OneDeviceStrategy("CPU:0"),
        "one other device": lambda: mx.OneDeviceStrategy("CPU:3"),
        "default": mx.get_strategy,
    }[kind]()
