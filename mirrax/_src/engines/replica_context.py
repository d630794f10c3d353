"""`ReplicaContext`: what code can ask and do while it runs for one replica."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirrax._src.base import context
from mirrax._src.base.devices import device_name
from mirrax._src.base.errors import RunEagerly, users_line
from mirrax._src.base.hiding import hides
from mirrax._src.base.jax_compat import Device, Tracer, uncommitted
from mirrax._src.base.mesh import AXIS_NAME, Layout
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.reduce_op import ReduceOp
from mirrax._src.base.sparse import IndexedSlices
from mirrax._src.base.structures import opened
from mirrax._src.base.values import (
    Args,
    Fn,
    Kwargs,
    Mirrored,
    PerReplica,
    PyTree,
    is_array,
    is_leaf,
    parts_of,
    regroup,
)
from mirrax._src.collectives.destinations import copy_to
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.engines.meeting import Meeting, Request


@hides("local_index", "merge", "rejoined")
class ReplicaContext:
    """The current replica: its id, and collectives with the other replicas.

    >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> def replica_fn(x):
    ...     return mx.distribute.get_replica_context().all_reduce("sum", x)
    >>> strategy.run(replica_fn, args=(jnp.float32(2),))
    Mirrored:{
      0: Array(4., dtype=float32),
      1: Array(4., dtype=float32)
    }
    """

    __module__ = "mirrax.distribute"
    _own_index: int | None = 0  # which part of a merged result is this replica's

    def __init__(self, strategy: StrategyLike, local_index: int = 0) -> None:
        self._strategy = strategy
        self.local_index = local_index

    @property
    def strategy(self) -> StrategyLike:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are summed."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        """This replica's number, from 0 to `num_replicas_in_sync` - 1; an int32 array."""
        return _replica_id(*self._strategy.place_of(self.local_index))

    @property
    def devices(self) -> tuple[str, ...]:
        """The device that this replica runs on, in a tuple of one."""
        return (device_name(self._strategy.place_of(self.local_index)[1]),)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        options: CommunicationOptions | None = None,
    ) -> PyTree:
        """`value`, summed or averaged over all replicas; every replica gets the result.

        Small arrays of a nested value travel together. The gradient is the same reduction
        of the replicas' gradients, as in TensorFlow.

        Args:
            reduce_op: `ReduceOp.SUM`, `ReduceOp.MEAN` or their names, in any case.
            value: An array, an `IndexedSlices`, or a nested structure of them.
            options: How the reduction travels.
        """
        op = ReduceOp(reduce_op)
        leaves, tree = jax.tree.flatten(opened(value, "value"), is_leaf=_is_sparse)
        leaves = [leaf if _is_sparse(leaf) else jnp.asarray(leaf) for leaf in leaves]

        def merge(strategy: StrategyLike, *values: Any) -> list[Any]:
            pairs = [(v, v.values if _is_sparse(v) else v) for v in values]
            reduced = strategy.extended.batch_reduce_to(op, pairs, options)
            # A user's own algorithm may return one plain array for all.
            return [
                copy_to(r, v) if isinstance(r, jax.Array) else r
                for r, v in zip(reduced, values)
            ]

        def pull_back(leaves: list[Any], gradients: list[Any]) -> list[Any]:
            whole = [g.values if _is_sparse(g) else g for g in gradients]
            own = self.all_reduce(op, whole, options)
            sparse = [i for i, leaf in enumerate(leaves) if _is_sparse(leaf)]
            rows = [leaves[i].values for i in sparse]  # which were joined
            parts = self._own_slices(rows, [own[i] for i in sparse], 0)
            for i, part in zip(sparse, parts):
                own[i] = _gradient_like(leaves[i], part)
            return own

        what = "all_reduce", f"{op.name} of {_show_tree(tree)}"
        return tree.unflatten(self._collective(what, merge, pull_back, leaves))

    def all_gather(
        self, value: PyTree, axis: int, options: CommunicationOptions | None = None
    ) -> PyTree:
        """The replicas' values joined along `axis`; every replica gets the result.

        In an eager run their lengths along `axis` may differ.
        """
        leaves, tree = jax.tree.flatten(opened(value, "value"), is_leaf=_is_sparse)
        if any(map(_is_sparse, leaves)):
            raise NotImplementedError(
                "`all_gather` does not support IndexedSlices, got "
                f"{next(filter(_is_sparse, leaves))!r}; gather their values and indices."
            )
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        for leaf in leaves:
            check_gather_axis(leaf, axis)

        def merge(strategy: StrategyLike, *values: Any) -> list[Any]:
            mesh = strategy.replica_mesh
            whole = [strategy.gather_everywhere(v, axis) for v in values]
            return whole if mesh is None else [Mirrored.of(w, mesh) for w in whole]

        def pull_back(leaves: list[Any], gradients: list[Any]) -> list[Any]:
            summed = self.all_reduce(ReduceOp.SUM, gradients, options)
            return self._own_slices(leaves, summed, axis)

        what = "all_gather", f"along axis {axis} of {_show_tree(tree)}"
        return tree.unflatten(self._collective(what, merge, pull_back, leaves))

    def merge_call(
        self, merge_fn: Fn, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Pauses all replicas and calls `merge_fn(strategy, *args, **kwargs)` once.

        `merge_fn` runs in cross-replica context; arguments that differ between replicas
        arrive as per-replica values. Each replica gets its own part of the result.
        """
        if not callable(merge_fn):
            raise TypeError(f"`merge_fn` must be a function, got {merge_fn!r}.")
        given = tuple(args), dict(kwargs or {})
        opened(given, "argument")
        result = self.merge("merge_call", merge_fn, *given)
        opened(result, "result")
        return result

    def merge(
        self, what: str, merge_fn: Fn, args: Args, kwargs: Any = None, detail: str = ""
    ) -> PyTree:
        """A `merge_call` that messages call `what`; `detail` must be equal on all replicas."""
        # One replica, or the program of all: `merge_fn` runs here and now.
        with context.changed(replica=None, updating=None):
            result = merge_fn(self._strategy, *args, **kwargs or {})
        return parts_of(result, self._strategy.replica_mesh, self._own_index)

    def _own_slices(
        self, leaves: list[Any], gathered: list[Any], axis: int
    ) -> list[Any]:
        """Of values that were gathered, what has come from this replica's `leaves`."""
        if not leaves:
            return []
        lengths = [leaf.shape[axis] for leaf in leaves]
        own = tuple(map(np.int32, lengths))
        starts = self.merge("all_gather", _start_positions, own)
        every = zip(gathered, starts, lengths)
        return [lax.dynamic_slice_in_dim(g, at, n, axis) for g, at, n in every]

    def _collective(
        self, what: tuple[str, str], merge: Fn, pull_back: Fn, leaves: list[Any]
    ) -> list[Any]:
        """What `merge` makes of all replicas' leaves.

        `pull_back` is its gradient, for eager replicas; a program has one of its own.
        """
        name, detail = what
        return list(self.merge(name, merge, tuple(leaves), detail=detail))

    def __repr__(self) -> str:
        return f"ReplicaContext({self._strategy.describe_replica(self.local_index)})"


class SpmdReplicaContext(ReplicaContext):
    """Every replica at once, while one program is traced for all of them."""

    __module__ = "mirrax.distribute"
    _own_index = None

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        return lax.axis_index(AXIS_NAME)

    @property
    def devices(self) -> tuple[str, ...]:
        raise RuntimeError(
            "`devices` of a replica is not known in a compiled function, which is one "
            "program for all replicas; use `strategy.extended.worker_devices`."
        )

    def merge(
        self, what: str, merge_fn: Fn, args: Args, kwargs: Any = None, detail: str = ""
    ) -> PyTree:
        mesh = self._strategy.replica_mesh

        def spread(leaf: Any) -> Any:
            if isinstance(leaf, Mirrored) and leaf.array is not None:
                leaf = leaf.array
            if isinstance(leaf, Tracer) and mesh.size > 1:
                return PerReplica.of(leaf, mesh, Layout.OWN)
            return leaf

        given = opened((args, kwargs))
        args, kwargs = jax.tree.map(spread, given, is_leaf=is_leaf)
        return super().merge(what, merge_fn, args, kwargs)

    def _collective(self, what: Any, merge: Fn, pull_back: Fn, leaves: Any) -> Any:
        # An array that the function closes over is every replica's, and counts for each.
        def own(leaf: Any) -> Any:
            is_real = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
            return jnp.copy(leaf) if is_real else leaf

        return super()._collective(what, merge, pull_back, list(map(own, leaves)))


class EagerReplicaContext(ReplicaContext):
    """One replica that runs as plain Python on a thread of its own."""

    __module__ = "mirrax.distribute"

    def __init__(
        self,
        strategy: StrategyLike,
        local_index: int,
        meeting: Meeting,
        caller: context.Context,
        mirrored_results: dict[int, tuple[Any, Mirrored]],
    ) -> None:
        super().__init__(strategy, local_index)
        self._meeting = meeting
        self._caller = caller
        self._mirrored_results = mirrored_results

    def _collective(self, what: Any, merge: Fn, pull_back: Fn, leaves: Any) -> Any:
        # What `jax.grad` can go through: the values meet, and so do the gradients.
        meet = functools.partial(super()._collective, what, merge, pull_back)
        if not any(isinstance(x, Tracer) for x in jax.tree.leaves(leaves)):
            return meet(leaves)
        meet = jax.custom_vjp(meet)
        meet.defvjp(
            lambda leaves: (meet(leaves), leaves),
            lambda leaves, gradients: (pull_back(leaves, gradients),),
        )
        return meet(leaves)

    def merge(
        self, what: str, merge_fn: Fn, args: Args, kwargs: Any = None, detail: str = ""
    ) -> PyTree:
        frame = context.current().frame
        if frame is not None and frame.mode.is_traced:
            raise RunEagerly(f"`{what}` while a part of an eager replica is traced")
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(opened((args, kwargs)))):
            raise RuntimeError(
                f"`{what}` ({users_line()}) is called on values that JAX is tracing "
                "(`jax.jit`, `jax.grad`, `lax.scan`, ...) in an eager replica, where "
                "replicas can only exchange real values. Wrap the replica function in "
                "`mx.function`."
            )
        act = functools.partial(self._act, what)
        payload = merge_fn, args, kwargs or {}
        request = Request(what, detail, users_line(), act, payload)
        return self._meeting.meet(self.local_index, request)

    def _act(self, what: str, payloads: list[Any]) -> list[Any]:
        """Done once, on the caller's thread, when all replicas have arrived."""
        merge_fn, merge_fn_is_users = payloads[0][0], what == "merge_call"
        mesh = self._strategy.replica_mesh

        def may_stay_one(leaf: Any) -> bool:
            # What replicas bring to a collective counts once for each, also if equal.
            return merge_fn_is_users and not (mesh.spans_workers and is_array(leaf))

        args, kwargs = regroup(
            [payload[1:] for payload in payloads],
            self._strategy.describe_replica,
            lambda parts: PerReplica(parts, mesh=mesh),
            may_stay_one,
        )
        with context.enter(self._caller):
            result = merge_fn(self._strategy, *args, **kwargs)
        for leaf in jax.tree.leaves(opened(result), is_leaf=is_leaf):
            if isinstance(leaf, Mirrored):
                # The array is kept too, so that its id stays its own.
                self._mirrored_results.update((id(v), (v, leaf)) for v in leaf.values)
        return [parts_of(result, mesh, i) for i in range(len(payloads))]

    def rejoined(self, tree: PyTree) -> PyTree:
        """`tree`, with the copies of what a collective has returned as one value again."""

        def rejoin(leaf: Any) -> Any:
            if not isinstance(leaf, PerReplica):
                return leaf
            known = [
                self._mirrored_results.get(id(v), (v, None))[1] for v in leaf.values
            ]
            is_one = known[0] is not None and all(k is known[0] for k in known)
            return known[0] if is_one else leaf

        return jax.tree.map(rejoin, tree, is_leaf=is_leaf)


def _start_positions(strategy: StrategyLike, *lengths: Any) -> list[PerReplica]:
    """Where each replica's part of a gathered value begins."""
    mesh = strategy.replica_mesh
    starts = []
    for own in map(strategy.experimental_local_results, lengths):
        rows = [((int(n),), "int32") for n in own]
        if mesh.spans_workers:
            rows = mesh.agreed_shapes([np.empty(n, np.int8) for n in own])
        ends = np.cumsum([0, *(shape[0] for shape, _ in rows)]).astype(np.int32)
        starts.append(PerReplica(ends[i] for i in mesh.local_ids))
    return starts


def _show_tree(tree: Any) -> str:
    return str(tree).removeprefix("PyTreeDef(").removesuffix(")")


def check_gather_axis(value: Any, axis: int) -> None:
    """Raises the error of a gather that cannot be: scalars, or an axis that is not there."""
    ndim = np.ndim(value)
    if axis is None:
        raise ValueError(f"`axis` must be the axis to join the parts on, got {axis}.")
    if ndim == 0:
        raise ValueError(
            f"Scalars cannot be gathered: they have no axis {axis} to concatenate along. "
            "Reshape them to (1,) first, or use `experimental_local_results`."
        )
    if not -ndim <= axis < ndim:
        raise ValueError(f"Axis {axis} is out of range for a value with {ndim} axes.")


def _is_sparse(value: Any) -> bool:
    return isinstance(value, IndexedSlices)


def _gradient_like(slices: IndexedSlices, rows: jax.Array) -> IndexedSlices:
    """The gradient `rows` of a value's; its indices have none."""
    _, *others = jax.tree.leaves(slices)
    return jax.tree.structure(slices).unflatten([rows, *[None] * len(others)])


@functools.lru_cache(maxsize=1024)
def _replica_id(replica_id: int, device: Device) -> jax.Array:
    with jax.ensure_compile_time_eval():  # also when it is asked for in a trace
        return uncommitted(jax.device_put(np.int32(replica_id), device))
