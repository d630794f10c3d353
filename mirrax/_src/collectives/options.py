"""`CommunicationOptions`: how collectives are packed, sent and waited for."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CommunicationImplementation(enum.Enum):
    """Which transport carries collectives."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """How a reduction travels.

    Args:
        bytes_per_pack: Arrays up to this size travel together in packs of about this
            many bytes. 0 chooses by measurement: arrays under 64 KiB are packed.
        timeout_seconds: How long to wait for other workers before an error names them;
            on one worker there is nobody to wait for.
        implementation: The transport. AUTO and RING run everywhere; NCCL on anything but
            GPUs is an error.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        size, seconds = self.bytes_per_pack, self.timeout_seconds
        if size < 0:
            raise ValueError(f"`bytes_per_pack` must be at least 0, got {size}.")
        if seconds is not None and seconds <= 0:
            raise ValueError(f"`timeout_seconds` must be positive, got {seconds}.")
        implementation = self.implementation
        if isinstance(implementation, str):
            known = CommunicationImplementation.__members__
            implementation = known.get(implementation.upper())
        if not isinstance(implementation, CommunicationImplementation):
            raise ValueError(
                f"`implementation` must be AUTO, RING or NCCL, got {self.implementation!r}."
            )
        object.__setattr__(self, "implementation", implementation)


CommunicationOptions.__module__ = "mirrax.distribute.experimental"
CommunicationImplementation.__module__ = "mirrax.distribute.experimental"
