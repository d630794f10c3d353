"""Pools of workers that all tests share, each in one process of pytest-xdist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mirrax.testing import WorkerPool
from mirrax.testing import worker_pool as worker_pool

from .comparing import Pool

Pools = Callable[..., WorkerPool]

# With `--dist loadgroup` each group runs in one process, which starts its pools once.
_GROUPS = {
    "two_by_two": "workers of two replicas",
    "two_by_one": "workers of one replica",
    "three_by_one": "workers of one replica",
    "four_by_one": "workers of one replica",
}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for the marks
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Marks the groups, and puts the tests of a pool one after another."""
    here = Path(__file__).parent
    pools = list(_GROUPS)

    def pool_of(item: pytest.Item) -> int:
        names = list(getattr(item, "fixturenames", ()))
        case = getattr(item, "callspec", None)  # a pool may be a parameter, by its name
        names += [v for v in case.params.values() if isinstance(v, str)] if case else []
        used = [i for i, name in enumerate(pools) if name in names]
        return max(used, default=-1) if here in item.path.parents else -1

    for item in items:
        if (i := pool_of(item)) >= 0:
            item.add_marker(pytest.mark.xdist_group(_GROUPS[pools[i]]))
            if getattr(config.option, "loadgroup", False):
                _name_group(item, _GROUPS[pools[i]])
    items.sort(key=pool_of)


def _name_group(item: pytest.Item, group: str) -> None:
    """Puts the group into the test's name, by which pytest-xdist 3.8 tells groups.

    It tries to do so itself, but pytest 9.2 keeps names elsewhere.
    """
    known: Any = getattr(item, "_id", None)
    if known is not None:
        item._id = known.parse(f"{item.nodeid}@{group}")  # pyright: ignore


@pytest.fixture
def two_by_two(worker_pool: Pools) -> Pool:
    """Two workers of two replicas each."""
    return Pool(worker_pool(2, 2))


@pytest.fixture
def two_by_one(worker_pool: Pools) -> Pool:
    """Two workers of one replica each."""
    return Pool(worker_pool(2, 1))


@pytest.fixture
def three_by_one(worker_pool: Pools) -> Pool:
    """Three workers of one replica each."""
    return Pool(worker_pool(3, 1))


@pytest.fixture
def four_by_one(worker_pool: Pools) -> Pool:
    """Four workers of one replica each."""
    return Pool(worker_pool(4, 1))
