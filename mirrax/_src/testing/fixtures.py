"""The pytest fixture `worker_pool`. In a conftest.py: `from mirrax.testing import worker_pool`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

try:
    import pytest
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "mirrax.testing needs pytest, which is not installed. Type: "
        "pip install 'mirrax[testing]'",
        name="pytest",
    ) from None

from mirrax._src.testing.pool import WorkerPool

# Processes that wait still hold memory.
_MOST_POOLS = 3


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[Callable[..., WorkerPool]]:
    """Pools that all tests of a session share: `worker_pool(workers=2, devices=2)`.

        def test_sum(worker_pool):
            assert worker_pool(workers=2).run(my_function) == [3, 3]

    The same size gives the same pool. A few are kept; all are closed at the end. With
    pytest-xdist each of its processes has its own.
    """
    pools: dict[tuple[int, int | None], WorkerPool] = {}

    def get(workers: int = 2, devices: int | None = 2) -> WorkerPool:
        size = (workers, devices)
        pool = pools.pop(size, None)
        if pool is None or pool.is_closed:
            pool = WorkerPool(workers, devices)
        pools[size] = pool  # the last one used is the last one to go
        if len(pools) > _MOST_POOLS:
            pools.pop(next(iter(pools))).close()
        return pool

    yield get
    for pool in pools.values():
        pool.close()
