"""What a variable refuses: values that are no arrays, and Python's own assignments."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp


def as_array(value: Any, name: str | None) -> jax.Array:
    """`value` as an array, for the variable of that name."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        text = f"Variable {name!r} needs an array or a number, got {value!r}"
        raise type(error)(f"{text}: {error}") from None


class NotInPlace:
    """Refuses Python's assignments, which would leave the variable as it is."""

    name: str

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(
            f"Variable {self.name!r} does not support `variable[{index!r}] = value`. Use "
            f"`variable[{index!r}].assign(value)`."
        )

    def _refuse(self, other: Any) -> NoReturn:
        raise RuntimeError(
            f"Variable {self.name!r} does not support `variable += value` and its like, after "
            "which the name would stand for an array. Use `variable.assign_add(value)`, "
            "`assign_sub` or `assign` to change the variable, `result = variable + value` for "
            "a new array."
        )

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = _refuse
