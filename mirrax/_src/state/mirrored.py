"""`MirroredVariable`: copies that are kept in step when they are written."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.context import Context
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.launching import launching
from mirrax._src.base.protocols import Mode, ReplicaLike, StrategyLike
from mirrax._src.base.reduce_op import ReduceOp, VariableAggregation
from mirrax._src.base.values import PerReplica, is_leaf, one_copy, part_of
from mirrax._src.state.distributed import DistributedVariable
from mirrax._src.state.parts import Scatter
from mirrax._src.state.variable import Update, updated

# Python's own numbers, booleans among them.
_PYTHON_NUMBER = (int, float, complex)


class MirroredVariable(DistributedVariable):
    """A variable whose copies are kept in step.

    Cross-replica code assigns all copies. In a replica the values of all replicas are
    combined by `aggregation` first; with `NONE` each replica sets its own copy.
    """

    __module__ = "mirrax.distribute"

    def _read_together(self, here: Context) -> jax.Array:
        found = self._found(here)
        if isinstance(found, PerReplica):
            return found.values[0]
        return found if here.frame else one_copy(found)

    def _found(self, here: Context) -> Any:
        """What cross-replica code finds: one array, or a `PerReplica` of unequal copies."""
        return here.frame.read(self) if here.frame else self.concrete()

    def _assign_together(self, here: Context, value: Any, update: Update) -> None:
        if isinstance(value, DistributedVariable) and value.strategy is self.strategy:
            value = value.copies()  # copy by copy, as any distributed value
        # One new value makes copies the same again, whatever they were.
        given = value if update is None else (value, self._found(here))
        given = jax.tree.leaves(given, is_leaf=is_leaf)
        if any(isinstance(x, PerReplica) for x in given):
            self._update_copies(value, update)
            return
        value = self.convert(value, update)
        read = functools.partial(self._read_together, here)
        with launching():  # nobody else may assign in between
            self._store_all(here, updated(update, read, value))

    def _assign_in_replica(self, here: Context, value: Any, update: Update) -> None:
        if self.aggregation is VariableAggregation.NONE:
            self._assign_own(here, value, update)
            return

        frame, replica = here.frame, here.replica
        assert replica is not None
        if isinstance(update, Scatter):
            value = update.convert(self, value)
        elif isinstance(value, PerReplica):  # captured: each replica brings its part
            index = None if context.in_program(here) else context.local_index(here)
            value = jnp.asarray(part_of(value, self.strategy.replica_mesh, index))
        elif not isinstance(value, _PYTHON_NUMBER):
            value = jnp.asarray(value)
        if frame is not None and frame.mode is Mode.EAGER:
            if isinstance(value, Tracer):  # which no `merge_fn` can see
                together = self._reduce_in_gradient(replica, value)
            else:
                together = replica.merge("assign", self._aggregated, (value,))
            value = self.convert(together, update)
            is_agreed = update is None or frame.is_agreed(self)
            frame.write(self, updated(update, self.read_value, value), is_agreed)
            return

        def merge(strategy: StrategyLike, value: Any) -> None:
            self._update_copies(self._aggregated(strategy, value), update)

        replica.merge("assign", merge, (value,))

    def _aggregated(self, strategy: StrategyLike, value: Any) -> Any:
        """The replicas' values as one, by the variable's aggregation."""
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            extended, first = strategy.extended, strategy.first_part
            return jax.tree.map(
                lambda part: extended.broadcast_to(first(part), self),
                value,
                is_leaf=is_leaf,
            )
        op = ReduceOp.from_variable_aggregation(self.aggregation)
        if isinstance(value, _PYTHON_NUMBER) and op is ReduceOp.MEAN:
            return value
        parts: tuple[Any, ...] = (value,)
        if isinstance(value, PerReplica) and value.array is None:
            parts = value.values
        if (
            op is ReduceOp.SUM
            and all(isinstance(p, _PYTHON_NUMBER) and p == parts[0] for p in parts)
            and strategy.num_replicas_in_sync > 1
        ):
            raise ValueError(
                f"Variable {self.name!r} has aggregation SUM, and every replica assigned "
                f"the Python number {parts[0]!r}: whether it is meant once or once per "
                "replica is ambiguous. Assign an array, `jnp.asarray(...)`, to have it "
                "summed."
            )
        return strategy.extended.reduce_to(op, value, self)

    def _reduce_in_gradient(self, replica: ReplicaLike, value: jax.Array) -> jax.Array:
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return replica.all_gather(value[None], axis=0)[0]
        return replica.all_reduce(
            ReduceOp.from_variable_aggregation(self.aggregation), value
        )

    def store_agreed(self, value: jax.Array, is_agreed: bool = True) -> None:
        here = context.current()
        frame, replica = here.frame, here.replica
        is_own = self._is_own_copy(here)
        is_alone = self.aggregation is VariableAggregation.NONE or not is_own
        is_traced = frame is not None and frame.mode.is_traced
        if replica is None or is_alone or is_traced:
            self.store_local(value)
        elif frame is not None:  # of a gradient around this one
            frame.write(self, value, is_agreed)
        else:
            replica.merge("assign", self._store_merged, (value, is_agreed))

    def _store_merged(self, strategy: StrategyLike, value: Any, is_agreed: Any) -> None:
        """Keeps what all replicas have brought, as one if it is known to be the same."""
        if all(strategy.experimental_local_results(is_agreed)):
            own = strategy.experimental_local_results(value)[0]
            self._store_all(context.current(), own)
        else:
            self._update_copies(value, None)
