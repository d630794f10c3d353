"""The strategies of TensorFlow 1.11 that a program makes: how each chooses its core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mirrax._src.base.devices import DeviceLike
from mirrax._src.base.errors import warn_renamed
from mirrax._src.cluster.resolvers import SimpleClusterResolver
from mirrax._src.cluster.spec import ClusterSpec
from mirrax._src.integrations.contrib.cross_tower_ops import CrossTowerOps
from mirrax._src.integrations.contrib.strategy import DistributionStrategy
from mirrax._src.strategies.mirrored import MirroredStrategy as CoreMirrored
from mirrax._src.strategies.multi_worker import MultiWorkerMirroredStrategy
from mirrax._src.strategies.one_device import OneDeviceStrategy as CoreOneDevice
from mirrax._src.strategies.strategy import Strategy


class MirroredStrategy(DistributionStrategy):
    """One tower on each device, with a copy of each variable.

    >>> distribution = mx.contrib.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> def tower_fn(three):
    ...     return three + mx.contrib.get_tower_context().tower_id
    >>> print(*distribution.unwrap(distribution.call_for_each_tower(tower_fn, 3)))
    3 4

    With a cluster, see `configure`, it is one tower on each device of all workers.

    Args:
        devices: Device strings, or `jax.Device`s.
        num_gpus: The number of GPUs, in place of `devices`; all by default. 0 is the first
            CPU device.
        num_gpus_per_worker: The same.
        cross_tower_ops: How values are reduced, a `CrossTowerOps`.
        prefetch_on_device: Whether elements of `distribute_dataset` are copied to the
            devices ahead; by default they are.
    """

    __module__ = "mirrax.contrib.distribute"

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        num_gpus: int | None = None,
        num_gpus_per_worker: int | None = None,
        cross_tower_ops: CrossTowerOps | None = None,
        prefetch_on_device: bool | None = None,
    ) -> None:
        warn_renamed(
            "mx.contrib.distribute.MirroredStrategy", "mx.distribute.MirroredStrategy"
        )
        if num_gpus is not None and num_gpus_per_worker is not None:
            raise ValueError(
                "`num_gpus` and `num_gpus_per_worker` mean the same; give one of them, not "
                f"{num_gpus} and {num_gpus_per_worker}."
            )
        self._num_gpus = num_gpus if num_gpus is not None else num_gpus_per_worker
        if devices is not None and self._num_gpus is not None:
            raise ValueError(
                "Give `devices` or `num_gpus`, not both; got "
                f"{devices!r} and {self._num_gpus}."
            )
        if cross_tower_ops is not None and not isinstance(
            cross_tower_ops, CrossTowerOps
        ):
            raise TypeError(
                "`cross_tower_ops` must be a CrossTowerOps, such as "
                f"AllReduceCrossTowerOps(), got {cross_tower_ops!r}."
            )
        if isinstance(devices, str) or not isinstance(devices, Sequence | None):
            raise TypeError(f"`devices` must be a list of devices, got {devices!r}.")
        self._devices = devices if devices is not None else _gpus(self._num_gpus)
        self._cross_tower_ops = cross_tower_ops
        self._prefetch_on_device = prefetch_on_device
        self._core = None
        if devices is not None:  # no cluster can follow, so that errors come at once
            _ = self.core

    @property
    def core(self) -> Strategy:
        """The main strategy that does the work; made when it is first needed."""
        if self._core is None:
            ops = self._cross_tower_ops
            self._take(CoreMirrored(self._devices, ops and ops.as_cross_device_ops()))
        assert self._core is not None
        return self._core

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Makes this one tower on each device of all workers, which run the same program.

        Call it first of all. In TensorFlow one program drove all workers; here each runs
        its own, so `task_type` and `task_id` have to say which this one is.

        Args:
            session_config: Its `isolate_session_state` is set.
            cluster_spec: Who the workers are: a `ClusterSpec` or what one is made of.
            task_type: "worker" or "chief".
            task_id: The number among those.
        """
        super().configure(session_config)
        if cluster_spec is None:
            return
        if self._num_gpus is None:
            raise ValueError(
                "A cluster needs `num_gpus`, the number of GPUs of each worker, or 0 for CPUs; "
                f"this strategy was made without it, for {cluster_spec!r}."
            )
        if self._cross_tower_ops is not None:
            raise ValueError(
                "`cross_tower_ops` is for the devices of one machine; leave it out for a "
                f"cluster. Got {self._cross_tower_ops!r}."
            )
        if self._core is not None:
            raise RuntimeError(
                "`configure` with a `cluster_spec` comes first: before the scope, before "
                f"variables, before anything asks for the devices of {self._core!r}."
            )
        resolver = SimpleClusterResolver(
            ClusterSpec(cluster_spec), task_type=task_type or "", task_id=task_id
        )
        core = MultiWorkerMirroredStrategy(resolver)
        self._take(core)
        found = len(core.extended.worker_devices)
        if self._num_gpus not in (0, found):
            raise ValueError(
                f"`num_gpus` is {self._num_gpus}, but this worker has {found} device(s)."
            )


class OneDeviceStrategy(DistributionStrategy):
    """Everything on one device.

    Args:
        device: A device string or a `jax.Device`.
        prefetch_on_device: As in `MirroredStrategy`.
    """

    __module__ = "mirrax.contrib.distribute"

    def __init__(
        self, device: DeviceLike, prefetch_on_device: bool | None = None
    ) -> None:
        warn_renamed(
            "mx.contrib.distribute.OneDeviceStrategy", "mx.distribute.OneDeviceStrategy"
        )
        super().__init__(CoreOneDevice(device))
        self._prefetch_on_device = prefetch_on_device


def _gpus(count: int | None) -> list[str] | None:
    if count is None:
        return None
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(f"`num_gpus` must be an integer, 0 or larger, got {count!r}.")
    return [f"GPU:{i}" for i in range(count)] or ["CPU:0"]
