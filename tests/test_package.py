"""The package as a whole: light to import, layered, documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import mirrax

ROOT = Path(mirrax.__path__[0])
LAYERS = [
    "base",
    "cluster",
    "state",
    "collectives",
    "engines",
    "input",
    "strategies",
    "train",
    "integrations",
    "testing",
    "command_line",
]
DOORS = [
    "mirrax",
    "mirrax.compat",
    "mirrax.compat.v1",
    "mirrax.compat.v1.distribute",
    "mirrax.compat.v1.distribute.experimental",
    "mirrax.config",
    "mirrax.contrib",
    "mirrax.contrib.distribute",
    "mirrax.data",
    "mirrax.data.experimental",
    "mirrax.distribute",
    "mirrax.distribute.cluster_resolver",
    "mirrax.distribute.experimental",
    "mirrax.errors",
    "mirrax.io",
    "mirrax.metrics",
    "mirrax.nn",
    "mirrax.testing",
    "mirrax.train",
]
SOURCES = sorted((ROOT / "_src").glob("*/**/*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT / "_src").parts[0]


def test_importing_starts_no_backend_and_nothing_optional() -> None:
    code = """
import sys, jax, mirrax
from mirrax._src.base.jax_compat import backend_started
assert not backend_started(), "a backend was started"
heavy = {"flax", "optax", "orbax", "tensorflow", "torch", "keras", "grain", "datasets"}
heavy |= {"rich", "click", "google_crc32c"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def imported_layers(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
        found |= {n.split(".")[2] for n in names if n.startswith("mirrax._src.")}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    own = LAYERS.index(layer_of(path))
    assert all(LAYERS.index(layer) <= own for layer in imported_layers(path))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_jax_names_are_in_one_file(path: Path) -> None:
    text = path.read_text()
    is_private = "jax._src" in text or "from jaxlib" in text or "import jaxlib" in text
    # The roster's server is a program of its own, which must not import JAX.
    assert is_private == (path.name in ("jax_compat.py", "roster_server.py"))


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.name != "__init__.py"], ids=str
)
def test_files_open_with_their_idea(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("name", DOORS)
def test_doors_hold_reexports_only(name: str) -> None:
    module = importlib.import_module(name)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    allowed = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign)
    assert all(isinstance(node, allowed) for node in tree.body)


def public_objects() -> list[tuple[str, object]]:
    found = []
    for name in DOORS:
        module = importlib.import_module(name)
        found += [
            (f"{name}.{attribute}", value)
            for attribute, value in vars(module).items()
            if not attribute.startswith("_") and not inspect.ismodule(value)
        ]
    return found


PUBLIC = dict(public_objects())


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    value = PUBLIC[name]
    if isinstance(value, str | list):
        return
    assert inspect.getdoc(value), f"{name} has no docstring"
    if inspect.isclass(value):
        for attribute, member in vars(value).items():
            if not attribute.startswith("_") and callable(member):
                assert inspect.getdoc(getattr(value, attribute)), f"{name}.{attribute}"


def test_public_classes_carry_their_public_home() -> None:
    for name, value in public_objects():
        if inspect.isclass(value):
            assert "_src" not in value.__module__, name


def test_every_module_can_be_imported() -> None:
    for info in pkgutil.walk_packages(mirrax.__path__, "mirrax."):
        importlib.import_module(info.name)
