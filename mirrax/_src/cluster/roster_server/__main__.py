"""Runs the roster without importing mirrax, which would import JAX."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from roster_server import listening  # type: ignore[import-not-found]

    del sys.path[0]
    listening.run()
