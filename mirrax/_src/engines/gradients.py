"""`mx.value_and_grad` and `mx.grad`: gradients with respect to variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.hiding import brief
from mirrax._src.base.protocols import Mode
from mirrax._src.base.structures import opened
from mirrax._src.base.values import Fn, PyTree, is_leaf
from mirrax._src.state.foreign import route_of, variable_of
from mirrax._src.state.frame import Frame
from mirrax._src.state.variable import Variable


@brief
def value_and_grad(
    fn: Fn, variables: PyTree, has_aux: bool = False
) -> Callable[..., tuple[Any, PyTree]]:
    """A function that returns `fn`'s value and its gradients with respect to `variables`.

    >>> w = mx.Variable([1.0, 2.0])
    >>> mx.value_and_grad(lambda x: jnp.sum(w * w) * x, w)(10.0)
    (Array(50., dtype=float32), Array([20., 40.], dtype=float32))

    In a replica the gradients are the replica's own; sum them with `all_reduce`. Variables
    that `fn` assigns (moving averages, say) keep what was assigned. Outside compiled code
    `fn` runs as plain Python, operation by operation; `mx.function` around the step
    compiles it.

    Args:
        fn: Returns a scalar, or with `has_aux` a pair (scalar, anything).
        variables: A variable or any nested structure of variables, also of those of other
            libraries (`nnx.state(model, nnx.Param)`) made in a scope.
        has_aux: Whether `fn` returns a pair; the value then is `(value, aux)`.
    """
    given, tree = jax.tree.flatten(opened(variables), is_leaf=_is_variable)
    leaves = list(map(variable_of, given))
    for leaf in leaves:
        if not isinstance(leaf, Variable):
            raise TypeError(
                f"`variables` must hold mx.Variable objects only, got {type(leaf).__name__}. "
                "For gradients with respect to arrays use `jax.grad`."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"Variable {leaf.name!r} has dtype {leaf.dtype}; gradients need a "
                "floating-point variable."
            )
    each = list(dict.fromkeys(leaves))  # one that is given twice has one gradient

    @brief
    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        outer: Any = context.current().frame
        mode = Mode.EAGER if outer is None else outer.mode
        written: dict[Any, bool | None] = {}

        def pure(values: list[jax.Array]) -> tuple[jax.Array, Any]:
            frame = Frame(dict(zip(each, values)), mode, outer)
            with frame, context.changed(frame=frame):
                result = fn(*args, **kwargs)
            value, aux = _as_pair(result) if has_aux else (_as_one(result), None)
            written.update((v, frame.agreed.get(v)) for v in frame.writes)
            return jnp.asarray(value), (aux, list(frame.writes.values()))

        values = [v.__jax_array__() for v in each]
        (value, (aux, writes)), found = jax.value_and_grad(pure, has_aux=True)(values)
        for (variable, is_agreed), new in zip(written.items(), writes):
            if is_agreed is None:
                variable.store_local(new)
            else:
                variable.store_agreed(new, is_agreed)
        routes, by_variable = map(route_of, given), dict(zip(each, found))
        grads = [by_variable[v] for v in leaves]
        grads = [r.like(v, g) if r else g for r, v, g in zip(routes, given, grads)]
        gradients = _in_order_of(variables, tree.unflatten(grads))
        return ((value, aux) if has_aux else value), gradients

    return wrapped


def grad(fn: Fn, variables: PyTree, has_aux: bool = False) -> Callable[..., PyTree]:
    """As `value_and_grad`, but returns the gradients only, or with `has_aux` (gradients, aux).

    >>> w = mx.Variable(3.0)
    >>> mx.grad(lambda: w * w, w)()
    Array(6., dtype=float32)
    """
    both = value_and_grad(fn, variables, has_aux)

    @brief
    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> PyTree:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return wrapped


def _in_order_of(given: PyTree, tree: PyTree) -> PyTree:
    """`tree` with the keys of its dicts in the order of `given`'s, which JAX has sorted.

    `zip(gradients.values(), variables.values())` would pair what does not belong together.
    """
    if type(given) is dict:
        return {key: _in_order_of(part, tree[key]) for key, part in given.items()}
    if type(given) in (list, tuple):
        return type(given)(map(_in_order_of, given, tree))
    return tree


def _is_variable(value: Any) -> bool:
    return is_leaf(value) or route_of(value) is not None


def _as_one(result: Any) -> Any:
    if isinstance(result, tuple | list | dict | None):
        raise TypeError(
            f"The function to differentiate must return one number, got a {type(result).__name__}. "
            "If it returns a loss and other values, `(loss, aux)`, pass `has_aux=True`."
        )
    return result


def _as_pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            "With `has_aux=True` the function must return a pair (value, aux), got "
            f"{type(result).__name__}."
        )
    return result
