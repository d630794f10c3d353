"""`MirroredVariable`: copies that are kept in step when they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.reduce_op import VariableAggregation
from mirrax._src.base.values import PerReplica, is_number
from mirrax._src.state.distributed import DistributedVariable, aggregate


class MirroredVariable(DistributedVariable):
    """A variable whose copies are kept in step.

    Cross-replica code assigns all copies. In a replica the values of all replicas are
    combined by `aggregation` first; with `NONE` each replica sets its own copy.
    """

    __module__ = "mirrax.distribute"

    def _read_together(self, here: context.Context) -> jax.Array:
        return self.first(here) if self._is_split(here) else self._whole(here)

    def _is_split(self, here: context.Context) -> bool:
        value = here.frame.read(self) if here.frame else self.stored
        return isinstance(value, PerReplica)

    def _whole(self, here: context.Context) -> jax.Array:
        return here.frame.read(self) if here.frame else self.copy(0)

    def _assign_together(
        self, here: context.Context, value: Any, update: Callable[[Any, Any], Any]
    ) -> None:
        if isinstance(value, PerReplica) or self._is_split(here):
            self._update_copies(value, update)
        else:
            self._store_all(
                here, update(lambda: self._whole(here), self.convert(value))
            )

    def _assign_in_replica(
        self, here: context.Context, value: Any, update: Callable[[Any, Any], Any]
    ) -> None:
        if self.aggregation is VariableAggregation.NONE:
            self._store_own(here, update(self.read_value, self.convert(value)))
            return

        frame = here.frame
        if frame is not None and not frame.is_staged and isinstance(value, Tracer):
            # Replicas cannot meet while `jax.grad` runs; they do right afterwards.
            frame.deferred.append((self, value, update))
            return
        # A number is the same on all replicas, so it does not have to travel.
        is_plain = is_number(value) or isinstance(value, bool)
        parts = () if is_plain else (jnp.asarray(value),)

        def merge(strategy: Any, *parts: Any) -> None:
            given = parts[0] if parts else value
            together = aggregate(strategy, given, self.aggregation, self)
            self._update_copies(together, update)

        here.replica.merge("assign", merge, parts)
