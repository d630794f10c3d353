"""What the pages list, as `record.py` has read it from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "pages.json").read_text()
)

# Slips of the pages, and what is meant.
SLIPS = {
    "MirroredVariables": "MirroredVariable",
    "MultiWorkerMiroredStrategy": "MultiWorkerMirroredStrategy",
    "tf.distribute.distribute_datasets_from_function": "tf.distribute.Strategy.distribute_datasets_from_function",
    "tf.distribute.experimental_distribute_dataset": "tf.distribute.Strategy.experimental_distribute_dataset",
}
