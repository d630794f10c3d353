"""`CrossDeviceOps`: how values of several devices are reduced and copied.

A user's subclass overrides the `*_implementation` hooks and sees `PerReplica` values. The
algorithms that come with mirrax (algorithms.py) override `reduce_in_program` instead: what
one replica does, inside the program that all replicas run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mirrax._src.base.hiding import hides
from mirrax._src.base.reduce_op import ReduceOp
from mirrax._src.base.sparse import IndexedSlices
from mirrax._src.base.values import PerReplica, ReplicaValues
from mirrax._src.collectives.destinations import Destinations, copy_to
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.state.distributed import DistributedVariable


@hides("limits", "pack_limits", "reduce_in_program")
class CrossDeviceOps:
    """How a strategy reduces and copies values; subclass it to bring an algorithm of your own.

    A subclass overrides `reduce_implementation`, `batch_reduce_implementation` and
    `broadcast_implementation`; they are called in cross-replica context with `PerReplica`
    values, in both engines.
    """

    __module__ = "mirrax.distribute"

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Destinations,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """`per_replica_value` reduced, with a copy on each device of `destinations`."""
        return self.reduce_implementation(
            ReduceOp(reduce_op),
            _as_per_replica(per_replica_value),
            check_destinations(destinations),
            options or CommunicationOptions(),
        )

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Destinations]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Several reductions in one, so that small values can travel together."""
        pairs = check_pairs(value_destination_pairs)
        return self.batch_reduce_implementation(
            ReduceOp(reduce_op),
            [(_as_per_replica(v), check_destinations(d)) for v, d in pairs],
            options or CommunicationOptions(),
        )

    def broadcast(self, tensor: Any, destinations: Destinations) -> Any:
        """`tensor` with a copy on each device of `destinations`."""
        return self.broadcast_implementation(tensor, check_destinations(destinations))

    # The hooks of a subclass -----------------------------------------------------------

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Any:
        """One reduction; a subclass has to bring it."""
        raise NotImplementedError(
            f"{type(self).__name__} does not override `reduce_implementation`."
        )

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Destinations]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Several reductions: one after another, unless a subclass does better."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Destinations) -> Any:
        """A copy on each destination; a subclass may do it its own way."""
        return copy_to(tensor, destinations)


def check_pairs(pairs: Any) -> list[tuple[Any, Destinations]]:
    """`pairs` as a list; raises unless it is one of (value, destinations)."""
    is_list = isinstance(pairs, tuple | list)
    if not is_list or not all(
        isinstance(p, tuple | list) and len(p) == 2 for p in pairs
    ):
        raise ValueError(
            "`value_destination_pairs` must be a list of (value, destinations) pairs, got "
            f"{pairs!r}."
        )
    return [(value, destinations) for value, destinations in pairs]


def check_destinations(destinations: Destinations) -> Destinations:
    """`destinations`; raises if they name nothing."""
    if destinations is None or (
        isinstance(destinations, tuple | list) and not destinations
    ):
        raise ValueError(
            "`destinations` must name where the result goes: a variable, a distributed "
            f"value, a device or a list of devices; got {destinations!r}."
        )
    return destinations


def _as_per_replica(value: Any) -> Any:
    if isinstance(value, IndexedSlices):
        rows, indices = map(_as_per_replica, (value.values, value.indices))
        return IndexedSlices(rows, indices, value.dense_shape)
    if isinstance(value, DistributedVariable):
        return value.copies()
    is_apart = isinstance(value, PerReplica) and value.array is None
    if is_apart and isinstance(value.values[0], IndexedSlices):
        rows = PerReplica([s.values for s in value.values], mesh=value.mesh)
        indices = PerReplica([s.indices for s in value.values], mesh=value.mesh)
        return IndexedSlices(rows, indices, value.values[0].dense_shape)
    return value if isinstance(value, ReplicaValues) else PerReplica([value])
