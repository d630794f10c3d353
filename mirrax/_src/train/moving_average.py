"""`mx.train.ExponentialMovingAverage`: variables that follow others slowly."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.base import context
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.reduce_op import ReduceOp
from mirrax._src.base.values import PerReplica, ReplicaValues
from mirrax._src.state.distributed import ComponentVariable, DistributedVariable
from mirrax._src.state.on_read import SyncOnReadVariable
from mirrax._src.state.spec import VariableSpec
from mirrax._src.state.variable import Variable


class ExponentialMovingAverage:
    """Keeps moving averages of variables, for an evaluation that is steadier than the last step.

    >>> v = mx.Variable(10.0, name="v")
    >>> ema = mx.train.ExponentialMovingAverage(decay=0.5)
    >>> ema.apply([v])  # the first call makes the average, which starts as the variable
    >>> v.assign(20.0)
    <mx.Variable 'v' shape=() dtype=float32, numpy=20.0>
    >>> ema.apply([v])  # average -= (1 - decay) * (average - variable)
    >>> ema.average(v)
    <mx.Variable 'v/ExponentialMovingAverage' shape=() dtype=float32, numpy=15.0>

    Call `apply` after each step: in the scope, in replicas, in an `mx.function` around either.
    To evaluate, assign the averages: `v.assign(ema.average(v))`. A checkpoint saves them if
    they are given to it: `mx.train.Checkpoint(v=v, average=ema.average(v))`.

    Values, such as losses, can be averaged too. They have no identity from one step to the
    next, so a value is recognised by its place in the list, and its average starts at 0:

    >>> ema = mx.train.ExponentialMovingAverage(decay=0.5, zero_debias=True)
    >>> for loss in (jnp.float32(1.0), jnp.float32(4.0)):
    ...     ema.apply([loss])
    >>> ema.average(loss).numpy()  # (0.25 * 1 + 0.5 * 4) / 0.75
    array(3., dtype=float32)

    Args:
        decay: How much of an average stays: a number, an array or a variable, usually close
            to 1.
        num_updates: The number of steps so far, as a number, an array or a variable. If it is
            given, averages move faster at the start: the decay is at most
            `(1 + num_updates) / (10 + num_updates)`.
        zero_debias: Whether to undo the pull towards 0, where they start, in averages of
            values. Averages of variables have none.
        name: What is appended to the variable's name to name its average.
    """

    __module__ = "mirrax.train"

    def __init__(
        self,
        decay: Any,
        num_updates: Any = None,
        zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
    ) -> None:
        self._decay, self._num_updates = decay, num_updates
        self._zero_debias, self._name = zero_debias, name
        self._variables: dict[int, Variable] = {}  # by their numbers
        self._averages: dict[int, Variable] = {}
        self._values: dict[int, _AverageOfValue] = {}  # by their places
        # Each replica's value at each place in the last call.
        self._last: dict[tuple[int, int], Callable[[], Any]] = {}

    @property
    def name(self) -> str:
        """What is appended to the variable's name to name its average."""
        return self._name

    def apply(self, var_list: Iterable[Any] | None = None) -> None:
        """Makes the averages that do not exist yet, and moves all towards what is there now.

        In a replica the mean of all replicas' values counts, and of the copies of a variable
        that is synchronized on reading. In cross-replica context each copy of an average
        follows its own copy of the variable.

        Args:
            var_list: Floating-point variables, and arrays, of which each is taken for the one
                at the same place in the last call.

        Raises:
            TypeError: If something else is in the list.
            ValueError: If a variable was made outside the scope of the current strategy, or
                the shape of the array at a place has changed.
        """
        listed = self._checked(var_list)
        here = context.current()
        values = {i: x for i, x in enumerate(listed) if not isinstance(x, Variable)}
        for place, value in values.items():
            self._last[place, context.local_index(here)] = _reference(value)
        if here.replica is None or context.is_default():
            self._apply_all(listed, values, is_replica=False)
            return

        def merge(strategy: StrategyLike, values: dict[int, Any]) -> None:
            self._apply_all(listed, values, is_replica=True)

        here.replica.merge("ExponentialMovingAverage.apply", merge, (values,))

    def average(self, var: Any) -> Any:
        """The variable that holds the average of `var`; None if there is none.

        Args:
            var: A variable, or an array of the last call of `apply`, the same object.
        """
        if isinstance(var, ComponentVariable):
            return None
        if isinstance(var, Variable):
            return self._averages.get(var.number)
        for (place, _), last in self._last.items():
            if last() is var:
                return self._values[place].average
        return None

    def average_name(self, var: Any) -> str:
        """The name of the variable that holds, or will hold, the average of `var`."""
        if isinstance(var, Variable):
            return f"{var.name}/{self.name}"
        average = self.average(var)
        if average is None:
            raise ValueError(
                f"An array of shape {jnp.shape(var)} has no name before `apply` has been called "
                "with it: the average is named after its place in the list."
            )
        return average.name

    def variables_to_restore(
        self, moving_avg_variables: Iterable[Variable] | None = None
    ) -> dict[str, Variable]:
        """The variables by the names of their averages, to restore them from those.

        Args:
            moving_avg_variables: The variables; by default those that have an average here.
        """
        if moving_avg_variables is None:
            moving_avg_variables = self._variables.values()
        return {self.average_name(v): v for v in moving_avg_variables}

    def __repr__(self) -> str:
        count = len(self._averages) + len(self._values)
        return f"<mx.train.ExponentialMovingAverage {self.name!r} of {count}>"

    # Updating --------------------------------------------------------------------------

    def _checked(self, var_list: Iterable[Any] | None) -> list[Any]:
        if var_list is None:
            raise ValueError(
                f"`apply` of {self.name!r} needs `var_list`, the variables to average: mirrax "
                "keeps no collection of all trainable ones."
            )
        if isinstance(var_list, Variable):
            raise TypeError(f"`var_list` must be a list, got {var_list!r}.")
        listed = list(var_list)
        for item in listed:
            is_copy = isinstance(item, ComponentVariable)
            if is_copy or not isinstance(item, Variable | _ARRAY):
                hint = "; pass the whole variable" if is_copy else ""
                raise TypeError(
                    f"Only variables and arrays can be averaged, got {item!r}{hint}."
                )
            dtype = _example(item).dtype
            if not jnp.issubdtype(dtype, jnp.floating):
                what = getattr(item, "name", "a value")
                raise TypeError(
                    f"Only floating-point variables can be averaged; {what} is {dtype}."
                )
        return listed

    def _apply_all(
        self, listed: list[Any], values: dict[int, Any], is_replica: bool
    ) -> None:
        """In cross-replica context, for all replicas."""
        rate = self._rate()
        for place, item in enumerate(listed):
            if isinstance(item, Variable):
                self._apply_variable(item, rate, is_replica)
            else:
                like = _example(item)
                self._apply_value(place, values[place], like, rate, is_replica)

    def _rate(self) -> jax.Array:
        """How far averages move: 1 - decay."""
        decay = jnp.asarray(self._decay, jnp.float32)
        if self._num_updates is not None:
            count = jnp.asarray(self._num_updates, jnp.float32)
            decay = jnp.minimum(decay, (1.0 + count) / (10.0 + count))
        return 1.0 - decay

    def _apply_variable(
        self, variable: Variable, rate: jax.Array, is_replica: bool
    ) -> None:
        here = context.current()
        strategy: StrategyLike = variable.strategy or here.strategy
        if variable.strategy is None and strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"Variable {variable.name!r} was made outside the scope of {strategy!r}, so its "
                "average cannot have a copy on each of its devices. Make it inside `with "
                "strategy.scope():`, or call `apply` outside."
            )
        if variable.number not in self._averages:
            initial = _value_now(variable, is_replica)
            name = self.average_name(variable)
            average = _make(strategy, initial, name)
            self._variables[variable.number] = variable
            self._averages[variable.number] = average
        average = self._averages[variable.number]
        if is_replica and isinstance(variable, SyncOnReadVariable):
            mean = strategy.extended.reduce_to(
                ReduceOp.MEAN, variable.copies(), variable
            )
            _update(strategy, average, _move, (mean, rate))
        else:
            _update(
                strategy,
                average,
                lambda copy, rate: _move(copy, variable.read_value(), rate),
                (rate,),
            )

    def _apply_value(
        self, place: int, value: Any, like: Any, rate: jax.Array, is_replica: bool
    ) -> None:
        strategy = context.current().strategy
        if place not in self._values:
            name = f"value_{place}/{self.name}"
            self._values[place] = _AverageOfValue(
                strategy, like, name, self._zero_debias
            )
        known = self._values[place]
        known.check(like, place)
        if is_replica:
            average = known.average
            value = strategy.extended.reduce_to(ReduceOp.MEAN, value, average)
        _update(strategy, known.average, known.move, (value, rate))


class _AverageOfValue:
    """The average of a value, and what undoes the pull towards 0, where it starts."""

    def __init__(
        self, strategy: StrategyLike, like: Any, name: str, zero_debias: bool
    ) -> None:
        # NumPy's zeros, which exist also while a function is traced.
        zeros, zero = np.zeros(like.shape, like.dtype), np.zeros((), like.dtype)
        self.average = _make(strategy, zeros, name)
        self._biased = self._local_step = None
        if zero_debias:
            self._biased = _make(strategy, zeros, f"{name}/biased")
            self._local_step = _make(strategy, zero, f"{name}/local_step")

    def check(self, like: Any, place: int) -> None:
        average = self.average
        if (like.shape, like.dtype) != (average.shape, average.dtype):
            raise ValueError(
                f"The value at place {place} of `var_list` was {average.dtype} of shape "
                f"{average.shape} and is now {like.dtype} of shape {like.shape}. Values are "
                "recognised by their places: use another ExponentialMovingAverage for others."
            )

    def move(self, copy: Variable, value: Any, rate: jax.Array) -> None:
        if self._biased is None or self._local_step is None:
            _move(copy, value, rate)
            return
        _move(self._biased, value, rate)
        self._local_step.assign_add(jnp.ones((), copy.dtype))
        kept = (1.0 - rate.astype(copy.dtype)) ** self._local_step.read_value()
        copy.assign(self._biased.read_value() / (1.0 - kept))


_ARRAY = jax.Array | np.ndarray | ReplicaValues


def _example(item: Any) -> Any:
    """What has the shape and dtype of an item of `var_list`, or of its first part."""
    return item.values[0] if isinstance(item, PerReplica) else item


def _reference(value: Any) -> Callable[[], Any]:
    """Gives `value` for as long as somebody else holds it, where that can be known."""
    is_array = isinstance(value, jax.Array | np.ndarray)
    return weakref.ref(value) if is_array else lambda: value


def _value_now(variable: Variable, is_replica: bool) -> jax.Array:
    """The value to start from, computed now even while something is traced."""
    with context.changed(frame=None) as here, jax.ensure_compile_time_eval():
        is_own = is_replica or here.updating is not None
        if is_own or not isinstance(variable, SyncOnReadVariable):
            return variable.concrete(is_local=True)
        return jnp.asarray(variable._read_together(here))


def _make(strategy: StrategyLike, value: Any, name: str) -> Variable:
    spec = VariableSpec(value, trainable=False, name=name, dtype=value.dtype)
    return strategy.extended.create_variable(spec)


def _move(average: Variable, value: Any, rate: jax.Array) -> None:
    distance = average.read_value() - value
    average.assign_sub(distance * rate.astype(average.dtype))


def _update(
    strategy: StrategyLike, average: Variable, fn: Callable[..., None], args: Any
) -> None:
    """Calls `fn` for each copy of `average`, or for the one that is being updated."""
    is_one = not isinstance(average, DistributedVariable)
    if is_one or context.current().updating is not None:
        fn(average, *args)
    else:
        strategy.extended.update(average, fn, args=args)
