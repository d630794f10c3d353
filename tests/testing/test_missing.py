"""What `mirrax.testing` needs and an ordinary installation does not have."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.waiting import SECONDS_TO_HANG

RUNS = "from mirrax.testing import run_workers; run_workers(int, workers=1)"


@pytest.mark.parametrize("package", ["pytest", "cloudpickle"])
def test_a_package_that_is_missing_is_named(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None\n{RUNS}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
    )
    assert done.returncode == 1
    assert f"mirrax.testing needs {package}" in done.stderr
    assert "pip install 'mirrax[testing]'" in done.stderr
