"""Independent all-reduces of one program become few messages, whoever asked for them.

A message costs about as much as a small step (between workers about a millisecond), so the
loss and the metrics travel with the gradients. A program is evaluated in waves: all that can
be computed before a sum is, then all sums that are ready travel together, then the rest. In
cross-replica code a `reduce` of what `run` has returned first becomes a part of that run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base.jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    eval_jaxpr,
    make_jaxpr,
    sub_program,
)
from mirrax._src.base.mesh import AXIS_NAME, ReplicaMesh
from mirrax._src.collectives.algorithms import sum_together
from mirrax._src.engines.jaxprs import (
    called,
    has_side_effects,
    open_program,
    sums_over_replicas,
    variables_of,
    within,
)

_Values = Mapping[Any, Any]
# Calls that stay calls: inlined, XLA could keep what they are there to compute again, and
# whoever differentiates the program (`jax.grad` around `run`) would not find their rules.
_KEPT = {"remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}


def eval_replica(
    jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], mesh: ReplicaMesh
) -> list[Any]:
    """Evaluates a replica's program; sums over replicas travel together."""
    return _eval(jaxpr, [*consts, *inputs], _Sums(mesh))


def eval_call(
    jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], mesh: ReplicaMesh
) -> list[Any]:
    """Evaluates cross-replica code; what replicas do one after another is one program."""
    return _eval(jaxpr, [*consts, *inputs], _Runs(mesh))


# What is done together --------------------------------------------------------------------


@dataclass(frozen=True)
class _Sums:
    """Sums over all replicas, in a replica's program."""

    mesh: ReplicaMesh

    @property
    def axis(self) -> tuple[str, int]:
        return AXIS_NAME, self.mesh.size

    def has(self, eqn: Any) -> bool:
        return sums_over_replicas(eqn)

    def may_follow(self, eqn: Any, group: Sequence[Any], late: set[Any]) -> bool:
        return False

    def run(self, group: Sequence[Any], read: Callable[[Any], Any]) -> dict[Any, Any]:
        pairs = [p for eqn in group for p in zip(eqn.invars, eqn.outvars)]
        wanted = {_key(atom): atom for atom, _ in pairs}  # each array once
        arrays = [jnp.asarray(read(atom)) for atom in wanted.values()]
        sums = dict(zip(wanted, sum_together(arrays, self.mesh)))
        return {var: sums[_key(atom)] for atom, var in pairs}


@dataclass(frozen=True)
class _Runs:
    """Programs of all replicas, in cross-replica code."""

    mesh: ReplicaMesh
    axis: None = None

    def has(self, eqn: Any) -> bool:
        params = eqn.params
        # A user's own may have types that tell what varies between replicas.
        is_ours = eqn.primitive.name == "shard_map" and not params.get("check_vma")
        return is_ours and params["mesh"] == self.mesh.mesh

    def may_follow(self, eqn: Any, group: Sequence[Any], late: set[Any]) -> bool:
        """Whether the replicas of `group` have all that those of `eqn` take, as they do."""
        made = {v: s for e in group for v, s in zip(e.outvars, e.params["out_specs"])}
        needed = zip(eqn.invars, eqn.params["in_specs"])
        return all(
            isinstance(atom, Literal)
            or (made.get(atom) == spec if atom in made else atom not in late)
            for atom, spec in needed
        )

    def run(self, group: Sequence[Any], read: Callable[[Any], Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        taken: dict[Any, tuple[Any, Any, Any]] = {}  # atom, spec, a replica's part
        for eqn in group:
            own = eqn.params["jaxpr"].invars
            for atom, spec, var in zip(eqn.invars, eqn.params["in_specs"], own):
                if isinstance(atom, Literal) or atom not in made:
                    taken.setdefault((_key(atom), spec), (atom, spec, var.aval))
            made.update(zip(eqn.outvars, eqn.params["out_specs"]))

        def one_by_one(*values: Any) -> tuple[list[Any], Any]:
            given, done = dict(zip(taken, values)), {}
            for eqn in group:
                each = zip(eqn.invars, eqn.params["in_specs"])
                ins = [
                    done[a] if _key(a) in done else given[_key(a), s] for a, s in each
                ]
                outs = eval_jaxpr(open_program(eqn.params["jaxpr"]), (), *ins)
                done.update(zip(eqn.outvars, outs))
            return [done[var] for var in made], ()

        avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for _, _, a in taken.values()]
        closed, _ = make_jaxpr(one_by_one, _Sums(self.mesh).axis, avals)
        mapped = jax.shard_map(
            lambda *own: eval_replica(closed.jaxpr, closed.consts, own, self.mesh),
            mesh=self.mesh.mesh,
            in_specs=tuple(spec for _, spec, _ in taken.values()),
            out_specs=list(made.values()),
            check_vma=False,
        )
        return dict(zip(made, mapped(*(read(atom) for atom, _, _ in taken.values()))))


_Kind = _Sums | _Runs


def _key(atom: Any) -> Any:
    return id(atom) if isinstance(atom, Literal) else atom


# Waves ----------------------------------------------------------------------------------------


def _eval(jaxpr: Jaxpr, values: Sequence[Any], kind: _Kind) -> list[Any]:
    if not any(_holds(eqn, kind) for eqn in jaxpr.eqns):
        return eval_jaxpr(
            sub_program(jaxpr, jaxpr.eqns, _inputs(jaxpr), jaxpr.outvars), (), *values
        )
    if any(_inlinable(eqn, kind) is not None for eqn in jaxpr.eqns):
        flat, _ = make_jaxpr(
            lambda *own: (_eval_inlined(jaxpr, own, kind), ()),
            kind.axis,
            [v.aval for v in _inputs(jaxpr)],
        )
        jaxpr, values = flat.jaxpr, [*flat.consts, *values]
    env = dict(zip(_inputs(jaxpr), values))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    eqns = _needed(jaxpr)
    while eqns:
        now, group, eqns = _next_wave(eqns, kind)
        env.update(_eval_equations(jaxpr, [_rewritten(eqn, kind) for eqn in now], env))
        if group:
            env.update(kind.run(group, read))
    return [read(atom) for atom in jaxpr.outvars]


def _needed(jaxpr: Jaxpr) -> list[Any]:
    """The equations that an output or an effect needs: no other sum should travel."""
    used, kept = set(variables_of(jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if has_side_effects(eqn) or not used.isdisjoint(eqn.outvars):
            kept.append(eqn)
            used.update(variables_of(eqn.invars))
    return kept[::-1]


def _next_wave(
    eqns: Sequence[Any], kind: _Kind
) -> tuple[list[Any], list[Any], list[Any]]:
    """What can be computed now, what can then be done together, and what needs that."""
    now: list[Any] = []
    group: list[Any] = []
    later: list[Any] = []
    late: set[Any] = set()
    effects_wait = False  # effects stay in their order
    for eqn in eqns:
        has_effects = has_side_effects(eqn)
        must_wait = has_effects and effects_wait
        is_late = must_wait or not late.isdisjoint(variables_of(eqn.invars))
        if kind.has(eqn) and (
            not is_late or (not must_wait and kind.may_follow(eqn, group, late))
        ):
            group.append(eqn)
        elif is_late:
            later.append(eqn)
        else:
            now.append(eqn)
            continue
        late.update(eqn.outvars)
        effects_wait = effects_wait or has_effects
    return now, group, later


def _eval_equations(jaxpr: Jaxpr, eqns: Sequence[Any], env: _Values) -> dict[Any, Any]:
    made = dict.fromkeys(var for eqn in eqns for var in eqn.outvars)
    used = dict.fromkeys(var for eqn in eqns for var in variables_of(eqn.invars))
    given = [var for var in used if var not in made]
    program = sub_program(jaxpr, eqns, given, list(made))
    return dict(zip(made, eval_jaxpr(program, (), *(env[var] for var in given))))


def _eval_inlined(jaxpr: Jaxpr, values: Sequence[Any], kind: _Kind) -> list[Any]:
    """Evaluates a program, going into calls that hold what is done together."""
    env = dict(zip(_inputs(jaxpr), values))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inner = _inlinable(eqn, kind)
        if inner is None:
            env.update(_eval_equations(jaxpr, [eqn], env))
        else:
            own = [*getattr(inner, "consts", ()), *map(read, eqn.invars)]
            outs = _eval_inlined(open_program(inner), own, kind)
            env.update(zip(eqn.outvars, outs))
    return [read(atom) for atom in jaxpr.outvars]


def _rewritten(eqn: Any, kind: _Kind) -> Any:
    """A loop, a branch or the like whose bodies hold what is done together, with them merged."""
    if not _holds(eqn, kind):
        return eqn

    def merged(program: Any) -> Any:
        if not isinstance(program, ClosedJaxpr | Jaxpr):
            return program
        jaxpr, consts = open_program(program), getattr(program, "consts", ())
        avals = [var.aval for var in jaxpr.invars]
        made, _ = make_jaxpr(
            lambda *own: (_eval(jaxpr, [*consts, *own], kind), ()), kind.axis, avals
        )
        return made if isinstance(program, ClosedJaxpr) else made.jaxpr

    params = {
        name: tuple(map(merged, param)) if isinstance(param, tuple) else merged(param)
        for name, param in eqn.params.items()
    }
    return eqn.replace(params=params)


def _inlinable(eqn: Any, kind: _Kind) -> Any:
    """The program that `eqn` only calls, if it holds what is done together; else None."""
    inner = None if eqn.primitive.name in _KEPT else called(eqn)
    return inner if inner is not None and _holds(eqn, kind) else None


def _holds(eqn: Any, kind: _Kind) -> bool:
    """Whether what is done together stands in `eqn`, at any depth."""
    return any(map(kind.has, within(eqn)))


def _inputs(jaxpr: Jaxpr) -> list[Any]:
    return [*jaxpr.constvars, *jaxpr.invars]
