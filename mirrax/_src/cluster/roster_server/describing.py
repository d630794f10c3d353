"""A worker in messages, and what it has run."""

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


def describe_difference(count: int, theirs: str, own: str, me: str) -> str:
    """How two workers differ whose first `count` programs are not the same.

    `theirs` is what the other one ran last, `own` what `me` did.
    """
    if theirs == own:
        found = (
            f"one of the {count - 1} before {own} differs (`debug=True` shows which)"
        )
    else:
        found = f"program {count} is {theirs} there and {own} on {me}"
    return (
        f"ran different programs from {me}: {found}. All workers have to take the same steps "
        "with the same shapes and dtypes."
    )
