"""A number for a pipeline: equal for equal steps over equal data, in later programs too.

Arrays count with their values, functions with their code and all that they refer to, as
far as that can be seen; of other objects only the class counts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from typing import Any

import numpy as np

from mirrax._src.input.blocks import Block
from mirrax._src.input.element_fn import ElementFn
from mirrax._src.input.node import Node
from mirrax._src.input.purity import globals_of, is_filled
from mirrax._src.input.structure import DatasetSpec, Nested, TensorSpec

_PLAIN = int | float | complex | str | bytes | bool | None | np.dtype | TensorSpec


def fingerprint(value: Any) -> int:
    """The number of a step and all before it, or of a function; of 64 bits."""
    digest = hashlib.blake2b(digest_size=8)
    _add(digest, value, set())
    return int.from_bytes(digest.digest(), "little")


def _add(digest: Any, value: Any, seen: set[int]) -> None:
    """Adds to the digest what tells `value` from others; `seen` are the ones around it."""
    if id(value) in seen:
        return
    seen = {*seen, id(value)}
    digest.update(f"<{type(value).__name__}>".encode())
    if isinstance(value, _PLAIN | DatasetSpec | range) or value is Ellipsis:
        digest.update(repr(value).encode())
    elif isinstance(value, np.ndarray | np.generic):
        _add_array(digest, np.asarray(value))
    elif isinstance(value, tuple | list):
        digest.update(str(len(value)).encode())
        for part in value:
            _add(digest, part, seen)
    elif isinstance(value, dict):
        for key, part in value.items():
            _add(digest, (key, part), seen)
    elif isinstance(value, Block):
        _add(digest, [value.row(i).value() for i in range(len(value))], seen)
    elif isinstance(value, Node):
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            # What was drawn in place of a seed is no part of what was asked for.
            if field.init and field.name != "entropy":
                digest.update(field.name.encode())
                _add(digest, getattr(value, field.name), seen)
    elif isinstance(value, ElementFn):
        _add(digest, value.fn, seen)
    elif isinstance(value, Nested):  # a dataset that a function refers to
        _add(digest, getattr(value, "node", None), seen)
    elif isinstance(value, set | frozenset):
        digest.update(repr(sorted(map(repr, value))).encode())
    else:
        _add_function(digest, value, seen)


def _add_array(digest: Any, array: np.ndarray) -> None:
    digest.update(f"{array.dtype}{array.shape}".encode())
    if array.dtype.hasobject:
        digest.update(repr(array.tolist()).encode())
    else:
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)


def _add_function(digest: Any, value: Any, seen: set[int]) -> None:
    if isinstance(value, types.FunctionType):
        cells = [
            cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)
        ]
        _add(digest, (value.__defaults__, value.__kwdefaults__, cells), seen)
        _add_code(digest, value.__code__, value.__globals__, seen)
    elif isinstance(value, types.MethodType):
        _add(digest, (value.__func__, value.__self__), seen)
    elif isinstance(value, functools.partial):
        _add(digest, (value.func, value.args, value.keywords), seen)
    else:
        named = value if hasattr(value, "__qualname__") else type(value)
        home = getattr(named, "__module__", "")
        digest.update(f"{home}.{getattr(named, '__qualname__', '')}".encode())
        if isinstance(value, types.ModuleType):
            digest.update(value.__name__.encode())


def _add_code(
    digest: Any, code: types.CodeType, names: dict[str, Any], seen: set[int]
) -> None:
    digest.update(code.co_code)
    digest.update(repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add_code(digest, constant, names, seen)
        else:
            _add(digest, constant, seen)
    for name in sorted(globals_of(code)):
        if name in names:
            _add(digest, names[name], seen)
