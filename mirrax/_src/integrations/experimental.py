"""`mx.distribute.experimental`: names as TensorFlow 2.0 to 2.3 had them."""

from __future__ import annotations

from typing import Any

from mirrax._src.base.errors import warn_renamed
from mirrax._src.cluster.resolvers import ClusterResolver
from mirrax._src.collectives.options import (
    CommunicationImplementation,
    CommunicationOptions,
)
from mirrax._src.strategies.multi_worker import MultiWorkerMirroredStrategy


class ExperimentalMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy):
    """`MultiWorkerMirroredStrategy` as it was first: `communication` comes first.

    Args:
        communication: A `CollectiveCommunication`.
        cluster_resolver: Says who the workers are; a `TFConfigClusterResolver` by default.
        **options: As those of `mx.distribute.MultiWorkerMirroredStrategy`.
    """

    __module__ = "mirrax.distribute.experimental"
    __qualname__ = "MultiWorkerMirroredStrategy"

    def __init__(
        self,
        communication: CommunicationImplementation
        | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
        **options: Any,
    ) -> None:
        if options.get("communication_options") is None:
            options["communication"] = communication
        super().__init__(cluster_resolver, **options)


class CollectiveHints:
    """The older name of `CommunicationOptions`: calling it makes one.

    Args:
        bytes_per_pack: As that of `CommunicationOptions`.
        timeout_seconds: As that of `CommunicationOptions`.
    """

    __module__ = "mirrax.distribute.experimental"

    def __new__(
        cls, bytes_per_pack: int = 0, timeout_seconds: float | None = None
    ) -> CommunicationOptions:
        warn_renamed("CollectiveHints", "CommunicationOptions")
        return CommunicationOptions(bytes_per_pack, timeout_seconds)


ExperimentalMultiWorkerMirroredStrategy.__name__ = "MultiWorkerMirroredStrategy"
