"""The fixture `launcher`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.forked_workers import forked_workers

from .launching import Launcher


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(path / "state"))
    return path


@pytest.fixture
def forked() -> Iterator[None]:
    """Workers that train need not import JAX; others start as for a user."""
    with forked_workers():
        yield


@pytest.fixture
def launcher(tmp_path: Path, temporary: Path, capfd: Any) -> Launcher:
    """Launches scripts in this process, and gives what was printed."""
    return Launcher(tmp_path, capfd)
