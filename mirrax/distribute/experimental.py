"""`mx.distribute.experimental`."""

from mirrax._src.collectives.options import (
    CommunicationImplementation as CollectiveCommunication,
)
from mirrax._src.collectives.options import (
    CommunicationImplementation as CommunicationImplementation,
)
from mirrax._src.collectives.options import CommunicationOptions as CommunicationOptions
from mirrax._src.integrations.experimental import CollectiveHints as CollectiveHints
from mirrax._src.integrations.experimental import (
    ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from mirrax._src.strategies.arguments import ValueContext as ValueContext
from mirrax._src.train.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from mirrax._src.train.preemption import TerminationConfig as TerminationConfig

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "PreemptionCheckpointHandler",
    "TerminationConfig",
    "ValueContext",
]
