"""The clusters in which scenarios are run, and what a worker of them has as `api`."""

import json
from dataclasses import dataclass
from itertools import count
from typing import Any


@dataclass(frozen=True)
class Cluster:
    """Jobs with their numbers of tasks, and the tasks that are started.

    Without `starts` all tasks of `chief` and `worker` are. Without jobs there is one
    process without `TF_CONFIG`.
    """

    jobs: dict[str, int]
    starts: tuple[tuple[str, int], ...] = ()
    replicas_per_worker: int = 1

    @property
    def tasks(self) -> tuple[tuple[str, int], ...]:
        trains = [
            (job, index)
            for job in ("chief", "worker")
            for index in range(self.jobs.get(job, 0))
        ]
        return self.starts or tuple(trains) or (("worker", 0),)

    def config(self, worker: int, addresses: list[str]) -> str | None:
        """`TF_CONFIG` of a process, where those that are started have `addresses`."""
        if not self.jobs:
            return None
        listening = dict(zip(self.tasks, addresses, strict=True))
        unused_ports = count(1)
        cluster = {
            job: [
                listening.get((job, index)) or f"127.0.0.1:{next(unused_ports)}"
                for index in range(size)
            ]
            for job, size in self.jobs.items()
        }
        job, index = self.tasks[worker]
        return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


CLUSTERS = {
    "two": Cluster({"worker": 2}),
    "three": Cluster({"worker": 3}),
    "two_by_two": Cluster({"worker": 2}, replicas_per_worker=2),
    "one": Cluster({"worker": 1}),
    "none": Cluster({}),
    "chief": Cluster({"chief": 1, "worker": 1}),
    "chief_only": Cluster({"chief": 1}),
    "with_ps": Cluster({"worker": 2, "ps": 1}),
    "with_evaluator": Cluster({"worker": 2, "evaluator": 1}),
    "ps": Cluster({"worker": 2, "ps": 1}, (("ps", 0),)),
    "evaluator": Cluster({"worker": 2, "evaluator": 1}, (("evaluator", 0),)),
    "unlisted_evaluator": Cluster({"worker": 2}, (("evaluator", 0),)),
}


class WorkerApi:
    """`api` of one worker: all that one process has, and what only a cluster has."""

    def __init__(self, base: Any, worker: int, num_workers: int) -> None:
        self.base = base
        self.worker = worker
        self.num_workers = num_workers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def multi_worker(self, **kwargs: Any) -> Any:
        return self.distribute.MultiWorkerMirroredStrategy(**kwargs)

    def of_replica(self, strategy: Any, fn: Any, dtype: str = "float32") -> Any:
        """A per-replica value: `fn(replica_id)` on each replica of the cluster."""
        return strategy.experimental_distribute_values_from_function(
            lambda context: self.array(fn(context.replica_id_in_sync_group), dtype)
        )
