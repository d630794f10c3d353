"""Which variables of a program live in packs, and how they get there.

JAX's launch takes microseconds for each array that goes in and comes out, on each device: of a
thousand small variables a step is mostly that. Only variables of one shape are in a pack, so
that what opens it is compiled once, and a pack has few, since each place in it is an
offset of its own in XLA's code.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
# In all new packs of a program. XLA compiles code of its own for each place in a pack, which on
# CPUs takes as long as thousands of launches save.
_MANY, _MANY_ON_CPUS = 96, 384


class Groups:
    """Variables as a program takes or gives them: each in an array, or several in a pack."""

    def __init__(
        self, groups: Sequence[Sequence[Variable]], mesh: ReplicaMesh | None
    ) -> None:
        self.each = groups
        several = {i: len(group) for i, group in enumerate(groups) if len(group) > 1}
        assert mesh is not None or not several
        # By their places.
        self.packs = {i: Pack(count, mesh) for i, count in several.items()}  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[Variable]:
        return itertools.chain(*self.each)

    def arrays(
        self, array_of: Callable[[Variable], jax.Array]
    ) -> tuple[list[jax.Array], int]:
        """What the program takes, from wherever the variables live now.

        And how many packs have to be opened and closed for that; if somebody has opened one since
        the last step it counts too, so that all workers count alike.

        Raises:
            SignatureChanged: If replicas have their own values of one in a pack by now.
        """
        arrays, opened, closed = [], set(), 0
        for i, group in enumerate(self.each):
            pack = self.packs.get(i)
            array = pack and _living(group, pack)
            if array is None:
                opened |= {v.lives_at[:2] for v in group if v.lives_at[2] is not None}
                closed += pack is not None
                array = _stack(group, pack) if pack else array_of(group[0])
            arrays.append(array)
        return arrays, len(opened) + closed

    def values(self, arrays: Iterable[jax.Array]) -> dict[Variable, Any]:
        """Of each variable, in the program."""
        found: dict[Variable, Any] = {}
        for i, (group, array) in enumerate(zip(self.each, arrays)):
            pack = self.packs.get(i)
            found.update(zip(group, pack.split(array) if pack else [array]))
        return found

    def updated(
        self, old: Sequence[jax.Array], values: Mapping[Variable, Any]
    ) -> list[jax.Array]:
        """What the program gives: new values, packs of which may reuse the memory of old ones."""
        return [
            self.packs[i].updated(old[i], [values[v] for v in group])
            if i in self.packs
            else values[group[0]]
            for i, group in enumerate(self.each)
        ]


def group_living(
    variables: Sequence[Variable], mesh: ReplicaMesh | None
) -> list[list[Variable]]:
    """Packs that another program has left and that hold only such variables; else each alone."""
    if mesh is None:
        return [[v] for v in variables]
    parts: defaultdict[Any, dict[int, Variable]] = defaultdict(dict)
    for v in variables:
        home, place, part = v.lives_at
        if part is not None:
            parts[home, place][part] = v
    packs = [
        [found[part] for part in range(len(found))]
        for (home, place), found in parts.items()
        if home.pack_at(place) == Pack(len(found), mesh)
    ]
    return [*packs, *_others(variables, packs)]


def group_updated(variables: Sequence[Variable], trace: Trace) -> list[list[Variable]]:
    """Packs that live already, and new ones if small variables are many; else each alone.

    They have to hold most of the numbers: next to large ones a launch is a small part of a step.
    """
    fitting = [v for v in variables if _can_be_packed(v, trace)]
    packs = [group for group in group_living(fitting, trace.mesh) if len(group) > 1]
    new = _packs_of([v for [v] in _others(fitting, packs)])
    inside = list(itertools.chain(*new))
    if new and len(inside) >= _fewest_in_all(trace):
        if 2 * _bytes(inside) >= _bytes(variables):
            packs += new
    return [*packs, *_others(variables, packs)]


def _packs_of(variables: Iterable[Variable]) -> list[list[Variable]]:
    alike: defaultdict[Any, list[Variable]] = defaultdict(list)
    # A weight and its slots at like places, in whatever order the slots were made: XLA
    # compiles equal code once.
    for v in sorted(variables, key=_by_numbers_in_name):
        alike[v.shape, v.dtype].append(v)
    return [
        members[i : i + _MOST]
        for members in alike.values()
        for i in range(0, len(members), _MOST)
        if len(members) - i >= _FEWEST
    ]


def _others(
    variables: Iterable[Variable], packs: Iterable[Iterable[Variable]]
) -> list[list[Variable]]:
    inside = set(itertools.chain(*packs))
    return [[v] for v in variables if v not in inside]


def _fewest_in_all(trace: Trace) -> int:
    assert trace.mesh is not None
    is_cpu = trace.mesh.devices[0].platform == "cpu"
    return _MANY_ON_CPUS if is_cpu else _MANY


def _bytes(variables: Iterable[Variable]) -> int:
    return sum(math.prod(v.shape) * v.dtype.itemsize for v in variables)


def _by_numbers_in_name(variable: Variable) -> list[Any]:
    parts = re.split(r"([0-9]+)", str(variable.name))  # which may be anything
    return [(len(p), p) if i % 2 else p for i, p in enumerate(parts)]


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
    is_fit = is_mirrored and is_plain and variable.may_be_packed
    return is_fit and 0 < _bytes([variable]) < _SMALL_BYTES


def _living(variables: Sequence[Variable], pack: Pack) -> jax.Array | None:
    """The pack in which `variables` live, if it is such a one."""
    home, place, _ = variables[0].lives_at
    here = ((home, place, part) for part in range(len(variables)))
    if home.pack_at(place) == pack and all(
        v.lives_at == at for v, at in zip(variables, here)
    ):
        return home.arrays[place]
    return None


def _stack(variables: Sequence[Variable], pack: Pack) -> jax.Array:
    """A pack of `variables`, wherever they live.

    Raises:
        SignatureChanged: If replicas have their own values of one by now.
    """
    found = [v.in_one_array() for v in variables]
    if any(layout is not Layout.MIRRORED for _, layout in found):
        raise SignatureChanged
    return pack.close([array for array, _ in found])
