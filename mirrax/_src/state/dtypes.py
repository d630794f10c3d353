"""Which dtypes of values a variable takes: those that lose nothing."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def check_fits(value: Any, source: Any, target: Any, name: str | None) -> None:
    """Raises if a variable of dtype `target` would lose what `value`, of dtype `source`, has.

    Python's numbers raise a `TypeError` and arrays a `ValueError`, as in TensorFlow.
    """
    if source != target and not _fits(source, target):
        error = ValueError if hasattr(value, "dtype") else TypeError
        raise error(
            f"Variable {name!r} has dtype {target}; a value of dtype {source} would lose "
            f"information. Convert it first: `jnp.asarray(value).astype({target})`."
        )


def _fits(source: Any, target: Any) -> bool:
    order = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)

    def rank(dtype: Any) -> int:
        return next(i for i, kind in enumerate(order) if jnp.issubdtype(dtype, kind))

    return rank(source) <= rank(target)
