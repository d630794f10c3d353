"""Elements as bytes, for files and for states: plain data, which no code runs to read.

Each leaf is its rank, its lengths and its values, one after the other; a string is its
length and its bytes. What does not vary, structure and dtypes, is kept elsewhere.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from typing import Any

import numpy as np

from mirrax._src.input.structure import (
    STRING,
    PyTree,
    TensorSpec,
    dtype_name,
    dtype_of,
    empty,
    leaves_of,
    map_leaves,
    shape_of,
)

_NUMBER = struct.Struct("<q")


def encode(element: PyTree) -> bytes:
    """The element as bytes."""
    parts: list[bytes] = []
    for leaf in leaves_of(element):
        shape = shape_of(leaf)
        parts += [_NUMBER.pack(n) for n in (len(shape), *shape)]
        if dtype_of(leaf) == STRING:
            texts = [leaf] if isinstance(leaf, bytes) else leaf.ravel().tolist()
            for text in texts:
                parts += [_NUMBER.pack(len(text)), text]
        else:
            little = leaf.dtype.newbyteorder("<")
            parts.append(np.ascontiguousarray(leaf, little).tobytes())
    return b"".join(parts)


def decode(data: bytes, spec: PyTree) -> PyTree:
    """The element of these bytes, which has the structure and the dtypes of `spec`.

    Raises:
        ValueError: If they are no such element.
    """
    reader = _Reader(data)
    element = map_leaves(lambda leaf: reader.leaf(leaf.dtype), spec)
    if reader.position != len(data):
        raise ValueError(f"{len(data) - reader.position} bytes are left over")
    return element


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self.position = data, 0

    def _take(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if size < 0 or self.position > len(self._data):
            raise ValueError(f"it ends too early, after {len(self._data)} bytes")
        return self._data[start : self.position]

    def _number(self) -> int:
        return _NUMBER.unpack(self._take(_NUMBER.size))[0]

    def leaf(self, dtype: np.dtype) -> Any:
        rank = self._number()
        if not 0 <= rank <= 32:
            raise ValueError(f"an array has rank {rank}")
        shape = tuple(self._number() for _ in range(rank))
        if any(n < 0 for n in shape):
            raise ValueError(f"an array has the shape {shape}")
        count = 1
        for n in shape:
            count *= n
        if dtype == STRING:
            texts = [self._take(self._number()) for _ in range(count)]
            if not rank:
                return texts[0]
            array = np.empty(count, object)
            array[:] = texts
            return array.reshape(shape)
        stored = self._take(count * dtype.itemsize)
        values = np.frombuffer(stored, dtype.newbyteorder("<")).reshape(shape)
        if not rank:
            return values.astype(dtype)[()]
        out = empty(shape, dtype)
        out[...] = values
        return out


# Specs as JSON ----------------------------------------------------------------------------


def spec_to_json(spec: PyTree) -> Any:
    """A structure of specs as JSON has it.

    Raises:
        TypeError: If it holds what a file cannot describe.
    """
    if isinstance(spec, TensorSpec):
        shape = None if spec.shape is None else list(spec.shape)
        return {"shape": shape, "dtype": dtype_name(spec.dtype)}
    if spec is None:
        return None
    if isinstance(spec, dict) and all(isinstance(key, str) for key in spec):
        return {"dict": [[key, spec_to_json(part)] for key, part in spec.items()]}
    if isinstance(spec, tuple):
        parts = [spec_to_json(part) for part in spec]
        if type(spec) is tuple:
            return {"tuple": parts}
        fields = list(getattr(spec, "_fields", ()))
        return {"namedtuple": type(spec).__name__, "fields": fields, "parts": parts}
    raise TypeError(
        "Elements that are saved are arrays, strings, tuples, named tuples and dicts with "
        f"strings as keys, and these hold {type(spec).__name__}. Convert them with `map` first."
    )


def spec_from_json(value: Any) -> PyTree:
    """The structure of specs that `spec_to_json` wrote."""
    if value is None:
        return None
    if "shape" in value:
        return TensorSpec(value["shape"], value["dtype"])
    if "dict" in value:
        return {key: spec_from_json(part) for key, part in value["dict"]}
    if "tuple" in value:
        return tuple(spec_from_json(part) for part in value["tuple"])
    made = namedtuple(value["namedtuple"], value["fields"])  # type: ignore[misc]
    return made(*[spec_from_json(part) for part in value["parts"]])
