"""How long workers wait for each other; without JAX, which the launcher does not use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ClusterOptions:
    """How long a worker waits for the others; each has an environment variable.

    Args:
        heartbeat: Seconds without a sign of life after which a worker counts as lost
            (`MIRRAX_HEARTBEAT`). One that dies is noticed at once.
        step_timeout: Seconds that a worker may be behind the others
            (`MIRRAX_STEP_TIMEOUT`).
        join_timeout: Seconds to wait for all workers at the start (`MIRRAX_JOIN_TIMEOUT`).
        debug: Whether workers compare each program before its first run (`MIRRAX_DEBUG`).
    """

    heartbeat: float = 20.0
    step_timeout: float = 600.0
    join_timeout: float = 300.0
    debug: bool = False

    @classmethod
    def of_environment(cls, **given: Any) -> ClusterOptions:
        """What is given, else what the environment says, else the defaults."""
        values: dict[str, Any] = {}
        for name in ("heartbeat", "step_timeout", "join_timeout"):
            values[name] = _seconds(name, given.get(name), getattr(cls, name))
        debug = given.get("debug")
        if debug is None:
            debug = os.environ.get("MIRRAX_DEBUG", "") not in ("", "0")
        return cls(**values, debug=bool(debug))


def _seconds(name: str, given: float | None, default: float) -> float:
    variable = f"MIRRAX_{name.upper()}"
    text = os.environ.get(variable) if given is None else given
    if text is None:
        return default
    try:
        seconds = float(text)
    except (TypeError, ValueError):
        seconds = 0.0
    if not seconds > 0:
        where = f"`{name}`" if given is not None else f"The environment's {variable}"
        raise ValueError(f"{where} must be a positive number of seconds, got {text!r}.")
    return seconds
