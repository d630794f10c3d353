"""What a compiled function does on the devices, read from XLA's own text."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

import mirrax as mx
from mirrax._src.engines.arguments import sort_arguments
from mirrax._src.state.foreign import settings


def last_programs(function: mx.Function) -> Any:
    """The programs that a function ran last, by the strategy or the place."""
    return function._recent[settings.token]


def compiled_text(function: mx.Function, strategy: Any, *args: Any) -> str:
    """The program that `strategy.run(function, args)` ran last, compiled, as text."""
    arrays = sort_arguments(args, {}, strategy.replica_mesh).arrays
    return last_programs(function)[strategy].lower(arrays).compile().as_text()


def count(text: str, operation: str) -> int:
    """How many `operation`s (`all-reduce`, say) a program has."""
    return len(_lines(text, operation))


def arrays_in(text: str, operation: str) -> int:
    """How many arrays travel in the `operation`s of a program.

    XLA combines neighbouring operations into one that has several operands, so this, and
    not the number of operations, tells what was packed.
    """
    operands = [line.split(f"{operation}(", 1)[1] for line in _lines(text, operation)]
    return sum(line.split("),", 1)[0].count("%") for line in operands)


def _lines(text: str, operation: str) -> list[str]:
    return [line for line in text.splitlines() if f" {operation}(" in line]


def replica_groups(text: str) -> list[list[list[int]]]:
    """The groups of each all-reduce in order, also where XLA writes them as `[2,2]<=[4]`."""
    found = []
    for line in _lines(text, "all-reduce"):
        listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
        if listed:
            groups = re.findall(r"\{([\d,]+)\}", listed[1])
            found.append([[int(i) for i in group.split(",")] for group in groups])
            continue
        whole = re.search(r"replica_groups=mesh\['replica'=(\d+)\]", line)
        if whole:  # as JAX 0.11 writes it
            found.append([list(range(int(whole[1])))])
            continue
        iota = re.search(
            r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](T\([\d,]+\))?", line
        )
        assert iota, line
        shape, dims = ([int(i) for i in iota[k].split(",")] for k in (1, 2))
        ids = np.arange(np.prod(dims)).reshape(dims)
        if iota[3]:
            ids = ids.transpose([int(i) for i in re.findall(r"\d+", iota[3])])
        found.append(ids.reshape(shape).tolist())
    return found
