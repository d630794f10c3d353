"""What each process of a training does that is told to end: train, or go on, and tell how."""

from __future__ import annotations

import sys
from pathlib import Path

# The folder of the tests, as pytest would have it.
sys.path.insert(0, str(Path(__file__).parents[1]))

from workers.comparing import own_strategy  # noqa: E402
from workers.training import train_on  # noqa: E402


def main() -> None:
    """Trains in a folder; prints where it started and what came of it."""
    folder, steps, signal_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    started, mean, weights = train_on(own_strategy(), folder, steps, signal_at)
    print("started at", started, "mean", mean.hex(), "weights", weights.tobytes().hex())


if __name__ == "__main__":
    main()
