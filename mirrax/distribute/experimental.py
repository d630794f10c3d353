"""`mx.distribute.experimental`."""

from mirrax._src.collectives.options import (
    CommunicationImplementation as CollectiveCommunication,
)
from mirrax._src.collectives.options import (
    CommunicationImplementation as CommunicationImplementation,
)
from mirrax._src.collectives.options import CommunicationOptions as CommunicationOptions
from mirrax._src.strategies.strategy import ValueContext as ValueContext

__all__ = [
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ValueContext",
]
