"""Where this thread is: which strategy, which kind of context, which frame of variables.

One stack a thread. Below everything lies the default strategy's replica context, so that
code written for replicas also runs without a strategy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mirrax._src.base.protocols import FrameLike, Mode, ReplicaLike, StrategyLike

if TYPE_CHECKING:
    from mirrax._src.base.values import Atom


@dataclass(frozen=True, slots=True)
class Context:
    """One entry of the stack.

    Attributes:
        strategy: The current strategy.
        replica: The replica context, or None in cross-replica context.
        updating: The local replica whose copies `extended.update` is changing, or None.
        frame: Where variables are read and written while a function is traced, or None.
        compile_runs: The `mx.function` whose own Python runs on the host, and in which
            `run` compiles plain functions; or None.
        colocate_with: The variable whose devices new variables are put on, or None.
    """

    strategy: StrategyLike
    replica: ReplicaLike | None = None
    updating: int | None = None
    frame: FrameLike | None = None
    compile_runs: Any = None
    colocate_with: Atom | None = None


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entries: list[Context] = []
        self.has_base = False


_stack = _Stack()
_default: Context | None = None
_make_default: Callable[[], Context] | None = None


def set_default_context(make: Callable[[], Context]) -> None:
    """Registers what an empty stack means; it is made when somebody asks."""
    global _make_default
    _make_default = make


def current() -> Context:
    """The innermost context of this thread."""
    entries = _stack.entries
    return entries[-1] if entries else _default or _load_default()


def is_default() -> bool:
    """Whether no strategy has been entered."""
    entries = _stack.entries
    default = _default or _load_default()
    return not entries or entries[-1].strategy is default.strategy


def _load_default() -> Context:
    global _default
    assert _make_default is not None
    _default = _make_default()
    return _default


def replace_base(context: Context | None) -> None:
    """Makes `context` the bottom of this thread's stack; None goes back to the default."""
    _stack.entries[:] = [context] if context else []
    _stack.has_base = context is not None


def has_base() -> bool:
    """Whether `replace_base` has put something at the bottom of this thread's stack."""
    return _stack.has_base


def depth() -> int:
    """How many contexts this thread has entered."""
    return len(_stack.entries)


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
