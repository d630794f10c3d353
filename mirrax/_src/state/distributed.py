"""What the distributed kinds of variables share: one copy on each replica's device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.context import Context
from mirrax._src.base.errors import RunEagerly
from mirrax._src.base.hiding import hides
from mirrax._src.base.launching import launching
from mirrax._src.base.mesh import Layout
from mirrax._src.base.protocols import Mode, StrategyLike
from mirrax._src.base.reduce_op import VariableAggregation, VariableSynchronization
from mirrax._src.base.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReplicaValues,
    copies_of,
    to_device,
)
from mirrax._src.state.parts import Scatter, SliceUpdate
from mirrax._src.state.spec import VariableSpec
from mirrax._src.state.variable import Update, Variable, updated


@hides("assign_copies", "copies")
class DistributedVariable(Variable):
    """A variable with a copy for each replica.

    `stored` is one replicated global array while the copies are in step, and a
    `PerReplica` once replicas have written their own.
    """

    __module__ = "mirrax.distribute"
    _layout = Layout.MIRRORED
    # What cross-replica reading, and assigning in and outside a replica, means to each kind.
    _read_together: ClassVar[Callable[..., jax.Array]]
    _assign_in_replica: ClassVar[Callable[..., None]]
    _assign_together: ClassVar[Callable[..., None]]

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
            array = spec.initial_array()
            is_float = jnp.issubdtype(array.dtype, jnp.inexact)
            if spec.aggregation is VariableAggregation.MEAN and not is_float:
                raise ValueError(
                    f"Variable {spec.name!r}: aggregation MEAN needs a floating-point "
                    f"variable, this one is {array.dtype}."
                )
            array = strategy.initial_on_all_workers(array)
            self._setup(spec, strategy, strategy.replica_mesh.mirror(array))

    @property
    def distribute_strategy(self) -> StrategyLike:
        """The strategy that the variable was made under."""
        return self.strategy

    @functools.cached_property
    def values(self) -> tuple[ComponentVariable, ...]:
        """This worker's copies, each a variable of its own."""
        count = len(self.strategy.replica_mesh.local_ids)
        return tuple(ComponentVariable(self, i) for i in range(count))

    def home_sharding(self) -> Any:
        """Where the array lies while the copies are in step."""
        return self.strategy.replica_mesh.mirrored

    # Reading -------------------------------------------------------------------------

    def concrete(self, is_local: bool = False) -> Any:
        stored = super().concrete()
        if not is_local:
            return stored
        copies = stored.values if isinstance(stored, PerReplica) else copies_of(stored)
        return copies[context.local_index(context.current())]

    def read_value(self) -> jax.Array:
        self._check_strategy(context.current(), "read")
        return self._read()

    def _read(self) -> jax.Array:
        here = context.current()
        if here.frame is None:
            self.check_readable()
        if not self._is_own_copy(here):
            return self._read_together(here)
        return here.frame.read(self) if here.frame else self.concrete(is_local=True)

    __jax_array__ = _read

    def _is_own_copy(self, here: Context) -> bool:
        """Whether the current code works for one replica, and so with its copy."""
        return here.updating is not None or (
            here.replica is not None and here.strategy is self.strategy
        )

    # Writing -------------------------------------------------------------------------

    def _assign(self, value: Any, update: Update) -> None:
        here = context.current()
        is_own = self._is_own_copy(here)
        if here.updating is None and isinstance(update, Scatter):
            update.check(self)
        if here.updating is not None or (is_own and isinstance(update, SliceUpdate)):
            self._assign_own(here, value, update)
        elif is_own:
            self._assign_in_replica(here, value, update)
        else:
            self._check_strategy(here, "assigned")
            self._assign_together(here, value, update)

    def _check_strategy(self, here: Context, what: str) -> None:
        """Raises if the current code belongs to a different strategy from the variable's."""
        if here.strategy is self.strategy or context.is_default():
            return
        place = "scope" if here.replica is None else "replica"
        raise RuntimeError(
            f"Variable {self.name!r} was made in the scope of {self.strategy!r} and is {what} "
            f"in a {place} of {here.strategy!r}. Mixing different strategies does not work: make it in the "
            "scope of the strategy that uses it, or do this outside of all scopes."
        )

    def _update_copies(self, value: Any, update: Update) -> None:
        """Updates every copy with its part of `value`, or with all of a plain one."""
        assign = functools.partial(ComponentVariable._assign, update=update)
        self.strategy.extended.update(self, assign, args=(value,))

    def _assign_own(self, here: Context, value: Any, update: Update) -> None:
        """Updates the copy of the replica that the current code works for."""
        value = self.convert(value, update)
        with launching():  # nobody else may assign in between
            self._store_own(here, updated(update, self.read_value, value))

    def _store_own(self, here: Context, value: jax.Array) -> None:
        """Makes `value` the copy of the replica that the current code works for."""
        frame, mesh = here.frame, self.strategy.replica_mesh
        if frame is not None and frame.mode.is_local:
            frame.write(self, value)
            return
        index = context.local_index(here)
        if frame is None:
            self._check_leak(value)
            value = to_device(value, mesh.local_devices[index])
        with launching():
            parts = list(self.copies().values)
            parts[index] = value
            copies = PerReplica(parts, mesh.equal_shapes(self), mesh)
            if frame is not None:
                frame.write(self, copies)
            else:
                is_alone = mesh.size == 1
                self._keep(mesh.join(parts, mirrored=True) if is_alone else copies)

    def store_local(self, value: jax.Array) -> None:
        here = context.current()
        if self._is_own_copy(here):
            self._store_own(here, value)
        else:
            self._store_all(here, value)

    def _store_all(self, here: Context, value: jax.Array) -> None:
        """Makes `value` every replica's copy."""
        mesh = self.strategy.replica_mesh
        if here.frame is not None:
            if not here.frame.mode.is_local:
                value = jax.lax.with_sharding_constraint(value, mesh.mirrored)
            here.frame.write(self, value)
            return
        self._check_leak(value)
        self._keep(mesh.mirror(value))

    def copies(self) -> ReplicaValues:
        """All copies, as a distributed value."""
        frame = context.current().frame
        mesh = self.strategy.replica_mesh
        if frame is None or frame.mode is Mode.EAGER:
            value = self.concrete()
        elif frame.mode is Mode.PART:
            raise RunEagerly("all copies of a variable, in one replica's compiled part")
        else:
            value = frame.read(self)
            if frame.mode.is_program:
                return PerReplica.of(value, mesh, Layout.OWN)
        return value if isinstance(value, PerReplica) else Mirrored.of(value, mesh)

    # Showing -------------------------------------------------------------------------

    def __repr__(self) -> str:
        frame = context.current().frame
        if frame is not None and not frame.mode.is_local:
            kind = f"shape={self.shape} dtype={self.dtype}"
            return f"<{type(self).__name__} {self.name!r} {kind}, traced>"
        rows = ",\n".join(f"  {i}: {copy!r}" for i, copy in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{rows}\n}}"


@hides("local_index", "whole")
class ComponentVariable(Variable):
    """One replica's copy of a distributed variable, as `extended.update` hands it out."""

    __module__ = "mirrax.distribute"

    def __init__(self, whole: DistributedVariable, local_index: int) -> None:
        self.whole, self.local_index = whole, local_index
        self.name = whole.name + (f"/replica_{local_index}" if local_index else "")
        self.trainable, self.strategy = whole.trainable, whole.strategy
        self.synchronization = whole.synchronization
        self.aggregation = whole.aggregation
        self.shape, self.dtype = whole.shape, whole.dtype

    def read_value(self) -> jax.Array:
        frame = context.current().frame
        if frame is not None and frame.mode.is_local:
            return frame.read(self.whole)
        return self.whole.copies().values[self.local_index]

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        return copy.deepcopy(self.whole, memo).values[self.local_index]

    def _assign(self, value: Any, update: Update) -> None:
        value = self.whole.convert(value, update)
        place = context.changed(updating=self.local_index, replica=None)
        with launching(), place as here:
            self.whole._store_own(here, updated(update, self.read_value, value))


DistributedValues.register(DistributedVariable)
