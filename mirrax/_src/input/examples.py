"""`tf.train.Example` records to arrays and back, without TensorFlow.

An Example is a map from names to lists of bytes, floats or integers, in the wire format of
protocol buffers, of which it needs four message shapes:

    Example      1: Features
    Features     1: repeated {1: name, 2: Feature}
    Feature      1: BytesList | 2: FloatList | 3: Int64List
    ...List      1: repeated value, packed for numbers
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mirrax._src.base.hiding import brief
from mirrax._src.input.structure import STRING, TensorSpec, dtype_name, to_array

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_KINDS = {1: STRING, 2: np.dtype("float32"), 3: np.dtype("int64")}


# Reading the wire -------------------------------------------------------------------------


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, Any, int]]:
    """The fields of a message: number, wire type, start and end (or the value)."""
    while at < end:
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == _BYTES:
            size, at = _varint(data, at)
            if at + size > end:
                raise IndexError
            yield number, wire, at, at + size
            at += size
        elif wire == _VARINT:
            value, at = _varint(data, at)
            yield number, wire, value, at
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
            if at + size > end:
                raise IndexError
            yield number, wire, at, at + size
            at += size
        else:
            raise IndexError


@brief
def decode_example(record: bytes) -> dict[str, np.ndarray]:
    """All features of an Example: names and one-dimensional arrays.

    >>> record = mx.io.encode_example({"x": [1.0, 2.0], "name": "a"})
    >>> mx.io.decode_example(record)
    {'x': array([1., 2.], dtype=float32), 'name': array([b'a'], dtype=object)}

    Raises:
        ValueError: If `record` is no Example.
    """
    found: dict[str, np.ndarray] = {}
    try:
        for number, wire, at, end in _fields(record, 0, len(record)):
            if number != 1 or wire != _BYTES:
                continue
            for inner, wire, start, stop in _fields(record, at, end):
                if inner == 1 and wire == _BYTES:
                    name, feature = _entry(record, start, stop)
                    if feature is not None:
                        found[name] = feature
    except (IndexError, UnicodeDecodeError, ValueError):
        raise ValueError(
            f"A record of {len(record)} bytes is not a `tf.train.Example`: it cannot be decoded."
        ) from None
    return found


def _entry(data: bytes, at: int, end: int) -> tuple[str, np.ndarray | None]:
    """A feature and its name; one without any list is as good as missing."""
    name, feature = "", None
    for number, wire, start, stop in _fields(data, at, end):
        if number == 1 and wire == _BYTES:
            name = data[start:stop].decode()
        elif number == 2 and wire == _BYTES:
            for kind, wire, first, last in _fields(data, start, stop):
                if kind in _KINDS and wire == _BYTES:
                    feature = _list(data, first, last, kind)
    return name, feature


def _list(data: bytes, at: int, end: int, kind: int) -> np.ndarray:
    parts = []
    for number, wire, start, stop in _fields(data, at, end):
        if number != 1:
            continue
        if kind == 1:
            parts.append(data[start:stop])
        elif kind == 2:
            parts.append(np.frombuffer(data, "<f4", (stop - start) // 4, start))
        elif wire == _VARINT:
            parts.append(np.array([start], np.uint64).view(np.int64))
        else:
            parts.append(_varints(data, start, stop))
    if kind == 1:
        out = np.empty(len(parts), object)
        out[:] = parts
        return out
    if not parts:
        return np.empty(0, _KINDS[kind])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _varints(data: bytes, at: int, end: int) -> np.ndarray:
    """Packed integers, all at once: 7 bits a byte, the last byte of each below 128."""
    raw = np.frombuffer(data, np.uint8, end - at, at)
    ends = np.flatnonzero(raw < 0x80)
    if len(ends) == len(raw):
        return raw.astype(np.int64)
    if not len(ends) or ends[-1] != len(raw) - 1:
        raise IndexError
    starts = np.concatenate([[0], ends[:-1] + 1])
    place = np.arange(len(raw)) - np.repeat(starts, ends - starts + 1)
    bits = (raw & 0x7F).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts).view(np.int64)


# Writing the wire -------------------------------------------------------------------------


@brief
def encode_example(features: Mapping[str, Any]) -> bytes:
    """A dict of arrays, numbers and strings as a serialized `tf.train.Example`.

    Integers and booleans become an Int64List, floats a FloatList, strings and bytes a
    BytesList; arrays of any rank are written row by row.
    """
    entries = []
    for name, value in features.items():
        array = _as_array(value)
        if array.dtype == object or array.dtype.kind == "S":
            kind, body = 1, b"".join(_field(1, item) for item in array.ravel().tolist())
        elif array.dtype.kind == "f" or array.dtype.name == "bfloat16":
            kind, body = 2, _field(1, array.astype("<f4").tobytes())
        elif array.dtype.kind in "iub":
            if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
                raise ValueError(
                    f"Feature {name!r} holds {array.max()}, which does not fit into int64."
                )
            numbers = array.ravel().astype(np.int64).view(np.uint64).tolist()
            kind, body = 3, _field(1, b"".join(map(_encode_varint, numbers)))
        else:
            raise TypeError(
                f"Feature {name!r} is {dtype_name(array.dtype)}; an Example holds integers, "
                "floats and strings."
            )
        entry = _field(1, name.encode()) + _field(2, _field(kind, body))
        entries.append(_field(1, entry))
    return _field(1, b"".join(entries))


def _as_array(value: Any) -> np.ndarray:
    found = to_array(value)
    # Not NumPy's fixed-width strings: they lose zeros at the end.
    return np.asarray(found, object if isinstance(found, bytes) else None)


def _field(number: int, body: bytes) -> bytes:
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(body)) + body


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# What is asked for ------------------------------------------------------------------------


class FixedLenFeature(NamedTuple):
    """A feature with the same number of values in every record.

    Attributes:
        shape: The shape to give the values.
        dtype: int64, float32 or string.
        default_value: What a record has that lacks the feature; without it, an error.
    """

    shape: Sequence[int]
    dtype: Any
    default_value: Any = None


class FixedLenSequenceFeature(NamedTuple):
    """A feature with any number of values of one shape, filled up to the longest in a batch.

    Attributes:
        shape: The shape of one value.
        dtype: int64, float32 or string.
        allow_missing: Whether a record may lack it; it must be True, as in TensorFlow.
        default_value: What batches are filled up with.
    """

    shape: Sequence[int]
    dtype: Any
    allow_missing: bool = False
    default_value: Any = None


class VarLenFeature(NamedTuple):
    """A feature with any number of values: one array a record, `Ragged` for several.

    Attributes:
        dtype: int64, float32 or string.
    """

    dtype: Any


class RaggedFeature(NamedTuple):
    """As `VarLenFeature`; the name may differ from the key in the result.

    Attributes:
        dtype: int64, float32 or string.
        value_key: The feature's name in the records; the key of the result if None.
        partitions: Not supported; only ().
    """

    dtype: Any
    value_key: str | None = None
    partitions: tuple[Any, ...] = ()


class Ragged:
    """Rows of different lengths: `values` one after the other, row i from `row_splits[i]` on.

    >>> rows = mx.io.Ragged(np.array([1, 2, 3]), np.array([0, 1, 3]))
    >>> rows.to_list()
    [[1], [2, 3]]
    >>> rows.to_tensor()
    array([[1, 0],
           [2, 3]])
    """

    __module__ = "mirrax.io"

    def __init__(self, values: np.ndarray, row_splits: np.ndarray) -> None:
        self.values, self.row_splits = values, row_splits

    @classmethod
    def from_rows(cls, rows: Sequence[np.ndarray], dtype: np.dtype) -> Ragged:
        """The ragged array of these rows."""
        lengths = [len(row) for row in rows]
        values = np.concatenate(rows) if rows else np.empty(0, dtype)
        return cls(values, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))

    def __len__(self) -> int:
        return len(self.row_splits) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        i = range(len(self))[i]
        return self.values[self.row_splits[i] : self.row_splits[i + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def to_list(self) -> list[list[Any]]:
        """The rows as lists."""
        return [row.tolist() for row in self]

    def to_tensor(
        self, default_value: Any = None, length: int | None = None
    ) -> np.ndarray:
        """One array with a row for each, filled up to the longest, or cut to `length`."""
        longest = max((len(row) for row in self), default=0)
        width = longest if length is None else length
        if default_value is None:
            default_value = b"" if self.values.dtype == object else 0
        out = np.full((len(self), width), default_value, self.values.dtype)
        for i, row in enumerate(self):
            out[i, : len(row)] = row[:width]
        return out

    def __repr__(self) -> str:
        return f"Ragged({self.to_list()})"


jax.tree_util.register_pytree_node(
    Ragged, lambda r: ((r.values, r.row_splits), None), lambda _, parts: Ragged(*parts)
)


# Parsing ------------------------------------------------------------------------------------


@brief
def parse_single_example(
    serialized: bytes, features: Mapping[str, Any], name: str | None = None
) -> dict[str, Any]:
    """The features of one serialized Example, as arrays.

    >>> record = mx.io.encode_example({"image": np.zeros((2, 2)), "label": 3})
    >>> mx.io.parse_single_example(record, {
    ...     "image": mx.io.FixedLenFeature([2, 2], "float32"),
    ...     "label": mx.io.FixedLenFeature([], "int64")})
    {'image': array([[0., 0.],
           [0., 0.]], dtype=float32), 'label': np.int64(3)}

    Args:
        serialized: The record.
        features: Names and `FixedLenFeature`, `VarLenFeature`, ... for each.
        name: A name for messages.

    Raises:
        ValueError: If a feature is missing, or of another type or length.
    """
    features = _checked(features)
    if not isinstance(serialized, bytes):
        raise TypeError(
            "`parse_single_example` takes one record as bytes, got "
            f"{type(serialized).__name__}; `parse_example` takes a batch of records."
        )
    found = decode_example(serialized)
    where = f" of {name}" if name else ""
    return {key: _parse(found, key, f, where) for key, f in features.items()}


@brief
def parse_example(
    serialized: Any,
    features: Mapping[str, Any],
    example_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The features of a batch of serialized Examples, stacked.

    Args:
        serialized: A sequence or array of records.
        features: Names and `FixedLenFeature`, `VarLenFeature`, ... for each; features of
            varying length come as `Ragged`.
        example_names: Names of the records, for messages.
    """
    features = _checked(features)
    if isinstance(serialized, bytes):
        return parse_single_example(serialized, features)
    records = list(serialized)
    names = example_names or [f"record {i}" for i in range(len(records))]
    found = [decode_example(record) for record in records]
    parsed = {}
    for key, feature in features.items():
        rows = [_parse(f, key, feature, f" of {n}") for f, n in zip(found, names)]
        parsed[key] = _stack(rows, feature)
    return parsed


def _checked(features: Mapping[str, Any]) -> dict[str, Any]:
    """The features, with their dtypes as NumPy's."""
    if not features:
        raise ValueError(f"`features` names no feature, got {features!r}.")
    return {key: _check_feature(key, feature) for key, feature in features.items()}


def _check_feature(key: str, feature: Any) -> Any:
    known = FixedLenFeature | FixedLenSequenceFeature | VarLenFeature | RaggedFeature
    if not isinstance(feature, known):
        raise ValueError(
            f"Feature {key!r} must be a FixedLenFeature, FixedLenSequenceFeature, VarLenFeature "
            f"or RaggedFeature, got {feature!r}."
        )
    dtype = TensorSpec((), feature.dtype).dtype
    if dtype not in _KINDS.values():
        raise ValueError(
            f"Feature {key!r} must be int64, float32 or string, as records are, not "
            f"{dtype.name}; convert it in a `map` after parsing."
        )
    if isinstance(feature, FixedLenSequenceFeature) and not feature.allow_missing:
        raise ValueError(
            f"Feature {key!r}: `FixedLenSequenceFeature` needs `allow_missing=True`; a record "
            "without the feature has a sequence of length 0."
        )
    if isinstance(feature, RaggedFeature) and feature.partitions:
        raise ValueError(f"Feature {key!r}: `partitions` are not supported.")
    return feature._replace(dtype=dtype)


def _parse(found: dict[str, np.ndarray], key: str, feature: Any, where: str) -> Any:
    name = getattr(feature, "value_key", None) or key
    values = found.get(name)
    if values is not None and values.dtype != feature.dtype:
        raise ValueError(
            f"Feature {name!r}{where} is {dtype_name(values.dtype)}, "
            f"not {dtype_name(feature.dtype)}. The record has: {_show(found)}."
        )
    if not isinstance(feature, FixedLenFeature):
        values = np.empty(0, feature.dtype) if values is None else values
        if isinstance(feature, FixedLenSequenceFeature):
            return _sequence(values, feature, name, where)
        return values
    size = int(np.prod(feature.shape))
    if values is None:
        if feature.default_value is None:
            raise ValueError(
                f"Feature {name!r}{where} is missing and has no default value. The record has: "
                f"{_show(found)}."
            )
        default = _as_array(feature.default_value)
        if feature.dtype != object:
            default = default.astype(feature.dtype)
        return _scalar(np.broadcast_to(default, feature.shape).copy())
    if len(values) != size:
        raise ValueError(
            f"Feature {name!r}{where} has {len(values)} values, which do not fill the shape "
            f"{feature.shape}. Use VarLenFeature if their number varies."
        )
    return _scalar(values.reshape(feature.shape))


def _sequence(
    values: np.ndarray, feature: FixedLenSequenceFeature, name: str, where: str
) -> np.ndarray:
    size = int(np.prod(feature.shape))
    if not size or len(values) % size:
        raise ValueError(
            f"Feature {name!r}{where} has {len(values)} values, which do not form a sequence of shape "
            f"{feature.shape}."
        )
    return values.reshape(-1, *feature.shape)


def _scalar(array: np.ndarray) -> Any:
    return array[()] if not array.ndim else array


def _stack(rows: list[Any], feature: Any) -> Any:
    if isinstance(feature, VarLenFeature | RaggedFeature):
        return Ragged.from_rows(rows, feature.dtype)
    if isinstance(feature, FixedLenSequenceFeature):
        filling: Any = feature.default_value
        if filling is None:
            filling = b"" if feature.dtype == object else 0
        longest = max(map(len, rows), default=0)
        shape = (len(rows), longest, *feature.shape)
        out = np.full(shape, filling, feature.dtype)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return out
    out = np.empty((len(rows), *feature.shape), feature.dtype)
    for i, row in enumerate(rows):
        out[i] = row
    return out


def _show(found: dict[str, np.ndarray]) -> str:
    return (
        ", ".join(
            f"{name!r} ({dtype_name(v.dtype)}, {len(v)} values)"
            for name, v in found.items()
        )
        or "no features"
    )


for _feature in (
    FixedLenFeature,
    FixedLenSequenceFeature,
    VarLenFeature,
    RaggedFeature,
):
    _feature.__module__ = "mirrax.io"
