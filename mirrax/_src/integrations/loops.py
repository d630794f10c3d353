"""TensorFlow 1's loop over many steps: each is given a context, to name its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.errors import OutOfRangeError
from mirrax._src.base.hiding import hides
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.reduce_op import ReduceOp
from mirrax._src.base.values import Fn, PyTree, is_array, is_leaf
from mirrax._src.engines.function import Function
from mirrax._src.state.variable import Variable
from mirrax._src.strategies.stepping import Step, check_not_traced, take, values_of
from mirrax._src.strategies.strategy import Strategy

_AnyContext = TypeVar("_AnyContext", bound="MultiStepContext")


@hides("result_of_step", "take_over", "unpacks")
class MultiStepContext:
    """What a step function is given to name its outputs, and what the loop over it returns.

    Attributes:
        run_op: Runs the same number of steps again, on the next elements.
    """

    __module__ = "mirrax.compat.v1.distribute"
    unpacks = False  # whether an element that is a tuple is several arguments of a step

    def __init__(self, slots: dict[Any, Variable] | None = None) -> None:
        self._slots = {} if slots is None else slots
        self._outputs: dict[str, Any] = {}
        self._non_tensor_outputs: dict[str, Any] = {}
        self.run_op: Callable[[], None] = _nothing_to_run

    @property
    def last_step_outputs(self) -> dict[str, Any]:
        """The outputs of the last step, by name."""
        return self._outputs

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """What is no array, by name; it was set when the step was traced."""
        return self._non_tensor_outputs

    def set_last_step_output(
        self, name: str, output: PyTree, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Makes `output` of the last step a result of the loop.

        Args:
            name: Its name in `last_step_outputs`.
            output: A value of this step; in a replica, of this replica.
            reduce_op: How the replicas' values become one. Needed in a replica; without,
                the value stays as it is.
        """
        op = None if reduce_op is None else ReduceOp(reduce_op)
        self._set_output(name, output, op)

    def _set_output(self, name: str, output: PyTree, op: Any) -> None:
        here = context.current()
        if here.replica is None:
            self._outputs[name] = self._combined(here.strategy, op, output)
            return
        if op is None:
            raise ValueError(
                f"Output {name!r} is set inside a replica, so say how the replicas' values "
                f"become one: `set_last_step_output({name!r}, value, "
                f"{self._example_of_combining})`."
            )

        def merge(strategy: StrategyLike, output: PyTree) -> None:
            combined = self._combined(strategy, op, output)
            self._outputs[name] = jax.tree_util.tree_map_with_path(
                lambda path, leaf: self._kept(name, path, leaf),
                combined,
                is_leaf=is_leaf,
            )

        here.replica.merge_call(merge, args=(output,))

    _example_of_combining = 'reduce_op="MEAN"'

    def _combined(self, strategy: StrategyLike, op: Any, output: PyTree) -> PyTree:
        """The replicas' values as one, on all of them."""
        if op is None:
            return output
        return strategy.reduce(op, output, axis=None)

    def _kept(self, name: str, path: Any, value: Any) -> Variable:
        """A variable with `value`: what a replica's program computes cannot leave it else."""
        value = value if is_leaf(value) or is_array(value) else jnp.asarray(value)
        key = (name, jax.tree_util.keystr(path), value.shape, value.dtype)
        if key not in self._slots:
            shape, dtype = value.shape, value.dtype
            self._slots[key] = Variable(
                lambda: jnp.zeros(shape, dtype), trainable=False, name=f"output/{name}"
            )
        return self._slots[key].assign(value)

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Makes `output`, which is not an array, a result: in a replica, those of all in a tuple."""
        here = context.current()
        leaves = jax.tree.leaves(output, is_leaf=is_leaf)
        if any(isinstance(leaf, Tracer) or is_leaf(leaf) for leaf in leaves):
            raise ValueError(
                f"Output {name!r} is an array, which a compiled loop computes anew in every "
                "step. Use `set_last_step_output`."
            )
        if here.replica is None:
            self._non_tensor_outputs[name] = output
            return

        def merge(strategy: StrategyLike, output: Any) -> None:
            self._non_tensor_outputs[name] = self._parts(strategy, output)

        here.replica.merge_call(merge, args=(output,))

    def _parts(self, strategy: StrategyLike, value: Any) -> Sequence[Any]:
        return strategy.experimental_local_results(value)

    # For the loop ----------------------------------------------------------------------

    def result_of_step(self) -> tuple[dict[str, Any], Any]:
        """What a step has set, as what it returns."""
        return values_of(self._outputs), _Others(self._non_tensor_outputs)

    def take_over(self, outputs: dict[str, Any], others: Any = None) -> None:
        """Makes the results of the last step those of this context."""
        self._outputs = outputs
        self._non_tensor_outputs = dict(others.values) if others else {}


def run_loop(
    strategy: Strategy,
    fn: Callable[..., Any],
    iterator: Iterator[Any],
    iterations: int,
    initial: dict[str, Any] | None,
    kind: type[_AnyContext],
) -> _AnyContext:
    """`fn(context, element)` for the next elements; the context has the last outputs.

    Args:
        strategy: Runs the loop.
        fn: The step, called in cross-replica context.
        iterator: Gives the elements.
        iterations: How many steps.
        initial: What the outputs are if `iterations` is 0.
        kind: The context of a generation.
    """
    check_not_traced("experimental_run_steps_on_iterator")
    if not callable(fn):
        raise TypeError(f"`fn` must be a function of a context, got {fn!r}.")
    if isinstance(iterations, bool) or not isinstance(iterations, int):
        raise TypeError(f"`iterations` must be a number, got {iterations!r}.")
    result = kind()

    def run() -> None:
        if iterations <= 0:
            result.take_over(dict(initial or {}))
            return
        step, common = strategy.stepper.step(fn, lambda fn: _step_of(fn, kind), kind)
        step.initial = initial
        if step.outputs is not None:
            _check_initial(initial, step.outputs)
        elements = take(iterator, iterations)
        with strategy.entered("run_op"):
            result.take_over(*_last_results(step, common, elements, iterations))

    with strategy.entered("experimental_run_steps_on_iterator"):
        run()
    result.run_op = run
    return result


@dataclass(frozen=True, eq=False)
class _Others:
    """Results that are no arrays, which pass through a program untouched."""

    values: dict[str, Any]


@dataclass
class _ContextStep(Step):
    """A step that is given a context.

    Attributes:
        slots: The variables that hold outputs of its replicas.
        initial: The initial values that the current call gives for its outputs.
        outputs: The names of its outputs, once it has been traced.
    """

    slots: dict[Any, Variable] = field(default_factory=dict)
    initial: dict[str, Any] | None = None
    outputs: list[str] | None = None


def _step_of(fn: Fn, kind: type[MultiStepContext]) -> _ContextStep:
    def run(common: tuple[Any, ...], element: Any) -> PyTree:
        ctx = kind(made.slots)
        inputs = element if kind.unpacks and isinstance(element, tuple) else (element,)
        fn(*common, ctx, *inputs)
        made.outputs = sorted(ctx.last_step_outputs)
        _check_initial(made.initial, made.outputs)
        return ctx.result_of_step()

    run.__name__ = getattr(fn, "__name__", "step")
    made = _ContextStep(Function(run))
    return made


def _check_initial(initial: dict[str, Any] | None, outputs: Sequence[str]) -> None:
    if initial is not None and len(initial) != len(outputs):
        raise ValueError(
            f"`initial_loop_values` has {sorted(initial)}, but the step sets the outputs "
            f"{list(outputs)}."
        )


def _last_results(
    step: Step, common: tuple[Any, ...], elements: Sequence[Any], count: int
) -> Any:
    """What the last of `count` steps gives."""
    looped = step.loop(common, elements, count, keep_all=False)
    if looped is not None:
        return looped[0]
    results = None
    for element in elements:
        results = step.function(common, element)
    if len(elements) < count:
        raise OutOfRangeError(
            f"The data has ended after {len(elements)} of {count} steps."
        )
    return results


def _nothing_to_run() -> None:
    raise RuntimeError("`run_op` is available only after the loop has run.")
