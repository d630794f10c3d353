"""Towers, which are replicas: the context of one, and the functions that ask where one is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mirrax._src.base.errors import renamed
from mirrax._src.base.reduce_op import VariableAggregation
from mirrax._src.base.values import PyTree
from mirrax._src.engines.replica_context import ReplicaContext, SpmdReplicaContext
from mirrax._src.integrations.contrib.strategy import DistributionStrategy, face_of
from mirrax._src.strategies.default import (
    get_replica_context,
    get_strategy,
    has_strategy,
)


@dataclass(frozen=True)
class TowerContext:
    """The current tower: its id, and how to meet the other towers.

    Attributes:
        distribution_strategy: The strategy that runs this tower.
    """

    distribution_strategy: DistributionStrategy
    _replica: ReplicaContext

    @property
    def tower_id(self) -> Any:
        """This tower's number, from 0 on; in a compiled function an array."""
        if isinstance(self._replica, SpmdReplicaContext):
            return self._replica.replica_id_in_sync_group
        return self._replica.strategy.place_of(self._replica.local_index)[0]

    @property
    def num_towers(self) -> int:
        """How many towers there are."""
        return self.distribution_strategy.num_towers

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one only."""
        return self.num_towers == 1

    @property
    def device(self) -> str:
        """The device that this tower runs on; not known in a compiled function."""
        device = self._replica.devices[0]
        strategy: Any = self._replica.strategy
        if strategy.replica_mesh is None:
            return device
        return strategy.extended.worker_devices[self._replica.local_index]

    def merge_call(
        self, merge_fn: Callable[..., PyTree], *args: Any, **kwargs: Any
    ) -> PyTree:
        """Pauses all towers and calls `merge_fn(distribution, *args, **kwargs)` once.

        It runs in cross-tower context; arguments that differ between towers arrive as
        per-device values. Each tower gets its own part of the result.
        """
        if not callable(merge_fn):
            raise TypeError(f"`merge_fn` must be a function, got {merge_fn!r}.")

        def merge(core: Any, *args: Any, **kwargs: Any) -> PyTree:
            return merge_fn(self.distribution_strategy, *args, **kwargs)

        return self._replica.merge_call(merge, args, kwargs)


@renamed("mx.distribute.get_replica_context")
def get_tower_context() -> TowerContext | None:
    """The current tower's context, or None in cross-tower context.

    >>> mx.contrib.get_tower_context().tower_id
    0
    """
    return current_tower()


def current_tower() -> TowerContext | None:
    """As `get_tower_context`."""
    replica = get_replica_context()
    if replica is None:
        return None
    return TowerContext(face_of(replica.strategy), replica)


@renamed("mx.distribute.get_strategy")
def get_cross_tower_context() -> DistributionStrategy | None:
    """The current strategy in cross-tower context, or None in a tower."""
    return None if get_replica_context() else face_of(get_strategy())


@renamed("mx.distribute.get_strategy")
def get_distribution_strategy() -> DistributionStrategy:
    """The current strategy; outside any scope the default one."""
    return face_of(get_strategy())


@renamed("mx.distribute.has_strategy")
def has_distribution_strategy() -> bool:
    """Whether a strategy other than the default one is current."""
    return has_strategy()


@renamed("mx.distribute.get_replica_context")
def require_tower_context(tower_ctx: TowerContext) -> None:
    """Raises RuntimeError unless `tower_ctx` is the current tower's."""
    found = current_tower()
    if found is None:
        raise RuntimeError(
            "This code has to run in a tower: in a function that `call_for_each_tower` calls."
        )
    if found != tower_ctx:
        raise RuntimeError(
            f"The context of tower {tower_ctx.tower_id} is not that of the current tower; ask for it by "
            "`get_tower_context()` where you use it."
        )


@renamed("mx.nn.compute_average_loss")
def get_loss_reduction() -> VariableAggregation:
    """How towers' losses become one: by `MEAN`.

    >>> mx.contrib.distribute.get_loss_reduction()
    <VariableAggregation.MEAN: 2>
    """
    return VariableAggregation.MEAN


for _public in (
    TowerContext,
    get_tower_context,
    get_cross_tower_context,
    get_distribution_strategy,
    has_distribution_strategy,
    require_tower_context,
    get_loss_reduction,
):
    _public.__module__ = "mirrax.contrib.distribute"
