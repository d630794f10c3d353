"""Devices: `mx.config`."""

from mirrax._src.base.devices import list_logical_devices as list_logical_devices
from mirrax._src.base.logical import (
    set_logical_device_configuration as set_logical_device_configuration,
)
from mirrax._src.engines.function import functions_run_eagerly as functions_run_eagerly
from mirrax._src.engines.function import run_functions_eagerly as run_functions_eagerly
