"""Parts of eager code that compile themselves, for one device: gradients, functions.

An eager replica runs as plain Python, but the parts where the time goes are compiled and
found again the next step. A part that cannot be compiled (it exchanges values with other
replicas, or branches on an array's value) runs as plain Python too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from mirrax._src.base import context
from mirrax._src.base.jax_compat import in_trace
from mirrax._src.base.values import PyTree
from mirrax._src.engines.fingerprint import Lifted, lift
from mirrax._src.engines.program import Staged
from mirrax._src.engines.signature import Signature, sort_arguments
from mirrax._src.engines.staging import stage_call
from mirrax._src.state.frame import RunEagerly

_MOST_BLOCKS = 512
_MOST_FOR_ONE_CODE = 32
_blocks: dict[Any, Block | None] = {}
_made: Counter[Any] = Counter()
_run_eagerly = False

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.NonConcreteBooleanIndexError,
    RunEagerly,
)


def run_functions_eagerly(run_eagerly: bool) -> None:
    """Makes everything run as plain Python, for debugging; False goes back to compiling.

    >>> mx.config.run_functions_eagerly(True)
    >>> mx.config.run_functions_eagerly(False)
    """
    global _run_eagerly
    _run_eagerly = bool(run_eagerly)


def functions_run_eagerly() -> bool:
    """Whether `run_functions_eagerly(True)` is in force."""
    return _run_eagerly


class Block:
    """A compiled part: reads and writes the copies of the replica that calls it."""

    def __init__(self, staged: Staged) -> None:
        self._staged = staged
        self._reads = list(staged.reads)
        self._jitted = jax.jit(self._pure)

    def _pure(self, values: list[jax.Array], arrays: list[Any]) -> Any:
        return self._staged.apply(dict(zip(self._reads, values)), arrays)

    def __call__(self, arrays: list[Any]) -> PyTree:
        values = [v.concrete(is_local=True) for v in self._reads]
        results, written = self._jitted(values, arrays)
        for variable, value in zip(self._staged.writes, written):
            variable.store_local(value)
        return self._staged.result(results)


def run_block(
    inline: Callable[[Callable[..., PyTree]], Callable[..., PyTree]],
    fn: Callable[..., PyTree],
    key: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PyTree:
    """`inline(fn)(*args, **kwargs)`, compiled where that is possible.

    `key` tells different `inline` apart.
    """
    if _run_eagerly or in_trace() or context.current().frame is not None:
        return inline(fn)(*args, **kwargs)
    lifted = lift(fn)
    if lifted is None:
        return inline(fn)(*args, **kwargs)
    signature, arrays = sort_arguments((lifted.arrays, *args), kwargs, None)
    full_key = (key, lifted.key, signature, tuple(map(jax.typeof, arrays)), _device())
    if full_key in _blocks:
        block = _blocks[full_key]
    else:
        code = lifted.key[0]
        if _made[code] >= _MOST_FOR_ONE_CODE:  # something in it changes every time
            return inline(fn)(*args, **kwargs)
        _made[code] += 1
        block = _make_block(inline, lifted, signature, arrays)
        if len(_blocks) >= _MOST_BLOCKS:
            _blocks.pop(next(iter(_blocks)))
        _blocks[full_key] = block
    return inline(fn)(*args, **kwargs) if block is None else block(arrays)


def _make_block(
    inline: Callable[[Callable[..., PyTree]], Callable[..., PyTree]],
    lifted: Lifted,
    signature: Signature,
    arrays: list[Any],
) -> Block | None:
    def call(closed_over: tuple[Any, ...], *args: Any, **kwargs: Any) -> PyTree:
        return inline(lifted.rebuild(closed_over))(*args, **kwargs)

    try:
        return Block(stage_call(call, signature, arrays, None, is_local=True))
    except _NEEDS_VALUES:
        return None


def _device() -> Any:
    here = context.current()
    return (here.strategy, context.local_index(here))
