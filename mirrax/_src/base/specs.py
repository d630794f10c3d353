"""`TensorSpec` and `PerReplicaSpec`: what is known of an array before it is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

STRING = np.dtype(object)  # of bytes


class TensorSpec:
    """Shape and dtype of an array; None stands for a length that varies.

    >>> mx.TensorSpec((None, 3), "float32")
    TensorSpec(shape=(None, 3), dtype=float32)

    Args:
        shape: The lengths of the axes; None for an array of any rank.
        dtype: Anything that NumPy takes for a dtype; `str` or `"string"` for strings.
        name: A name to show.
    """

    __slots__ = ("shape", "dtype", "name")
    __module__ = "mirrax"

    def __init__(
        self,
        shape: Sequence[int | None] | None,
        dtype: Any = "float32",
        name: Any = None,
    ) -> None:
        self.shape = None if shape is None else tuple(shape)
        self.dtype = _parse_dtype(dtype)
        self.name = name

    @classmethod
    def from_tensor(cls, tensor: Any, name: Any = None) -> TensorSpec:
        """The spec of an array."""
        return cls(tensor.shape, tensor.dtype, name)

    @classmethod
    def from_spec(cls, spec: Any, name: Any = None) -> TensorSpec:
        """Another spec's shape and dtype; its name too, if none is given."""
        return cls(spec.shape, spec.dtype, name or getattr(spec, "name", None))

    def is_compatible_with(self, value: Any) -> bool:
        """Whether an array, or another spec, could be described by this one."""
        dtype = getattr(value, "dtype", None)
        dtype = STRING if isinstance(value, bytes) else dtype
        shape = getattr(value, "shape", ())
        if dtype != self.dtype:
            return False
        if self.shape is None or shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            a is None or b is None or a == b for a, b in zip(self.shape, shape)
        )

    def _key(self) -> tuple[Any, ...]:
        return self.shape, self.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        name = f", name={self.name!r}" if self.name else ""
        return f"TensorSpec(shape={self.shape}, dtype={dtype_name(self.dtype)}{name})"


class PerReplicaSpec:
    """The specs of a per-replica value: one for each of this worker's replicas.

    Attributes:
        values: The specs.
    """

    __module__ = "mirrax.distribute"

    def __init__(self, *values: TensorSpec) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerReplicaSpec) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        return f"PerReplicaSpec({', '.join(map(repr, self.values))})"


def _parse_dtype(dtype: Any) -> np.dtype:
    if dtype in (str, bytes) or (isinstance(dtype, str) and dtype == "string"):
        return STRING
    name = getattr(dtype, "name", None)  # of TensorFlow's and of JAX's dtypes
    return STRING if name == "string" else np.dtype(name if name else dtype)


def dtype_name(dtype: np.dtype) -> str:
    """A dtype's name, TensorFlow's for strings."""
    return "string" if dtype == STRING else dtype.name
