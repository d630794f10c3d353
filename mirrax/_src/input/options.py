"""Choices: how a dataset is sharded over workers, how it is fed to replicas."""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

AUTOTUNE = -1
SHARD_HINT = -1
LAST_BATCHES = ("exact", "drop", "pad")


class AutoShardPolicy(enum.IntEnum):
    """How a dataset is divided among workers.

    AUTO takes FILE if the dataset reads at least as many files as there are workers, else
    DATA. FILE gives each worker files of its own, DATA a part of every batch, OFF
    everything to every worker; HINT replaces `shard(SHARD_HINT, SHARD_HINT)`.
    """

    __module__ = "mirrax.data.experimental"  # type: ignore[misc]

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class _Choices:
    """Options that refuse what they do not know."""

    _kinds: ClassVar[
        dict[str, Any]
    ]  # of each option the type, as `isinstance` takes it

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._kinds:
            known = ", ".join(self._kinds)
            raise AttributeError(
                f"{type(self).__name__} has no option {name!r}; it has {known}."
            )
        kind = self._kinds[name]
        if not isinstance(value, kind):
            raise TypeError(
                f"Option {name!r} of {type(self).__name__} must be of type "
                f"{getattr(kind, '__name__', kind)}, got {value!r}."
            )
        object.__setattr__(self, name, value)

    def merge(self, options: Self) -> Self:
        """These options, with those of `options` that are not the default in their place."""
        merged, default = copy.deepcopy(self), type(self)()
        for name in self._kinds:
            own, other = getattr(self, name), getattr(options, name)
            if isinstance(own, _Choices):
                setattr(merged, name, own.merge(other))
            elif other != getattr(default, name):
                setattr(merged, name, other)
        return merged


@dataclass
class DistributeOptions(_Choices):
    """How a dataset is distributed.

    Attributes:
        auto_shard_policy: How it is divided among workers.
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    _kinds = {"auto_shard_policy": AutoShardPolicy}


@dataclass
class ThreadingOptions(_Choices):
    """How many threads a pipeline may use.

    Attributes:
        private_threadpool_size: The calls at a time that `AUTOTUNE` stands for; None for
            as many as the machine has cores.
    """

    private_threadpool_size: int | None = None
    _kinds = {"private_threadpool_size": int | None}


@dataclass
class Options(_Choices):
    """Options of a dataset, for `dataset.with_options(options)`.

    >>> options = mx.data.Options()
    >>> options.experimental_distribute.auto_shard_policy = (
    ...     mx.data.experimental.AutoShardPolicy.DATA)
    >>> dataset = mx.data.Dataset.range(8).with_options(options)

    Attributes:
        deterministic: Whether parallel maps keep the order where they do not say it
            themselves; None is True.
        experimental_distribute: How the dataset is distributed.
        threading: How many threads it may use.
    """

    deterministic: bool | None = None
    experimental_distribute: DistributeOptions = field(
        default_factory=DistributeOptions
    )
    threading: ThreadingOptions = field(default_factory=ThreadingOptions)
    _kinds = {
        "deterministic": bool | None,
        "experimental_distribute": DistributeOptions,
        "threading": ThreadingOptions,
    }


class InputReplicationMode(enum.Enum):
    """For how many replicas a `dataset_fn` is called: once a worker, or once a replica."""

    __module__ = "mirrax.distribute"  # type: ignore[misc]

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class InputOptions(
    NamedTuple(
        "InputOptions",
        [
            ("experimental_fetch_to_device", bool | None),
            ("experimental_replication_mode", InputReplicationMode),
            ("experimental_place_dataset_on_device", bool),
            ("experimental_per_replica_buffer_size", int),
            ("last_batch", str),
        ],
    )
):
    """How a distributed dataset feeds the replicas.

    Args:
        experimental_fetch_to_device: Whether batches are copied to the replicas' devices;
            otherwise they stay NumPy arrays until a replica uses them.
        experimental_replication_mode: Whether a `dataset_fn` is called once for each
            worker or once for each replica.
        experimental_place_dataset_on_device: Not supported; only False.
        experimental_per_replica_buffer_size: The batches that are copied ahead, in the
            background; 0 for none. With 1, where CPU replicas take all cores, none are
            until batches have turned out to be slow.
        last_batch: What happens to a batch that is not full. "exact": it is split over
            the replicas as it is, some of which may get less, or nothing. "drop": it is
            left out. "pad": it is filled up with zeros, and every element is a pair
            `(batch, mask)` whose mask is true for real rows; all steps have one shape.
    """

    __slots__ = ()
    __module__ = "mirrax.distribute"

    def __new__(
        cls,
        experimental_fetch_to_device: bool | None = True,
        experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
        experimental_place_dataset_on_device: bool = False,
        experimental_per_replica_buffer_size: int = 1,
        last_batch: str = "exact",
    ) -> InputOptions:
        if experimental_fetch_to_device is None:
            experimental_fetch_to_device = True
        if experimental_place_dataset_on_device:
            raise ValueError(
                "`experimental_place_dataset_on_device="
                f"{experimental_place_dataset_on_device!r}` is not supported: datasets run on the host, and batches are copied to the devices in the background."
            )
        if not isinstance(experimental_replication_mode, InputReplicationMode):
            names = " or ".join(
                f"InputReplicationMode.{m.name}" for m in InputReplicationMode
            )
            raise ValueError(
                f"`experimental_replication_mode` must be {names}, got "
                f"{experimental_replication_mode!r}."
            )
        if not isinstance(experimental_per_replica_buffer_size, int):
            raise TypeError(
                "`experimental_per_replica_buffer_size` must be an integer, got "
                f"{experimental_per_replica_buffer_size!r}."
            )
        if experimental_per_replica_buffer_size < 0:
            raise ValueError(
                "`experimental_per_replica_buffer_size` is a number of batches, got "
                f"{experimental_per_replica_buffer_size}."
            )
        if last_batch not in LAST_BATCHES:
            raise ValueError(
                f"`last_batch` must be one of {', '.join(LAST_BATCHES)}, got {last_batch!r}."
            )
        return super().__new__(
            cls,
            experimental_fetch_to_device,
            experimental_replication_mode,
            experimental_place_dataset_on_device,
            experimental_per_replica_buffer_size,
            last_batch,
        )


@dataclass(frozen=True)
class InputContext:
    """What a `dataset_fn` is told: which of how many input pipelines it makes.

    >>> context = mx.distribute.InputContext(
    ...     num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(32)
    8
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """One replica's share of a global batch.

        Raises:
            ValueError: If the replicas' shares would not be equal.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            count, below = self.num_replicas_in_sync, global_batch_size - rest
            raise ValueError(
                f"`global_batch_size` {global_batch_size} is not divisible by {count} "
                f"replicas. Use {f'{below} or ' if below else ''}{below + count}."
            )
        return size

    def __str__(self) -> str:
        return (
            f"mx.distribute.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )


for _cls in (DistributeOptions, ThreadingOptions, Options):
    _cls.__module__ = "mirrax.data"
InputContext.__module__ = "mirrax.distribute"
