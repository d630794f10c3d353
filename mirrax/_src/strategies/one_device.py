"""`OneDeviceStrategy`: everything on one device, with the interface of the others."""

from __future__ import annotations

from mirrax._src.base.devices import DeviceLike, resolve_devices
from mirrax._src.base.hiding import all_brief
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.strategies.strategy import Strategy


@all_brief
class OneDeviceStrategy(Strategy):
    """Runs everything on one device; for trying out code that is written for many.

    >>> strategy = mx.distribute.OneDeviceStrategy("CPU:0")
    >>> strategy.run(lambda x: x + 1, args=(1,))
    2

    Args:
        device: A device string (`"GPU:0"`) or a `jax.Device`.
    """

    __module__ = "mirrax.distribute"
    has_plain_values = True

    def __init__(self, device: DeviceLike) -> None:
        mesh = ReplicaMesh(resolve_devices([device]))
        super().__init__(self.extended_class(self), mesh)
