"""What holds after every error: the strategy works, and nothing is left behind."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mirrax as mx

from .engines import all_sum, parts, replica_id


@contextlib.contextmanager
def fails(
    strategy: Any,
    error: type[BaseException] | tuple[type[BaseException], ...],
    match: str,
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """The block raises `error` with a message that fits, and `strategy` works afterwards."""
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert_usable(strategy)


def assert_usable(strategy: Any) -> None:
    """Both engines, collectives, variables and `reduce` of `strategy` still work."""
    left = [t.name for t in threading.enumerate() if t.name.startswith("mirrax")]
    assert not left, f"threads are left: {left}"
    assert not mx.distribute.has_strategy(), "a scope is left open"
    n = strategy.num_replicas_in_sync
    v, replica_fn, compiled = _probe(strategy)
    v.assign(1.0)
    for fn, expected in [(replica_fn, 1), (compiled, 2)]:
        total = strategy.run(fn)
        assert parts(strategy, total) == [n * (n + 1) // 2] * n
        np.testing.assert_allclose(v, 1 + expected * n * (n - 1) / 2)


@functools.cache
def _probe(strategy: Any) -> tuple[mx.Variable, Callable[[], Any], mx.Function]:
    """A variable and a step that uses it, plain and compiled; made once a strategy."""
    with strategy.scope():
        v = mx.Variable(1.0, aggregation=mx.VariableAggregation.SUM)

    def replica_fn():
        v.assign_add(replica_id().astype("float32"))
        return all_sum(replica_id() + 1)

    return v, replica_fn, mx.function(replica_fn)
