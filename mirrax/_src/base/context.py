"""Where this thread is: which strategy, which kind of context, which frame of variables.

One stack a thread. Below everything lies the default strategy's replica context, so that
code written for replicas also runs without a strategy.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mirrax._src.base.protocols import FrameLike, Mode, ReplicaLike, StrategyLike


@dataclass(frozen=True, slots=True)
class Context:
    """One entry of the stack."""

    strategy: StrategyLike
    replica: ReplicaLike | None = None  # None in cross-replica context
    updating: int | None = (
        None  # the local replica whose copy `extended.update` changes
    )
    frame: FrameLike | None = None  # where variables are while a function is traced
    # The `mx.function` whose own Python runs on the host, and in which `run` compiles.
    compile_runs: Any = None


class _Stack(threading.local):
    @functools.cached_property  # whose cache is the thread's own, too
    def entries(self) -> list[Context]:
        return [_default()]


_stack = _Stack()
_default: Callable[[], Context]


def set_default_context(load: Callable[[], Context]) -> None:
    """Registers what lies at the bottom of a stack; it is loaded when somebody asks."""
    global _default
    _default = functools.cache(load)


def current() -> Context:
    """The innermost context of this thread."""
    return _stack.entries[-1]


def is_default() -> bool:
    """Whether no strategy has been entered."""
    return _stack.entries[-1].strategy is _default().strategy


def replace_base(context: Context) -> None:
    """Makes `context` the bottom of this thread's stack."""
    _stack.entries[0] = context


def is_entered() -> bool:
    """Whether this thread has entered a context."""
    return len(_stack.entries) > 1


class enter:
    """Makes a context the current one for a `with` block; a class, because it is hot."""

    __slots__ = ("_context",)

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> Context:
        _stack.entries.append(self._context)
        return self._context

    def __exit__(self, *error: Any) -> None:
        _stack.entries.pop()


def changed(**changes: Any) -> enter:
    """The current context with some fields replaced, for a `with` block."""
    return enter(replace(current(), **changes))


def in_program(here: Context) -> bool:
    """Whether one program is being traced for all replicas at once."""
    return here.frame is not None and here.frame.mode.is_program


def is_uneven(here: Context) -> bool:
    """Whether a replica's program is being traced whose arrays fit that replica only."""
    return here.frame is not None and here.frame.mode is Mode.UNEVEN


def local_index(here: Context) -> int:
    """Which of this worker's replicas the current code works for; 0 in cross-replica code."""
    if here.replica is not None:
        return here.replica.local_index
    return here.updating or 0
