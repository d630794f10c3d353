"""`CrossTowerOps`: how TensorFlow 1.11 named what reduces and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from mirrax._src.base.devices import DeviceLike
from mirrax._src.base.hiding import hides
from mirrax._src.base.reduce_op import ReduceOp, VariableAggregation
from mirrax._src.collectives.algorithms import (
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from mirrax._src.collectives.destinations import Destinations, copy_to
from mirrax._src.collectives.ops import CrossDeviceOps
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.collectives.packing import PackLimits

Pairs = Sequence[tuple[Any, Destinations]]


@hides("as_cross_device_ops")
class CrossTowerOps:
    """How towers' values are reduced and copied; subclass it to bring an algorithm of your own.

    A subclass overrides `_reduce`, and `_batch_reduce` or `_broadcast` if it can do better.
    """

    __module__ = "mirrax.contrib.distribute"

    def reduce(
        self,
        aggregation: VariableAggregation,
        per_device_value: Any,
        destinations: Destinations,
    ) -> Any:
        """`per_device_value` reduced, with a copy on each device of `destinations`."""
        reduce_op_of(aggregation)
        return self._reduce(aggregation, per_device_value, destinations)

    def batch_reduce(
        self, aggregation: VariableAggregation, value_destination_pairs: Pairs
    ) -> list[Any]:
        """Several reductions in one."""
        reduce_op_of(aggregation)
        return self._batch_reduce(aggregation, list(value_destination_pairs))

    def broadcast(self, tensor: Any, destinations: Destinations) -> Any:
        """`tensor` with a copy on each device of `destinations`."""
        return self._broadcast(tensor, destinations)

    def _reduce(
        self, aggregation: VariableAggregation, per_device_value: Any, destinations: Any
    ) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not override `_reduce`.")

    def _batch_reduce(
        self, aggregation: VariableAggregation, value_destination_pairs: Pairs
    ) -> list[Any]:
        return [self._reduce(aggregation, v, d) for v, d in value_destination_pairs]

    def _broadcast(self, tensor: Any, destinations: Destinations) -> Any:
        return copy_to(tensor, destinations)

    def as_cross_device_ops(self) -> CrossDeviceOps:
        """The same for the main strategies."""
        return _Adapted(self)


class _Known(CrossTowerOps):
    """An algorithm that comes with mirrax."""

    def __init__(self, ops: CrossDeviceOps) -> None:
        self._ops = ops

    def _reduce(
        self, aggregation: VariableAggregation, per_device_value: Any, destinations: Any
    ) -> Any:
        return self._ops.reduce(
            reduce_op_of(aggregation), per_device_value, destinations
        )

    def _batch_reduce(
        self, aggregation: VariableAggregation, value_destination_pairs: Pairs
    ) -> list[Any]:
        return self._ops.batch_reduce(
            reduce_op_of(aggregation), value_destination_pairs
        )

    def _broadcast(self, tensor: Any, destinations: Destinations) -> Any:
        return self._ops.broadcast(tensor, destinations)

    def as_cross_device_ops(self) -> CrossDeviceOps:
        return self._ops


class AllReduceCrossTowerOps(_Known):
    """All towers reduce together.

    Args:
        all_reduce_alg: "nccl", or "hierarchical_copy" for two levels.
        num_packs: 1 packs small arrays as measured best, more splits them into that many
            packs, 0 leaves it to the next two.
        agg_small_grads_max_bytes: With `num_packs=0`: arrays smaller than this are packed.
        agg_small_grads_max_group: At most so many of them in one pack.
    """

    __module__ = "mirrax.contrib.distribute"

    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ) -> None:
        algorithms = {
            "nccl": NcclAllReduce,
            "hierarchical_copy": HierarchicalCopyAllReduce,
        }
        if all_reduce_alg not in algorithms:
            raise ValueError(
                f"`all_reduce_alg` must be one of {', '.join(map(repr, algorithms))}, got "
                f"{all_reduce_alg!r}."
            )
        ops = algorithms[all_reduce_alg](max(num_packs, 0))
        if num_packs <= 0 and agg_small_grads_max_bytes > 0:
            ops.limits = PackLimits(
                small_bytes=agg_small_grads_max_bytes,
                pack_arrays=agg_small_grads_max_group,
            )
        super().__init__(ops)


class ReductionToOneDeviceCrossTowerOps(_Known):
    """All values are copied to one device, reduced there, and the result is copied back.

    Args:
        reduce_to_device: The device that reduces; the first tower's by default.
        accumulation_fn: Takes the list of values and returns their sum; `sum` by default.
    """

    __module__ = "mirrax.contrib.distribute"

    def __init__(
        self,
        reduce_to_device: DeviceLike | None = None,
        accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None,
    ) -> None:
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn
        super().__init__(ReductionToOneDevice(reduce_to_device, accumulation_fn))


class _Adapted(CrossDeviceOps):
    """A user's `CrossTowerOps` for the main strategies."""

    def __init__(self, ops: CrossTowerOps) -> None:
        self._ops = ops

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Any:
        return self._ops.reduce(
            _aggregation_of(reduce_op), per_replica_value, destinations
        )

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: Any
    ) -> list[Any]:
        return self._ops.batch_reduce(
            _aggregation_of(reduce_op), value_destination_pairs
        )

    def broadcast_implementation(self, tensor: Any, destinations: Destinations) -> Any:
        return self._ops.broadcast(tensor, destinations)


def reduce_op_of(aggregation: VariableAggregation) -> ReduceOp:
    """`SUM` or `MEAN` as what the main strategies call it."""
    if not isinstance(aggregation, VariableAggregation):
        raise ValueError(
            "`aggregation` must be a VariableAggregation, such as "
            f"mx.VariableAggregation.SUM, got {aggregation!r}."
        )
    return ReduceOp.from_variable_aggregation(aggregation)


def _aggregation_of(reduce_op: ReduceOp) -> VariableAggregation:
    return VariableAggregation[reduce_op.name]
