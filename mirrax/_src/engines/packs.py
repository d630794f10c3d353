"""Which variables of a program live in packs, and how they get there.

JAX's launch takes microseconds for each array that goes in and comes out, on each device: of a
thousand small variables a step is mostly that. Only variables of one shape are in a pack, so
that what opens it is compiled once, and a pack has few, since each place in it is an
offset of its own in XLA's code.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.engines.inputs import SignatureChanged
from mirrax._src.engines.traced import Trace
from mirrax._src.state.home import Pack
from mirrax._src.state.variable import Variable

_SMALL_BYTES = 64 * 1024
_MOST, _FEWEST = 16, 8  # in a pack
_MANY = 96  # in all packs of a program


def group_small(variables: Sequence[Variable], trace: Trace) -> list[list[Variable]]:
    """Groups of one, and packs if small ones are many and hold most of the numbers.

    Next to large ones a launch is a small part of a step.
    """
    alike: defaultdict[Any, list[Variable]] = defaultdict(list)
    # A weight and its slots at like places, in whatever order the slots were made: XLA
    # compiles equal code once.
    for v in sorted(variables, key=_by_numbers_in_name):
        if _can_be_packed(v, trace):
            alike[v.shape, v.dtype].append(v)
    packs = [
        members[i : i + _MOST]
        for members in alike.values()
        for i in range(0, len(members), _MOST)
        if len(members) - i >= _FEWEST
    ]
    inside = {v for pack in packs for v in pack}
    if len(inside) < _MANY or 2 * _bytes(inside) < _bytes(variables):
        return [[v] for v in variables]
    return [*packs, *([v] for v in variables if v not in inside)]


def _bytes(variables: Iterable[Variable]) -> int:
    return sum(math.prod(v.shape) * v.dtype.itemsize for v in variables)


def _by_numbers_in_name(variable: Variable) -> list[Any]:
    parts = re.split(r"(\d+)", variable.name)
    return [int(part) if part.isdecimal() else part for part in parts]


def _can_be_packed(variable: Variable, trace: Trace) -> bool:
    is_mirrored = (
        type(variable)._layout is Layout.MIRRORED
        and variable.strategy.replica_mesh == trace.mesh
        and not trace.reads[variable].in_parts
        and not trace.writes[variable].in_parts
    )
    dtype = variable.dtype
    # Wide ones lose half of their bits where JAX has no such now.
    is_plain = not jnp.issubdtype(dtype, jax.dtypes.extended) and dtype.itemsize <= 4
    return is_mirrored and is_plain and 0 < _bytes([variable]) < _SMALL_BYTES


def packs_of(
    groups: Sequence[Sequence[Variable]], mesh: ReplicaMesh | None
) -> dict[int, Pack]:
    """The packs, by their place among the groups."""
    several = {i: len(group) for i, group in enumerate(groups) if len(group) > 1}
    assert mesh is not None or not several
    return {i: Pack(count, mesh) for i, count in several.items()}  # pyright: ignore[reportArgumentType]


def pack_of(variables: Sequence[Variable], pack: Pack) -> jax.Array:
    """The pack of `variables`, made anew unless they live in such a one.

    Raises:
        SignatureChanged: If replicas have their own values of one by now.
    """
    home, place, _ = variables[0].lives_at()
    here = ((home, place, part) for part in range(len(variables)))
    if home.pack_at(place) == pack and all(
        v.lives_at() == at for v, at in zip(variables, here)
    ):
        return home.arrays[place]
    found = [v.in_one_array() for v in variables]
    if any(layout is not Layout.MIRRORED for _, layout in found):
        raise SignatureChanged
    return pack.close([array for array, _ in found])
