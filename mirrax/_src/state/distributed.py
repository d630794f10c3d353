"""What the distributed kinds of variables share: one copy on each replica's device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.errors import RunEagerly
from mirrax._src.base.logical import launching
from mirrax._src.base.mesh import Layout
from mirrax._src.base.protocols import Mode, StrategyLike
from mirrax._src.base.reduce_op import (
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from mirrax._src.base.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReplicaValues,
    copies_of,
    is_number,
    join,
    to_device,
)
from mirrax._src.state.variable import (
    Variable,
    VariableSpec,
    describe_variable,
    shared,
)


class DistributedVariable(Variable):
    """A variable with a copy for each replica.

    `stored` is one replicated global array while the copies are in step, and a
    `PerReplica` once replicas have written their own.
    """

    __module__ = "mirrax.distribute"
    _layout = Layout.MIRRORED

    def __init__(self, spec: VariableSpec, strategy: StrategyLike) -> None:
        if spec.synchronization is VariableSynchronization.NONE:
            raise ValueError(
                f"Variable {spec.name!r}: synchronization NONE is not supported by a strategy "
                "that mirrors variables; use AUTO, ON_WRITE (copies kept in step) or ON_READ "
                "(combined when read)."
            )
        if spec.synchronization is VariableSynchronization.AUTO:
            spec = replace(spec, synchronization=VariableSynchronization.ON_WRITE)
        with jax.ensure_compile_time_eval():
            self._make(spec, strategy)

    def _make(self, spec: VariableSpec, strategy: StrategyLike) -> None:
        array = spec.initial_array()
        is_float = jnp.issubdtype(array.dtype, jnp.inexact)
        if spec.aggregation is VariableAggregation.MEAN and not is_float:
            raise ValueError(
                f"Variable {spec.name!r}: aggregation MEAN needs a floating-point variable, "
                f"this one is {array.dtype}."
            )
        mesh = strategy.replica_mesh
        self._setup(
            spec, strategy, mesh.mirror(strategy.initial_on_all_workers(array)), array
        )

    @property
    def distribute_strategy(self) -> StrategyLike:
        """The strategy that the variable was made under."""
        return self.strategy

    @property
    def values(self) -> tuple[ComponentVariable, ...]:
        """This worker's copies, each a variable of its own."""
        return self._components

    @functools.cached_property
    def _components(self) -> tuple[ComponentVariable, ...]:
        count = len(self.strategy.replica_mesh.local_ids)
        return tuple(ComponentVariable(self, i) for i in range(count))

    # Reading -------------------------------------------------------------------------

    def concrete(self, is_local: bool) -> Any:
        return (
            self.copy(context.local_index(context.current()))
            if is_local
            else self.stored
        )

    def copy(self, local_index: int) -> jax.Array:
        """The array on the device of this worker's replica `local_index`."""
        with launching:
            shared.add(self.number)
            stored = self.stored
            if isinstance(stored, PerReplica):
                return stored.values[local_index]
            return copies_of(stored)[local_index]

    def read_value(self) -> jax.Array:
        here = context.current()
        self._check_strategy(here, "read")
        return self._read(here)

    value = read_value

    def __jax_array__(self) -> jax.Array:
        return self._read(context.current())

    def _read(self, here: context.Context) -> jax.Array:
        if self._is_own_copy(here):
            return here.frame.read(self) if here.frame else self.read_concrete()
        if here.frame is None:
            self.check_readable()
        return self._read_together(here)

    def _is_own_copy(self, here: context.Context) -> bool:
        """Whether the current code works for one replica, and so with its copy."""
        return here.updating is not None or (
            here.replica is not None and here.strategy is self.strategy
        )

    def _read_together(self, here: context.Context) -> jax.Array:
        raise AssertionError("a kind says what cross-replica reading means")

    # Writing -------------------------------------------------------------------------

    def _assign(self, value: Any, update: Callable[[Any, Any], Any]) -> None:
        here = context.current()
        if here.updating is not None:
            self._assign_own(here, value, update)
        elif here.replica is not None and self._is_own_copy(here):
            self._assign_in_replica(here, value, update)
        else:
            self._check_strategy(here, "assigned")
            self._assign_together(here, value, update)

    def _check_strategy(self, here: context.Context, what: str) -> None:
        """Raises if the current code works for another strategy than the variable's."""
        if here.strategy is self.strategy or context.is_default():
            return
        place = "scope" if here.replica is None else "replica"
        raise RuntimeError(
            f"Variable {self.name!r} was made in the scope of {self.strategy!r} and is {what} "
            f"in a {place} of {here.strategy!r}. Strategies cannot be mixed: make it in the "
            "scope of the strategy that uses it, or do this outside of all scopes."
        )

    def _assign_in_replica(
        self, here: context.Context, value: Any, update: Callable[[Any, Any], Any]
    ) -> None:
        raise AssertionError("a kind says what assigning in a replica means")

    def _assign_together(
        self, here: context.Context, value: Any, update: Callable[[Any, Any], Any]
    ) -> None:
        raise AssertionError("a kind says what cross-replica assigning means")

    def _update_copies(self, value: Any, update: Callable[[Any, Any], Any]) -> None:
        """Updates every copy with its part of `value`, or with all of a plain one."""

        def assign(copy: ComponentVariable, part: Any) -> None:
            copy._assign(part, update)

        self.strategy.extended.update(self, assign, args=(value,))

    def _assign_own(
        self, here: context.Context, value: Any, update: Callable[[Any, Any], Any]
    ) -> None:
        """Updates the copy of the replica that the current code works for."""
        value = self.convert(value)
        with launching:  # nobody else may assign in between
            self._store_own(here, update(self.read_value, value))

    def _store_own(self, here: context.Context, value: jax.Array) -> None:
        if here.frame is not None:
            here.frame.write(self, value)
            return
        self._check_leak(value)
        index = context.local_index(here)
        mesh = self.strategy.replica_mesh
        value = to_device(value, mesh.local_devices[index])
        with launching:
            parts = list(self._copies())
            parts[index] = value
            self.stored = (
                mesh.join(parts, mirrored=True)
                if mesh.size == 1
                else PerReplica(parts, mesh.equal_shapes(self), mesh)
            )
            shared.add(self.number)

    def store_local(self, value: jax.Array) -> None:
        here = context.current()
        if self._is_own_copy(here):
            self._store_own(here, value)
        else:
            self._store_all(here, value)

    def _copies(self) -> tuple[jax.Array, ...]:
        stored = self.stored
        return stored.values if isinstance(stored, PerReplica) else copies_of(stored)

    def _store_all(self, here: context.Context, value: jax.Array) -> None:
        """Makes `value` every replica's copy."""
        mesh = self.strategy.replica_mesh
        if here.frame is not None:
            if not here.frame.mode.is_local:
                value = jax.lax.with_sharding_constraint(value, mesh.mirrored)
            here.frame.write(self, value)
            return
        self._check_leak(value)
        value = mesh.mirror(value)
        with launching:
            self.stored = value
            shared.add(self.number)

    def combine(self, op: ReduceOp) -> jax.Array:
        """The copies, reduced."""
        return self.strategy.reduce(op, self.copies(), axis=None)

    def copies(self) -> ReplicaValues:
        """All copies, as a distributed value."""
        frame = context.current().frame
        mesh = self.strategy.replica_mesh
        if frame is None or frame.mode is Mode.EAGER:
            with launching:
                shared.add(self.number)
                value = self.stored
        elif frame.mode is Mode.PART:
            raise RunEagerly(
                "all copies of a variable, in a part that is compiled alone"
            )
        else:
            value = frame.read(self)
            if frame.mode.is_program:
                return PerReplica.of(value, mesh, Layout.OWN)
        return value if isinstance(value, PerReplica) else Mirrored.of(value, mesh)

    def first(self, here: context.Context) -> jax.Array:
        """The first replica's copy."""
        copies = self.copies()
        if context.in_program(here):
            return self.strategy.first_part(copies)
        return copies.values[0]

    # Showing -------------------------------------------------------------------------

    def __repr__(self) -> str:
        frame = context.current().frame
        if frame is not None and not frame.mode.is_local:
            kind = f"shape={self.shape} dtype={self.dtype}"
            return f"<{type(self).__name__} {self.name!r} {kind}, traced>"
        rows = ",\n".join(f"  {i}: {copy!r}" for i, copy in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{rows}\n}}"


class ComponentVariable(Variable):
    """One replica's copy of a distributed variable, as `extended.update` hands it out."""

    __module__ = "mirrax.distribute"

    def __init__(self, whole: DistributedVariable, local_index: int) -> None:
        self.whole = whole
        self.local_index = local_index
        self.name = whole.name + (f"/replica_{local_index}" if local_index else "")
        self.trainable, self.strategy = whole.trainable, whole.strategy
        self.synchronization, self.aggregation = (
            whole.synchronization,
            whole.aggregation,
        )
        self.shape, self.dtype = whole.shape, whole.dtype

    def read_value(self) -> jax.Array:
        here = context.current()
        if here.frame is None:
            return self.whole.copy(self.local_index)
        if here.frame.mode.is_local:
            return here.frame.read(self.whole)
        return self.whole.copies().values[self.local_index]

    value = read_value

    def _assign(self, value: Any, update: Callable[[Any, Any], Any]) -> None:
        value = self.whole.convert(value)
        frame = context.current().frame
        with launching:
            value = update(self.read_value, value)
            if frame is not None and not frame.mode.is_local:
                self._write_in_call(frame, value)
                return
            with context.changed(updating=self.local_index, replica=None) as here:
                self.whole._store_own(here, value)

    def _write_in_call(self, frame: Any, value: jax.Array) -> None:
        """Replaces one of the copies that traced cross-replica code sees."""
        mesh = self.strategy.replica_mesh
        parts = list(self.whole.copies().values)
        parts[self.local_index] = value
        array, layout = join(PerReplica(parts), mesh)
        frame.write(self.whole, PerReplica.of(array, mesh, layout))

    def __repr__(self) -> str:
        return describe_variable(self.name, self, self.read_value())


DistributedValues.register(DistributedVariable)


def aggregate(
    strategy: StrategyLike,
    value: Any,
    aggregation: VariableAggregation,
    variable: Variable,
) -> Any:
    """The replicas' values for `variable` as one, by its aggregation."""
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return strategy.extended.broadcast_to(strategy.first_part(value), variable)
    if _is_number(value) and aggregation is VariableAggregation.MEAN:
        return value
    parts = value.values if _is_apart(value) else (value,)
    if (
        aggregation is VariableAggregation.SUM
        and all(_is_number(part) and part == parts[0] for part in parts)
        and strategy.num_replicas_in_sync > 1
    ):
        raise ValueError(
            f"Variable {variable.name!r} has aggregation SUM, and every replica assigned "
            f"the Python number {parts[0]!r}: whether it is meant once or once per replica "
            "is ambiguous. Assign an array, `jnp.asarray(...)`, to have it summed."
        )
    return strategy.extended.reduce_to(
        ReduceOp.from_variable_aggregation(aggregation), value, variable
    )


def _is_number(value: Any) -> bool:
    return is_number(value) or isinstance(value, bool)


def _is_apart(value: Any) -> bool:
    return isinstance(value, PerReplica) and value.array is None
