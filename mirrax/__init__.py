"""TensorFlow's distribution strategies for JAX.

    import mirrax as mx
    strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

Importing mirrax starts no JAX backend, and loads only what has to be there before one starts.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from mirrax._src.base.context import set_default_context as _set_default_context
from mirrax._src.base.logical import install as _install
from mirrax._src.cluster.reporting import install as _install_reporting
from mirrax._src.doors import loading as _loading
from mirrax._src.doors import open_lazily as _open_lazily

if _TYPE_CHECKING:
    from mirrax import compat as compat
    from mirrax import config as config
    from mirrax import contrib as contrib
    from mirrax import data as data
    from mirrax import distribute as distribute
    from mirrax import errors as errors
    from mirrax import io as io
    from mirrax import metrics as metrics
    from mirrax import nn as nn
    from mirrax import summary as summary
    from mirrax import train as train
    from mirrax._src.base.reduce_op import VariableAggregation as VariableAggregation
    from mirrax._src.base.reduce_op import (
        VariableSynchronization as VariableSynchronization,
    )
    from mirrax._src.base.sparse import IndexedSlices as IndexedSlices
    from mirrax._src.engines.function import Function as Function
    from mirrax._src.engines.function import function as function
    from mirrax._src.engines.gradients import grad as grad
    from mirrax._src.engines.gradients import value_and_grad as value_and_grad
    from mirrax._src.base.specs import TensorSpec as TensorSpec
    from mirrax._src.state.variable import Variable as Variable
    from mirrax._src.strategies.default import (
        get_replica_context as get_replica_context,
    )
    from mirrax._src.strategies.default import get_strategy as get_strategy
    from mirrax._src.strategies.mirrored import MirroredStrategy as MirroredStrategy
    from mirrax._src.strategies.multi_worker import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from mirrax._src.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
else:
    __all__, __dir__, __getattr__ = _open_lazily(
        __name__,
        modules=(
            "compat",
            "config",
            "contrib",
            "data",
            "distribute",
            "errors",
            "io",
            "metrics",
            "nn",
            "summary",
            "train",
        ),
        names={
            "base.reduce_op": ("VariableAggregation", "VariableSynchronization"),
            "base.sparse": ("IndexedSlices",),
            "base.specs": ("TensorSpec",),
            "engines.function": ("Function", "function"),
            "engines.gradients": ("grad", "value_and_grad"),
            "state.variable": ("Variable",),
            "strategies.default": ("get_replica_context", "get_strategy"),
            "strategies.mirrored": ("MirroredStrategy",),
            "strategies.multi_worker": ("MultiWorkerMirroredStrategy",),
            "strategies.one_device": ("OneDeviceStrategy",),
        },
    )

_install()
_install_reporting()
# Variables, functions and data ask for the current strategy, and none of them loads it.
_set_default_context(_loading("strategies.default", "default_context"))

__version__ = "0.1.0"
