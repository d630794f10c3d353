"""`JaxClusterResolver`: the cluster as JAX itself detects it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mirrax._src.base.jax_compat import cluster_detection_methods, detect_cluster
from mirrax._src.cluster.resolvers import ClusterResolver, with_protocol
from mirrax._src.cluster.spec import Claim, ClusterSpec


class JaxClusterResolver(ClusterResolver):
    """The cluster that JAX detects: Open MPI, Slurm, Cloud TPU, Kubernetes, or mpi4py.

    >>> resolver = mx.distribute.cluster_resolver.JaxClusterResolver("a:2222", 3, 1)
    >>> resolver.cluster_spec(), resolver.task_type, resolver.task_id
    (ClusterSpec({'worker': ['a:2222', '', '']}), 'worker', 1)

    The arguments are those of `jax.distributed.initialize`, and what is left out is found in
    the same way. JAX knows the address of the first worker only; the others' are "".

    Args:
        coordinator_address: The first worker's address, also `JAX_COORDINATOR_ADDRESS`.
        num_processes: How many workers there are.
        process_id: Which of them this process is.
        local_device_ids: Which of the machine's devices this process uses, also
            `JAX_LOCAL_DEVICE_IDS`. In Slurm and Open MPI JAX gives each process one.
        cluster_detection_method: "ompi", "slurm", "mpi4py", ...; by default the first that
            fits, "mpi4py" never.
        initialization_timeout: How many seconds to wait for the first worker's address
            where there is a wait, in Kubernetes and on Cloud TPUs.

    Attributes:
        local_device_ids: Which of the machine's devices this process uses; None for all.

    Raises:
        RuntimeError: If JAX finds no cluster.
    """

    __module__ = "mirrax.distribute.cluster_resolver"

    def __init__(
        self,
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        local_device_ids: int | Sequence[int] | None = None,
        cluster_detection_method: str | None = None,
        initialization_timeout: int = 300,
    ) -> None:
        method = cluster_detection_method
        if method is not None and method not in cluster_detection_methods():
            raise ValueError(
                f"`cluster_detection_method` is {method!r}, but JAX has "
                f"{', '.join(cluster_detection_methods())}."
            )
        # Only here: with mpi4py each detection is a broadcast, which all must take part in.
        address, count, own, device_ids = detect_cluster(
            (
                coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS"),
                num_processes,
                process_id,
                _device_ids(local_device_ids),
            ),
            method,
            initialization_timeout,
        )
        if address is None or count is None or own is None:
            missing = {
                "coordinator_address": address,
                "num_processes": count,
                "process_id": own,
            }
            names = [f"`{name}`" for name, value in missing.items() if value is None]
            raise RuntimeError(
                f"JAX found no cluster{f' with {method}' if method else ''}, so that "
                f"{', '.join(names)} must be given. It looks for the environment of Open "
                "MPI (mpirun), Slurm (srun), Cloud TPU and Kubernetes (with the package "
                '`kubernetes`); "mpi4py" only as `cluster_detection_method`.'
            )
        if not 0 <= own < count:
            raise ValueError(
                f"`process_id` is {own}, but must be from 0 to `num_processes` - 1, which "
                f"is {count - 1}."
            )
        self._addresses = [address] + [""] * (count - 1)
        self.local_device_ids = None if device_ids is None else tuple(device_ids)
        self.task_type, self.task_id = "worker", own
        self.rpc_layer: str | None = None

    def cluster_spec(self) -> ClusterSpec:
        """All workers, of which only the first one's address is known."""
        return ClusterSpec({"worker": self._addresses})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task, the first by default; "" if JAX does not know it."""
        cluster = self.cluster_spec()
        address = cluster.task_address(task_type or "worker", task_id or 0)
        return address and with_protocol(address, rpc_layer or self.rpc_layer)

    def claim(self) -> Claim:
        """What `training_cluster` is to check."""
        cluster = self.cluster_spec().as_dict()
        return Claim(cluster, self.task_type, self.task_id, knows_addresses=False)


def _device_ids(given: int | Sequence[int] | None) -> Sequence[int] | None:
    if given is None and (text := os.environ.get("JAX_LOCAL_DEVICE_IDS")):
        return [int(part) for part in text.split(",")]
    return [given] if isinstance(given, int) else given
