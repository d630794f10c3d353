"""TensorFlow's public members, and what becomes of each here.

python tests/reference/members.py             # every member and its state
python tests/reference/members.py --record    # with TensorFlow: writes members.json anew

The states are those of the tables in docs/names.md: "here" (the same name, `mx.` for
`tf.`), "elsewhere" (with what to write) and "not" (with the reason).
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

RECORDED = Path(__file__).parent / "members.json"
DOCS = Path(__file__).parents[2] / "docs" / "names.md"
OWNERS = [
    "tf.distribute",
    "tf.distribute.experimental",
    "tf.distribute.cluster_resolver",
    "tf.distribute.Strategy",
    "tf.distribute.StrategyExtended",
    "tf.distribute.ReplicaContext",
    "tf.distribute.DistributedDataset",
    "tf.distribute.DistributedIterator",
    "tf.Variable",
    "tf.data.Dataset",
    "tf.data.Options",
    "tf.data.experimental",
]
SECTION = re.compile(r"^### `(tf\.[\w.]+)`$(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (`.+?`) \| (here|elsewhere|not) \| (.*?) ?\|$", re.MULTILINE)


class State(NamedTuple):
    """What a row of a table says."""

    word: str
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="ask TensorFlow")
    if parser.parse_args().record:
        RECORDED.write_text(json.dumps(ask_tensorflow(), indent=2) + "\n")
    states = read_states()
    for owner, names in recorded()["members"].items():
        for name in names:
            print(f"{owner}.{name:32} {' '.join(states[owner][name])}")


def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text())


def ask_tensorflow() -> dict[str, Any]:
    import tensorflow as tf

    def members(owner: str) -> list[str]:
        found = tf
        for part in owner.split(".")[1:]:
            found = getattr(found, part)
        return sorted(name for name in dir(found) if not name.startswith("_"))

    return {
        "tensorflow": tf.__version__,
        "members": {owner: members(owner) for owner in OWNERS},
    }


def read_states() -> dict[str, dict[str, State]]:
    """By owner and member, what docs/names.md says."""
    return {
        owner: {
            name: State(word, text)
            for names, word, text in ROW.findall(section)
            for name in re.findall(r"`(\w+)`", names)
        }
        for owner, section in SECTION.findall(DOCS.read_text())
    }


if __name__ == "__main__":
    main()
