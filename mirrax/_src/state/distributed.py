"""What the distributed kinds of variables share: one copy on each replica's device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
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
    to_device,
)
from mirrax._src.state.frame import RunEagerly
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

    def __init__(self, spec: VariableSpec, strategy: Any) -> None:
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

    def _make(self, spec: VariableSpec, strategy: Any) -> None:
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
    def distribute_strategy(self) -> Any:
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
        shared.add(self.number)
        if isinstance(self.stored, PerReplica):
            return self.stored.values[local_index]
        return copies_of(self.stored)[local_index]

    def read_value(self) -> jax.Array:
        here = context.current()
        if self._is_own_copy(here):
            return here.frame.read(self) if here.frame else self.read_concrete()
        if here.frame is None:
            self.check_readable()
        return self._read_together(here)

    value = read_value

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
            self._store_own(here, update(self.read_value, self.convert(value)))
        elif here.replica is None or not self._is_own_copy(here):
            self._check_no_foreign_replica(here)
            self._assign_together(here, value, update)
        else:
            self._assign_in_replica(here, value, update)

    def _check_no_foreign_replica(self, here: context.Context) -> None:
        if here.replica is not None and here.strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"Variable {self.name!r} belongs to another strategy than the one whose "
                "replica assigns it. Make it in the scope of the strategy that runs the "
                "function."
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

    def _store_own(self, here: context.Context, value: jax.Array) -> None:
        """Replaces the copy of the replica that the current code works for."""
        if here.frame is not None:
            here.frame.write(self, value)
            return
        self._check_leak(value)
        index = context.local_index(here)
        mesh = self.strategy.replica_mesh
        parts = list(self._copies())
        parts[index] = to_device(value, mesh.local_devices[index])
        is_alone = mesh.size == 1
        self.stored = (
            mesh.join(parts, mirrored=True)
            if is_alone
            else PerReplica(parts, mesh.equal_shapes(self))
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
        return (
            stored if isinstance(stored, PerReplica) else Mirrored.of(stored)
        ).values

    def _store_all(self, here: context.Context, value: jax.Array) -> None:
        """Makes `value` every replica's copy."""
        if here.frame is not None:
            if not here.frame.is_local:
                mesh = self.strategy.replica_mesh
                value = jax.lax.with_sharding_constraint(value, mesh.mirrored)
            here.frame.write(self, value)
            return
        self._check_leak(value)
        self.stored = self.strategy.replica_mesh.mirror(value)
        shared.add(self.number)

    def combine(self, op: ReduceOp) -> jax.Array:
        """The copies, reduced."""
        return self.strategy.reduce(op, self.copies(), axis=None)

    def copies(self) -> ReplicaValues:
        """All copies, as a distributed value."""
        here = context.current()
        if here.frame is not None and here.frame.is_spmd:
            return self.strategy.in_program_value(here.frame.read(self))
        return self._all_copies(here)

    def first(self, here: context.Context) -> jax.Array:
        """The first replica's copy."""
        frame = here.frame
        if frame is not None and frame.is_spmd:
            return self.strategy.first_in_program(frame.read(self))
        return self._all_copies(here).values[0]

    def _all_copies(self, here: context.Context) -> ReplicaValues:
        shared.add(self.number)
        value = self.stored
        if here.frame is not None and not here.frame.is_local:
            value = here.frame.read(self)
        elif here.frame is not None and here.frame.is_staged:
            raise RunEagerly(
                "all copies of a variable, in a part that is compiled alone"
            )
        return value if isinstance(value, PerReplica) else Mirrored.of(value)

    # Showing -------------------------------------------------------------------------

    def __repr__(self) -> str:
        frame = context.current().frame
        if frame is not None and not frame.is_local:
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
        with self._own_copy() as here:
            return (
                here.frame.read(self.whole)
                if here.frame
                else self.whole.copy(self.local_index)
            )

    value = read_value

    def _assign(self, value: Any, update: Callable[[Any, Any], Any]) -> None:
        converted = self.whole.convert(value)
        updated = update(self.read_value, converted)
        with self._own_copy() as here:
            self.whole._store_own(here, updated)

    def _own_copy(self):
        here = context.current()
        if here.frame is not None and not here.frame.is_local:
            raise RuntimeError(
                f"A single copy of variable {self.whole.name!r} cannot be used while an "
                "`mx.function` is traced in cross-replica context; use "
                "`strategy.extended.update(variable, fn)`."
            )
        return context.changed(updating=self.local_index, replica=None)

    def __repr__(self) -> str:
        return describe_variable(self.name, self, self.read_value())


DistributedValues.register(DistributedVariable)


def aggregate(
    strategy: Any, value: Any, aggregation: VariableAggregation, variable: Variable
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
            "cannot be told. Assign an array, `jnp.asarray(...)`, to have it summed."
        )
    return strategy.extended.reduce_to(
        ReduceOp.from_variable_aggregation(aggregation), value, variable
    )


def _is_number(value: Any) -> bool:
    return is_number(value) or isinstance(value, bool)


def _is_apart(value: Any) -> bool:
    return isinstance(value, PerReplica) and value.piece is None
