"""The package as a whole: light to import, layered, documented."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.modules import importable_modules
from helpers.waiting import SECONDS_TO_HANG

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
    "mirrax.summary",
    "mirrax.summary.experimental",
    "mirrax.testing",
    "mirrax.train",
]
SOURCES = sorted((ROOT / "_src").glob("*/**/*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT / "_src").parts[0]


@pytest.mark.slow
def test_importing_starts_no_backend_and_nothing_optional() -> None:
    code = """
import sys, jax, mirrax
for name in dir(mirrax):
    getattr(mirrax, name)  # loads it
from mirrax._src.base.jax_compat import backend_started
assert not backend_started(), "a backend was started"
heavy = {"flax", "optax", "orbax", "tensorflow", "torch", "keras", "grain", "datasets"}
heavy |= {"rich", "click", "google_crc32c", "tensorboard", "safetensors"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS_TO_HANG)


def modules_after(code: str) -> set[str]:
    """The modules of mirrax that a new process has loaded after running `code`."""
    code += "\nimport sys; print(*(m for m in sys.modules if m.startswith('mirrax.')))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=SECONDS_TO_HANG,
        stdout=subprocess.PIPE,
        text=True,
    )
    return set(done.stdout.split())


@pytest.mark.slow
def test_importing_loads_only_what_acts_before_jax_starts() -> None:
    loaded = modules_after("import mirrax")
    assert loaded - {"mirrax._src", "mirrax._src.base", "mirrax._src.cluster"} == {
        "mirrax._src.base.context",
        "mirrax._src.base.errors",
        "mirrax._src.base.hiding",
        "mirrax._src.base.hooks",
        "mirrax._src.base.jax_compat",
        "mirrax._src.base.logical",
        "mirrax._src.base.protocols",
        "mirrax._src.cluster.reporting",
        "mirrax._src.doors",
    }


@pytest.mark.slow
def test_strategies_load_neither_training_nor_the_older_apis() -> None:
    loaded = modules_after("import mirrax as mx; mx.distribute.MirroredStrategy")
    layers = {name.split(".")[2] for name in loaded if name.startswith("mirrax._src.")}
    assert "strategies" in layers
    assert not layers & {"train", "integrations", "testing", "command_line"}
    assert "mirrax.distribute.cluster_resolver" not in loaded


@pytest.mark.slow
def test_a_part_is_loaded_when_it_is_used() -> None:
    for code in (
        "import mirrax as mx; mx.train.Checkpoint",
        "from mirrax import train; train.Checkpoint",
        "from mirrax.train import Checkpoint",
        "import mirrax.train; mirrax.train.Checkpoint",
        "from mirrax import *; train.Checkpoint",
    ):
        assert "mirrax._src.train.checkpoint" in modules_after(code), code


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "assert mx.Variable(1.0).numpy() == 1",
        "assert mx.function(lambda: 1)() == 1",
        "assert list(mx.data.Dataset.range(1)) == [0]",
        "assert mx.nn.compute_average_loss(np.ones(2), global_batch_size=4) == 0.5",
        "assert mx.metrics.Mean().result() == 0",
        "with mx.MirroredStrategy().scope(): assert mx.distribute.has_strategy()",
        "with mx.OneDeviceStrategy('CPU:0').scope(): mx.Variable(1.0)",
    ],
)
def test_each_part_works_as_the_first_that_is_used(code: str) -> None:
    modules_after(f"import numpy as np, mirrax as mx\n{code}")


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'mirrax' has no attribute 'trian'") as e:
        mirrax.trian  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    assert (e.value.name, e.value.obj) == ("trian", mirrax)
    with pytest.raises(ImportError, match="cannot import name 'trian'"):
        from mirrax import trian  # pyright: ignore  # noqa: F401


def imported_layers(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree_of(path)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
        found |= {n.split(".")[2] for n in names if n.startswith("mirrax._src.")}
    return found


def test_imports_point_downwards() -> None:
    for path in SOURCES:
        own = LAYERS.index(layer_of(path))
        above = {x for x in imported_layers(path) if LAYERS.index(x) > own}
        assert not above, f"{path.relative_to(ROOT)} imports from {above}"


def test_private_jax_names_are_in_one_file() -> None:
    private = re.compile("jax\\._src|from jaxlib|import jaxlib")
    found = {path.name for path in SOURCES if private.search(path.read_text())}
    # The roster's server is a program of its own, which must not import JAX.
    assert found == {"jax_compat.py", "jax_service.py"}


def test_frames_of_running_threads_are_taken_in_one_file() -> None:
    # With the garbage collector on, CPython 3.11 may deadlock or crash.
    takes = [p.name for p in SOURCES if "sys._current_frames()" in p.read_text()]
    assert takes == ["stacks.py"]


HOOKS = {
    "_register_atexit",
    "atexit",
    "excepthook",
    "register_at_fork",
    "wrap_cpu_start",
}


def names_in(path: Path) -> set[str]:
    used = set()
    for node in ast.walk(tree_of(path)):
        used |= {getattr(node, field, None) for field in ("attr", "id", "module")}
        if isinstance(node, ast.Import | ast.ImportFrom):
            used |= {alias.name for alias in node.names}
    return used


def test_hooks_of_the_process_are_in_one_file() -> None:
    used = {path.name: HOOKS & names_in(path) for path in SOURCES}
    assert {name: each for name, each in used.items() if each} == {"hooks.py": HOOKS}


def test_files_open_with_their_idea() -> None:
    files = [path for path in SOURCES if path.name != "__init__.py"]
    assert not [path for path in files if not ast.get_docstring(tree_of(path))]


@pytest.mark.parametrize("name", DOORS)
def test_doors_hold_reexports_only(name: str) -> None:
    tree = tree_of_door(name)
    body = [node for node in tree.body if not isinstance(node, ast.If)]
    for node in lazy_parts(tree):
        body += node.body + node.orelse
    allowed = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign)
    assert all(isinstance(node, allowed) for node in body)


def tree_of_door(name: str) -> ast.Module:
    return ast.parse(Path(str(importlib.import_module(name).__file__)).read_text())


def lazy_parts(tree: ast.Module) -> list[ast.If]:
    """`if TYPE_CHECKING: imports else: open_lazily(...)`, the only condition in a door."""
    found = [node for node in tree.body if isinstance(node, ast.If)]
    assert all(ast.unparse(node.test) == "_TYPE_CHECKING" for node in found)
    return found


@pytest.mark.parametrize("name", DOORS)
def test_type_checkers_see_what_a_lazy_door_has(name: str) -> None:
    tree = tree_of_door(name)
    if not lazy_parts(tree):
        return
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {}
    for node in imports:
        for alias in node.names:
            seen[alias.asname or alias.name] = (node.module, alias.name)
    public = {shown for shown in seen if not shown.startswith("_")}
    door = importlib.import_module(name)
    assert public == set(door.__all__) and public <= set(dir(door))
    for shown in public:
        home, own_name = seen[shown]
        expected = getattr(importlib.import_module(str(home)), own_name)
        assert getattr(door, shown) is expected, shown


def public_objects() -> list[tuple[str, object]]:
    found = []
    for name in DOORS:
        module = importlib.import_module(name)
        found += [
            (f"{name}.{attribute}", value)
            for attribute in dir(module)
            if not attribute.startswith("_")
            and not inspect.ismodule(value := getattr(module, attribute))
        ]
    return found


def test_public_names_are_documented() -> None:
    for name, value in public_objects():
        if isinstance(value, str | list):
            continue
        assert inspect.getdoc(value), f"{name} has no docstring"
        for attribute, member in vars(value).items() if inspect.isclass(value) else ():
            if not attribute.startswith("_") and callable(member):
                assert inspect.getdoc(getattr(value, attribute)), f"{name}.{attribute}"


def test_public_classes_carry_their_public_home() -> None:
    for name, value in public_objects():
        if inspect.isclass(value):
            assert "_src" not in value.__module__, name


def test_every_module_can_be_imported() -> None:
    for name in importable_modules():
        importlib.import_module(name)


# They never reach a user: another part of mirrax catches them, or nothing can raise them.
INTERNAL = {"AssertionError", "RunEagerly", "StructureError", "UnevenError", "_Misfit"}


def raised_errors() -> list[tuple[str, ast.Call]]:
    """Every `raise SomeError(...)` of the package, with its place."""
    found = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = ast.unparse(node.exc.func).rpartition(".")[2]
                if name[0].isupper() and name not in INTERNAL:
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    found.append((place, node.exc))
    return found


def test_messages_of_errors_have_a_value() -> None:
    raised = raised_errors()
    without = [
        place
        for place, error in raised
        if all(isinstance(argument, ast.Constant) for argument in error.args)
    ]
    share = 1 - len(without) / len(raised)
    assert len(raised) > 400 and share >= 0.95, f"{share:.1%} have one; not: {without}"


UNIDIOMATIC = (
    *("made unique by", "found by themselves", "a number from 1 on", "cannot be told"),
    *("nobody knows", "which is no ", "which are no ", "Raises for who", "its kin"),
)


def test_messages_and_docstrings_are_idiomatic() -> None:
    for path in SOURCES:
        for phrase in UNIDIOMATIC:
            is_used = phrase in path.read_text()
            assert not is_used, f"{path.relative_to(ROOT)} says {phrase!r}"
