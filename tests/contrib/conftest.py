"""How steps of a loop run: as one program, or as plain Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import mirrax as mx


@pytest.fixture
def run_eagerly(eagerly: bool) -> Iterator[None]:
    """Functions run as plain Python, or as they do by default."""
    mx.config.run_functions_eagerly(eagerly)
    yield
    mx.config.run_functions_eagerly(False)
