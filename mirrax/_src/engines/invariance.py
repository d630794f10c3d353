"""Which results of a replica's program are the same on all replicas.

JAX's own varying-axes types (`check_vma=True`) answer this too, but they reject ordinary
user code (a `lax.scan` that starts from `jnp.zeros`), so the traced program is read instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mirrax._src.base.jax_compat import ClosedJaxpr, Jaxpr, Literal
from mirrax._src.base.mesh import AXIS_NAME
from mirrax._src.collectives.same import MARK

# Collectives whose result all replicas share, and those that give each its own.
COMBINING = {
    "psum",
    "pmax",
    "pmin",
    "all_gather",
    "psum_invariant",
    "all_gather_invariant",
}
SEPARATING = {"axis_index", "ppermute", "all_to_all", "reduce_scatter", "psum_scatter"}
COLLECTIVES = COMBINING | SEPARATING


def is_collective(eqn: Any) -> bool:
    """Whether `eqn` communicates between replicas (or asks which one this is)."""
    return eqn.primitive.name in COLLECTIVES and AXIS_NAME in _axes(eqn)


def sub_jaxprs(eqn: Any) -> Iterator[Jaxpr]:
    """The programs inside an equation: bodies of loops, branches, calls."""
    for param in eqn.params.values():
        for item in param if isinstance(param, tuple | list) else (param,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def contains_collective(eqn: Any) -> bool:
    """Whether `eqn` is a collective or has one inside."""
    return is_collective(eqn) or any(
        contains_collective(inner) for jaxpr in sub_jaxprs(eqn) for inner in jaxpr.eqns
    )


def invariant_outputs(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """For each output of `jaxpr` whether all replicas compute the same.

    Args:
        jaxpr: One replica's program.
        inputs: For each input whether it is the same on all replicas.
    """
    known: dict[Any, bool] = dict(zip(jaxpr.invars, inputs))
    known.update((var, True) for var in jaxpr.constvars)

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
        is_whole = eqn.params.get("axis_index_groups") is None
        return [name in COMBINING and is_whole] * count
    if name == "optimization_barrier":
        return ins
    if eqn.params.get("name") == MARK:
        return [True] * count
    if name == "cond" and ins[0]:
        branches = [invariant_outputs(b.jaxpr, ins[1:]) for b in eqn.params["branches"]]
        return [all(same) for same in zip(*branches)]
    if name == "scan":
        return _invariant_scan(eqn, ins)
    if name == "while":
        return _invariant_while(eqn, ins)
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    is_call = name in (
        "jit",
        "pjit",
        "closed_call",
        "remat2",
        "checkpoint",
        "custom_jvp_call",
    )
    if is_call and inner is not None:
        inner = _program(inner)
        if len(inner.invars) == len(ins):
            return invariant_outputs(inner, ins)
    return [all(ins) and not _separates(eqn)] * count


def _program(closed: Any) -> Jaxpr:
    """A program inside an equation; JAX 0.11 no longer wraps it."""
    return getattr(closed, "jaxpr", closed)


def _invariant_scan(eqn: Any, ins: list[bool]) -> list[bool]:
    body: Any = _program(eqn.params["jaxpr"])
    # Constants, the carry, what is scanned over: that has an axis more than in the body.
    scanned = sum(a.aval.ndim > b.aval.ndim for a, b in zip(eqn.invars, body.invars))
    count = sum(a.aval.ndim == b.aval.ndim for a, b in zip(eqn.outvars, body.outvars))
    end = len(ins) - scanned
    first = end - count
    carry = ins[first:end]
    while True:  # ends: a carry only ever turns from same to different
        outs = invariant_outputs(body, [*ins[:first], *carry, *ins[end:]])
        after = [a and b for a, b in zip(carry, outs)]
        if after == carry:
            return [*carry, *outs[count:]]
        carry = after


def _invariant_while(eqn: Any, ins: list[bool]) -> list[bool]:
    params = eqn.params
    first = params["cond_nconsts"]
    end = first + params["body_nconsts"]
    carry = ins[end:]
    while True:
        outs = invariant_outputs(
            _program(params["body_jaxpr"]), [*ins[first:end], *carry]
        )
        after = [a and b for a, b in zip(carry, outs)]
        if after == carry:
            break
        carry = after
    # Replicas that leave the loop at different times have nothing in common.
    tests = invariant_outputs(_program(params["cond_jaxpr"]), [*ins[:first], *carry])
    return carry if all(tests) else [False] * len(carry)


def _separates(eqn: Any) -> bool:
    """Whether `eqn` may give each replica something of its own, here or inside."""
    if eqn.effects or "callback" in eqn.primitive.name:
        return True
    if is_collective(eqn):
        is_whole = eqn.params.get("axis_index_groups") is None
        return eqn.primitive.name in SEPARATING or not is_whole
    return any(_separates(e) for jaxpr in sub_jaxprs(eqn) for e in jaxpr.eqns)


def _axes(eqn: Any) -> tuple[Any, ...]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)
