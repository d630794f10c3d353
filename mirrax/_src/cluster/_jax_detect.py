"""JAX's own detection of clusters; its place is base/jax_compat.py."""

from __future__ import annotations

from collections.abc import Sequence

from jax._src import clusters as _clusters

Detected = tuple[str | None, int | None, int | None, Sequence[int] | None]


def detect_cluster(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: Sequence[int] | None,
    method: str | None,
    timeout_seconds: int,
) -> Detected:
    """These four, with what JAX finds in the environment for those that are None."""
    return _clusters.ClusterEnv.auto_detect_unset_distributed_params(
        coordinator_address,
        num_processes,
        process_id,
        local_device_ids,
        method,
        timeout_seconds,
    )


def cluster_detection_methods() -> list[str]:
    """What `method` may be."""
    return [kind.name for kind in _clusters.ClusterEnv._cluster_types if kind.name]
