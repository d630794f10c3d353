"""`KubernetesClusterResolver`: the cluster is the pods that labels select."""

from __future__ import annotations

import enum
import re
from typing import Any

from mirrax._src.cluster.resolvers import ClusterResolver, with_protocol
from mirrax._src.cluster.spec import ClusterSpec


class KubernetesExecutableLocation(enum.Enum):
    """Whether this process runs in a pod of the cluster: how it talks to Kubernetes."""

    __module__ = "mirrax.distribute.cluster_resolver"  # type: ignore[misc]

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """The cluster of the running pods that labels select, by the names of the pods.

        resolver = KubernetesClusterResolver({"worker": ["job-name=train"]})
        resolver.task_type, resolver.task_id = "worker", 0

    Kubernetes does not say which of the tasks this process is, so set it. A task's address
    is that of the pod's node, as TensorFlow has it: pods need `hostNetwork`, and a node or
    a port of their own.

    Args:
        job_to_label_mapping: The label selectors of each job; by default `job-name=tensorflow`
            for "worker".
        tf_server_port: The port of every task.
        rpc_layer: The protocol for `master`.
        override_client: A `CoreV1Api` to ask, with its configuration loaded; by default
            one of the `kubernetes` package.
        executable_location: Where this process runs.
    """

    __module__ = "mirrax.distribute.cluster_resolver"

    def __init__(
        self,
        job_to_label_mapping: dict[str, list[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = (
            KubernetesExecutableLocation.WITHIN_CLUSTER
        ),
    ) -> None:
        default = {"worker": ["job-name=tensorflow"]}
        self._selectors = job_to_label_mapping or default
        self._port = tf_server_port
        self._client = override_client or _client(executable_location)
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """The cluster as Kubernetes has it now.

        Raises:
            RuntimeError: If a pod is not running.
        """
        return ClusterSpec(
            {
                job: [a for selector in selectors for a in self._addresses(selector)]
                for job, selectors in self._selectors.items()
            }
        )

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task, this one by default; "" if it is not known which."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return with_protocol(address, rpc_layer or self.rpc_layer)

    def _addresses(self, selector: str) -> list[str]:
        found = self._client.list_pod_for_all_namespaces(label_selector=selector)
        pods = sorted(found.items, key=lambda pod: _by_number(pod.metadata.name))
        for pod in pods:
            if pod.status.phase != "Running":
                raise RuntimeError(
                    f'Pod "{pod.metadata.name}", selected by "{selector}", is in the phase '
                    f'"{pod.status.phase}". Start training when all pods are running.'
                )
        return [f"{pod.status.host_ip}:{self._port}" for pod in pods]


def _client(location: KubernetesExecutableLocation) -> Any:
    """A client of Kubernetes' API, configured for where this process runs."""
    try:
        from kubernetes import client, config  # type: ignore[import-not-found]
    except ImportError:
        raise ImportError(
            "KubernetesClusterResolver needs the package `kubernetes`: pip install "
            "kubernetes. Or pass `override_client`."
        ) from None
    match location:
        case KubernetesExecutableLocation.WITHIN_CLUSTER:
            config.load_incluster_config()
        case KubernetesExecutableLocation.OFF_CLUSTER:
            config.load_kube_config()
        case _:
            raise ValueError(
                "`executable_location` must be a KubernetesExecutableLocation, got "
                f"{location!r}."
            )
    return client.CoreV1Api()


def _by_number(name: str) -> list[Any]:
    """Sorts `train-2` before `train-10`."""
    return [int(t) if t.isdigit() else t for t in re.split(r"([0-9]+)", name)]
