"""Asks mirrax what TensorFlow was asked, and compares the answers."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest
from property.examples import IS_THOROUGH

from . import mirrax_api, record
from .describe import describe, same
from .scenarios import all_scenarios

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(is the older name|has nothing to do in mirrax)"
)
SCENARIOS = all_scenarios()
ASKED = [(each, engine) for each in SCENARIOS for engine in each.engines]
# Hundreds of scenarios that each ask about another number of replicas, shape or kind of variable:
# every other one in each engine, all of them with MIRRAX_THOROUGH.
IN_TURN = ("compat_v1", "scattering")
REPLAYED = [
    (each, engine)
    for number, each in enumerate(SCENARIOS)
    for place, engine in enumerate(each.engines)
    if IS_THOROUGH or each.file not in IN_TURN or place == number % len(each.engines)
]
RECORDED = {
    file: record.read(file)["answers"]
    for file in sorted({each.file for each in SCENARIOS})
    if record.path(file).exists()
}

# Answers that mirrax does not give yet; a line goes when its test passes.
_LINES = (Path(__file__).parent / "departures.txt").read_text().splitlines()
DEPARTURES = {line for line in _LINES if line and not line.startswith("#")}

ROWS = """
1.1 1.2 1.4 2.1 2.2 2.3 2.4 3.1 3.2 3.3 3.4 3.5 3.6 4.1 4.2 4.3 4.4 4.5
5.1 5.2 5.3 5.4 5.5 5.6 5.7 5.8 5.9 5.10 6.1 6.2 6.3 6.4 7.1 7.3 7.4 7.5 7.6
8.3 9.1 9.2 9.3 10.1 10.3
12.1 12.3 12.4 12.5 12.6 12.7 12.8 12.9 12.10 12.11 12.12 12.14 12.15 12.16
""".split()
# TensorFlow has no 1.3 (when JAX's backend starts) and no 2.5 (JAX's collectives).


def _id(scenario: Any, engine: str) -> str:
    return f"{scenario.file}-{scenario.name}-{engine}"


def _parameters(scenario: Any, engine: str) -> Any:
    name = _id(scenario, engine)
    marks = [pytest.mark.xfail(strict=True)] if name in DEPARTURES else []
    return pytest.param(scenario, engine, marks=marks, id=name)


@pytest.mark.parametrize(
    ("scenario", "engine"), [_parameters(*each) for each in REPLAYED]
)
def test_answers_like_tensorflow(scenario, engine):
    if "1.2" in scenario.rows and jax.default_backend() != "cpu":
        pytest.skip("these scenarios are about machines without accelerators")
    theirs = RECORDED[scenario.file][scenario.name][engine]
    expected = describe(scenario.expect) if scenario.departs(engine) else theirs
    result = mirrax_api.attempt(lambda: scenario.run(mirrax_api, engine))
    if isinstance(result, Exception) and not _is_error(expected):
        raise result
    ours = describe(result)
    if scenario.departs(engine):
        assert not same(theirs, ours), f"No departure any more: {scenario.differs}"
    assert same(expected, ours), _differences(scenario, expected, ours)


def test_every_scenario_is_recorded_and_every_recording_has_its_scenario():
    asked = {(each.file, each.name, engine) for each, engine in ASKED}
    recorded = {
        (path.stem, name, engine)
        for path in record.RECORDED.glob("*.json")
        if path.stem != "workers"
        for name, answers in json.loads(path.read_text())["answers"].items()
        for engine in answers
    }
    assert recorded == asked, "Run tests/conformance/record.py with TensorFlow."


def test_every_departure_belongs_to_a_scenario():
    assert DEPARTURES <= {_id(*each) for each in ASKED}


def test_scenario_names_are_unique():
    names = [each.name for each in SCENARIOS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_a_scenario(row):
    assert any(row in each.rows for each in SCENARIOS)


def test_recording_imports_no_jax():
    here = Path(__file__).parent
    files = [*here.glob("scenarios/*.py"), here / "record.py", here / "describe.py"]
    files += [here / "neutral.py", here / "tensorflow_api.py"]
    for file in files:
        assert not re.search(r"^\s*(import|from) (jax|mirrax)", file.read_text(), re.M)


def _is_error(described) -> bool:
    return isinstance(described, dict) and "error" in described


def _differences(scenario, expected, ours) -> str:
    said = "mirrax should give" if scenario.differs else "TensorFlow gives"
    return "\n".join(
        [f"SPEC {', '.join(scenario.rows)}", f"{said}:", f"  {json.dumps(expected)}"]
        + ["mirrax gives:", f"  {json.dumps(ours)}"]
    )
