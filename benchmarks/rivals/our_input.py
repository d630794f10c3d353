"""Epochs of mirrax's input, and of NumPy's with `device_put`.

Run by `peers.py`: `our_input.py ROWS REPLICAS PLATFORM`. See `epochs.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import cpu_devices
from input import Pipelines
from rivals.epochs import answer, make_rows


def main() -> None:
    rows, replicas = map(int, sys.argv[1:3])
    ours = Pipelines(make_rows(rows), cpu_devices(replicas))
    answer({"mirrax": ours.mirrax(), "NumPy and device_put": ours.numpy})


if __name__ == "__main__":
    main()
