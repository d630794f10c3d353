"""Pools of workers that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.forked_workers import forked_workers

from mirrax.testing import WorkerPool
from mirrax.testing import worker_pool as worker_pool

from .comparing import Pool

Pools = Callable[..., WorkerPool]

_POOLS = ("two_by_two", "two_by_one", "three_by_one", "four_by_one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of a pool one after another; only a few pools are kept."""
    here = Path(__file__).parent

    def pool_of(item: pytest.Item) -> int:
        names = list(getattr(item, "fixturenames", ()))
        case = getattr(item, "callspec", None)  # a pool may be a parameter, by its name
        names += [v for v in case.params.values() if isinstance(v, str)] if case else []
        used = [i for i, name in enumerate(_POOLS) if name in names]
        return max(used, default=-1) if here in item.path.parents else -1

    items.sort(key=pool_of)


@pytest.fixture
def two_by_two(worker_pool: Pools) -> Pool:
    """Two workers of two replicas each, in processes as a user starts them."""
    return Pool(worker_pool(2, 2))


@pytest.fixture
def two_by_one(worker_pool: Pools) -> Pool:
    """Two workers of one replica each."""
    with forked_workers():
        return Pool(worker_pool(2, 1))


@pytest.fixture
def three_by_one(worker_pool: Pools) -> Pool:
    """Three workers of one replica each."""
    with forked_workers():
        return Pool(worker_pool(3, 1))


@pytest.fixture
def four_by_one(worker_pool: Pools) -> Pool:
    """Four workers of one replica each."""
    with forked_workers():
        return Pool(worker_pool(4, 1))
