"""Parts of the replicas' program that are computed once for all, each device a part of it.

`in_global_view` marks a computation whose inputs are the same on all replicas. Where the mark
stands in the program itself, that is cut there: replicas do what comes before and after, and
in between XLA divides the computation among the devices. Anywhere else, in a loop or under a
gradient, every replica computes it by itself, to the same result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mirrax._src.base.jax_compat import Jaxpr, Literal, eval_jaxpr, sub_program
from mirrax._src.base.mesh import AXIS_NAME, Layout, ReplicaMesh
from mirrax._src.collectives.scattering import JoinProgram
from mirrax._src.engines.jaxprs import invariant_outputs, variables_of
from mirrax._src.engines.merging import eval_replica

_MARK = re.compile(r"in_global_view_(\d+)")
# What can as well be done to the parts of an array, one by one.
_ELEMENTWISE = frozenset(
    ("add", "add_any", "sub", "mul", "div", "neg", "convert_element_type", "copy")
)


def in_global_view(
    fn: Callable[..., list[Any]], num_wanted: int, *operands: Any
) -> list[jax.Array]:
    """`fn(*operands)`, marked; operands are whole arrays that all replicas have alike.

    Of the arrays that `fn` gives, replicas go on with the first `num_wanted`; the others they
    only keep, and these stay in parts.
    """

    def marked(*operands: Any) -> list[Any]:
        return fn(*operands)

    marked.__name__ = f"in_global_view_{num_wanted}"
    return jax.jit(marked)(*operands)


def sharded_outputs(jaxpr: Jaxpr, ins: Sequence[Layout]) -> list[bool]:
    """For each output of a replica's program whether it is kept in parts."""
    kept = {v for v, layout in zip(jaxpr.invars, ins) if layout is Layout.SHARDED}
    for eqn in jaxpr.eqns:
        if (count := _num_wanted(eqn)) is not None:
            kept.update(eqn.outvars[count:])
    return [not isinstance(v, Literal) and v in kept for v in jaxpr.outvars]


def is_marked(jaxpr: Jaxpr) -> bool:
    """Whether something in the program itself is computed in the global view."""
    return any(_num_wanted(eqn) is not None for eqn in jaxpr.eqns)


def _num_wanted(eqn: Any) -> int | None:
    """How many results of a marked equation replicas go on with; None if it has no mark."""
    found = _MARK.fullmatch(str(eqn.params.get("name", "")))
    return int(found[1]) if found else None


@dataclass
class _Value:
    """What all replicas have of a variable of their program: in one array, which lies so."""

    array: Any
    layout: Layout


class StagedProgram:
    """A replica's program, cut where something is computed in the global view.

    Unless it `is_merged`, its sums wait for those of the program that it is a part of.
    """

    def __init__(
        self, jaxpr: Jaxpr, ins: Sequence[Layout], mesh: ReplicaMesh, is_merged: bool
    ) -> None:
        self._jaxpr, self._mesh, self._is_merged = jaxpr, mesh, is_merged
        self._ins = [Layout.MIRRORED] * len(jaxpr.constvars) + list(ins)
        self._inputs = [*jaxpr.constvars, *jaxpr.invars]
        made = [v for eqn in jaxpr.eqns for v in eqn.outvars if _is_used(v)]
        whole = sub_program(jaxpr, jaxpr.eqns, self._inputs, made)
        same = invariant_outputs(whole, [not k.is_split for k in self._ins])
        self._same = dict(zip(made, same))
        self._same |= {v: not k.is_split for v, k in zip(self._inputs, self._ins)}
        # Gathered parts: the global view takes the parts themselves.
        self._parts = {
            eqn.outvars[0]: (eqn.invars[0], eqn.params["all_gather_dimension"])
            for eqn in jaxpr.eqns
            if _is_joining(eqn)
        }

    def run(self, consts: Sequence[Any], inputs: Sequence[Any]) -> list[_Value]:
        """The outputs, from the inputs of all replicas."""
        given = zip(self._inputs, [*consts, *inputs], self._ins)
        env = {var: _Value(array, layout) for var, array, layout in given}
        rest = list(self._jaxpr.eqns)
        while rest:
            at = next((i for i, e in enumerate(rest) if self._is_cut(e)), len(rest))
            eqns, cut, rest = rest[:at], rest[at : at + 1], rest[at + 1 :]
            self._run_replicas(eqns, cut, rest, env)
            for eqn in cut:
                rest = self._compute_globally(eqn, rest, env)
        return [
            _Value(jnp.asarray(v.val), Layout.MIRRORED)
            if isinstance(v, Literal)
            else env[v]
            for v in self._jaxpr.outvars
        ]

    def _is_cut(self, eqn: Any) -> bool:
        is_alike = all(self._same[v] for v in variables_of(eqn.invars))
        return _num_wanted(eqn) is not None and is_alike

    def _run_replicas(
        self, eqns: list[Any], cut: list[Any], rest: list[Any], env: dict[Any, Any]
    ) -> None:
        """What every replica does: the equations up to a cut; the results go into `env`."""
        mesh = self._mesh
        made = {v for eqn in eqns for v in eqn.outvars}
        later = [v for eqn in rest for v in variables_of(eqn.invars)]
        later += variables_of(self._jaxpr.outvars)
        outs: dict[Any, Any] = {}  # each with its layout, or the axis of a part
        for var in later:
            if var in made:
                is_same = self._same[var]
                own = mesh.split_layout(var.aval.ndim)
                outs[var] = Layout.MIRRORED if is_same else own
        for var in (v for eqn in cut for v in variables_of(eqn.invars)):
            part, axis = self._parts.get(var, (None, None))
            if part in made:
                outs[part, axis] = axis
            elif var in made:
                outs[var] = Layout.MIRRORED
        names = [key[0] if isinstance(key, tuple) else key for key in outs]
        reads = [v for eqn in eqns for v in variables_of(eqn.invars) if v not in made]
        reads = list(dict.fromkeys(reads))
        program = sub_program(self._jaxpr, eqns, reads, names)
        ins = [env[v].layout for v in reads]
        arrays = self._on_devices(program, ins, list(outs.values()))(
            *(env[v].array for v in reads)
        )
        for (key, kind), array in zip(outs.items(), arrays):
            env[key] = _Value(
                array, kind if isinstance(kind, Layout) else Layout.SHARDED
            )

    def _on_devices(
        self, program: Jaxpr, ins: list[Layout], outs: list[Any]
    ) -> Callable[..., list[jax.Array]]:
        mesh = self._mesh

        def spec(kind: Any) -> PartitionSpec:
            if isinstance(kind, Layout):
                return mesh.spec(kind)
            return PartitionSpec(*[None] * kind, AXIS_NAME)

        def has_row(kind: Any) -> bool:
            return isinstance(kind, Layout) and mesh.has_row(kind)

        def body(*inputs: Any) -> list[jax.Array]:
            own = [x[0] if has_row(k) else x for x, k in zip(inputs, ins)]
            if self._is_merged:
                results = eval_replica(program, (), own, mesh)
            else:
                results = eval_jaxpr(program, (), *own)
            return [x[None] if has_row(k) else x for x, k in zip(results, outs)]

        in_specs, out_specs = tuple(map(spec, ins)), list(map(spec, outs))
        return jax.shard_map(
            body,
            mesh=mesh.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def _compute_globally(
        self, eqn: Any, rest: list[Any], env: dict[Any, Any]
    ) -> list[Any]:
        """A marked equation, divided among the devices by XLA; what is left of the `rest`.

        What replicas would do to each of its arrays by itself, such as adding updates to
        parameters, is done to the parts, and its results are gathered instead.
        """
        mesh = self._mesh

        def operand(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return atom.val
            found = env.get(self._parts.get(atom)) or env[atom]
            return _constrained(found.array, mesh)

        def compute(program: Any, atoms: Sequence[Any]) -> list[Any]:
            consts = getattr(program, "consts", ())
            inner = getattr(program, "jaxpr", program)
            outs = eval_jaxpr(inner, consts, *map(operand, atoms))
            return [_constrained(x, mesh) for x in outs]

        count = _num_wanted(eqn) or 0
        outs = compute(eqn.params["jaxpr"], eqn.invars)
        for i, (var, array) in enumerate(zip(eqn.outvars, outs)):
            is_kept = i >= count and self._is_divided(var)
            env[var] = _Value(array, Layout.SHARDED if is_kept else Layout.MIRRORED)
        wanted = list(filter(_is_used, eqn.outvars[:count]))
        program, moved = self._followers(wanted, rest, env)
        taken = {v for e in moved for v in variables_of(e.invars)}
        whole = [v for v in wanted if v not in taken]
        arrays = [env[v].array for v in whole]
        arrays += compute(program, program.invars) if moved else []
        for var, array in zip(whole + program.outvars, self._joined(arrays)):
            env[var] = _Value(array, Layout.MIRRORED)
        gone = set(map(id, moved))
        return [e for e in rest if id(e) not in gone]

    def _followers(
        self, wanted: Sequence[Any], rest: list[Any], env: dict[Any, Any]
    ) -> tuple[Jaxpr, list[Any]]:
        """What can be done to parts of the `wanted` arrays instead of to the whole.

        A program that gives what is to be gathered in place of arrays that only it uses, and
        those of its equations that replicas need not compute any more.
        """
        uses = Counter(v for eqn in rest for v in variables_of(eqn.invars))
        uses.update(variables_of(self._jaxpr.outvars))
        parts = {v for v in wanted if self._is_divided(v) and uses[v] == 1}
        ready = {v for v, x in env.items() if not x.layout.is_split} - set(wanted)
        possible, moved = [], []
        for eqn in rest:
            reads = variables_of(eqn.invars)
            is_known = all(v in parts or v in ready for v in reads)
            if eqn.primitive.name not in _ELEMENTWISE or not is_known:
                continue
            possible.append(eqn)
            if any(v in parts for v in reads):
                moved.append(eqn)
                parts.update(v for v in eqn.outvars if uses[v] == 1)
            else:  # perhaps for one that follows: a parameter in another dtype
                ready.update(eqn.outvars)
        taken = {v for e in moved for v in variables_of(e.invars)}
        results = [v for e in moved for v in e.outvars if v not in taken]
        replaced = [v for v in wanted if v in taken]
        if sum(map(_num_bytes, results)) > sum(map(_num_bytes, replaced)):
            results = moved = []  # wider ones: more would be gathered
        needed, eqns = dict.fromkeys(results), []  # in an order that all workers have
        for eqn in reversed(possible):
            if any(v in needed for v in eqn.outvars):
                needed |= dict.fromkeys(variables_of(eqn.invars))
                eqns.append(eqn)
        made = {v for eqn in eqns for v in eqn.outvars}
        reads = [v for v in needed if v not in made]
        return sub_program(self._jaxpr, eqns[::-1], reads, results), moved

    def _is_divided(self, var: Any) -> bool:
        return self._mesh.sharded_axis(var.aval.shape) is not None

    def _joined(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Arrays that lie in parts, with a copy on every device."""
        mesh, results = self._mesh, list(arrays)
        axes = {i: mesh.sharded_axis(x.shape) for i, x in enumerate(arrays)}
        axes = {i: axis for i, axis in axes.items() if axis is not None}
        if axes:
            shapes = tuple(arrays[i].shape for i in axes)
            join = JoinProgram(mesh, shapes)
            joined = jax.shard_map(
                join,
                mesh=mesh.mesh,
                in_specs=([mesh.sharded(shape).spec for shape in shapes],),
                out_specs=PartitionSpec(),
                check_vma=False,
            )([arrays[i] for i in axes])
            results = [*arrays]
            for i, array in zip(axes, joined):
                results[i] = array
        return results


def _num_bytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize


def _is_used(var: Any) -> bool:
    return type(var).__name__ != "DropVar"


def _is_joining(eqn: Any) -> bool:
    """Whether `eqn` puts all replicas' parts together."""
    params = eqn.params
    return (
        eqn.primitive.name == "all_gather"
        and params.get("tiled")
        and "all_gather_dimension" in params
        and params.get("axis_name") in (AXIS_NAME, (AXIS_NAME,))
        and params.get("axis_index_groups") is None
        and not isinstance(eqn.invars[0], Literal)
    )


def _constrained(array: Any, mesh: ReplicaMesh) -> Any:
    return lax.with_sharding_constraint(array, mesh.sharded(jnp.shape(array)))
