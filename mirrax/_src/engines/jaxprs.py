"""All that reads a traced program: what is the same on all replicas, what is handed on.

JAX's own varying-axes types (`check_vma=True`) would answer the first question too, but they
reject ordinary user code (a `lax.scan` that starts from `jnp.zeros`), so programs are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import lax

from mirrax._src.base.errors import RunEagerly
from mirrax._src.base.jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    eval_jaxpr,
    sub_program,
    with_inputs,
)
from mirrax._src.base.mesh import AXIS_NAME
from mirrax._src.collectives.programs import EQUALITY_MARK

# Collectives whose result all replicas share, and those that give each its own.
_COMBINING = {"psum", "pmax", "pmin", "all_gather"}
_COMBINING |= {"psum_invariant", "all_gather_invariant"}
_SEPARATING = {"axis_index", "ppermute", "all_to_all", "reduce_scatter"}

# Equations that only call a program, which can as well stand in their place.
_CALLS = {"jit", "closed_call", "remat2", "checkpoint"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call"}

_Key = TypeVar("_Key")


# Equations ------------------------------------------------------------------------------


def is_collective(eqn: Any) -> bool:
    """Whether `eqn` communicates between replicas (or asks which one this is)."""
    name = eqn.primitive.name
    return (name in _COMBINING or name in _SEPARATING) and AXIS_NAME in _axes(eqn)


def sums_over_replicas(eqn: Any) -> bool:
    """Whether `eqn` sums numbers over all replicas, and does nothing else."""
    if eqn.primitive.name != "psum" or _axes(eqn) != (AXIS_NAME,):
        return False
    # Sums in groups, also in one of all replicas, travel as whoever asked for them says.
    dtypes = [atom.aval.dtype for atom in eqn.invars]
    is_whole = eqn.params.get("axis_index_groups") is None
    return is_whole and all(jnp.issubdtype(dtype, jnp.number) for dtype in dtypes)


def has_side_effects(eqn: Any) -> bool:
    """Whether `eqn` does something that others see: a callback, say."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def is_marked_equal(eqn: Any) -> bool:
    """Whether `eqn` says that its result is the same on all replicas."""
    return eqn.params.get("name") == EQUALITY_MARK


def variables_of(atoms: Iterable[Any]) -> list[Any]:
    """Those that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def convolves(jaxpr: Jaxpr) -> bool:
    """Whether there is a convolution in `jaxpr`, at any depth."""
    every = (inner for eqn in jaxpr.eqns for inner in within(eqn))
    return any(eqn.primitive is lax.conv_general_dilated_p for eqn in every)


def has_empty(jaxpr: Jaxpr) -> bool:
    """Whether the program takes, computes or contains arrays without elements."""

    def is_empty(atom: Any) -> bool:
        return 0 in getattr(atom.aval, "shape", ())

    every = [e for eqn in jaxpr.eqns for e in within(eqn)]
    used = [atom for eqn in every for atom in (*eqn.invars, *eqn.outvars)]
    return any(map(is_empty, [*jaxpr.invars, *used]))


def _axes(eqn: Any) -> tuple[Any, ...]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def within(eqn: Any) -> Iterator[Any]:
    """`eqn` and all equations in it: in bodies of loops, branches, calls."""
    yield eqn
    for program in _programs(eqn):
        for inner in open_program(program).eqns:
            yield from within(inner)


def _programs(eqn: Any) -> Iterator[Any]:
    """The programs that stand in an equation, closed or not."""
    for param in eqn.params.values():
        for item in param if isinstance(param, tuple | list) else (param,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                yield item


def called(eqn: Any) -> Any:
    """The program that `eqn` only calls, closed or not; None if it does more."""
    return next(_programs(eqn), None) if eqn.primitive.name in _CALLS else None


def open_program(program: Any) -> Jaxpr:
    """A program inside an equation; JAX 0.11 no longer wraps it."""
    return getattr(program, "jaxpr", program)


# What is the same on all replicas ---------------------------------------------------------


def invariant_outputs(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """For each output of a replica's program whether all replicas compute the same.

    `inputs` tells which inputs are the same on all replicas.
    """
    known = {**dict.fromkeys(jaxpr.constvars, True), **dict(zip(jaxpr.invars, inputs))}

    def same(atom: Any) -> bool:
        return isinstance(atom, Literal) or known.get(atom, False)

    for eqn in jaxpr.eqns:
        ins = [same(atom) for atom in eqn.invars]
        known.update(zip(eqn.outvars, _invariant_results(eqn, ins)))
    return [same(atom) for atom in jaxpr.outvars]


def _invariant_results(eqn: Any, ins: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    count = len(eqn.outvars)
    if is_collective(eqn):
        is_whole = len(eqn.params.get("axis_index_groups") or [()]) == 1
        return [name in _COMBINING and is_whole] * count
    if name == "optimization_barrier":
        return ins
    if is_marked_equal(eqn):
        return [True] * count
    if name == "cond" and ins[0]:
        programs = map(open_program, eqn.params["branches"])
        branches = [invariant_outputs(program, ins[1:]) for program in programs]
        return [all(same) for same in zip(*branches)]
    if name == "scan":
        return _invariant_scan(eqn, ins)
    if name == "while":
        return _invariant_while(eqn, ins)
    inner = called(eqn)
    if inner is not None and len(open_program(inner).invars) == len(ins):
        return invariant_outputs(open_program(inner), ins)
    return [all(ins) and not any(map(_separates, within(eqn)))] * count


def _invariant_scan(eqn: Any, ins: list[bool]) -> list[bool]:
    body: Any = open_program(eqn.params["jaxpr"])
    # Constants, the carry, what is scanned over: that has an axis more than in the body.
    scanned = sum(a.aval.ndim > b.aval.ndim for a, b in zip(eqn.invars, body.invars))
    count = sum(a.aval.ndim == b.aval.ndim for a, b in zip(eqn.outvars, body.outvars))
    end = len(ins) - scanned
    first = end - count
    return _invariant_turns(body, ins[:first], ins[first:end], ins[end:])


def _invariant_while(eqn: Any, ins: list[bool]) -> list[bool]:
    params = eqn.params
    first = params["cond_nconsts"]
    end = first + params["body_nconsts"]
    carry = _invariant_turns(
        open_program(params["body_jaxpr"]), ins[first:end], ins[end:]
    )
    # Replicas that leave the loop at different times have nothing in common.
    tests = invariant_outputs(
        open_program(params["cond_jaxpr"]), [*ins[:first], *carry]
    )
    return carry if all(tests) else [False] * len(carry)


def _invariant_turns(
    body: Jaxpr, consts: list[bool], carry: list[bool], scanned: Sequence[bool] = ()
) -> list[bool]:
    """For each output of a loop's body whether it is the same on all replicas in all turns."""
    while True:  # ends: a carry only ever turns from same to different
        outs = invariant_outputs(body, [*consts, *carry, *scanned])
        after = [a and b for a, b in zip(carry, outs)]
        if after == carry:
            return [*carry, *outs[len(carry) :]]
        carry = after


def _separates(eqn: Any) -> bool:
    """Whether `eqn` itself may give each replica something of its own."""
    return bool(eqn.effects) or is_collective(eqn) or "callback" in eqn.primitive.name


# Inputs and outputs -------------------------------------------------------------------------


def only_used(
    closed: ClosedJaxpr, keys: Collection[_Key], used: Collection[_Key]
) -> ClosedJaxpr:
    """`closed`, whose first inputs belong to `keys`, without those that are not used."""
    invars = closed.jaxpr.invars
    kept = [var for var, key in zip(invars, keys) if key in used]
    return with_inputs(closed, [*kept, *invars[len(keys) :]])


def handed_on(
    jaxpr: Jaxpr, reads: Iterable[_Key], writes: Iterable[_Key], num_results: int
) -> frozenset[_Key]:
    """The keys (of inputs, of the last outputs) whose array somebody else may hold later.

    JAX returns an input that is an output as the very same array: a variable that is
    returned, an argument that is assigned, a value that is assigned twice.
    """
    inputs = dict(zip(jaxpr.invars, reads))
    outs = [None if isinstance(v, Literal) else v for v in jaxpr.outvars]
    returned = {inputs[var] for var in outs[:num_results] if var in inputs}
    shared = {None, *jaxpr.invars, *jaxpr.constvars}
    shared.update(var for var, times in Counter(outs).items() if times > 1)
    written = zip(writes, outs[num_results:])
    return frozenset(returned).union(key for key, var in written if var in shared)


def eval_inlined(
    jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], replica_id: Any
) -> list[Any]:
    """Evaluates a replica's program, going into calls that communicate.

    Raises:
        RunEagerly: If replicas communicate inside a loop or a branch.
    """
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs]))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "axis_index" and is_collective(eqn):
            outs = [replica_id]
        elif is_collective(eqn):
            # Every operand becomes a variable, also a literal: other replicas may have another.
            values = lax.optimization_barrier([read(atom) for atom in eqn.invars])
            result = eqn.primitive.bind(*values, **eqn.params)
            outs = result if eqn.primitive.multiple_results else [result]
        elif not any(map(is_collective, within(eqn))):
            given = variables_of(eqn.invars)
            program = sub_program(jaxpr, [eqn], given, eqn.outvars)
            outs = eval_jaxpr(program, (), *map(read, given))
        elif (inner := called(eqn)) is not None:
            closed_over = getattr(inner, "consts", ())
            values = list(map(read, eqn.invars))
            outs = eval_inlined(open_program(inner), closed_over, values, replica_id)
        else:
            raise RunEagerly("replicas communicate inside a loop or a branch")
        env.update(zip(eqn.outvars, outs))
    return [read(atom) for atom in jaxpr.outvars]
