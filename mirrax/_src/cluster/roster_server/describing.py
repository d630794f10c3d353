"""A worker in messages."""

from __future__ import annotations

from typing import Any


def describe_worker(
    worker: int, address: str, facts: dict[str, Any], status: dict[str, Any]
) -> str:
    """A worker for messages: where it is, what it last did, and where its log is."""
    parts = [address, *([facts["process"]] if "process" in facts else [])]
    if status.get("step"):
        parts.append(f"last at step {status['step']}")
    if status.get("doing"):
        parts.append(f"in {status['doing']}")
    if facts.get("log"):
        parts.append(f"its log is {facts['log']}")
    name = facts.get("name") or f"worker {worker}"
    return f"{name.capitalize()} ({', '.join(parts)})"
