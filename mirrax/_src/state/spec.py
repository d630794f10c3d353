"""What a call of `mx.Variable(...)` asks for, and the array that it starts with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.base.arraylike import ArrayLike
from mirrax._src.base.errors import RunEagerly
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.reduce_op import VariableAggregation, VariableSynchronization
from mirrax._src.base.values import PerReplica
from mirrax._src.state.dtypes import check_fits
from mirrax._src.state.refusing import as_array


@dataclass(frozen=True)
class VariableSpec:
    """What a call of `mx.Variable(...)` asks for."""

    initial_value: Any = None
    trainable: bool | None = None
    name: str | None = None
    dtype: Any = None
    synchronization: VariableSynchronization = VariableSynchronization.AUTO
    aggregation: VariableAggregation = VariableAggregation.NONE
    shape: Any = None

    def __post_init__(self) -> None:
        if self.aggregation is None:
            object.__setattr__(self, "aggregation", VariableAggregation.NONE)
        for field, kind in (
            ("synchronization", VariableSynchronization),
            ("aggregation", VariableAggregation),
        ):
            if not isinstance(getattr(self, field), kind):
                raise ValueError(
                    f"`{field}` must be one of {', '.join(map(str, kind))}, got "
                    f"{getattr(self, field)!r}."
                )

    def initial_array(self) -> jax.Array:
        """The initial value, computed now even while something is traced."""
        with jax.ensure_compile_time_eval():
            value = self.initial_value
            value = value() if callable(value) else value
            if isinstance(value, Tracer):
                raise RunEagerly("a variable is made from a traced value")
            if isinstance(value, ArrayLike):
                value = value.__jax_array__()
            if isinstance(value, PerReplica):
                raise ValueError(
                    "A variable starts with one value for all replicas, but `initial_value` "
                    f"has one for each: {value!r}. Assign it when the variable is made."
                )
            if value is None:
                raise ValueError(
                    f"Variable {self.name!r} needs an `initial_value`: an array, a number or "
                    "a function without arguments that returns one."
                )
            if isinstance(value, np.ndarray):  # whose memory JAX may take over on CPUs
                value = value.copy()
            given = as_array(value, self.name)
            is_converted = self.dtype is not None and given.dtype != self.dtype
            if is_converted and not isinstance(value, np.ndarray):
                check_fits(value, given.dtype, jnp.dtype(self.dtype), self.name)
            # With the dtype written out a Python number loses its weak type.
            array = jnp.asarray(value, dtype=self.dtype or given.dtype)
            if self.shape is not None and tuple(self.shape) != array.shape:
                raise ValueError(
                    f"Variable {self.name!r}: `shape` is {tuple(self.shape)}, and the initial "
                    f"value has shape {array.shape}. A variable keeps the shape of its "
                    "initial value; leave `shape` out."
                )
            return array
