"""How long does `import mirrax` take after `import jax`?

Each figure is of fresh processes. What a program uses is loaded when it first does; the
other rows include that.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from statistics import median

from common import Report, parser, run_python, until_stopped

ROWS = {
    "import mirrax": (),
    "and a strategy": ("distribute",),
    "and data, training": ("distribute", "data", "train"),
}
TARGET = 0.15
CODE = """
import sys, time
import jax
start = time.perf_counter()
import mirrax
for name in sys.argv[1:]:
    getattr(mirrax, name)
print(time.perf_counter() - start)
"""


def main() -> None:
    options = parser(__doc__).parse_args()
    report = Report("importing", options)
    repeats = 5 if options.quick else 15
    with tempfile.TemporaryDirectory() as cache:
        # Where the environment forbids bytecode this would measure Python's compiler.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = cache
        times: dict[str, list[float]] = {}
        with until_stopped():
            for name, parts in ROWS.items():
                times[name] = seconds_of(parts, repeats)
    rows = [[name, median(found), min(found)] for name, found in times.items()]
    report.table("Seconds after `import jax`", ("", "median", "least"), rows)
    if "import mirrax" in times:
        report.check("import mirrax", median(times["import mirrax"]), TARGET, unit="s")
    report.finish()


def seconds_of(parts: Sequence[str], repeats: int) -> list[float]:
    """Of so many processes, after one that has written the bytecode."""
    found = [run_python(["-P", "-c", CODE, *parts]) for _ in range(repeats + 1)]
    return found[1:]


if __name__ == "__main__":
    main()
