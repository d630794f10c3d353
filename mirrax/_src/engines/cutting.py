"""Cuts a replica's program where replicas communicate.

What comes out is a list of segments, which a replica computes alone, and between them
exchanges, which all replicas do together. A training step is two segments (gradients;
update) and one exchange.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.base.jax_compat import (
    Jaxpr,
    Literal,
    eval_jaxpr,
    make_jaxpr,
    sub_program,
)
from mirrax._src.base.mesh import AXIS_NAME
from mirrax._src.engines.jaxprs import (
    eval_inlined,
    invariant_outputs,
    is_collective,
    is_marked_equal,
    live_equations,
    variables_of,
)
from mirrax._src.engines.traced import Trace

Equations = tuple[Any, ...]
_LARGE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Segment:
    """What a replica computes between two exchanges."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    compiled: Callable[..., list[Any]]


@dataclass(frozen=True)
class Cut:
    """A replica function for one shape, cut: segment k is followed by `exchanges[k]`.

    The jaxpr takes the replica's id, the variables it reads and its arguments.
    """

    trace: Trace
    jaxpr: Jaxpr
    consts: Sequence[Any]
    segments: Sequence[Segment]
    exchanges: Sequence[Equations]

    @functools.cached_property
    def ways(self) -> list[int]:
        """For each output a number that tells how it is computed from inputs and exchanges.

        Replicas with other shapes have other programs, in which equations may be missing;
        where the numbers agree, they compute the same.
        """
        eqns = itertools.chain(*self.exchanges)
        exchanged = {id(eqn): ("exchange", i) for i, eqn in enumerate(eqns)}
        known = {var: hash(("input", i)) for i, var in enumerate(self.jaxpr.invars)}
        known.update(zip(self.jaxpr.constvars, map(_number_of, self.consts)))

        def of(atom: Any) -> int:
            if isinstance(atom, Literal):
                return hash((repr(atom.val), str(atom.aval)))
            return known[atom]

        marks = itertools.count()
        for eqn in self.jaxpr.eqns:
            how = exchanged.get(id(eqn))
            if is_marked_equal(eqn):
                # What replicas have made the same is, however each has come to it.
                how = ("equal", next(marks))
            elif how is None:
                how = (eqn.primitive.name, str(eqn.params), *map(of, eqn.invars))
            for i, var in enumerate(eqn.outvars):
                known[var] = hash((how, i, str(var.aval)))
        return [of(atom) for atom in self.jaxpr.outvars]


def cut_trace(trace: Trace) -> Cut:
    """`trace`, cut at its collectives.

    Raises:
        RunEagerly: If replicas communicate inside a loop or a branch.
    """

    def flat(replica_id: jax.Array, *inputs: Any) -> tuple[list[Any], Any]:
        closed = trace.closed
        return eval_inlined(closed.jaxpr, closed.consts, inputs, replica_id), ()

    assert trace.mesh is not None
    avals: list[Any] = [var.aval for var in trace.closed.jaxpr.invars]
    inputs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals
    ]
    axis = (AXIS_NAME, trace.mesh.size)
    closed, _ = make_jaxpr(flat, axis, (np.int32(0), *inputs))
    segments, exchanges = _sort_equations(closed.jaxpr)
    return Cut(trace, closed.jaxpr, closed.consts, segments, exchanges)


def _sort_equations(jaxpr: Jaxpr) -> tuple[list[Segment], list[Equations]]:
    """The equations by how many exchanges they have to wait for."""
    level: dict[Any, int] = {}
    computing: dict[int, list[Any]] = defaultdict(list)
    exchanging: dict[int, list[Any]] = defaultdict(list)
    for eqn in live_equations(jaxpr):
        at = max((level.get(var, 0) for var in variables_of(eqn.invars)), default=0)
        together = is_collective(eqn)
        (exchanging if together else computing)[at].append(eqn)
        level.update((var, at + together) for var in eqn.outvars)
    last = max([0, *computing, *(k + 1 for k in exchanging)])
    needed = set(variables_of(jaxpr.outvars))
    segments: list[Segment] = []
    for k in range(last, -1, -1):
        for eqn in exchanging[k]:
            needed.update(variables_of(eqn.invars))
        eqns = computing[k]
        made = {var for eqn in eqns for var in eqn.outvars}
        used = dict.fromkeys(var for eqn in eqns for var in variables_of(eqn.invars))
        inputs = tuple(var for var in used if var not in made)
        outputs = tuple(var for var in made if var in needed)
        program = sub_program(jaxpr, eqns, inputs, outputs)
        compiled = jax.jit(functools.partial(eval_jaxpr, program, ()))
        segments.append(Segment(inputs, outputs, compiled))
        needed.update(inputs)
    return segments[::-1], [tuple(exchanging[k]) for k in range(last)]


def equal_outputs(cuts: Sequence[Cut]) -> list[bool]:
    """For each output of the cuts whether all replicas compute the same.

    A value that depends on a shape looks like a constant in each replica's program, so all
    of them have to compute it in the same way.
    """
    trace = cuts[0].trace
    layouts = [*trace.reads.values(), *trace.signature.layouts()]
    inputs = [False, *(not layout.is_split for layout in layouts)]
    same = invariant_outputs(cuts[0].jaxpr, inputs)
    ways = zip(*(cut.ways for cut in cuts))
    return [flag and len(set(numbers)) == 1 for flag, numbers in zip(same, ways)]


def _number_of(const: Any) -> int:
    """A constant's value as a number, or which object it is if it is large or a key."""
    is_key = jnp.issubdtype(jnp.result_type(const), jax.dtypes.prng_key)
    if is_key or getattr(const, "nbytes", _LARGE_BYTES) >= _LARGE_BYTES:
        return hash(id(const))
    array = np.asarray(const)
    return hash((array.shape, array.dtype.name, array.tobytes()))
