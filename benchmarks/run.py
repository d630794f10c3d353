"""Runs all benchmarks, one after another, and shows each figure beside its target.

`python benchmarks/run.py` for all, `python benchmarks/run.py steps uneven` for some.
Each script runs in a process of its own. The soak test is not one of them: `soak.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import CHECK_HEADER, Check, print_table, until_stopped

HERE = Path(__file__).resolve().parent
SCRIPTS = (
    "importing",
    "steps",
    "host_time",
    "eager",
    "many_steps",
    "first_step",
    "many_variables",
    "packing",
    "uneven",
    "input",
    "optimizer",
    "sharded_state",
    "checks",
    "checkpoints",
    "models_of_others",
    "workers",
)
RIVALS = {
    "steps": ("tensorflow", "torch"),
    "input": ("tensorflow", "torch", "grain"),
    "checkpoints": ("tensorflow",),
    "workers": ("tensorflow", "torch"),
}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "scripts",
        nargs="*",
        choices=[[], *SCRIPTS],  # Python 3.11 checks the empty list too
        metavar="SCRIPT",
        help=", ".join(SCRIPTS),
    )
    options.add_argument("--quick", action="store_true", help="few, short rounds")
    options.add_argument("--replicas", type=int, metavar="N")
    for rival in RIVALS["input"]:
        scripts = " and ".join(f"{s}.py" for s in SCRIPTS if rival in RIVALS.get(s, ()))
        options.add_argument(f"--{rival}", metavar="PYTHON", help=f"for {scripts}")
    options.add_argument("--json", type=Path, metavar="FILE", help="write results here")
    given = options.parse_args()
    results, failed = [], []
    with until_stopped():
        for script in given.scripts or SCRIPTS:
            result = run(script, given)
            if result:
                results.append(result)
            else:
                failed.append(script)
    if given.json:
        given.json.write_text(json.dumps(results, indent=2) + "\n")
    summarize(results)
    for script in failed:
        print(f"{script}.py FAILED; its output is above.")
    return int(bool(failed))


def run(script: str, given: argparse.Namespace) -> dict[str, Any] | None:
    """The results of one script, with its output shown; None if it failed."""
    print(f"== {script}.py", flush=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, str(HERE / f"{script}.py"), "--json", str(file)]
        command += ["--quick"] * given.quick
        if given.replicas:
            command += ["--replicas", str(given.replicas)]
        for rival in RIVALS.get(script, ()):
            if python := getattr(given, rival):
                command += [f"--{rival}", python]
        code = subprocess.run(command).returncode
        print(f"== {script}.py took {time.perf_counter() - start:.0f} s\n", flush=True)
        return json.loads(file.read_text()) if code == 0 else None


def summarize(results: list[dict[str, Any]]) -> None:
    """One table of all checks, under the machine and versions that they belong to."""
    if not results:
        return
    first = next((r for r in results if r["devices"]), results[0])
    versions = ", ".join(f"{name} {v}" for name, v in first["versions"].items())
    print(f"{first['date']}, {first['machine']}, {versions}")
    print("devices:", ", ".join(first["devices"]) or "see the scripts")
    rows = []
    for result in results:
        for check in result["checks"]:
            rows.append([result["script"], *Check.read(check).row()])
    print_table(("script", *CHECK_HEADER), rows, names=2)
    missed = sum(row[-1] != "ok" for row in rows)
    print(f"{len(rows) - missed} of {len(rows)} targets met.")


if __name__ == "__main__":
    sys.exit(main())
