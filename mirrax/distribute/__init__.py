"""Strategies and what belongs to them: `mx.distribute`."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from mirrax._src.doors import open_lazily as _open_lazily
from mirrax._src.base.reduce_op import ReduceOp as ReduceOp
from mirrax._src.base.values import DistributedValues as DistributedValues
from mirrax._src.base.values import Mirrored as Mirrored
from mirrax._src.base.values import PerReplica as PerReplica
from mirrax._src.base.values import Sharded as Sharded
from mirrax._src.collectives.algorithms import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from mirrax._src.collectives.algorithms import NcclAllReduce as NcclAllReduce
from mirrax._src.collectives.algorithms import (
    ReductionToOneDevice as ReductionToOneDevice,
)
from mirrax._src.collectives.ops import CrossDeviceOps as CrossDeviceOps
from mirrax._src.engines.replica_context import ReplicaContext as ReplicaContext
from mirrax._src.input.distributed import DistributedDataset as DistributedDataset
from mirrax._src.input.distributed import DistributedIterator as DistributedIterator
from mirrax._src.base.specs import PerReplicaSpec as PerReplicaSpec
from mirrax._src.input.options import InputContext as InputContext
from mirrax._src.input.options import InputOptions as InputOptions
from mirrax._src.input.options import InputReplicationMode as InputReplicationMode
from mirrax._src.state.mirrored import MirroredVariable as MirroredVariable
from mirrax._src.state.on_read import SyncOnReadVariable as SyncOnReadVariable
from mirrax._src.state.sharded import ShardedVariable as ShardedVariable
from mirrax._src.strategies.default import (
    experimental_set_strategy as experimental_set_strategy,
)
from mirrax._src.strategies.default import get_replica_context as get_replica_context
from mirrax._src.strategies.default import get_strategy as get_strategy
from mirrax._src.strategies.default import has_strategy as has_strategy
from mirrax._src.strategies.default import (
    in_cross_replica_context as in_cross_replica_context,
)
from mirrax._src.strategies.extended import StrategyExtended as StrategyExtended
from mirrax._src.strategies.memory import MemoryReport as MemoryReport
from mirrax._src.strategies.mirrored import MirroredStrategy as MirroredStrategy
from mirrax._src.strategies.multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from mirrax._src.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from mirrax._src.strategies.arguments import RunOptions as RunOptions
from mirrax._src.strategies.strategy import Strategy as Strategy

if _TYPE_CHECKING:
    from mirrax.distribute import cluster_resolver as cluster_resolver
    from mirrax.distribute import experimental as experimental
else:
    __all__, __dir__, __getattr__ = _open_lazily(
        __name__, modules=("cluster_resolver", "experimental")
    )
