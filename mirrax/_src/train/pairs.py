"""Pairs of a gradient and its variable: what an optimizer accepts, and what it says of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base.sparse import IndexedSlices
from mirrax._src.base.values import ReplicaValues
from mirrax._src.state.foreign import value_of, variable_of
from mirrax._src.state.variable import Variable
from mirrax._src.strategies.default import get_strategy


def split_pairs(grads_and_vars: Any) -> tuple[list[Any], list[Variable]]:
    """The gradients and the variables of pairs."""
    try:
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars]
    except (TypeError, ValueError):
        raise TypeError(
            "`apply_gradients` takes pairs of a gradient and its variable, "
            f"`zip(gradients, variables)`, got {_show(grads_and_vars)}."
        ) from None
    for first, second in pairs:
        if is_variable(first) and isinstance(second, jax.Array):
            raise TypeError(
                "`apply_gradients` takes the gradient first, then the variable, got "
                f"(variable {first.name!r}, {_show(second)}). Swap each pair: "
                "`zip(gradients, variables)`."
            )
    variables = own_variables(variable for _, variable in pairs)
    absent = [v.name for (gradient, _), v in zip(pairs, variables) if gradient is None]
    if absent:
        raise ValueError(
            f"There is no gradient (None) for {show_names(absent)}. The loss does not depend on "
            "it, or it was not computed: leave the pair out, and nothing of the variable "
            "changes, or pass zeros. Nothing has been updated."
        )
    return [value_of(gradient) for gradient, _ in pairs], variables


def own_variables(given: Iterable[Any]) -> list[Variable]:
    """The variables to train, also those that objects of other libraries hold.

    Raises:
        TypeError, ValueError: Unless they can be trained here, together.
    """
    variables = list(map(variable_of, given))
    if not variables:
        raise ValueError("There are no variables to train: the list of pairs is empty.")
    strategy = get_strategy()
    seen = set()
    for variable in variables:
        if not is_variable(variable):
            raise TypeError(
                f"An optimizer trains mx.Variable objects, got {_show(variable)}. "
                "`jax.tree.leaves` of variables gives their arrays: add `is_leaf=lambda v: "
                "isinstance(v, mx.Variable)`. For a pytree of arrays use `init` and `update`."
            )
        if not jnp.issubdtype(variable.dtype, jnp.inexact):
            raise TypeError(
                f"Variable {variable.name!r} has dtype {variable.dtype}; an optimizer trains "
                "floating-point variables."
            )
        if variable.strategy is not variables[0].strategy or (
            variable.strategy is not strategy and strategy.num_replicas_in_sync > 1
        ):
            raise ValueError(
                f"Variable {variable.name!r} was made outside the scope of {strategy!r}, or "
                "in a different scope from the others. Make all variables and the optimizer "
                "inside `with strategy.scope():`."
            )
        if variable.number in seen:
            raise ValueError(
                f"Variable {variable.name!r} is given twice. Add up its gradients first."
            )
        seen.add(variable.number)
    return variables


def as_dense(gradient: Any, variable: Variable) -> jax.Array:
    """A gradient as an array of its variable's shape."""
    is_sparse = isinstance(gradient, IndexedSlices)
    try:
        array = jnp.asarray(gradient.values if is_sparse else gradient)
    except (TypeError, ValueError):
        raise TypeError(
            f"The gradient of variable {variable.name!r} must be one array, got "
            f"{_show(gradient)}. Nothing has been updated."
        ) from None
    skip = 1 if is_sparse else 0  # the number of rows is free
    if len(array.shape) < skip or array.shape[skip:] != variable.shape[skip:]:
        raise ValueError(
            f"The gradient of variable {variable.name!r} has shape {array.shape}, the "
            f"variable has {variable.shape}. Nothing has been updated."
        )
    # Optax transforms whole arrays, so that nothing would be gained by reducing rows.
    if is_sparse:
        array = IndexedSlices(array, gradient.indices, variable.shape).to_dense()
    return variable.convert(array)


def is_distributed(gradient: Any) -> bool:
    """Whether a gradient has a part for each replica."""
    rows = gradient.values if isinstance(gradient, IndexedSlices) else gradient
    return isinstance(rows, ReplicaValues)


def is_variable(value: Any) -> bool:
    """For `is_leaf` of JAX, to which a variable is a structure."""
    return isinstance(value, Variable)


def show_names(names: Sequence[str]) -> str:
    """Names for a message."""
    return ", ".join(map(repr, names)) or "none"


def _show(value: Any) -> str:
    return f"{type(value).__name__}: {value!r}"[:200]
