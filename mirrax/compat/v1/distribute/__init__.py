"""Strategies as TensorFlow 2.4 kept them for programs of TensorFlow 1."""

from mirrax._src.base.reduce_op import ReduceOp as ReduceOp
from mirrax._src.collectives.algorithms import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from mirrax._src.collectives.algorithms import NcclAllReduce as NcclAllReduce
from mirrax._src.collectives.algorithms import (
    ReductionToOneDevice as ReductionToOneDevice,
)
from mirrax._src.collectives.ops import CrossDeviceOps as CrossDeviceOps
from mirrax._src.engines.replica_context import ReplicaContext as ReplicaContext
from mirrax._src.input.options import InputContext as InputContext
from mirrax._src.input.options import InputReplicationMode as InputReplicationMode
from mirrax._src.integrations.compat_v1 import InputIterator as InputIterator
from mirrax._src.integrations.compat_v1 import MirroredStrategy as MirroredStrategy
from mirrax._src.integrations.compat_v1 import OneDeviceStrategy as OneDeviceStrategy
from mirrax._src.integrations.compat_v1 import Strategy as Strategy
from mirrax._src.integrations.compat_v1 import StrategyExtended as StrategyExtended
from mirrax._src.integrations.compat_v1 import get_loss_reduction as get_loss_reduction
from mirrax._src.integrations.loops import MultiStepContext as MultiStepContext
from mirrax._src.strategies.default import (
    experimental_set_strategy as experimental_set_strategy,
)
from mirrax._src.strategies.default import get_replica_context as get_replica_context
from mirrax._src.strategies.default import get_strategy as get_strategy
from mirrax._src.strategies.default import has_strategy as has_strategy
from mirrax._src.strategies.default import (
    in_cross_replica_context as in_cross_replica_context,
)
from mirrax._src.strategies.arguments import RunOptions as RunOptions
from mirrax.compat.v1.distribute import experimental as experimental
from mirrax.distribute import cluster_resolver as cluster_resolver
