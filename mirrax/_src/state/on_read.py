"""`SyncOnReadVariable`: each replica writes its own copy; reading combines them."""

from __future__ import annotations

from typing import Any

import jax

from mirrax._src.base import context
from mirrax._src.base.context import Context
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.reduce_op import ReduceOp, VariableAggregation
from mirrax._src.base.values import PerReplica, copies_of
from mirrax._src.state.distributed import DistributedVariable
from mirrax._src.state.parts import SliceUpdate
from mirrax._src.state.spec import VariableSpec
from mirrax._src.state.variable import Update


class SyncOnReadVariable(DistributedVariable):
    """A variable with an independent copy on each replica, combined when it is read."""

    __module__ = "mirrax.distribute"

    def __init__(self, spec: VariableSpec, strategy: StrategyLike) -> None:
        super().__init__(spec, strategy)
        # From the start in the form that replicas' writes give it, so that the first
        # compiled step is not traced again for the second one.
        if strategy.num_replicas_in_sync > 1:
            mesh = strategy.replica_mesh
            self.stored = PerReplica(
                copies_of(self.stored), mesh.equal_shapes(self), mesh
            )

    __jax_array__ = DistributedVariable.read_value

    def _read_together(self, here: Context) -> jax.Array:
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"Variable {self.name!r} has synchronization ON_READ and aggregation NONE, "
                "so it has no value outside a replica. Read its copies with "
                "`strategy.experimental_local_results(variable)`, or give it an "
                "aggregation."
            )
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            copies = self.copies()
            is_program = context.in_program(here)
            return self.strategy.first_part(copies) if is_program else copies.values[0]
        op = ReduceOp.from_variable_aggregation(self.aggregation)
        return self.strategy.reduce(op, self.copies(), axis=None)

    _assign_in_replica = DistributedVariable._assign_own

    def _assign_together(self, here: Context, value: Any, update: Update) -> None:
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"Variable {self.name!r} has synchronization ON_READ and aggregation NONE: "
                "it can only be assigned inside a replica."
            )
        if isinstance(value, DistributedVariable):
            value = value.read_value()
        if self.aggregation is VariableAggregation.SUM:
            is_slice = isinstance(update, SliceUpdate) and update.replaces
            if update is not None and not is_slice:
                raise ValueError(
                    f"Variable {self.name!r} is summed when it is read: `assign_add` and "
                    "`assign_sub` in cross-replica context would count once for each "
                    "replica. Call them inside `strategy.run`, or use `assign`."
                )
            count = self.strategy.num_replicas_in_sync
            value = (self.convert(value, update) / count).astype(self.dtype)
        self._update_copies(value, update)

    def assign_copies(self, values: PerReplica) -> None:
        """Gives each replica's copy its own value, in cross-replica context."""
        self._update_copies(values, None)
