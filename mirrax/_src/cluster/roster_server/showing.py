"""A job as somebody sees it who looks at it from outside."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .server import Roster

_SHOWN_FACTS = ("name", "process", "log")


def picture_of(roster: Roster) -> dict[str, Any]:
    """What is known of all workers: nothing in it can be used to change anything."""
    now = time.monotonic()
    workers = []
    for k, address in enumerate(roster.addresses):
        member = roster.members.get(k)
        row: dict[str, Any] = {"worker": k, "address": address, "state": "missing"}
        if member is not None:
            row |= {name: member.facts.get(name, "") for name in _SHOWN_FACTS}
            row |= {name: v for name, v in member.status.items() if name != "mark"}
            row["silent"] = now - member.heard
            row["state"] = "joined"
            if k in roster.ended:
                row["state"] = "ended"
            elif member.connection.is_closed:
                row["state"] = "gone"
        workers.append(row)
    saved = roster.saved
    return {
        "workers": workers,
        "has_started": roster.has_started,
        "failure": roster.failure and roster.failure["text"],
        "saved": saved and {**saved, "seconds": now - saved["seconds"]},
    }
