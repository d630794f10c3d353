"""Which tests are slow, and how processes of pytest-xdist share them."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# These start processes, train whole models, draw random examples or replay TensorFlow's answers.
_SLOW = (
    *("workers", "cluster", "command_line", "testing", "examples", "interop"),
    *("property", "conformance"),
)
# What `make test-newest` runs: all quick tests of the layers that call JAX, and each other
# quick test of what depends on JAX once, with its last parameters: mostly the compiled engine.
# Tests with several workers are there once too, quick or not, if they use the pool that most use:
# processes of their own cost seconds each.
_NEWEST_WHOLE = ("base", "collectives")
_NEWEST = (*_NEWEST_WHOLE, "engines", "behaviour", "strategies", "train", "workers")

# One process has all of such a folder: its tests share worker processes, or wait more than
# they compute, while other processes compute. What takes long comes first.
_TOGETHER = ("workers", "cluster", "command_line", "testing")
_FIRST = (*_TOGETHER, "examples", "conformance", "train", "property")


@pytest.fixture(scope="module", autouse=True)
def what_is_old_is_not_searched() -> None:
    """Garbage is looked for in what this file has made: JAX keeps millions of objects."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting makes a hundred thousand objects and no garbage: nothing is looked for."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def _folder(nodeid: str) -> str:
    return nodeid.removeprefix("tests/").split("/")[0]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A folder of which nothing is run is not even imported."""
    folder, part = collection_path.name, config.option.markexpr
    if collection_path.parent != Path(__file__).parent or not collection_path.is_dir():
        return None
    is_left_out = {"not slow": folder in _SLOW, "newest": folder not in _NEWEST}
    return is_left_out.get(part) or None


def pytest_itemcollected(item: pytest.Item) -> None:
    if _folder(item.nodeid) in _SLOW:
        item.add_marker("slow")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    _mark_newest(items)  # before pytest chooses by marks

    def place(item: pytest.Item) -> int:
        folder = _folder(item.nodeid)
        return _FIRST.index(folder) if folder in _FIRST else len(_FIRST)

    yield
    items.sort(key=place)  # after all others have sorted


def _mark_newest(items: list[pytest.Item]) -> None:
    last: dict[str, pytest.Item] = {}
    for item in items:
        folder = _folder(item.nodeid)
        is_slow = item.get_closest_marker("slow") is not None
        is_shared = "two_by_two" in getattr(item, "fixturenames", ())
        if is_shared if folder == "workers" else folder in _NEWEST and not is_slow:
            is_whole = folder in _NEWEST_WHOLE
            last[item.nodeid if is_whole else item.nodeid.split("[")[0]] = item
    for item in last.values():
        item.add_marker("newest")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """File by file, but some folders whole, unless `--dist` asks for something else."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = _folder(nodeid)
            return folder if folder in _TOGETHER else nodeid.split("::")[0]

    config.option.loadscopereorder = False  # by size: long tests are in small files
    return Scheduling(config, log)
