"""`mx.compat.v1.distribute.experimental`."""

from mirrax._src.collectives.options import (
    CommunicationImplementation as CollectiveCommunication,
)
from mirrax._src.collectives.options import (
    CommunicationImplementation as CommunicationImplementation,
)
from mirrax._src.collectives.options import CommunicationOptions as CommunicationOptions
from mirrax._src.integrations.compat_v1 import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)

__all__ = [
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
]
