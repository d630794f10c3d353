"""PEERS.md, the chart and the README say what was measured, and what was not."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.peer_report import BEGIN, END, Found, update_readme, write_report

ROOT = Path(__file__).parents[2]


FOUND: Found = {
    "2 replicas, small": {
        "mirrax": {"figures": [2.0, 1.0, 3.0], "first": 1.5},
        "JAX, psum each": {"figures": [5.0]},
        "JAX, packed": {"figures": [4.0]},
        "TensorFlow": {"problem": "no answer in 75 s", "figures": [1.0]},
        "PyTorch DDP": {},
    },
    "input, shuffled rows": {
        "mirrax": {"rates": [2000.0]},
        "NumPy and device_put": {"rates": [1000.0]},
        "Grain": {"rates": [500.0]},
    },
    "faults": {
        "kill -9 of a worker: mirrax": {"said": "the other has ended after 0.4 s"},
    },
}
FACTS = {
    "date": "2026-01-02",
    "machine": "2 cores",
    "versions": {"jax": "0.10"},
    "peers": {"torch": "2.13"},
    "quick": False,
    "load": 0.25,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_report(FOUND, FACTS, tmp_path / "benchmarks")
    return tmp_path / "benchmarks"


def test_tables(folder: Path) -> None:
    lines = (folder / "PEERS.md").read_text().splitlines()
    assert "| mirrax | 2 | 1.5 to 2.5 |  | 1.50 |" in lines
    assert "| JAX, packed | 4 | 4 to 4 | 2.00 |  |" in lines
    assert "| TensorFlow | no answer in 75 s | | |  |" in lines
    assert "| PyTorch DDP | not measured | | |  |" in lines
    assert "| NumPy and device_put | 1,000 | 1,000 to 1,000 | 2.00 |  |" in lines
    assert "| kill -9 of a worker | mirrax | the other has ended after 0.4 s |" in lines
    assert any(
        "2 cores, load 0.2 at" in line and "torch 2.13" in line for line in lines
    )


def test_the_best_of_each_library_in_short(folder: Path) -> None:
    lines = (folder / "PEERS.md").read_text().splitlines()
    table = lines[lines.index(BEGIN) + 1 : lines.index(END)]
    assert table == [
        "| ms a step | mirrax | JAX by hand | TensorFlow | PyTorch DDP | Keras 3 |",
        "|---|---|---|---|---|---|",
        "| 2 replicas, small | 2 | 4 | fails | not measured |  |",
        "| input, shuffled rows: rows/s | 2,000 | NumPy 1,000 |  |  | Grain 500 |",
    ]


def test_the_chart_is_an_image_with_a_bar_for_each_library(folder: Path) -> None:
    chart = ElementTree.parse(folder / "peers.svg").getroot()
    kinds = [part.get("class") for part in chart.iter() if part.tag.endswith("rect")]
    assert kinds == ["page", "ours", "peer"]
    texts = [part.text for part in chart.iter() if part.tag.endswith("text")]
    assert "4 ms (2.00x)" in texts


def test_the_readme_takes_the_short_table(folder: Path) -> None:
    readme = folder.parent / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):  # what was written is replaced
        update_readme(readme, folder / "PEERS.md")
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "old" not in text and text.count("| 2 replicas, small | 2 | 4 |") == 1
    assert "(benchmarks/peers.svg)" in text and "(benchmarks/PEERS.md)" in text


def test_the_figures_in_the_readme_are_those_of_the_last_run(tmp_path: Path) -> None:
    readme, report = ROOT / "README.md", ROOT / "benchmarks" / "PEERS.md"
    written = readme.read_text()
    assert written.count(BEGIN) == written.count(END) == 1
    if not report.exists():
        assert f"{BEGIN}\n{END}" in written
        return
    copy = tmp_path / "README.md"
    copy.write_text(written)
    update_readme(copy, report)
    assert copy.read_text() == written, "type: make bench-peers"
