"""Keras' variables: those made in a scope hold an `mx.Variable`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.base import context
from mirrax._src.base.jax_compat import Tracer, is_staging
from mirrax._src.base.launching import launching
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.protocols import ReplicaLike
from mirrax._src.base.reduce_op import VariableAggregation, VariableSynchronization
from mirrax._src.base.values import PerReplica, ReplicaValues, copies_of, one_copy
from mirrax._src.integrations.keras.private import JaxVariable, in_stateless_scope
from mirrax._src.state.distributed import DistributedVariable
from mirrax._src.state.foreign import Route
from mirrax._src.state.on_read import SyncOnReadVariable
from mirrax._src.state.variable import (
    FAILED,
    Variable,
    VariableSpec,
    handed_out,
    lost,
)


class _Here(threading.local):
    """What this thread is doing with Keras' variables."""

    takes_whole = False  # collects them for a step of Keras' own
    in_step = False  # runs such a step, or traces it
    is_agreed = False  # writes what all replicas have computed together
    adopts = True


here = _Here()


@contextlib.contextmanager
def doing(**changes: bool) -> Iterator[None]:
    """Sets fields of `here` for a `with` block."""
    before = {name: getattr(here, name) for name in changes}
    vars(here).update(changes)
    try:
        yield
    finally:
        vars(here).update(before)


def current_replica() -> ReplicaLike | None:
    """The replica whose function runs, if one does."""
    return None if context.is_default() else context.current().replica


class ValueRoute(Route):
    """`JaxVariable._value`."""

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        if obj is None:
            return self
        held = self.held(obj)
        if isinstance(held, Variable):
            return self.read(obj, held)
        frame = context.current().frame
        is_traced = frame is not None and frame.mode.is_traced
        if is_traced and held is not None and not in_stateless_scope():
            raise ValueError(
                f"Keras variable {obj.path!r} was made outside the scope of a strategy and is "
                "read in a compiled function, which would keep the value it has now. Make "
                "the model (optimizer, metric) inside `with strategy.scope():`."
            )
        return held

    def read(self, obj: Any, variable: Variable) -> Any:
        if here.takes_whole:
            return whole(variable)
        place = context.current()
        if place.frame is not None or current_replica() is not None:
            return variable.read_value()
        if is_staging() and (here.in_step or in_stateless_scope()):
            # Keras itself takes it for a constant.
            return np.asarray(_first_copy(variable))
        if isinstance(variable, SyncOnReadVariable):
            return one_copy(whole(variable))
        return variable.read_value()

    def __set__(self, obj: Any, value: Any) -> None:
        held = vars(obj).get(self._name)
        if isinstance(held, Variable):
            self.write(obj, held, value)
        elif value is None or isinstance(value, Tracer) or context.is_default():
            self.hold(obj, value)
        elif current_replica() is not None and (here.adopts or held is not None):
            raise made_elsewhere(obj, held is None)
        elif held is None and here.adopts:
            self.hold(obj, _variable_of(obj, value))
        else:
            self.hold(obj, value)

    def write(self, obj: Any, variable: Variable, value: Any) -> None:
        if value is None:  # Keras gives the arrays to a step, which donates them
            if not isinstance(variable.stored, PerReplica):
                lost[variable.number] = FAILED
        elif context.current().frame is None and current_replica() is None:
            write_whole(variable, value)
        elif here.is_agreed:
            variable.store_agreed(variable.convert(value))
        else:
            variable.assign(value)


route: ValueRoute


def install() -> None:
    global route
    route = ValueRoute(JaxVariable, "_value")


def held_variable(obj: Any) -> Variable | None:
    """The `mx.Variable` that a Keras variable holds, if it was made in a scope."""
    held = vars(obj).get("_value")
    return held if isinstance(held, Variable) else None


def adopt(obj: Any, what: str) -> None:
    """Makes a Keras variable one of the current strategy, if it is not yet."""
    strategy = context.current().strategy
    held = vars(obj).get("_value")
    if isinstance(held, Variable):
        if held.strategy is not strategy:
            raise RuntimeError(
                f"{what} uses the Keras variable {obj.path!r}, which was made in the scope of "
                f"{held.strategy!r}, in the scope of {strategy!r}. Make the model in the scope "
                "of the strategy that trains it."
            )
    elif held is not None:
        route.hold(obj, _variable_of(obj, held))


def made_elsewhere(obj: Any, is_new: bool) -> Exception:
    """The error for a replica that assigns, or makes, a variable that is not the strategy's."""
    if is_new:
        return RuntimeError(
            f"Keras variable {obj.path!r} would be made inside a replica function, once for each "
            "replica. Build the model before, in the scope: `model.build(input_shape)`, or "
            "call it once on some data."
        )
    return ValueError(
        f"Keras variable {obj.path!r} was made outside the scope of "
        f"{context.current().strategy!r}, so it has one copy, which replicas cannot assign. "
        "Make the model (optimizer, metric) inside `with strategy.scope():`."
    )


_AGGREGATIONS = {
    "mean": VariableAggregation.MEAN,
    "sum": VariableAggregation.SUM,
    "only_first_replica": VariableAggregation.ONLY_FIRST_REPLICA,
}


def _variable_of(obj: Any, value: Any) -> Variable:
    """An `mx.Variable` for a Keras variable with this value.

    Metrics, and averages over a batch, are each replica's own until they are read. All else is
    kept in step.
    """
    array = jnp.asarray(value)
    is_float = jnp.issubdtype(array.dtype, jnp.inexact)
    aggregation = _AGGREGATIONS.get(obj.aggregation)
    is_own = aggregation in (VariableAggregation.MEAN, VariableAggregation.SUM) and (
        not obj.trainable
    )
    if aggregation is None or (
        aggregation is VariableAggregation.MEAN and not is_float
    ):
        is_own = False
        aggregation = (
            VariableAggregation.MEAN
            if is_float
            else VariableAggregation.ONLY_FIRST_REPLICA
        )
    synchronization = (
        VariableSynchronization.ON_READ if is_own else VariableSynchronization.AUTO
    )
    spec = VariableSpec(
        array, obj.trainable, obj.path, array.dtype, synchronization, aggregation
    )
    variable = context.current().strategy.extended.create_variable(spec)
    is_summed = is_own and aggregation is VariableAggregation.SUM
    if is_summed and np.any(array):  # of which each replica has all now
        write_whole(variable, _first_copy(variable))
    return variable


# One value with a copy on each device --------------------------------------------------

# The attribute of a variable that is combined when it is read: what it stored, and that combined.
_WHOLE = "whole_for_keras"


def whole(variable: Variable) -> jax.Array:
    """The value as one array with a copy on every device of the strategy."""
    variable.check_not_lost()
    mesh = variable.strategy.replica_mesh
    with launching():
        stored = variable.stored
        if not isinstance(stored, PerReplica):
            handed_out.add(variable.number)
            return mesh.mirror(stored)
        known = vars(variable).get(_WHOLE)
        if known is not None and known[0] is stored and not known[1].is_deleted():
            return known[1]
        with variable.strategy.entered("reading a variable"):
            if isinstance(variable, SyncOnReadVariable):
                value: Any = variable.read_value()
            else:
                value = variable.strategy.first_part(stored)
        if isinstance(value, ReplicaValues):
            value = value.values[0]
        array = mesh.mirror(value)
        if isinstance(variable, SyncOnReadVariable):
            vars(variable)[_WHOLE] = stored, array
        return array


def write_whole(variable: Variable, value: Any) -> None:
    """Gives every replica's copy the value, or its share of one that is summed."""
    place = context.current()
    if not isinstance(variable, DistributedVariable):
        variable.assign(value)
        return
    if variable.synchronization is not VariableSynchronization.ON_READ:
        fits = isinstance(value, jax.Array) and value.dtype == variable.dtype
        if not fits or value.shape != variable.shape or isinstance(value, Tracer):
            variable.assign(value)
            return
        variable._check_strategy(place, "assigned")
        variable._keep(variable.strategy.replica_mesh.mirror(value))
        return
    variable._check_strategy(place, "assigned")
    variable._check_leak(value)
    mesh = variable.strategy.replica_mesh
    array = mesh.mirror(variable.convert(value))
    if mesh.size == 1:
        variable._keep(array)
        return
    copies = copies_of(array)
    if variable.aggregation is VariableAggregation.SUM:
        copies = _shares(variable, array, mesh)
    parts = PerReplica(copies, mesh.equal_shapes(variable), mesh)
    with launching():
        variable._keep(parts)
        vars(variable)[_WHOLE] = parts, array


def _shares(
    variable: Variable, array: jax.Array, mesh: ReplicaMesh
) -> tuple[jax.Array, ...]:
    """What adds up to the value: equal shares; of a count, which need not divide, all and none."""
    if jnp.issubdtype(variable.dtype, jnp.inexact):
        return copies_of((array / mesh.size).astype(variable.dtype))
    pairs = zip(mesh.local_ids, copies_of(array))
    return tuple(x if k == 0 else jnp.zeros_like(x) for k, x in pairs)


def _first_copy(variable: Variable) -> jax.Array:
    stored = variable.stored
    return stored.values[0] if isinstance(stored, PerReplica) else one_copy(stored)
