"""Cuts a replica's program where replicas communicate.

What comes out are stages, by turns one that a replica computes alone and an exchange, which
all replicas do together. A training step is gradients, exchange, update.
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
    Device,
    Jaxpr,
    Literal,
    eval_jaxpr,
    make_jaxpr,
    sub_program,
)
from mirrax._src.base.mesh import AXIS_NAME, ReplicaMesh
from mirrax._src.engines.jaxprs import (
    eval_inlined,
    is_collective,
    is_marked_equal,
    variables_of,
)
from mirrax._src.engines.merging import eval_replica
from mirrax._src.engines.traced import Trace

_LARGE_BYTES = 64 * 1024


@dataclass(frozen=True, eq=False)
class Stage:
    """Some equations of a replica's program, as a program of their own."""

    program: Any
    mesh: ReplicaMesh
    __name__ = "an uneven step"  # for messages

    @functools.cached_property
    def _compiled(self) -> Callable[..., list[Any]]:
        return jax.jit(functools.partial(eval_jaxpr, self.program, ()))

    def compute(self, arrays: Sequence[Any], device: Device) -> list[Any]:
        """The outputs of a stage that a replica computes alone."""
        with jax.default_device(device):
            return self._compiled(*arrays)

    def __call__(self, arrays: list[Any]) -> list[Any]:
        """An exchange as one replica does it; a scalar gets an axis to be split on."""
        outs = eval_replica(self.program, (), arrays, self.mesh)
        return [x if x.ndim else x[None] for x in outs]


@dataclass(frozen=True)
class Cut:
    """A replica function for one shape, cut.

    The jaxpr takes the replica's id, the variables it reads and its arguments.
    """

    trace: Trace
    jaxpr: Jaxpr
    consts: Sequence[Any]
    stages: Sequence[Stage]

    @functools.cached_property
    def exchanges(self) -> list[Any]:
        """What the replica does in each exchange."""
        return [
            [
                (e.primitive, str(e.params), [str(a.aval) for a in e.invars])
                for e in eqns
            ]
            for eqns in (stage.program.eqns for stage in self.stages[1::2])
        ]

    @functools.cached_property
    def ways(self) -> list[int]:
        """For each output a number that tells how it is computed from inputs and exchanges.

        Replicas with other shapes have other programs, in which equations may be missing;
        where the numbers agree, they compute the same.
        """
        eqns = (eqn for stage in self.stages[1::2] for eqn in stage.program.eqns)
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
    """`trace`, cut at its collectives; raises what `eval_inlined` does."""

    def flat(replica_id: jax.Array, *inputs: Any) -> tuple[list[Any], Any]:
        closed = trace.closed
        return eval_inlined(closed.jaxpr, closed.consts, inputs, replica_id), ()

    assert trace.mesh is not None
    axis = (AXIS_NAME, trace.mesh.size)
    closed, _ = make_jaxpr(flat, axis, (np.int32(0), *trace.closed.in_avals))
    return Cut(trace, closed.jaxpr, closed.consts, _stages(closed.jaxpr, trace.mesh))


def _stages(jaxpr: Jaxpr, mesh: ReplicaMesh) -> list[Stage]:
    """The equations that an output or an effect needs, each as late as it can be."""
    # Counted from the end, where even stages compute and odd ones exchange.
    needed = dict.fromkeys(variables_of(jaxpr.outvars), 0)
    eqns_at: dict[int, list[Any]] = defaultdict(list)
    for eqn in reversed(jaxpr.eqns):
        uses = [needed[var] for var in eqn.outvars if var in needed]
        if uses or eqn.effects:
            at, together = max(uses, default=0), is_collective(eqn)
            eqns_at[at + together].append(eqn)
            for var in variables_of(eqn.invars):
                needed[var] = max(needed.get(var, 0), at + 2 * together)
    stages = []
    used = set(variables_of(jaxpr.outvars))
    for i in range(max(eqns_at, default=0) + 1):
        eqns, is_exchange = eqns_at[i][::-1], i % 2
        made = dict.fromkeys(var for eqn in eqns for var in eqn.outvars)
        read = dict.fromkeys(var for eqn in eqns for var in variables_of(eqn.invars))
        inputs = [var for var in read if var not in made]
        outputs = [var for var in made if is_exchange or var in used]
        used.update(inputs)
        stages.append(Stage(sub_program(jaxpr, eqns, inputs, outputs), mesh))
    return stages[::-1]


def _number_of(const: Any) -> int:
    """A constant's value as a number, or which object it is if it is large or a key."""
    is_key = jnp.issubdtype(jnp.result_type(const), jax.dtypes.prng_key)
    if is_key or getattr(const, "nbytes", _LARGE_BYTES) >= _LARGE_BYTES:
        return hash(id(const))
    array = np.asarray(const)
    return hash((array.shape, array.dtype.name, array.tobytes()))
