"""Workers that are killed at random moments: the same weights, nothing hangs, nothing is left.

Once here; `make kills` does it 150 times.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.cluster.kills import run_with_kills, steps_for

KILLS = int(os.environ.get("MIRRAX_KILLS", "1"))


def test_killed_workers_start_anew_and_end_with_the_same_weights(
    tmp_path: Path,
) -> None:
    steps = steps_for(KILLS)
    undisturbed = run_with_kills(tmp_path / "undisturbed", 0, 0, steps)
    assert len(undisturbed.result) == 1
    seed = int.from_bytes(os.urandom(2), "little")
    killed = run_with_kills(tmp_path / "killed", KILLS, seed, steps)
    assert len(killed.kills) == KILLS
    assert killed.result == undisturbed.result, f"seed {seed}, {killed.kills}"
