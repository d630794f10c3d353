"""Many steps in one program: a call, traced once, in a loop over elements that are there.

The variables that a step writes are carried from one turn of the loop to the next, and so
are the results where only those of the last step are wanted; else they come out stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mirrax._src.base.jax_compat import Jaxpr
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.values import (
    PerReplica,
    PyTree,
    copies_of,
    is_array,
    is_number,
    stack,
)
from mirrax._src.engines.invariance import sub_jaxprs
from mirrax._src.engines.program import Staged
from mirrax._src.engines.signature import (
    SAME,
    SPLIT,
    Kind,
    Signature,
    Split,
    Static,
)
from mirrax._src.engines.spmd import layout_in
from mirrax._src.engines.staging import (
    CallTrace,
    aval_of,
    forwarded,
    on_every_worker,
    spanning,
    trace_call,
    until_no_new_variables,
)
from mirrax._src.state.variable import Variable


class UnlikeSteps(Exception):
    """The elements are not of one kind, so no one program loops over them."""


class SlowInLoops(Exception):
    """XLA would compile the step to something much slower inside a loop."""


def stage_steps(
    fn: Callable[..., PyTree],
    signature: Signature,
    arrays: Sequence[Any],
    mesh: ReplicaMesh | None,
    keep_all: bool,
) -> Staged:
    """`fn(common, element)` for each element, as one program.

    Args:
        fn: The function; it is traced for the first element.
        signature: That of `(common, *elements)`.
        arrays: The arrays of these arguments.
        mesh: Where they lie.
        keep_all: Whether the results of all steps are wanted, stacked; else the last ones.

    Raises:
        UnlikeSteps: If the elements differ in structure, shape or what is static.
        SlowInLoops: If a loop would take much longer than single steps.
    """
    one, num_common, width = _of_one_step(signature, arrays)
    first = arrays[: num_common + width]
    while True:
        traced = until_no_new_variables(lambda: trace_call(fn, one, first, mesh), fn)
        split = [v for v, k in traced.writes.items() if isinstance(k, Split)]
        if not split_up(split):
            break
    if _is_slow_in_loops(traced):
        raise SlowInLoops
    loop = _Loop(traced, num_common, width, _num_steps(signature), keep_all)
    reads = {v: layout_in(v, v.stored)[0] for v in (*traced.reads, *traced.writes)}
    return Staged(
        signature=signature,
        reads=reads,
        writes=loop.carried,
        apply=on_every_worker(
            lambda values, arrays: loop.run(dict(zip(reads, values)), arrays),
            loop.out_kinds,
            traced.mesh,
        ),
        consts=spanning(traced.code.closed.consts),
        result=replace(traced.code, out_kinds=loop.out_kinds).result,
        mesh=traced.mesh,
        moves_arguments=traced.mesh is not None and traced.mesh != mesh,
        forwarded=forwarded(
            traced.code.closed.jaxpr,
            traced.reads,
            traced.writes,
            traced.code.num_results,
        ),
    )


def _is_slow_in_loops(traced: CallTrace) -> bool:
    """Whether a step convolves on CPUs: XLA has its fast convolutions outside loops only."""
    device = traced.mesh.devices[0] if traced.mesh is not None else jax.devices()[0]
    return device.platform == "cpu" and _convolves(traced.code.closed.jaxpr)


def _convolves(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive is lax.conv_general_dilated_p
        or any(map(_convolves, sub_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def split_up(variables: Iterable[Variable]) -> bool:
    """Gives each replica a part of its own of what all have alike; whether any had to."""
    alike = [v for v in variables if layout_in(v, v.stored)[0] == SAME]
    for variable in alike:
        copies = PerReplica(copies_of(variable.stored))
        stack(copies, variable.strategy.replica_mesh)
        variable.stored = copies
    return bool(alike)


def _num_steps(signature: Signature) -> int:
    return len(signature.tree.children()[0].children()) - 1


def _of_one_step(
    signature: Signature, arrays: Sequence[Any]
) -> tuple[Signature, int, int]:
    """The signature of `fn(common, element)`, and how many arrays each of the two has."""
    args_tree, kwargs_tree = signature.tree.children()
    common_tree, *trees = args_tree.children()
    first = common_tree.num_leaves
    size = trees[0].num_leaves
    kinds = signature.kinds[: first + size]
    tuple_of = jax.tree_util.treedef_tuple
    one = Signature(tuple_of((tuple_of((common_tree, trees[0])), kwargs_tree)), kinds)
    num_common = len(Signature(common_tree, kinds[:first]).array_kinds())
    width = len(one.array_kinds()) - num_common
    rest = [aval_of(a) for a in arrays[num_common:]]
    alike = (
        all(tree == trees[0] for tree in trees)
        and signature.kinds[first:] == kinds[first:] * len(trees)
        and rest == rest[:width] * len(trees)
    )
    if not alike:
        raise UnlikeSteps
    return one, num_common, width


class _Loop:
    """The loop over a traced step."""

    def __init__(
        self,
        traced: CallTrace,
        num_common: int,
        width: int,
        steps: int,
        keep_all: bool,
    ) -> None:
        self._traced = traced
        self._num_common, self._width, self._steps = num_common, width, steps
        self._keep_all = keep_all
        # A variable may begin with a part for each replica and be written alike on all.
        self.carried = {v: layout_in(v, v.stored)[0] for v in traced.writes}
        code = traced.code
        self.out_kinds = (
            tuple(_stacked_kind(k, steps) for k in code.out_kinds)
            if keep_all
            else code.out_kinds
        )

    def run(
        self, values: dict[Variable, jax.Array], arrays: Sequence[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The arrays of the results, and the last values of what was written."""
        code, width = self._traced.code, self._width
        end = self._num_common + width * self._steps
        common, rest, consts = (
            arrays[: self._num_common],
            arrays[self._num_common : end],
            arrays[end:],
        )
        elements = [jnp.stack(rest[i::width]) for i in range(width)]
        start = [values[v] for v in self.carried]

        def step(carry: list[jax.Array], element: list[jax.Array]) -> Any:
            now = {**values, **dict(zip(self.carried, carry))}
            reads = [now[v] for v in self._traced.reads]
            results, written = code.apply(reads, [*common, *element, *consts])
            kinds = self._traced.writes.values()
            written = [
                x if kind == into else _spread(x, v, into)
                for x, kind, (v, into) in zip(written, kinds, self.carried.items())
            ]
            return written, results

        if self._keep_all:
            written, results = lax.scan(step, start, elements, length=self._steps)
            return self._stacked(results), written
        shapes = code.closed.out_avals[: code.num_results]
        nothing = [jnp.zeros(s.shape, s.dtype) for s in shapes]
        (written, results), _ = lax.scan(
            lambda carry, element: (step(carry[0], element), None),
            (start, nothing),
            elements,
            length=self._steps,
        )
        return results, written

    def _stacked(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        """The steps as the first axis within each replica, where results are split."""
        code = self._traced.code
        places = [
            (kind, mesh)
            for kind, mesh in zip(code.out_kinds, code.out_meshes)
            if not isinstance(kind, Static)
        ]
        return [_within_replicas(r, *place) for r, place in zip(results, places)]


def _within_replicas(
    array: jax.Array, kind: Kind, mesh: ReplicaMesh | None
) -> jax.Array:
    """From steps, then replicas' rows, to replicas' steps, then rows."""
    if not isinstance(kind, Split) or mesh is None or mesh.size == 1:
        return array
    steps, rows = array.shape[:2]
    own = () if kind.is_scalar else (rows // mesh.size,)
    apart = array.reshape(steps, mesh.size, *own, *array.shape[2:]).swapaxes(0, 1)
    whole = apart.reshape(mesh.size * steps, *own, *array.shape[2:])
    return lax.with_sharding_constraint(whole, mesh.split)


def _stacked_kind(kind: Kind, steps: int) -> Kind:
    if isinstance(kind, Split):
        return SPLIT
    if isinstance(kind, Static) and (
        is_array(kind.value) or is_number(kind.value) or isinstance(kind.value, bool)
    ):
        return Static(jnp.stack([jnp.asarray(kind.value)] * steps))
    return kind


def _spread(array: jax.Array, variable: Variable, kind: Kind) -> jax.Array:
    """The value that all replicas have, with a part for each if `kind` is that."""
    if not isinstance(kind, Split):
        return array
    mesh = variable.strategy.replica_mesh
    copies = (mesh.size,) if kind.is_scalar else (mesh.size, *[1] * (array.ndim - 1))
    return lax.with_sharding_constraint(jnp.tile(array, copies), mesh.split)
