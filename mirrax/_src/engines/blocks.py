"""Parts of eager code that compile themselves, for one device: gradients, functions.

An eager replica runs as plain Python, but the parts where the time goes are compiled and
found again the next step. A part that cannot be compiled (it exchanges values with other
replicas, or branches on an array's value) runs as plain Python too.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mirrax._src.base import context
from mirrax._src.base.jax_compat import in_trace
from mirrax._src.base.values import PyTree
from mirrax._src.engines.fingerprint import Lifted, describe_objects, lift
from mirrax._src.engines.program import Staged
from mirrax._src.engines.signature import Signature, Static, sort_arguments
from mirrax._src.engines.staging import stage_call
from mirrax._src.state.frame import RunEagerly
from mirrax._src.state.variable import Variable

_MOST_BLOCKS = 512
_MOST_FOR_ONE_CODE = 32
_blocks: dict[Any, Block | None] = {}
_made: Counter[Any] = Counter()
_run_eagerly = False


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
    """A compiled part: reads and writes the copies of the replica that calls it.

    It holds its variables weakly, for it may be kept longer than they live.
    """

    def __init__(self, staged: Staged) -> None:
        self._reads = [weakref.ref(v) for v in staged.reads]
        self._writes = [weakref.ref(v) for v in staged.writes]
        self._result = staged.result
        self._jitted = jax.jit(staged.apply)

    def __call__(self, arrays: list[Any]) -> PyTree:
        values = [v.concrete(is_local=True) for v in _alive(self._reads)]
        results, written = self._jitted(values, arrays)
        for variable, value in zip(_alive(self._writes), written):
            variable.store_local(value)
        return self._result(results, arrays)


def _alive(references: Sequence[weakref.ref[Variable]]) -> list[Variable]:
    return [v for v in (reference() for reference in references) if v is not None]


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
    signature, arrays, _ = sort_arguments((lifted.arrays, *args), kwargs, None)
    statics = [k.value for k in signature.kinds if isinstance(k, Static)]
    objects = describe_objects(statics)
    if objects is None:
        return inline(fn)(*args, **kwargs)
    full_key = (
        objects,
        key,
        lifted.key,
        signature,
        tuple(map(jax.typeof, arrays)),
        _device(),
    )
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
    except (Exception, RunEagerly):
        # It needs real values, or is wrong: as plain Python it works, or says why not.
        return None


def _device() -> Any:
    here = context.current()
    return (here.strategy, here.replica is None, context.local_index(here))
