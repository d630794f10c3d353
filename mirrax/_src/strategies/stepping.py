"""Many steps in one dispatch: `run_steps`, and what other loops over steps are made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.errors import OutOfRangeError, RunEagerly
from mirrax._src.base.jax_compat import outside_traces
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.structures import opened
from mirrax._src.base.values import Args, Fn, PyTree, UnevenError, is_leaf, is_numeric
from mirrax._src.engines.closures import FunctionCache
from mirrax._src.engines.function import Function, functions_run_eagerly
from mirrax._src.engines.loop import SlowInLoops, UnlikeSteps
from mirrax._src.state.variable import Variable

_AnyStep = TypeVar("_AnyStep", bound="Step")


@dataclass
class Step:
    """A step function, compiled: it takes what all steps share, then an element."""

    function: Function
    loops: bool = True  # whether it is worth looping over

    def loop(
        self, common: Args, elements: Sequence[Any], count: int, keep_all: bool
    ) -> tuple[PyTree] | None:
        """The results of a loop over `elements`; None if they have to go one by one."""
        if not self.loops or len(elements) < count or functions_run_eagerly():
            return None
        try:
            return (self.function.call_for_each(common, elements, keep_all),)
        except SlowInLoops:
            self.loops = False
        except (UnlikeSteps, UnevenError, RunEagerly):
            pass
        return None


class _Stacking(Function):
    """Traced for every number of steps that is left: retracing is expected, do not warn."""

    def note_trace(self, key: Any) -> None:
        self.trace_count += 1


class Stepper:
    """A strategy's loops over many steps, with their programs."""

    def __init__(self, strategy: StrategyLike) -> None:
        self._strategy = strategy
        self._steps: dict[Any, FunctionCache[Any]] = {}
        self._stack = _Stacking(_stacked)

    def run_steps(self, fn: Fn, iterator: Iterator[Any], steps: int) -> PyTree:
        """`strategy.run(fn, (element,))` for the next elements; the results, stacked."""
        step, common = self.step(fn, self._run_of, "run")
        elements = take(iterator, steps)
        if not elements:
            raise OutOfRangeError(
                f"The data has ended: there is no next element for {steps} step(s)."
            )
        looped = step.loop(common, elements, steps, keep_all=True)
        if looped is not None:
            return looped[0]
        results = [step.function(common, element) for element in elements]
        return self._strategy.run(self._stack, results)

    def step(
        self, fn: Fn, make: Callable[[Fn], _AnyStep], kind: Any
    ) -> tuple[_AnyStep, Args]:
        """`fn` as a step, made once for each `kind`, and what all its steps share."""
        if functions_run_eagerly():
            return make(fn), ()
        return self._steps.setdefault(kind, FunctionCache(make)).compiled(fn)

    def _run_of(self, fn: Fn) -> Step:
        def replica(*args: Any) -> PyTree:
            return values_of(fn(*args))

        def run(common: Args, element: Any) -> PyTree:
            return self._strategy.run(of_replica, (*common, element))

        replica.__name__ = run.__name__ = getattr(fn, "__name__", "step")
        of_replica = Function(replica)
        return Step(Function(run))


def values_of(tree: PyTree) -> PyTree:
    """`tree` with variables as the values that they have now."""
    return jax.tree.map(
        lambda leaf: leaf.read_value() if isinstance(leaf, Variable) else leaf,
        opened(tree),
        is_leaf=is_leaf,
    )


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    """The next elements, at most `count`."""
    if not hasattr(iterator, "__next__"):
        raise TypeError(
            f"Steps take their elements from an iterator, got {type(iterator).__name__}; "
            "pass `iter(dataset)`."
        )
    return list(itertools.islice(iterator, count))


def check_not_traced(what: str) -> None:
    """Raises inside a function that is being compiled."""
    if context.current().frame is not None or not outside_traces():
        raise RuntimeError(
            f"`{what}` is a compiled loop of its own: call it outside `mx.function` and "
            "`jax.jit`."
        )


def _stacked(*results: PyTree) -> PyTree:
    """A replica's results of all steps, with the steps as first axis."""

    def stack(*steps: Any) -> Any:
        first = steps[0]
        if not is_numeric(first):
            return first
        shapes = {jnp.shape(step) for step in steps}
        if len(shapes) > 1:
            raise ValueError(
                "The results of the steps cannot be stacked, their shapes are "
                f"{', '.join(map(str, sorted(shapes)))}. Return something that does not "
                "depend on the size of the batch, a sum for example."
            )
        return jnp.stack(steps)

    return jax.tree.map(stack, *map(opened, results))
