"""What programs of TensorFlow 1 use of `tf` itself: `mx.compat.v1`."""

from mirrax._src.base.reduce_op import VariableAggregation as VariableAggregation
from mirrax._src.base.reduce_op import (
    VariableSynchronization as VariableSynchronization,
)
from mirrax._src.integrations.compat_v1 import ConfigProto as ConfigProto
from mirrax._src.state.variable import Variable as Variable
from mirrax.compat.v1 import distribute as distribute
