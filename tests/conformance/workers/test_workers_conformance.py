"""Asks mirrax's workers what TensorFlow's were asked, and compares the answers."""

import json
import re
from pathlib import Path

import pytest
from helpers.forked_workers import forked_workers
from helpers.waiting import SECONDS_TO_HANG
from property.examples import IS_THOROUGH

from mirrax.testing import WorkerPool

from ..describe import describe, same
from . import record
from .clusters import CLUSTERS
from .replay import answer
from .scenarios import all_scenarios

# Rows of the SPEC that only several workers can show.
ROWS = ("8.1", "8.4", "12.2", "12.13")
# Cluster by cluster, so that only one has to be there at a time.
SCENARIOS = sorted(all_scenarios(), key=lambda each: list(CLUSTERS).index(each.cluster))
ASKED = [(each, engine) for each in SCENARIOS for engine in each.engines]
RECORDED = {
    file: record.read(file)["answers"]
    for file in sorted({each.file for each in SCENARIOS})
    if record.path(file).exists()
}
# What two workers of two replicas are asked as well, three workers are asked with MIRRAX_THOROUGH.
_TWO_BY_TWO = {each.name for each in SCENARIOS if each.cluster == "two_by_two"}
REPLAYED = [
    (each, engine)
    for each, engine in ASKED
    if IS_THOROUGH
    or each.cluster != "three"
    or each.name.replace(" on three", " on two_by_two") not in _TWO_BY_TWO
]


class Asker:
    """Has the processes of the cluster that was asked last."""

    def __init__(self):
        self.cluster, self.pool = None, None

    def ask(self, scenario, engine):
        """Each worker's answer, and a text with the tracebacks of errors."""
        if self.pool is None or scenario.cluster != self.cluster:
            self.close()
            cluster = CLUSTERS[scenario.cluster]
            with forked_workers():
                self.pool = WorkerPool(len(cluster.tasks), cluster.replicas_per_worker)
            self.cluster = scenario.cluster
        name = f"{scenario.file}.{scenario.name}"
        found = self.pool.run(answer, (name, engine), timeout=SECONDS_TO_HANG)
        errors = [
            f"Worker {n}:\n{where}" for n, (_, where) in enumerate(found) if where
        ]
        if any("UnavailableError" in where for where in errors):
            self.close()  # who is lost to the others stays lost
        return [described for described, _ in found], "\n".join(errors)

    def close(self):
        if self.pool is not None:
            self.pool.close()
            self.pool = None


@pytest.fixture(scope="module")
def asker():
    made = Asker()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("scenario", "engine"),
    REPLAYED,
    ids=[f"{each.file}-{each.name}-{engine}" for each, engine in REPLAYED],
)
def test_workers_answer_like_tensorflows(scenario, engine, asker):
    theirs = RECORDED[scenario.file][scenario.name][engine]
    expected = theirs
    if scenario.departs(engine):
        expected = [describe(each) for each in scenario.expect]
    ours, errors = asker.ask(scenario, engine)
    if scenario.departs(engine):
        assert not same(theirs, ours), f"No departure any more: {scenario.differs}"
    assert same(expected, ours), _differences(scenario, expected, ours, errors)


def test_every_scenario_is_recorded_and_every_recording_has_its_scenario():
    asked = {(each.file, each.name, engine) for each, engine in ASKED}
    recorded = {
        (path.stem, name, engine)
        for path in record.RECORDED.glob("*.json")
        for name, answers in json.loads(path.read_text())["answers"].items()
        for engine in answers
    }
    assert recorded == asked, "Run tests/conformance/workers/record.py with TensorFlow."


def test_every_worker_is_recorded():
    for each, engine in ASKED:
        answers = RECORDED[each.file][each.name][engine]
        assert len(answers) == len(CLUSTERS[each.cluster].tasks)


def test_scenario_names_are_unique_in_their_file():
    names = [(each.file, each.name) for each in SCENARIOS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_a_scenario(row):
    assert any(row in each.rows for each in SCENARIOS)


def test_recording_imports_no_jax():
    here = Path(__file__).parent
    for file in [
        *here.glob("scenarios/*.py"),
        here / "record.py",
        here / "clusters.py",
    ]:
        assert not re.search(r"^\s*(import|from) (jax|mirrax)", file.read_text(), re.M)


def _differences(scenario, expected, ours, errors) -> str:
    said = "mirrax should give" if scenario.differs else "TensorFlow gives"
    lines = [f"SPEC {', '.join(scenario.rows)}"]
    for worker, (wanted, found) in enumerate(zip(expected, ours, strict=True)):
        if not same(wanted, found):
            lines += [f"{said} on worker {worker}:", f"  {json.dumps(wanted)}"]
            lines += [f"mirrax gives on worker {worker}:", f"  {json.dumps(found)}"]
    return "\n".join([*lines, errors])
