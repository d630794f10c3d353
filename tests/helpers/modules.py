"""The modules of mirrax that can be imported here."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Iterator

import mirrax

# What works with a library and needs it: tests/interop has all of them.
_NEEDS = {
    "mirrax._src.integrations.equinox_norm": "equinox",
    "mirrax._src.integrations.keras": "keras",
    "mirrax._src.integrations.linen": "flax",
    "mirrax._src.integrations.nnx": "flax",
}


def importable_modules() -> Iterator[str]:
    """The names of all modules, without those whose library is not installed."""
    missing = [m for m, name in _NEEDS.items() if not importlib.util.find_spec(name)]
    for info in pkgutil.walk_packages(mirrax.__path__, "mirrax."):
        if not info.name.startswith(tuple(missing)):
            yield info.name
