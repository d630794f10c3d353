"""Pools of workers that all tests share, each in one process of pytest-xdist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the groups, and puts the tests of a pool one after another."""
    here = Path(__file__).parent
    pools = list(_GROUPS)

    def pool_of(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ())
        used = [i for i, name in enumerate(pools) if name in names]
        return max(used, default=-1) if here in item.path.parents else -1

    for item in items:
        if (i := pool_of(item)) >= 0:
            item.add_marker(pytest.mark.xdist_group(_GROUPS[pools[i]]))
    items.sort(key=pool_of)


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
