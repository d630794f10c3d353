"""A module that is no test: what is here travels by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

calls = 0


def count() -> int:
    """How often this was called in this process."""
    global calls
    calls += 1
    return calls


def own_number() -> int:
    """The number of this worker."""
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def without_jax(folder: Path) -> str:
    """A place for `sys.path` where mirrax is found, but brings nothing along when imported.

    JAX takes every process a second and more, and pools themselves do not use it.
    """
    import mirrax

    (folder / "mirrax").mkdir()
    paths = list(mirrax.__path__)
    (folder / "mirrax" / "__init__.py").write_text(f"__path__ = {paths}\n")
    return str(folder)
