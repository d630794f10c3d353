"""Many steps in one program: a call, traced once, in a loop over elements that are there.

The variables that a step writes are carried from one turn of the loop to the next, and so
are the results where only those of the last step are wanted; else they come out stacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base.mesh import Layout, ReplicaMesh
from mirrax._src.base.values import (
    Fn,
    PerReplica,
    abstract,
    copies_of,
    is_numeric,
    join,
)
from mirrax._src.engines.arguments import Signature
from mirrax._src.engines.jaxprs import convolves
from mirrax._src.engines.trace import trace_call, until_no_new_variables
from mirrax._src.engines.traced import Out, Trace, settled
from mirrax._src.state.variable import Variable


class UnlikeSteps(Exception):
    """The elements are not of one kind, so no one program loops over them."""


class SlowInLoops(Exception):
    """XLA would compile the step to something much slower inside a loop."""


def trace_steps(
    fn: Fn,
    signature: Signature,
    arrays: Sequence[Any],
    mesh: ReplicaMesh | None,
    keep_all: bool,
) -> Trace:
    """`fn(common, element)` for each element, as one program; traced for the first one.

    `signature` and `arrays` are those of `(common, *elements)`. With `keep_all` the results
    of all steps are stacked; else only the last ones come out.

    Raises:
        UnlikeSteps: If the elements differ in structure, shape or what is static.
        SlowInLoops: If a loop would take much longer than single steps.
    """
    one, num_common, steps = _of_one_step(signature, arrays)
    first = arrays[: len(one.layouts())]
    while True:
        traced = until_no_new_variables(lambda: trace_call(fn, one, first, mesh), fn)
        if not split_up(v for v, k in traced.writes.items() if k.is_split):
            break
    device = traced.mesh.devices[0] if traced.mesh is not None else jax.devices()[0]
    if device.platform == "cpu" and convolves(traced.closed.jaxpr):
        raise SlowInLoops  # XLA has its fast convolutions outside loops only
    outs = traced.outs
    if keep_all:
        outs = tuple(_stacked_out(out, steps) for out in outs)
    # A variable may begin with a part for each replica and be written alike on all.
    layouts = {v: v.layout_now() for v in (*traced.reads, *traced.writes)}
    writes = {v: layouts[v] for v in traced.writes}
    result = (), traced.out_tree, outs, traced.mesh, False, steps * traced.runs
    loop = traced, num_common, steps, keep_all
    return _Loop(traced.closed, signature, layouts, writes, *result, *loop)


def split_up(variables: Iterable[Variable]) -> bool:
    """Gives each replica a part of its own of what all have alike; whether any had to."""
    alike = [v for v in variables if not v.layout_now().is_split]
    for variable in alike:
        mesh = variable.strategy.replica_mesh
        copies = PerReplica(copies_of(variable.stored), mesh.equal_shapes(variable))
        join(copies, mesh)
        variable.stored = copies
    return bool(alike)


def _of_one_step(
    signature: Signature, arrays: Sequence[Any]
) -> tuple[Signature, int, int]:
    """The signature of `fn(common, element)`, how many arrays are common, and the steps."""
    by_position, by_name = signature.tree.children()
    common, *trees = by_position.children()
    first = common.num_leaves
    kinds = signature.kinds[: first + trees[0].num_leaves]
    tuple_of = jax.tree_util.treedef_tuple
    one = Signature(tuple_of((tuple_of((common, trees[0])), by_name)), kinds)
    num_common = len(Signature(common, kinds[:first]).layouts())
    width = len(one.layouts()) - num_common
    rest = [abstract(a) for a in arrays[num_common:]]
    if (
        any(tree != trees[0] for tree in trees)
        or signature.kinds[first:] != kinds[first:] * len(trees)
        or rest != rest[:width] * len(trees)
    ):
        raise UnlikeSteps
    return one, num_common, len(trees)


@dataclass(frozen=True)
class _Loop(Trace):
    """The loop over a traced step, whose arguments are `num_common` arrays and an element."""

    step: Trace
    num_common: int
    steps: int
    keep_all: bool

    def apply(
        self, values: Sequence[jax.Array], arrays: Sequence[Any], consts: Sequence[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        known = dict(zip(self.reads, values))
        common, rest = arrays[: self.num_common], arrays[self.num_common :]
        width = len(rest) // self.steps
        elements = [jnp.stack(rest[i::width]) for i in range(width)]
        start = [known[v] for v in self.writes]
        kept = [] if self.keep_all else self.closed.out_avals[: self.num_results]
        nothing = [jnp.zeros(aval.shape, aval.dtype) for aval in kept]

        def turn(carry: Any, element: list[jax.Array]) -> Any:
            now = {**known, **dict(zip(self.writes, carry[0]))}
            reads = [now[v] for v in self.step.reads]
            results, written = self.step.apply(reads, [*common, *element], consts)
            layouts = self.step.writes.values()
            written = [
                x if layout is into else _spread(x, v, into)
                for x, layout, (v, into) in zip(written, layouts, self.writes.items())
            ]
            last, each = ([], results) if self.keep_all else (results, [])
            return (written, last), each

        (written, last), every = lax.scan(turn, (start, nothing), elements, self.steps)
        if self.mesh is not None and Layout.SHARDED in self.writes.values():
            places = zip(written, self.writes.values())
            written = [settled(x, layout, self.mesh) for x, layout in places]
        outs = [out for out in self.step.outs if out.is_array]
        return [*last, *map(_within_replicas, every, outs)], written

    def handed_on(self) -> frozenset[Variable]:
        return self.step.handed_on()


def _within_replicas(array: jax.Array, out: Out) -> jax.Array:
    """From steps, then replicas' rows, to replicas' steps, then rows."""
    mesh = out.mesh
    if out.layout is None or not out.layout.is_split or mesh is None or mesh.size == 1:
        return array
    steps, *whole = array.shape
    own = mesh.part_shape(out.layout, tuple(whole))
    apart = array.reshape(steps, mesh.size, *own).swapaxes(0, 1)
    joined = apart.reshape(mesh.size * steps, *own)
    return lax.with_sharding_constraint(joined, mesh.split)


def _stacked_out(out: Out, steps: int) -> Out:
    """The place of the results of all steps."""
    if out.layout is not None and out.layout.is_split:
        return Out(Layout.SPLIT, out.mesh)
    if out.layout is None and out.argument is None and is_numeric(out.static):
        return Out(static=jnp.stack([jnp.asarray(out.static)] * steps))
    return out


def _spread(array: jax.Array, variable: Variable, layout: Layout) -> jax.Array:
    """The value that all replicas have, with a part for each if `layout` says so."""
    if not layout.is_split:
        return array
    mesh = variable.strategy.replica_mesh
    copies = (mesh.size, *[1] * (array.ndim - 1))
    return lax.with_sharding_constraint(jnp.tile(array, copies), mesh.split)
