"""`MirroredStrategy`: one replica on each device of one machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from mirrax._src.base.devices import DeviceLike, resolve_devices
from mirrax._src.base.errors import warn_user
from mirrax._src.base.hiding import all_brief
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.cluster.runtime import current_cluster
from mirrax._src.cluster.spec import TRAINING_JOBS
from mirrax._src.collectives.ops import CrossDeviceOps
from mirrax._src.strategies.strategy import Strategy


@all_brief
class MirroredStrategy(Strategy):
    """Synchronous training on all devices of one machine, with a copy of each variable on each.

    >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> strategy.num_replicas_in_sync
    2

    Args:
        devices: Device strings (`"GPU:0"`) or `jax.Device`s; all accelerators by default,
            or all CPU devices where there are none.
        cross_device_ops: How values are reduced; `NcclAllReduce()` by default.
    """

    __module__ = "mirrax.distribute"

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        if not isinstance(cross_device_ops, CrossDeviceOps | None):
            raise TypeError(
                "`cross_device_ops` must be a CrossDeviceOps, such as "
                f"mx.distribute.NcclAllReduce(), got {cross_device_ops!r}."
            )
        mesh = ReplicaMesh(resolve_devices(devices))
        super().__init__(self.extended_class(self, cross_device_ops), mesh)
        _warn_of_other_workers(os.environ.get("TF_CONFIG"))


def _warn_of_other_workers(tf_config: str | None) -> None:
    """Warns in a job of several workers, each of which would train alone."""
    if not tf_config:
        return
    try:
        config = json.loads(tf_config)
        jobs = {job: config["cluster"].get(job, ()) for job in TRAINING_JOBS}
        is_worker = config["task"]["type"] in jobs
        count = sum(map(len, jobs.values()))
    except (AttributeError, KeyError, TypeError, ValueError):
        return  # whoever reads it says what is wrong
    if is_worker and count > 1 and current_cluster() is None:
        warn_user(
            f"TF_CONFIG describes {count} workers, but MirroredStrategy trains on this one alone. "
            "Use `mx.distribute.MultiWorkerMirroredStrategy()` to train on all of them together."
        )
