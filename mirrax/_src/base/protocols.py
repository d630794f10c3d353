"""What lower layers may ask of the higher ones: a strategy, a replica, a frame, a cluster."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import jax

    from mirrax._src.base.mesh import ReplicaMesh


class ClusterLike(Protocol):
    """The workers, as code that runs on all of them knows them."""

    @property
    def names(self) -> Sequence[str]: ...
    def agree(self, what: str, value: Any) -> list[Any]: ...
    def agree_numbered(self, what: str, value: Any) -> tuple[list[Any], int]: ...
    def agree_ahead(
        self, name: str, value: Any, wanted: Callable[[], bool | None]
    ) -> list[Any]: ...
    def compare(self, program: str) -> None: ...
    def check(self) -> None: ...
    def note_steps(self, count: int) -> None: ...
    def explaining(self) -> contextlib.AbstractContextManager[None]: ...
    def limit_waiting(self, seconds: float) -> None: ...


class ExtendedLike(Protocol):
    """`strategy.extended`, as variables and replicas use it."""

    def create_variable(self, spec: Any) -> Any: ...
    def reduce_to(self, reduce_op: Any, value: Any, destinations: Any) -> Any: ...
    def batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> list[Any]: ...
    def broadcast_to(self, tensor: Any, destinations: Any) -> Any: ...
    def update(self, var: Any, fn: Callable[..., Any], args: Any) -> Any: ...


class StrategyLike(Protocol):
    """A strategy, as variables, collectives and engines know it.

    Only code that may be called outside any scope meets the default one, without a mesh.
    """

    @property
    def replica_mesh(self) -> ReplicaMesh: ...
    @property
    def extended(self) -> ExtendedLike: ...
    @property
    def num_replicas_in_sync(self) -> int: ...
    def describe_replica(self, local_index: int) -> str: ...
    def place_of(self, local_index: int) -> tuple[int, Any]: ...
    def run(self, fn: Callable[..., Any], args: Sequence[Any]) -> Any: ...
    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any: ...
    def gather_everywhere(self, value: Any, axis: int) -> jax.Array: ...
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]: ...
    def first_part(self, value: Any) -> Any: ...
    def initial_on_all_workers(self, array: jax.Array) -> jax.Array: ...
    def entered(self, what: str) -> contextlib.AbstractContextManager[Any]: ...


class ReplicaLike(Protocol):
    """A replica context, as variables and losses use it."""

    local_index: int

    @property
    def num_replicas_in_sync(self) -> int: ...
    @property
    def replica_id_in_sync_group(self) -> Any: ...
    def all_reduce(self, reduce_op: Any, value: Any) -> Any: ...
    def all_gather(self, value: Any, axis: int) -> Any: ...
    def merge_call(self, merge_fn: Callable[..., Any], args: Any) -> Any: ...
    def merge(
        self, what: str, merge_fn: Callable[..., Any], args: Any, kwargs: Any = None
    ) -> Any: ...


class Mode(enum.Enum):
    """What the code that a frame belongs to is."""

    CALL = "cross-replica code, traced"
    REPLICAS = "one program for all replicas, traced"
    UNEVEN = "one replica's program, where the others' arrays have other shapes"
    PART = "a compiled part of one eager replica, traced"
    EAGER = "plain Python under `jax.grad`"

    @property
    def is_local(self) -> bool:
        """Whether variables are one replica's own arrays, not all copies."""
        return self is not Mode.CALL

    @property
    def is_program(self) -> bool:
        """Whether the code runs as a program for every replica."""
        return self in (Mode.REPLICAS, Mode.UNEVEN)

    @property
    def is_whole(self) -> bool:
        """Whether all that replicas do together in a step is seen, and can be merged."""
        return self in (Mode.CALL, Mode.REPLICAS, Mode.UNEVEN)

    @property
    def is_traced(self) -> bool:
        """Whether a program comes out; else code runs operation by operation."""
        return self is not Mode.EAGER


class FrameLike(Protocol):
    """Where variables are read and written while a function is traced."""

    mode: Mode

    def read(self, variable: Any) -> Any: ...
    def is_agreed(self, variable: Any) -> bool: ...
    def write(
        self, variable: Any, value: Any, is_agreed: bool | None = None
    ) -> None: ...
    def add_created(self, variable: Any) -> None: ...
