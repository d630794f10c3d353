"""Asks TensorFlow: writes its answer to every scenario into recorded/.

python tests/conformance/record.py            # with TensorFlow, without JAX
python tests/conformance/record.py --check    # only compares with what is recorded
python tests/conformance/record.py --only variables
"""

import argparse
import json
import multiprocessing
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
TIMEOUT_SECONDS = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--only", metavar="FILE", help="one file of scenarios")
    options = parser.parse_args()

    sys.path.insert(0, str(HERE.parent))
    from conformance import tensorflow_api as api
    from conformance.describe import same
    from conformance.scenarios import all_scenarios

    changed = []
    for file, scenarios in groupby(all_scenarios(), key=lambda each: each.file):
        if options.only not in (None, file):
            continue
        old = read(file)["answers"] if path(file).exists() else {}
        answers = {
            each.name: {engine: _ask(api, each, engine) for engine in each.engines}
            for each in scenarios
        }
        changed += [
            f"{file}: {name}: {old.get(name)} -> {answer}"
            for name, answer in answers.items()
            if name not in old or not same(old[name], answer)
        ]
        changed += [f"{file}: {name}: gone" for name in old.keys() - answers.keys()]
        if not options.check:
            write(file, api.version, answers)
    print("\n".join([*changed, f"{len(changed)} answers changed."]))
    return 1 if options.check and changed else 0


def path(file: str) -> Path:
    return RECORDED / f"{file}.json"


def read(file: str) -> dict[str, Any]:
    return json.loads(path(file).read_text())


def write(file: str, version: str, answers: dict[str, Any]) -> None:
    """One line for each scenario, so that a changed answer is a changed line."""
    lines = (f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in answers.items())
    path(file).write_text(
        f'{{\n  "tensorflow": "{version}",\n  "answers": {{\n'
        + ",\n".join(lines)
        + "\n  }\n}\n"
    )


def _ask(api: Any, scenario: Any, engine: str) -> Any:
    """Runs a scenario in a process of its own.

    One failed collective breaks all later ones of the process, and so do two
    strategies of different sizes; scopes may leak. A fork costs 0.1 s.
    """
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    child = fork.Process(target=_answer, args=(api, scenario, engine, there))
    child.start()
    there.close()
    try:
        if not here.poll(TIMEOUT_SECONDS):
            raise TimeoutError(f"{scenario.name} ({engine}) hangs in TensorFlow.")
        return here.recv()
    except EOFError:
        raise RuntimeError(f"{scenario.name} ({engine}) ends the process.") from None
    finally:
        child.kill()
        child.join()


def _answer(api: Any, scenario: Any, engine: str, there: Any) -> None:
    from conformance.describe import describe

    there.send(describe(api.attempt(lambda: scenario.run(api, engine))))


if __name__ == "__main__":
    sys.exit(main())
