"""Errors of JAX's about traced values, in the words of the function that was traced."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from mirrax._src.base.values import Fn
from mirrax._src.engines.arguments import Signature, Static

_FUNCTION = re.compile(r"the function \S+ at \S+ for \w+")
_INPUT = re.compile(r"\bargs\[([01])\]\[(\d+)\]")


def say_whose(
    error: Exception, fn: Fn, signature: Signature, variables: Sequence[str]
) -> None:
    """Has the message name `fn`, its arguments and variables, where JAX names mirrax's own.

    A trace has two arguments, the arrays of all variables and those of the call.
    """
    inner = inspect.unwrap(fn)
    code = getattr(inner, "__code__", None)
    where = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
    function = (
        f"the function {getattr(inner, '__name__', inner)!s}{where} for mx.function"
    )
    paths = [
        path
        for path, kind in zip(signature.paths(), signature.kinds)
        if not isinstance(kind, Static)
    ]
    names = _parameters(inner)

    def named(found: re.Match[str]) -> str:
        which, place = int(found[1]), int(found[2])
        if which == 0:
            return f"variable {variables[place]!r}"
        return re.sub(
            r"^argument (\d+|'\w+')", lambda m: _name(m[1], names), paths[place]
        )

    first, *rest = error.args or ("",)
    if isinstance(first, str):
        text = _INPUT.sub(named, _FUNCTION.sub(lambda _: function, first))
        error.args = (text.replace("argument variable", "variable"), *rest)


def _parameters(fn: Any) -> list[str]:
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return []


def _name(position: str, names: Sequence[str]) -> str:
    if not position.isdigit():
        return position.strip("'")
    return names[int(position)] if int(position) < len(names) else position
