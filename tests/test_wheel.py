"""The wheel: everything is in it, and README's examples run from it alone."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from helpers.waiting import SECONDS_TO_HANG

from tests.test_docs import BLOCK, ROOT, code_of

pytestmark = pytest.mark.slow

BUILD = (
    "import setuptools.build_meta, sys; setuptools.build_meta.build_wheel(sys.argv[1])"
)
# Each block is a program of its own, as for a reader who copies one of them.
RUN = """
import json, sys
import mirrax
assert mirrax.__file__.startswith(sys.argv[1]), mirrax.__file__
for number, code in enumerate(json.load(sys.stdin)):
    exec(compile(code, f"README.md, block {number}", "exec"), {"__name__": "__main__"})
    print("ran", number)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of a copy, so that building leaves nothing in the repository."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mirrax", copy / "mirrax", ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(copy)],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
    )
    assert done.returncode == 0, done.stderr
    (found,) = copy.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(wheel.parent / "unpacked")
    return wheel.parent / "unpacked"


def test_it_holds_the_whole_package_and_nothing_else(unpacked: Path) -> None:
    def files(root: Path) -> set[str]:
        found = {str(path.relative_to(root)) for path in root.rglob("*.*")}
        return {name for name in found if "__pycache__" not in name}

    assert files(unpacked / "mirrax") == files(ROOT / "mirrax")
    assert "py.typed" in files(unpacked / "mirrax")
    others = {path.name.partition("-")[0] for path in unpacked.iterdir()}
    assert others == {"mirrax"}


def test_it_says_what_it_needs(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    metadata = email.message_from_string((info / "METADATA").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == set(
        metadata.get_all("Provides-Extra", [])
    )
    needed = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert len(needed) == len(project["dependencies"])
    assert "mirrax = mirrax._src" in (info / "entry_points.txt").read_text()
    assert (info / "licenses" / "LICENSE").exists()


def test_readme_runs_from_it(unpacked: Path, tmp_path: Path) -> None:
    blocks = [
        code_of(*found) for found in BLOCK.findall((ROOT / "README.md").read_text())
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(unpacked)],
        input=json.dumps(blocks),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ran") == len(blocks) >= 3
