"""The learning rate of an optimizer, which can be read and set while it trains."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.hiding import brief
from mirrax._src.base.values import PyTree
from mirrax._src.state.variable import Variable

_NAME = "learning_rate"
_FIXED = (
    "The learning rate of {name!r} is a constant inside its transformation. To read and set "
    "it, make the optimizer by name, `mx.train.Optimizer('adam', learning_rate=1e-3)`, or "
    "give it `optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)`."
)


def by_name(name: str, hyperparameters: dict[str, Any]) -> Any:
    """Optax's transformation of that name, with hyperparameters that can be changed."""
    import optax

    made: Any = getattr(optax, name, None)
    if not inspect.isfunction(made) or _NAME not in _parameters(made):
        raise ValueError(
            f"Optax has no optimizer {name!r} with a learning rate. Name one that it has, such "
            "as 'adam', 'adamw', 'sgd' or 'rmsprop', or pass the transformation itself."
        )
    unknown = hyperparameters.keys() - _parameters(made)
    if unknown:
        raise TypeError(
            f"`optax.{name}` has no argument {', '.join(map(repr, sorted(unknown)))}; it has "
            f"{', '.join(_parameters(made))}."
        )
    if _NAME not in hyperparameters:
        raise TypeError(f"`mx.train.Optimizer({name!r})` needs a `learning_rate`.")
    transformation = optax.inject_hyperparams(made)(**hyperparameters)
    rate = hyperparameters[_NAME]
    if not isinstance(rate, Variable):
        return transformation

    class ReadsVariable(optax.GradientTransformationExtraArgs):
        """A transformation whose learning rate is a variable, which each step reads."""

        rate_variable = rate

    return ReadsVariable(*transformation)


def _parameters(fn: Any) -> list[str]:
    return list(inspect.signature(fn).parameters)


class HasLearningRate:
    """`learning_rate`, where the transformation keeps it in its state."""

    name: str
    _transformation: Any
    _state: PyTree
    _rate_to_come: Any = None  # set before there was a state

    @property
    @brief
    def learning_rate(self) -> jax.Array:
        """The learning rate, which can be set: `optimizer.learning_rate = 0.01`.

        >>> optimizer = mx.train.Optimizer("sgd", learning_rate=0.1)
        >>> optimizer.learning_rate = optimizer.learning_rate / 2
        >>> float(optimizer.learning_rate)
        0.05000000074505806

        It can be read and set in cross-replica context, in replicas, and in an `mx.function`,
        and is saved in checkpoints. For this the optimizer is made by name, or from
        `optax.inject_hyperparams`. A schedule can be read, not set. A variable,
        `mx.train.Optimizer("sgd", learning_rate=variable)`, is read by each step; setting the
        learning rate assigns it, and a checkpoint has it only if it is given the variable.
        """
        if (variable := self._rate_variable) is not None:
            return variable.read_value()
        if self._state is None and self._rate_to_come is not None:
            return jnp.asarray(self._rate_to_come)
        rate = self._rates().hyperparams[_NAME]
        return rate.read_value() if isinstance(rate, Variable) else rate

    @learning_rate.setter
    @brief
    def learning_rate(self, value: Any) -> None:
        variable = self._rate_variable
        state = None if variable is not None else self._rates()
        if isinstance(value, str) or value is None:
            raise TypeError(
                f"The learning rate of {self.name!r} must be a number, got {value!r}."
            )
        if callable(value) and not isinstance(value, Variable):
            raise TypeError(
                f"The learning rate of {self.name!r} is set to a function. A schedule is given "
                "when the optimizer is made: `mx.train.Optimizer('adam', "
                "learning_rate=schedule)`."
            )
        if _NAME in (getattr(state, "hyperparams_states", None) or ()):
            raise ValueError(
                f"The learning rate of {self.name!r} follows a schedule, so that it cannot be "
                f"set to {value}. Make the optimizer with a number, or change the schedule."
            )
        if variable is None:
            if self._state is None:
                self._rate_to_come = jnp.asarray(value, jnp.result_type(float))
                return
            variable = self._rates().hyperparams[_NAME]
        if context.current().replica is None or context.is_default():
            variable.assign(value)
        else:
            variable.store_agreed(variable.convert(value))

    @brief
    def _refuse_lr(self, value: Any = None) -> Any:
        raise AttributeError(
            f"{self.name!r} has no `lr`. Its learning rate is `optimizer.learning_rate`, which "
            "can be read and set."
        )

    lr = property(_refuse_lr, _refuse_lr)

    @property
    def _rate_variable(self) -> Variable | None:
        """The user's variable that is the learning rate, if it is one."""
        return getattr(self._transformation, "rate_variable", None)

    def _rates(self) -> Any:
        """The part of the state that has the learning rate."""

        def has_it(part: Any) -> bool:
            return _NAME in (getattr(part, "hyperparams", None) or ())

        state = self._state
        if state is None:
            with jax.ensure_compile_time_eval():
                state = self._transformation.init({})
        parts = jax.tree.leaves(state, is_leaf=has_it)
        found = [part for part in parts if has_it(part)]
        if not found:
            raise AttributeError(_FIXED.format(name=self.name))
        if len(found) > 1:
            raise AttributeError(
                f"{self.name!r} has {len(found)} learning rates. Read and set each in "
                "`optimizer.state`."
            )
        return found[0]

    def _set_rate_to_come(self) -> None:
        """Gives a state that has just been made the learning rate that was set before."""
        if self._rate_to_come is not None:
            rate, self._rate_to_come = self._rate_to_come, None
            now = context.changed(frame=None, replica=None, updating=None)
            with now, jax.ensure_compile_time_eval():
                self._rates().hyperparams[_NAME].assign(rate)
