"""Many steps in one dispatch: `run_steps`, and TensorFlow 1's loop with a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.errors import OutOfRangeError, RunEagerly
from mirrax._src.base.jax_compat import Tracer, in_trace
from mirrax._src.base.reduce_op import (
    ReduceOp,
    parse_reduce_op,
)
from mirrax._src.base.values import PyTree, UnevenError, is_array, is_leaf, is_number
from mirrax._src.engines.blocks import functions_run_eagerly
from mirrax._src.engines.function import Function, FunctionCache
from mirrax._src.engines.steps import SlowInLoops, UnlikeSteps
from mirrax._src.state.variable import Variable


class MultiStepContext:
    """What a step function is given to name its outputs, and what the loop over it returns.

    Attributes:
        run_op: Runs the same number of steps again, on the next elements.
    """

    __module__ = "mirrax.compat.v1.distribute"

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
        op = None if reduce_op is None else parse_reduce_op(reduce_op)
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

        def merge(strategy: Any, output: PyTree) -> None:
            combined = self._combined(strategy, op, output)
            self._outputs[name] = jax.tree_util.tree_map_with_path(
                lambda path, leaf: self._kept(name, path, leaf),
                combined,
                is_leaf=is_leaf,
            )

        here.replica.merge_call(merge, args=(output,))

    _example_of_combining = 'reduce_op="MEAN"'

    def _combined(self, strategy: Any, op: Any, output: PyTree) -> PyTree:
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
        """Makes `output`, which is no array, a result: in a replica, those of all in a tuple."""
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

        def merge(strategy: Any, output: Any) -> None:
            self._non_tensor_outputs[name] = self._parts(strategy, output)

        here.replica.merge_call(merge, args=(output,))

    def _parts(self, strategy: Any, value: Any) -> Sequence[Any]:
        return strategy.experimental_local_results(value)

    # For the loop ----------------------------------------------------------------------

    def result_of_step(self) -> tuple[dict[str, Any], Any]:
        """What a step has set, as what it returns."""
        return _values_of(self._outputs), _Others(self._non_tensor_outputs)

    def take_over(self, outputs: dict[str, Any], others: Any = None) -> None:
        """Makes the results of the last step those of this context."""
        self._outputs = outputs
        self._non_tensor_outputs = dict(others.values) if others else {}


@dataclass(frozen=True, eq=False)
class _Others:
    """Results that are no arrays, which pass through a program untouched."""

    values: dict[str, Any]


@dataclass
class _Step:
    """A step function, compiled.

    Attributes:
        function: Takes what all steps share, then an element.
        slots: The variables that hold outputs of its replicas.
        initial: The initial values that the current call gives for its outputs.
        outputs: The names of its outputs, once it has been traced.
        loops: Whether it is worth looping over.
    """

    function: Function
    slots: dict[Any, Variable] = field(default_factory=dict)
    initial: dict[str, Any] | None = None
    outputs: list[str] | None = None
    loops: bool = True

    def loop(
        self,
        common: tuple[Any, ...],
        elements: Sequence[Any],
        count: int,
        keep_all: bool,
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
    """Traced for every number of steps that is left, about which nobody need be warned."""

    def note_trace(self, key: Any) -> None:
        self.trace_count += 1


class Stepper:
    """A strategy's loops over many steps, with their programs."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._functions = FunctionCache()
        self._steps: dict[Any, _Step] = {}
        self._stack = _Stacking(_stacked)

    def run_steps(
        self, fn: Callable[..., PyTree], iterator: Iterator[Any], steps: int
    ) -> PyTree:
        """`strategy.run(fn, (element,))` for the next elements; the results, stacked."""
        step, common = self._run_step(fn)
        elements = take(iterator, steps)
        if not elements:
            raise OutOfRangeError("The data has ended: there is no next element.")
        with self._strategy.taking_steps(len(elements)):
            looped = step.loop(common, elements, steps, keep_all=True)
            if looped is not None:
                return looped[0]
            results = [step.function(common, element) for element in elements]
            return self._strategy.run(self._stack, results)

    def run_loop(
        self,
        fn: Callable[..., Any],
        iterator: Iterator[Any],
        iterations: int,
        initial: dict[str, Any] | None,
        kind: type[MultiStepContext],
        unpack: bool,
    ) -> MultiStepContext:
        """`fn(context, element)` for the next elements; the context has the last outputs."""
        if not callable(fn):
            raise TypeError(f"`fn` must be a function of a context, got {fn!r}.")
        if isinstance(iterations, bool) or not isinstance(iterations, int):
            raise TypeError(f"`iterations` must be a number, got {iterations!r}.")
        result = kind()

        def run() -> None:
            if iterations <= 0:
                result.take_over(dict(initial or {}))
                return
            step, common = self._context_step(fn, kind, unpack)
            step.initial = initial
            if step.outputs is not None:
                _check_initial(initial, step.outputs)
            elements = take(iterator, iterations)
            strategy = self._strategy
            with strategy.entered("run_op"), strategy.taking_steps(len(elements)):
                result.take_over(*_last_results(step, common, elements, iterations))

        run()
        result.run_op = run
        return result

    def _run_step(self, fn: Callable[..., PyTree]) -> tuple[_Step, tuple[Any, ...]]:
        """A `run` of `fn` as a step, and what all its steps share."""
        if functions_run_eagerly():
            return self._step_of(Function(fn)), ()
        compiled, common = self._functions.compiled(fn)
        if compiled not in self._steps:
            self._steps[compiled] = self._step_of(compiled)
        return self._steps[compiled], common

    def _step_of(self, compiled: Function) -> _Step:
        def replica(*args: Any) -> PyTree:
            return _values_of(compiled.fn(*args))

        def run(common: tuple[Any, ...], element: Any) -> PyTree:
            return self._strategy.run(of_replica, (*common, element))

        replica.__name__ = run.__name__ = getattr(compiled, "__name__", "step")
        of_replica = Function(replica)
        return _Step(Function(run))

    def _context_step(
        self,
        fn: Callable[..., Any],
        kind: type[MultiStepContext],
        unpack: bool,
    ) -> tuple[_Step, tuple[Any, ...]]:
        """A call of `fn` with a context as a step, and what all its steps share."""
        compiled, common = (
            (Function(fn), ())
            if functions_run_eagerly()
            else self._functions.compiled(fn)
        )
        key = (compiled, kind, unpack)
        if key not in self._steps:

            def run(common: tuple[Any, ...], element: Any) -> PyTree:
                ctx = kind(made.slots)
                inputs = (
                    element if unpack and isinstance(element, tuple) else (element,)
                )
                compiled.fn(*common, ctx, *inputs)
                made.outputs = sorted(ctx.last_step_outputs)
                _check_initial(made.initial, made.outputs)
                return ctx.result_of_step()

            run.__name__ = getattr(compiled, "__name__", "step")
            made = _Step(Function(run))
            if functions_run_eagerly():
                return made, common
            self._steps[key] = made
        return self._steps[key], common


def _values_of(tree: PyTree) -> PyTree:
    """`tree` with variables as the values that they have now."""
    return jax.tree.map(
        lambda leaf: leaf.read_value() if isinstance(leaf, Variable) else leaf,
        tree,
        is_leaf=is_leaf,
    )


def _check_initial(initial: dict[str, Any] | None, outputs: Sequence[str]) -> None:
    if initial is not None and len(initial) != len(outputs):
        raise ValueError(
            f"`initial_loop_values` has {sorted(initial)}, but the step sets the outputs "
            f"{list(outputs)}."
        )


def _last_results(
    step: _Step, common: tuple[Any, ...], elements: Sequence[Any], count: int
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


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    """The next elements, at most `count`."""
    if not hasattr(iterator, "__next__"):
        raise TypeError(
            f"Steps take their elements from an iterator, got {type(iterator).__name__}; "
            "pass `iter(dataset)`."
        )
    elements = []
    while len(elements) < count:
        try:
            elements.append(next(iterator))
        except StopIteration:
            break
    return elements


def check_not_traced(what: str) -> None:
    """Raises inside a function that is being compiled."""
    if context.current().frame is not None or in_trace():
        raise RuntimeError(
            f"`{what}` is a compiled loop of its own: call it outside `mx.function` and "
            "`jax.jit`."
        )


def _stacked(*results: PyTree) -> PyTree:
    """A replica's results of all steps, with the steps as first axis."""

    def stack(*steps: Any) -> Any:
        first = steps[0]
        if not (is_array(first) or is_number(first) or isinstance(first, bool)):
            return first
        shapes = {jnp.shape(step) for step in steps}
        if len(shapes) > 1:
            raise ValueError(
                "The results of the steps cannot be stacked, their shapes are "
                f"{', '.join(map(str, sorted(shapes)))}. Return something that does not "
                "depend on the size of the batch, a sum for example."
            )
        return jnp.stack(steps)

    return jax.tree.map(stack, *results)


def _nothing_to_run() -> None:
    raise RuntimeError("`run_op` is there when the loop has been started.")
