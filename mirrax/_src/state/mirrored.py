"""`MirroredVariable`: copies that are kept in step when they are written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.context import Context
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.logical import launching
from mirrax._src.base.protocols import Mode, ReplicaLike, StrategyLike
from mirrax._src.base.reduce_op import ReduceOp, VariableAggregation
from mirrax._src.base.values import PerReplica, part_of
from mirrax._src.state.distributed import PYTHON_NUMBER, DistributedVariable, aggregate
from mirrax._src.state.variable import Update


class MirroredVariable(DistributedVariable):
    """A variable whose copies are kept in step.

    Cross-replica code assigns all copies. In a replica the values of all replicas are
    combined by `aggregation` first; with `NONE` each replica sets its own copy.
    """

    __module__ = "mirrax.distribute"

    def _read_together(self, here: Context) -> jax.Array:
        return self.first(here) if self._is_split(here) else self._whole(here)

    def _is_split(self, here: Context) -> bool:
        value = here.frame.read(self) if here.frame else self.stored
        return isinstance(value, PerReplica)

    def _whole(self, here: Context) -> jax.Array:
        return here.frame.read(self) if here.frame else self.copy(0)

    def _assign_together(self, here: Context, value: Any, update: Update) -> None:
        if isinstance(value, PerReplica) or self._is_split(here):
            self._update_copies(value, update)
        else:
            value = self.convert(value)
            with launching:  # nobody else may assign in between
                self._store_all(here, update(lambda: self._whole(here), value))

    def _assign_in_replica(self, here: Context, value: Any, update: Update) -> None:
        if self.aggregation is VariableAggregation.NONE:
            self._assign_own(here, value, update)
            return

        frame, replica = here.frame, here.replica
        assert replica is not None
        is_traced = isinstance(value, Tracer)
        if frame is not None and frame.mode is Mode.EAGER and is_traced:
            # Replicas cannot run a `merge_fn` while `jax.grad` runs, but can reduce.
            together = self._reduce_in_gradient(replica, value)
            frame.write(self, update(self.read_value, self.convert(together)))
            return
        if isinstance(value, PerReplica):  # captured: each replica brings its part
            index = None if context.in_program(here) else context.local_index(here)
            value = jnp.asarray(part_of(value, self.strategy.replica_mesh, index))
        elif not isinstance(value, PYTHON_NUMBER):
            value = jnp.asarray(value)

        def merge(strategy: StrategyLike, value: Any) -> None:
            together = aggregate(strategy, value, self.aggregation, self)
            self._update_copies(together, update)

        replica.merge("assign", merge, (value,))

    def _reduce_in_gradient(self, replica: ReplicaLike, value: jax.Array) -> jax.Array:
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return replica.all_gather(value[None], axis=0)[0]
        return replica.all_reduce(
            ReduceOp.from_variable_aggregation(self.aggregation), value
        )

    def store_agreed(self, value: jax.Array) -> None:
        here = context.current()
        is_eager = here.frame is None and self._is_own_copy(here)
        is_alone = self.aggregation is VariableAggregation.NONE or not is_eager
        if is_alone or here.replica is None:
            self.store_local(value)
            return

        def merge(strategy: StrategyLike, value: Any) -> None:
            self._store_all(context.current(), strategy.first_part(value))

        here.replica.merge("assign", merge, (value,))
