"""`mx.distribute.experimental`: a strategy as TensorFlow 2.0 had it."""

from __future__ import annotations

from typing import Any

from mirrax._src.cluster.resolvers import ClusterResolver
from mirrax._src.collectives.options import CommunicationImplementation
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


ExperimentalMultiWorkerMirroredStrategy.__name__ = "MultiWorkerMirroredStrategy"
