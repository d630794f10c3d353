"""How a strategy is fed: `experimental_distribute_dataset` and the like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mirrax._src.base import context
from mirrax._src.base.errors import warn_renamed
from mirrax._src.base.hiding import all_brief
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.structures import opened
from mirrax._src.input.adapters import as_dataset
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.distributed import DistributedDataset
from mirrax._src.input.iterators import adopt, describe_steps
from mirrax._src.input.node import Node, walk
from mirrax._src.input.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from mirrax._src.input.sharding import make_plan
from mirrax._src.input.splitting import Dropping, InTurn, Padding, Share, StepCursor
from mirrax._src.input.transforms.selecting import Shard

DatasetFn = Callable[[InputContext], Any]


@all_brief
class Feeding:
    """The methods by which a strategy is given its data."""

    __module__ = "mirrax.distribute"

    replica_mesh: ReplicaMesh

    @property
    def input_share(self) -> Share:
        """This worker's replicas among all, for those who divide data."""
        return Share(1, 0, self.replica_mesh.size if self.replica_mesh else 1)

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """A dataset of global batches, each split over the replicas and on their devices.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> dataset = mx.data.Dataset.range(6).batch(4)
        >>> for batch in strategy.experimental_distribute_dataset(dataset):
        ...     print(batch)
        PerReplica:{
          0: Array([0, 1], dtype=int32),
          1: Array([2, 3], dtype=int32)
        }
        PerReplica:{
          0: Array([4], dtype=int32),
          1: Array([5], dtype=int32)
        }

        Batch the dataset by the global batch size. The batches are copied ahead in the
        background. `explain()` of the result tells who gets what.

        Args:
            dataset: An `mx.data.Dataset`, or whatever `mx.data.as_dataset` takes.
            options: An `mx.distribute.InputOptions`.
        """
        check_not_in_replica("experimental_distribute_dataset")
        return distribute_dataset(dataset, self.input_share, self.replica_mesh, options)

    def distribute_datasets_from_function(
        self, dataset_fn: DatasetFn, options: InputOptions | None = None
    ) -> DistributedDataset:
        """The dataset that `dataset_fn(input_context)` makes; each replica takes a batch.

        It is called once, here. Batch by the size for one replica,
        `input_context.get_per_replica_batch_size(global_batch_size)`, and shard by
        `input_context.input_pipeline_id`: nothing is split or divided any more.
        """
        check_not_in_replica("distribute_datasets_from_function")
        return distribute_from_function(
            dataset_fn, self.input_share, self.replica_mesh, options
        )

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: DatasetFn, options: InputOptions | None = None
    ) -> DistributedDataset:
        """The older name of `distribute_datasets_from_function`."""
        warn_renamed(
            "experimental_distribute_datasets_from_function",
            "distribute_datasets_from_function",
        )
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> Dataset:
        """The rows of a copy of arrays in memory, as a dataset.

        Args:
            numpy_input: Arrays of the same length, in any structure; a list is stacked.
        """
        check_not_in_replica("experimental_make_numpy_dataset")
        return numpy_dataset(numpy_input)


def check_not_in_replica(what: str) -> None:
    """Raises in a replica function, where data and values cannot be distributed."""
    if context.current().replica is not None and not context.is_default():
        raise RuntimeError(
            f"`{what}` is called inside a replica function. Call it outside `run`, and pass "
            "what it gives to the function."
        )


def distribute_dataset(
    dataset: Any, share: Share, mesh: ReplicaMesh | None, options: InputOptions | None
) -> DistributedDataset:
    """A dataset of global batches, divided among workers and replicas."""
    options = _checked(options)
    if isinstance(dataset, DistributedDataset):
        raise ValueError(
            f"The dataset is distributed already: {dataset!r}. Iterate over it, or distribute the "
            "dataset that it was made from."
        )
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            f"`{options.experimental_replication_mode}` calls a `dataset_fn` for each replica; use "
            "it with `distribute_datasets_from_function`."
        )
    found = as_dataset(dataset)
    if mesh is not None and mesh.spans_workers:
        _agree_on_dataset(found, mesh)
    return DistributedDataset.of_plan(make_plan(found, share, options), mesh)


def _agree_on_dataset(dataset: Dataset, mesh: ReplicaMesh) -> None:
    """Has all workers shuffle in the same order, so that each row is distributed once.

    Raises:
        ValueError: If the workers' datasets are made in different ways.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    own = {**describe_steps((dataset.node,)), "policy": policy.name}
    found = mesh.cluster.agree("a distributed dataset", own)
    for k, theirs in enumerate(found):
        for what in ("policy", "steps"):
            if theirs[what] != found[0][what]:
                raise ValueError(
                    f"The workers distribute different datasets: {what} is {found[0][what]} on "
                    f"{mesh.cluster.names[0]} and {theirs[what]} on {mesh.cluster.names[k]}. "
                    "Make the same dataset on all workers, or use "
                    "`distribute_datasets_from_function`."
                )
    if policy is not AutoShardPolicy.OFF:  # where each worker has all data to itself
        adopt((dataset.node,), found[0])


def distribute_from_function(
    dataset_fn: DatasetFn,
    share: Share,
    mesh: ReplicaMesh | None,
    options: InputOptions | None,
    drop_incomplete: bool = False,
) -> DistributedDataset:
    """The datasets that `dataset_fn` makes, one for this worker or for each replica."""
    if not callable(dataset_fn):
        raise TypeError(
            f"`dataset_fn` must be a function of an InputContext, got {dataset_fn!r}."
        )
    options = _checked(options)
    local = share.replicas_per_worker
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        first = share.worker * local
        contexts = [
            InputContext(share.num_replicas, first + i, share.num_replicas)
            for i in range(local)
        ]
    else:
        contexts = [InputContext(share.num_workers, share.worker, share.num_replicas)]
    made = [dataset_fn(each) for each in contexts]
    roots = tuple(
        as_dataset(dataset, "What `dataset_fn` returned").node for dataset in made
    )
    if mesh is not None and mesh.spans_workers:
        _shuffle_alike(roots, mesh)
    rows = roots[0].batch_size()
    source = InTurn(roots, local, rows, share.num_workers == 1, drop_incomplete)

    def steps_of(path: Any, state: Any) -> StepCursor:
        cursor = source.open(path, state)
        if options.last_batch == "drop":
            return Dropping(cursor)
        return Padding(cursor, rows) if options.last_batch == "pad" else cursor

    return DistributedDataset.in_turn(roots, steps_of, share, mesh, options)


def _shuffle_alike(roots: tuple[Node, ...], mesh: ReplicaMesh) -> None:
    """Where `dataset_fn` shards what it has shuffled: the same order on all workers.

    Rows would be read twice or never otherwise. What is not sharded is not touched: workers
    that read all data better do so in different orders.
    """
    steps = describe_steps(roots)
    is_sharded = any(isinstance(n, Shard) for root in roots for n in walk(root))
    own = {**steps, "is_sharded": is_sharded}
    first = mesh.cluster.agree("the datasets of a function", own)[0]
    if is_sharded and len(first["entropy"]) == len(steps["entropy"]):
        adopt(roots, {**first, "steps": steps["steps"]})


def _checked(options: InputOptions | None) -> InputOptions:
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"`options` must be an InputOptions, got {options!r}.")
    return options or InputOptions()


def numpy_dataset(numpy_input: Any, session: None = None) -> Dataset:
    """The rows of arrays in memory, copied, so that the arrays may change."""
    if session is not None:
        raise ValueError(
            "`session` belongs to TensorFlow's graph execution, which mirrax does not "
            f"have; leave it out. Got {session!r}."
        )
    return Dataset.from_tensor_slices(
        jax.tree.map(
            lambda x: x.copy() if isinstance(x, np.ndarray) else x, opened(numpy_input)
        )
    )
