"""The same function on workers and in one process, and what has to be equal.

def sums(strategy):
    return strategy.reduce("SUM", numbered(strategy), axis=None)

def test_sums(two_by_two):
    two_by_two.assert_as_one(sums)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers.engines import mirrored
from helpers.programs import compile_quickly
from helpers.waiting import SECONDS_TO_HANG

import mirrax as mx
from mirrax._src.base.values import ReplicaValues, is_leaf
from mirrax._src.cluster import launches
from mirrax._src.state.distributed import DistributedVariable
from mirrax.testing import WorkerPool

compile_quickly()  # in workers too, which import this

# A worker that waits longer for another one says so, before a test is taken to hang.
_STEP_TIMEOUT = 100


class Pool:
    """Workers, as the tests use them: every function gets the strategy first."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.workers, self.local = pool.workers, pool.devices or 1
        self.replicas = self.workers * self.local

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """What `fn(strategy, *args)` returns on each worker, see `view`."""
        answers = self.pool.run(_call, (fn, args), timeout=SECONDS_TO_HANG)
        meetings = [met for _, met in answers]
        if any(met != meetings[0] for met in meetings):
            self.pool.close()  # the next test would only find out that they are apart
            raise AssertionError(f"the workers did not meet equally often: {meetings}")
        return [result for result, _ in answers]

    def run_alike(self, fn: Callable[..., Any], *args: Any) -> Any:
        """The one thing that `fn` returns on all workers."""
        results = self.run(fn, *args)
        for k, result in enumerate(results):
            assert_same(result, results[0], f"worker {k} and worker 0")
        return results[0]

    def assert_as_one(
        self, fn: Callable[..., Any], *args: Any, rtol: float = 1e-6, atol: float = 0.0
    ) -> Any:
        """`fn` gives the same here, in one process with as many replicas; returns it."""
        one = _call_on(one_process(self.replicas), fn, args)
        for k, result in enumerate(self.run(fn, *args)):
            own = jax.tree.map(
                lambda leaf, k=k: (
                    leaf.of_worker(k, self.local) if isinstance(leaf, Parts) else leaf
                ),
                one,
                is_leaf=lambda leaf: isinstance(leaf, Parts),
            )
            assert_same(result, own, f"worker {k} and one process", rtol, atol)
        return one


@functools.cache
def one_process(replicas: int) -> mx.MirroredStrategy:
    """The strategy to compare with."""
    return mirrored(replicas)


@functools.cache
def own_strategy() -> mx.distribute.MultiWorkerMirroredStrategy:
    """The strategy of this worker; each process has one."""
    return mx.distribute.MultiWorkerMirroredStrategy(step_timeout=_STEP_TIMEOUT)


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """What `fn` returns, and how often this worker has met the others so far."""
    strategy = own_strategy()
    result = _call_on(strategy, fn, args)
    cluster: Any = strategy.replica_mesh.cluster
    return result, (launches.last.count, dict(cluster._counts))


def _call_on(strategy: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return view(strategy, fn(strategy, *args))


# Values ---------------------------------------------------------------------------------


@dataclass
class Parts:
    """A worker's parts of a distributed value."""

    parts: list[Any]

    def of_worker(self, worker: int, local: int) -> Parts:
        """Those of one worker, if these are all replicas'."""
        return Parts(self.parts[worker * local : (worker + 1) * local])


def view(strategy: Any, tree: Any) -> Any:
    """`tree` as NumPy sees it, with `Parts` for what has a value for each replica."""

    def show(leaf: Any) -> Any:
        if isinstance(leaf, ReplicaValues | DistributedVariable):
            local = strategy.experimental_local_results(leaf)
            return Parts([view(strategy, part) for part in local])
        if isinstance(leaf, mx.Variable):
            leaf = leaf.read_value()
        if not isinstance(leaf, jax.Array):
            return leaf
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return jax.tree.map(show, tree, is_leaf=is_leaf)


def assert_same(
    found: Any, wanted: Any, who: str, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """The same structure, dtypes and shapes, and values to that precision."""
    leaves, tree = _flatten(found)
    others, other = _flatten(wanted)
    assert tree == other, f"{who}: {tree} is not {other}"
    for (path, a), (_, b) in zip(leaves, others):
        where = f"{who} differ at {jax.tree_util.keystr(path)}"
        if not isinstance(a, np.ndarray | np.generic):
            assert a == b, f"{where}: {a!r} is not {b!r}"
            continue
        assert isinstance(b, np.ndarray | np.generic), f"{where}: {a!r} is not {b!r}"
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{where}: {a!r} is not {b!r}"
        if a.dtype == jnp.bfloat16:
            a, b = a.astype("float32"), b.astype("float32")
        if a.dtype == object or not rtol:
            np.testing.assert_array_equal(a, b, where)
        else:
            a, b = np.asarray(a), np.asarray(b)
            np.testing.assert_allclose(a, b, rtol, atol, err_msg=where)


def _flatten(tree: Any) -> Any:
    def open_parts(leaf: Any) -> Any:
        return leaf.parts if isinstance(leaf, Parts) else leaf

    opened = jax.tree.map(
        open_parts, tree, is_leaf=lambda leaf: isinstance(leaf, Parts)
    )
    return jax.tree_util.tree_flatten_with_path(opened)


# What tests do on a worker --------------------------------------------------------------


def worker_of(strategy: Any) -> int:
    """The number of the worker that asks; 0 in one process."""
    return strategy.input_share.worker


def per_worker(strategy: Any, values: Sequence[Any]) -> Any:
    """This worker's one of `values`."""
    return values[worker_of(strategy)]


def error_of(fn: Callable[[], Any]) -> tuple[str, str]:
    """The type and the text of the exception that `fn` raises."""
    try:
        result = fn()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError(f"nothing was raised, but returned: {result!r}")


@contextlib.contextmanager
def agreements(strategy: Any) -> Iterator[list[str]]:
    """The names of what the workers agree on in the block."""
    roster = strategy.replica_mesh.cluster._roster
    found: list[str] = []
    original = roster.agree

    def agree(name: str, *args: Any) -> Any:
        found.append(name)
        return original(name, *args)

    roster.agree = agree
    try:
        yield found
    finally:
        del roster.agree
