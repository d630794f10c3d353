"""A module that is no test: what is here travels by name."""

from __future__ import annotations

import json
import os

calls = 0


def count() -> int:
    """How often this was called in this process."""
    global calls
    calls += 1
    return calls


def own_number() -> int:
    """The number of this worker."""
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]
