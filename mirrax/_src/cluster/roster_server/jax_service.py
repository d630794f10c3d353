"""JAX's coordination service, on a port of its own."""

from __future__ import annotations

import socket
from typing import Any

# JAX's own watch over workers would abort them; ours comes first, and explains.
_NEVER_SECONDS = 7 * 24 * 3600


def start_service(host: str, size: int) -> tuple[Any, int]:
    """The service and its port; it listens at the address `host`, or everywhere if ""."""
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    start: Any = _jax.get_distributed_runtime_service  # pyright: ignore
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    name = f"[{host}]" if ":" in host else host or "[::]"
    for attempt in range(5):
        with socket.create_server((host, 0), family=family) as probe:
            port = probe.getsockname()[1]
        try:
            service = start(
                f"{name}:{port}",
                size,
                heartbeat_timeout=_NEVER_SECONDS,
                shutdown_timeout=1,
            )
            return service, port
        except Exception:  # somebody has taken the port in between
            if attempt == 4:
                raise
    raise AssertionError
