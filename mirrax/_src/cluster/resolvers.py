"""What a `ClusterResolver` is, one that is told everything, and a union of several.

A resolver knows the cluster and which of its tasks this process is. Those that find out by
themselves have a file each: resolver_tf_config.py, resolver_slurm.py,
resolver_kubernetes.py and resolver_jax.py.
"""

from __future__ import annotations

import abc
import collections
from typing import Any

import jax

from mirrax._src.base.devices import device_kind, device_name, resolve_devices
from mirrax._src.base.hiding import hides
from mirrax._src.base.jax_compat import backend_started
from mirrax._src.cluster.runtime import Cluster
from mirrax._src.cluster.spec import TRAINING_JOBS, Claim, ClusterSpec


@hides("claim")
class ClusterResolver(abc.ABC):
    """Knows the tasks of a cluster, and which of them this process is.

    To write one for a cluster of your own, write `cluster_spec` and `master`, and set
    `task_type` and `task_id`.
    """

    __module__ = "mirrax.distribute.cluster_resolver"

    _task_type: str | None = None
    _task_id: int | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The cluster as it is now."""

    @abc.abstractmethod
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task, this process's by default, after `rpc_layer://`."""

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """How many accelerators a task has, by kind: `{"GPU": 8}`.

        By default this process's own. Those of another task are known once the workers
        have joined. It starts JAX's backend, so call it after you made the strategy.

        Args:
            task_type: The task's job.
            task_id: Its index in that job.
            config_proto: Ignored; TensorFlow has it.
        """
        devices = jax.local_devices()
        is_own = (task_type, task_id) == (self.task_type, self.task_id)
        if task_type is not None and task_id is not None and not is_own:
            process = self._process_of(task_type, task_id)
            devices = [d for d in jax.devices() if d.process_index == process]
        kinds = map(device_kind, devices)
        return collections.Counter(kind for kind in kinds if kind != "CPU")

    @property
    def environment(self) -> str | None:
        """Where this runs: "", as TensorFlow has it outside of Google."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job of this process: "chief", "worker", "ps" or "evaluator"."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def claim(self) -> Claim:
        """What `training_cluster` is to check."""
        cluster = self.cluster_spec().as_dict()
        return Claim(cluster, self.task_type, self.task_id)

    def _process_of(self, task_type: str, task_id: int) -> int | None:
        """The number that JAX gives to a task; None if it has not joined."""
        cluster = self.cluster_spec()
        cluster.task_address(task_type, task_id)
        jobs = [job for job in TRAINING_JOBS if job in cluster.jobs]
        tasks = [(job, index) for job in jobs for index in cluster.task_indices(job)]
        if (task_type, task_id) not in tasks or jax.process_count() != len(tasks):
            return None
        return tasks.index((task_type, task_id))

    def __repr__(self) -> str:
        task = f"task_type={self.task_type!r}, task_id={self.task_id!r}"
        return f"{type(self).__name__}({task})"


class SimpleClusterResolver(ClusterResolver):
    """A resolver that is told everything.

    >>> resolvers = mx.distribute.cluster_resolver
    >>> cluster = resolvers.ClusterSpec({"worker": ["a:2222", "b:2222"]})
    >>> resolver = resolvers.SimpleClusterResolver(
    ...     cluster, task_type="worker", task_id=1, rpc_layer="grpc")
    >>> resolver.master("worker", 0)
    'grpc://a:2222'

    Args:
        cluster_spec: The cluster.
        master: What `master()` gives where no task is asked for.
        task_type: The job of this process.
        task_id: Its index in that job.
        environment: What `environment` gives.
        num_accelerators: What `num_accelerators()` gives; `{}` by default.
        rpc_layer: The protocol that `master()` writes before addresses.
    """

    __module__ = "mirrax.distribute.cluster_resolver"

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"`cluster_spec` must be a ClusterSpec, got {cluster_spec!r}. Wrap it: "
                "`ClusterSpec({...})`."
            )
        if not isinstance(master, str):
            raise TypeError(f"`master` must be a string, got {master!r}.")
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type, self._task_id = task_type, task_id
        self._environment = environment
        self._num_accelerators = num_accelerators
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """The cluster that it was given."""
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of the task, or the `master` that it was given."""
        master = self._master
        if task_type is not None and task_id is not None:
            master = self._cluster_spec.task_address(task_type, task_id)
        return with_protocol(master, rpc_layer or self.rpc_layer)

    @property
    def environment(self) -> str:
        """The environment that it was given."""
        return self._environment

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """The number that it was given, for any task; the arguments are ignored."""
        return {} if self._num_accelerators is None else self._num_accelerators


class UnionResolver(ClusterResolver):
    """Several resolvers as one: all their tasks; all the rest is the first one's.

    >>> resolvers = mx.distribute.cluster_resolver
    >>> parts = [
    ...     resolvers.SimpleClusterResolver(resolvers.ClusterSpec({"worker": [address]}))
    ...     for address in ("a:2222", "b:2222")]
    >>> resolvers.UnionResolver(*parts, task_type="worker", task_id=0).cluster_spec()
    ClusterSpec({'worker': ['a:2222', 'b:2222']})

    Args:
        *cluster_resolvers: The resolvers.
        task_type: The job of this process, if the first resolver's is not right.
        task_id: Its index in that job, likewise.
        rpc_layer: The protocol for `master`, likewise.
    """

    __module__ = "mirrax.distribute.cluster_resolver"

    def __init__(
        self,
        *cluster_resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not cluster_resolvers:
            raise ValueError("A UnionResolver needs at least one ClusterResolver.")
        for resolver in cluster_resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"A UnionResolver joins resolvers, got {resolver!r}.")
        self._resolvers = cluster_resolvers
        self._task_type, self._task_id = task_type, task_id
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """All tasks of all resolvers.

        Lists of one job are joined in the order of the resolvers. If one of them has a job
        as a dictionary, indices stay as they are.

        Raises:
            KeyError: If an index is then there twice.
        """
        jobs: dict[str, list[Any]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                jobs.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _merged(job, parts) for job, parts in jobs.items()})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of the task, or what the first resolver gives."""
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        address = self.cluster_spec().task_address(task_type, task_id)
        return with_protocol(address, rpc_layer or self._rpc_layer)

    @property
    def task_type(self) -> str | None:
        """The job of this process."""
        first = self._resolvers[0]
        return first.task_type if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job."""
        return self._resolvers[0].task_id if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def environment(self) -> str | None:
        """The first resolver's environment."""
        return self._resolvers[0].environment

    @property
    def rpc_layer(self) -> str | None:
        """The protocol for `master`."""
        return self._rpc_layer or getattr(self._resolvers[0], "rpc_layer", None)

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """The first resolver's number."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)


def resolver_of(cluster: Cluster) -> ClusterResolver:
    """The processes of `jax.distributed` as a cluster; only the first one's address counts."""
    first = cluster.addresses[0]
    others = [f"worker-{k}:1" for k in range(1, cluster.size)]
    spec = ClusterSpec({"worker": [first, *others]})
    return SimpleClusterResolver(spec, task_type="worker", task_id=cluster.worker)


def choose_devices(resolver: ClusterResolver) -> None:
    """Takes those of this machine's GPUs that the cluster has given to this process."""
    ids = getattr(resolver, "local_device_ids", None)
    if ids is not None and not backend_started():
        for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            jax.config.update(name, ",".join(map(str, ids)))


def agree_on_devices(cluster: Cluster) -> tuple[Any, ...]:
    """The devices of all workers, worker by worker; each has to have the same."""
    found = cluster.agree("devices", [device_name(d) for d in resolve_devices(None)])
    for k, names in enumerate(found):
        if names != found[0]:
            raise ValueError(
                "The workers have different devices: "
                f"{', '.join(found[0])} on {cluster.names[0]}, {', '.join(names)} on "
                f"{cluster.names[k]}. Give every worker as many of the same kind."
            )
    return tuple(sorted(jax.devices(), key=lambda d: (d.process_index, d.id)))


def with_protocol(address: str, rpc_layer: str | None) -> str:
    """`grpc://host:port`, or just the address."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


def _merged(job: str, parts: list[Any]) -> list[str] | dict[int, str]:
    if all(isinstance(part, list) for part in parts):
        return sum(parts, [])
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        twice = merged.keys() & tasks.keys()
        if twice:
            raise KeyError(
                f"Job {job!r} has task {min(twice)} in two of the resolvers: "
                f"{merged[min(twice)]!r} and {tasks[min(twice)]!r}."
            )
        merged.update(tasks)
    return merged
