"""How long tests wait for what should come."""

from __future__ import annotations

# Who has not answered by then hangs. A machine may have ten times more to do than it has
# cores, so this is long; pytest's own limit (pyproject.toml) is longer, so that a test can
# show what its processes have printed.
SECONDS_TO_HANG = 300.0
