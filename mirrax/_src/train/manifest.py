"""What a manifest has to hold, whoever wrote it: a checksum shows damage, not malice."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

import jax.numpy as jnp


def is_well_formed(content: Any) -> bool:
    """Whether a manifest has all its fields, each of the right kind."""
    return (
        isinstance(content, dict)
        and _is_count(content.get("sequence"))
        and isinstance(content.get("saved_at"), int | float)
        and isinstance(content.get("values"), dict)
        and isinstance(content.get("arrays"), dict)
        and isinstance(content.get("files"), dict)
        and all(_is_entry(entry) for entry in content["arrays"].values())
        and all(_is_file(*item) for item in content["files"].items())
        and not content["arrays"].keys() & content["values"].keys()
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(_is_count(n) for n in value)


def _is_entry(entry: Any) -> bool:
    """Where an array is, and what it is."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    try:
        jnp.dtype(entry["dtype"])
    except TypeError:
        return False
    if not _is_shape(entry.get("shape")) or "crc" not in entry:
        return False
    if "pieces" in entry:
        pieces = entry["pieces"]
        return isinstance(pieces, list) and all(_is_piece(p, entry) for p in pieces)
    is_placed = _is_count(entry.get("at")) != isinstance(entry.get("file"), str)
    return is_placed and ("key" not in entry or _is_key(entry["key"]))


def _is_piece(piece: Any, entry: Any) -> bool:
    """Where a piece of an array is, inside the file and inside the array."""
    return (
        isinstance(piece, dict)
        and isinstance(piece.get("file"), str)
        and re.fullmatch(r"pieces-\d+", piece["file"]) is not None
        and _is_count(piece.get("at"))
        and _is_shape(piece.get("start"))
        and _is_shape(piece.get("shape"))
        and len(piece["start"]) == len(piece["shape"]) == len(entry["shape"])
        and all(
            start + size <= whole
            for start, size, whole in zip(
                piece["start"], piece["shape"], entry["shape"]
            )
        )
        and "crc" in piece
    )


def _is_key(key: Any) -> bool:
    return (
        isinstance(key, dict)
        and isinstance(key.get("impl"), str)
        and isinstance(key.get("dtype"), str)
        and _is_shape(key.get("shape"))
    )


def _is_file(name: str, facts: Any) -> bool:
    """A file of the checkpoint itself, with its size and checksum."""
    path = PurePosixPath(name)
    is_inside = not path.is_absolute() and ".." not in path.parts
    return is_inside and isinstance(facts, list) and len(facts) == 2
