"""The scope of a strategy: how it becomes current, and what must not happen in a replica."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from mirrax._src.base import context
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.state import foreign

_Face = TypeVar("_Face")


class Scope(Generic[_Face]):
    """A strategy's scope, which can be entered several times, also inside itself.

    `enter` makes the strategy current, `face` is what `with` gives.
    """

    def __init__(self, enter: Callable[[], context.enter], face: _Face) -> None:
        self._enter, self._face = enter, face
        self._entered: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> _Face:
        foreign.attach()
        entered = self._enter()
        entered.__enter__()
        self._entered.append(entered)
        return self._face

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def enter_scope(strategy: StrategyLike) -> context.enter:
    """Makes `strategy` current; not in a replica, nor in another's scope."""
    here = context.current()
    if not context.is_default():
        if here.replica is not None:
            raise RuntimeError(
                f"The scope of {strategy!r} is entered inside a replica function. Enter it "
                "in cross-replica context, outside `run`; inside, the strategy is current "
                "already."
            )
        if here.strategy is not strategy:
            raise RuntimeError(
                f"Mixing different strategies: the scope of {strategy!r} is entered inside "
                f"the scope of {here.strategy!r}. Leave that one before."
            )
    return context.changed(strategy=strategy, replica=None, updating=None)


def check_cross_replica(strategy: StrategyLike, what: str) -> None:
    """Raises in a replica, where `what` cannot be called, and in another's scope."""
    if context.is_default():
        return
    here = context.current()
    if here.replica is not None:
        inside = "all_gather" if what == "gather" else "all_reduce"
        raise RuntimeError(
            f"`{what}` is called inside a replica function. It works for all replicas "
            "together, in cross-replica context: call it outside `run`, or in the function "
            f"that you pass to `merge_call`; inside use `get_replica_context().{inside}`."
        )
    if here.strategy is not strategy:
        raise RuntimeError(
            f"Mixing different strategies: `{what}` of {strategy!r} is called inside the "
            f"scope of {here.strategy!r}. Leave that one before."
        )
