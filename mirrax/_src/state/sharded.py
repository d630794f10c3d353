"""`ShardedVariable`: one value, of which each replica's device holds a part."""

from __future__ import annotations

from typing import Any

import jax

from mirrax._src.base import context
from mirrax._src.base.context import Context
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.mesh import Layout, gathered, on_host, shard
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.values import (
    PerReplica,
    ReplicaValues,
    Sharded,
    copies_of,
    one_copy,
)
from mirrax._src.state.mirrored import MirroredVariable
from mirrax._src.state.spec import VariableSpec
from mirrax._src.state.variable import Variable


class ShardedVariable(MirroredVariable):
    """A variable that all replicas share, a part on each device: an optimizer's slot.

    It is read and assigned as a whole; whoever reads it has it gathered.
    """

    __module__ = "mirrax.distribute"
    _layout = Layout.SHARDED

    def __init__(self, spec: VariableSpec, strategy: StrategyLike) -> None:
        with jax.ensure_compile_time_eval():
            array = spec.initial_value
            if not isinstance(array, jax.Array) or array.dtype != spec.dtype:
                array = spec.initial_array()
            self._setup(spec, strategy, shard(array, strategy.replica_mesh))

    @property
    def stored(self) -> Any:
        """The array; a `PerReplica` if each replica has been given a value of its own."""
        return Variable.stored.fget(self)  # type: ignore[attr-defined]

    @stored.setter
    def stored(self, value: Any) -> None:
        if isinstance(value, jax.Array) and not isinstance(value, Tracer):
            value = shard(value, self.strategy.replica_mesh)
        Variable.stored.fset(self, value)  # type: ignore[attr-defined]

    def written_layout(self, layout: Layout) -> Layout:
        return layout if layout.is_split else Layout.SHARDED

    def in_full(self) -> Any:
        stored = self.stored
        if isinstance(stored, PerReplica):
            return stored
        return gathered(stored, self.strategy.replica_mesh)

    def to_save(self) -> Any:
        stored = self.stored
        if isinstance(stored, PerReplica):
            return stored.values[0]
        # Of many workers each has a part, and who saves has to bring these together.
        return on_host(stored) if stored.is_fully_addressable else stored

    def home_sharding(self) -> Any:
        return self.strategy.replica_mesh.sharded(self.shape)

    def concrete(self, is_local: bool = False) -> Any:
        if not is_local:
            return Variable.concrete(self)
        whole = self.in_full()
        copies = whole.values if isinstance(whole, PerReplica) else copies_of(whole)
        return copies[context.local_index(context.current())]

    def _read_together(self, here: Context) -> jax.Array:
        found = self._found(here)
        if isinstance(found, PerReplica):
            return found.values[0]
        return found if here.frame else one_copy(self.in_full())

    def copies(self) -> ReplicaValues:
        found = super().copies()
        if isinstance(found, PerReplica):
            return found
        return Sharded.of(found.array, found.mesh)

    def _store_all(self, here: Context, value: jax.Array) -> None:
        mesh = self.strategy.replica_mesh
        if here.frame is not None:
            if not here.frame.mode.is_local:
                sharding = mesh.sharded(self.shape)
                value = jax.lax.with_sharding_constraint(value, sharding)
            here.frame.write(self, value)
            return
        self._check_leak(value)
        self._keep(value)
