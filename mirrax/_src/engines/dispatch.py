"""Which engine runs a replica function: plain Python, a compiled program, or a trace's part."""

from __future__ import annotations

import functools
import types
from collections import Counter
from typing import Any

from mirrax._src.base import context
from mirrax._src.base.errors import warn_user
from mirrax._src.base.jax_compat import outside_traces
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.values import Args, Fn, Kwargs, PyTree
from mirrax._src.engines.eager import run_eagerly
from mirrax._src.engines.function import Function, functions_run_eagerly
from mirrax._src.engines.trace import run_in_trace

_HINT_AFTER = 1000
eager_runs: Counter[Any] = Counter()


def run_replicas(
    strategy: StrategyLike, fn: Fn, args: Args, kwargs: Kwargs, here: context.Context
) -> PyTree:
    """`strategy.run(fn, args, kwargs)`, by the engine that the place and `fn` call for."""
    if here.frame is not None or not outside_traces():
        return run_in_trace(strategy, fn, args, kwargs)
    if type(fn) is Function:
        return fn.run_on(strategy, args, kwargs)
    inner, own_args, own_kwargs = _unbound(fn, args, kwargs)
    if isinstance(inner, Function):
        return inner.run_on(strategy, own_args, own_kwargs)
    if here.compile_runs:
        compiled, first = here.compile_runs.inner.compiled(fn)
        return compiled.run_on(strategy, (*first, *args), kwargs)
    _note_eager_run(fn)
    return run_eagerly(strategy, fn, args, kwargs)


def _unbound(fn: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Args, Kwargs]:
    """The function in a method or a `functools.partial`, with all its arguments."""
    if isinstance(fn, types.MethodType):
        return _unbound(fn.__func__, (fn.__self__, *args), kwargs)
    if isinstance(fn, functools.partial):
        return _unbound(fn.func, (*fn.args, *args), {**fn.keywords, **kwargs})
    return fn, args, kwargs


def _note_eager_run(fn: Any) -> None:
    """Says once, of a function that runs as plain Python very often, how to compile it."""
    code = getattr(fn, "__code__", None)
    if code is None or functions_run_eagerly():
        return
    eager_runs[code] += 1
    if eager_runs[code] == _HINT_AFTER:
        warn_user(
            f"{code.co_name!r} has run {_HINT_AFTER} times as plain Python, operation by "
            f"operation on every replica. `mx.function({code.co_name})` compiles it to one "
            "program, which is many times as fast."
        )
