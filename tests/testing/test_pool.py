"""`WorkerPool` and the fixture `worker_pool`: calls that succeed."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.waiting import SECONDS_TO_HANG

import mirrax.testing
from mirrax.testing import WorkerPool

from . import helper

Pools = Callable[..., WorkerPool]
FACTOR = 3


@dataclass(frozen=True)
class Point:
    """Defined in a test module, so it travels by value; both ways it is the same class."""

    x: int


def scaled(number: int, offset: int = 0) -> int:
    return FACTOR * number + offset + helper.own_number()


def test_results_come_in_the_order_of_workers(worker_pool: Pools) -> None:
    pool = worker_pool()
    assert pool.run(helper.own_number) == [0, 1]
    assert pool.run(scaled, (2,), {"offset": 10}) == [16, 17]
    assert pool.run(functools.partial(scaled, 1)) == [3, 4]


def test_closures_and_lambdas(worker_pool: Pools) -> None:
    pool, seen = worker_pool(), {"value": 5}

    def double(fn: Callable[[], int]) -> int:
        return 2 * fn()

    assert pool.run(lambda: seen["value"]) == [5, 5]
    assert pool.run(double, (lambda: scaled(1),)) == [6, 8]


def test_arrays_and_classes_of_the_test(worker_pool: Pools) -> None:
    pool = worker_pool()
    array = np.arange(3_000_000)
    for result in pool.run(lambda a: a[::-1], (array,)):
        np.testing.assert_array_equal(result, array[::-1])
    points = pool.run(lambda point: Point(point.x + 1), (Point(1),))
    assert points == [Point(2), Point(2)]
    assert type(points[0]) is Point


def test_the_test_module_is_not_imported_but_others_are(worker_pool: Pools) -> None:
    def modules() -> tuple[bool, bool]:
        helper.own_number()
        return __name__ in sys.modules, helper.__name__ in sys.modules

    assert worker_pool().run(modules) == [(False, True)] * 2


def test_processes_stay_between_calls(worker_pool: Pools) -> None:
    pool = worker_pool()
    first = pool.run(helper.count)
    assert pool.run(helper.count) == [n + 1 for n in first]
    assert pool.run(os.getpid) == pool.run(os.getpid)
    assert worker_pool(workers=2, devices=2) is pool


def test_calls_run_at_the_same_time(worker_pool: Pools, tmp_path: Path) -> None:
    def meet() -> bool:
        me = helper.own_number()
        (tmp_path / str(me)).touch()
        end = time.monotonic() + SECONDS_TO_HANG
        while not (tmp_path / str(1 - me)).exists() and time.monotonic() < end:
            time.sleep(0.01)
        return (tmp_path / str(1 - me)).exists()

    assert worker_pool().run(meet) == [True, True]


def test_a_worker_has_its_devices_and_no_backend_before(worker_pool: Pools) -> None:
    def devices() -> tuple[bool, int]:
        import jax

        from mirrax._src.base.jax_compat import backend_started

        return backend_started(), len(jax.local_devices(backend="cpu"))

    pool = worker_pool(workers=2, devices=3)
    assert pool.run(devices) == [(False, 3), (False, 3)]
    assert pool.run(devices) == [(True, 3), (True, 3)]
    assert (
        pool.run(lambda: os.environ.get("JAX_PLATFORMS"))
        == [os.environ.get("JAX_PLATFORMS")] * 2
    )


def test_a_worker_has_no_descriptor_to_leak(worker_pool: Pools) -> None:
    assert worker_pool().run(lambda: "MIRRAX_POOL" in os.environ) == [False, False]


def test_functions_of_main(tmp_path: Path) -> None:
    import subprocess

    script = tmp_path / "script.py"
    script.write_text(
        "from mirrax.testing import run_workers\n"
        "def fn(a):\n    return a + other()\n"
        "def other():\n    return 1\n"
        "if __name__ == '__main__':\n    print(run_workers(fn, 2, None, (1,)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
        env=os.environ | {"PYTHONPATH": helper.without_jax(tmp_path)},
    )
    assert (done.stdout, done.stderr) == ("[2, 2]\n", "")


def test_a_closed_pool_says_so_and_leaves_nothing() -> None:
    with WorkerPool(1, None) as pool:
        (pid,) = pool.run(os.getpid)
        assert repr(pool) == "WorkerPool(workers=1, devices=None)"
    assert not Path(f"/proc/{pid}").exists()
    assert repr(pool) == "WorkerPool(workers=1, devices=None, closed)"
    with pytest.raises(RuntimeError, match="closed; make a new one"):
        pool.run(os.getpid)
    pool.close()


@pytest.mark.parametrize("sizes", [{"workers": 0}, {"devices": -1}])
def test_sizes_that_make_no_sense(sizes: dict[str, Any]) -> None:
    (name,) = sizes
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1"):
        WorkerPool(**sizes)


def test_few_pools_are_kept(
    worker_pool: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mirrax._src.testing import fixtures

    monkeypatch.setattr(fixtures, "_MOST_POOLS", 1)
    before = worker_pool()
    other = worker_pool(workers=1, devices=1)
    assert before.is_closed and not other.is_closed
    again = worker_pool()
    assert again is not before and other.is_closed


def test_the_fixture_works_under_xdist(tmp_path: Path) -> None:
    import subprocess

    light = tmp_path / "light"
    light.mkdir()
    (tmp_path / "conftest.py").write_text("from mirrax.testing import worker_pool\n")
    (tmp_path / "test_it.py").write_text(
        "import os\nimport pytest\n"
        "@pytest.mark.parametrize('n', range(4))\n"
        "def test_run(worker_pool, n):\n"
        "    assert worker_pool(1, 1).run(lambda: n) == [n]\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-q", "-W", "error", tmp_path],
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_HANG,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": helper.without_jax(light)},
    )
    assert "4 passed" in done.stdout, done.stdout + done.stderr


def test_what_the_module_offers() -> None:
    for name in ("WorkerError", "WorkerPool", "run_workers", "worker_pool"):
        assert hasattr(mirrax.testing, name)
    assert WorkerPool.__module__ == "mirrax.testing"
