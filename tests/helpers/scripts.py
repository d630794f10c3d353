"""Small programs in a process of their own, for what could hang or has to come first."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import mirrax as mx

from .programs import WARNINGS_ARE_ERRORS
from .waiting import SECONDS_TO_HANG

_ROOT = Path(mx.__file__).parent.parent


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    """Runs a few lines of Python in a new process; a process that hangs is an error."""
    return subprocess.run(
        [sys.executable, *WARNINGS_ARE_ERRORS, "-c", textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
        cwd=_ROOT,
    )
