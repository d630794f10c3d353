"""Answers as JSON, and when two of them are the same.

TensorFlow's answers are written down as JSON, mirrax's are described in the same words
and compared. What only follows from the array library is let pass: JAX has no 64-bit
types by default, a Python number may come back as a scalar array, a failing TensorFlow
op raises `InvalidArgumentError` where JAX has `ValueError` or `TypeError`. And where
TensorFlow has one array, mirrax may have a mirrored value, which behaves as one array
(SPEC 3.6).
"""

import math
from enum import Enum
from typing import Any

import numpy as np

from .neutral import to_numpy

TOLERANCE = {"float16": 1e-2, "bfloat16": 1e-2}
OP_ERRORS = {
    "InvalidArgumentError": {"ValueError", "TypeError"},
    "UnimplementedError": {"ValueError", "TypeError"},
    "NotFoundError": {"FileNotFoundError"},
}


def describe(value: Any) -> Any:
    """Turns a scenario's result into what JSON can hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, BaseException):
        return {"error": _error_name(type(value))}
    if isinstance(value, type) and issubclass(value, BaseException):
        return {"error": _error_name(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): describe(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [describe(part) for part in value]
    if hasattr(value, "dense_shape") and isinstance(
        getattr(value.values, "values", None), tuple
    ):
        # Mirrored rows and mirrored indices are mirrored slices.
        parts = zip(value.indices.values, value.values.values, strict=True)
        return {
            "replicas": [
                {"indices": describe(i), "values": describe(v)} for i, v in parts
            ]
        }
    if isinstance(getattr(value, "values", None), tuple):
        return {"replicas": [describe(part) for part in value.values]}
    if hasattr(value, "indices") and hasattr(value, "dense_shape"):
        return {"indices": describe(value.indices), "values": describe(value.values)}
    return _describe_array(to_numpy(value))


def same(expected: Any, actual: Any) -> bool:
    """Whether mirrax's answer is TensorFlow's, both as `describe` gives them."""
    expected, actual = _as_array(expected), _as_array(actual)
    if isinstance(expected, dict) and isinstance(actual, dict):
        if "dtype" in expected and "replicas" in actual:
            return all(same(expected, part) for part in actual["replicas"])
        if expected.keys() != actual.keys():
            return False
        if "dtype" in expected:
            return _same_array(expected, actual)
        if "error" in expected:
            kin = OP_ERRORS.get(expected["error"], set()) | {expected["error"]}
            return actual["error"] in kin
        return all(same(expected[key], actual[key]) for key in expected)
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(same, expected, actual))
    return expected == actual


def _error_name(error: type) -> str:
    """The class that an `except` clause written for TensorFlow would name."""
    if error.__module__ == "mirrax.errors":
        return error.__name__
    ours = ("mirrax", "jax", "jaxlib")
    known = (c for c in error.__mro__ if c.__module__.partition(".")[0] not in ours)
    return next(known).__name__


def _describe_array(array: np.ndarray) -> dict[str, Any]:
    if array.dtype == object:
        raise TypeError(f"A scenario returned what cannot be described: {array!r}")
    plain = array.astype("float32") if array.dtype.name == "bfloat16" else array
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "value": plain.tolist(),
    }


def _as_array(value: Any) -> Any:
    """Python numbers as scalar arrays, 64-bit types as 32-bit ones."""
    if isinstance(value, bool):
        return {"dtype": "bool", "shape": [], "value": value}
    if isinstance(value, int):
        return {"dtype": "int32", "shape": [], "value": value}
    if isinstance(value, float):
        return {"dtype": "float32", "shape": [], "value": value}
    if isinstance(value, dict) and "dtype" in value:
        return {**value, "dtype": value["dtype"].replace("64", "32")}
    return value


def _same_array(expected: dict, actual: dict) -> bool:
    if (expected["dtype"], expected["shape"]) != (actual["dtype"], actual["shape"]):
        return False
    tolerance = TOLERANCE.get(expected["dtype"], 1e-5)
    pairs = zip(_flat(expected["value"]), _flat(actual["value"]), strict=True)
    return all(
        a == b
        or (a != a and b != b)
        or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
        for a, b in pairs
    )


def _flat(value: Any) -> list:
    if not isinstance(value, list):
        return [value]
    return [number for part in value for number in _flat(part)]
