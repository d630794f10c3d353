"""The default strategy, in force outside any scope, and the functions that ask what is in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mirrax._src.base import context
from mirrax._src.base.context import Context
from mirrax._src.base.values import Args, Fn, Kwargs, PyTree
from mirrax._src.engines.replica_context import ReplicaContext
from mirrax._src.state.spec import VariableSpec
from mirrax._src.state.variable import OrdinaryVariable, Variable
from mirrax._src.strategies.extended import StrategyExtended
from mirrax._src.strategies.strategy import Strategy


class _DefaultExtended(StrategyExtended):
    __module__ = "mirrax.distribute"

    def create_variable(self, spec: VariableSpec) -> Variable:
        return OrdinaryVariable(spec)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        raise RuntimeError("The default strategy has no devices of its own.")

    def variable_created_in_scope(self, v: Variable) -> bool:
        return v.strategy is None

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        return min(var_list, key=lambda v: v.name)


class _DefaultStrategy(Strategy):
    """What is current outside any scope: runs everything in place, as one replica."""

    __module__ = "mirrax.distribute"
    has_plain_values = True

    def __init__(self) -> None:
        super().__init__(_DefaultExtended(self), None)

    def enter_scope(self) -> context.enter:
        here = context.current()
        if here.strategy is not self:
            raise RuntimeError(
                "Strategy scopes must not be nested: the default strategy's scope is entered "
                f"inside that of {here.strategy!r}."
            )
        return context.enter(here)

    def _run(self, fn: Fn, args: Args, kwargs: Kwargs, here: Context) -> PyTree:
        with context.changed(replica=ReplicaContext(self)):
            return fn(*args, **kwargs)

    def __repr__(self) -> str:
        return "the default strategy"


_default = _DefaultStrategy()
default_context = Context(_default, replica=ReplicaContext(_default))


def get_strategy() -> Strategy:
    """The current strategy; outside any scope the default one.

    >>> mx.distribute.get_strategy()
    the default strategy
    """
    strategy: Any = context.current().strategy
    return strategy


def has_strategy() -> bool:
    """Whether a strategy other than the default one is current."""
    return not context.is_default()


def get_replica_context() -> Any:
    """The current replica's `ReplicaContext`, or None in cross-replica context."""
    return context.current().replica


def in_cross_replica_context() -> bool:
    """Whether the current code works for all replicas together."""
    return context.current().replica is None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes `strategy` current for this thread from now on; None goes back to the default."""
    if context.is_entered():
        raise RuntimeError(
            "`experimental_set_strategy` must not be called inside a strategy's scope, here "
            f"that of {context.current().strategy!r}. Call it outside of all "
            "`with strategy.scope():` blocks and of `run`."
        )
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(f"`strategy` must be a Strategy or None, got {strategy!r}.")
    other = None if strategy is _default else strategy
    context.replace_base(Context(other) if other else default_context)
