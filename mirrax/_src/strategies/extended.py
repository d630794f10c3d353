"""`StrategyExtended`: the methods for library authors, each a short call to the real thing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax

from mirrax._src.base import context
from mirrax._src.base.devices import device_kind, device_name
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.reduce_op import (
    ReduceOp,
    VariableSynchronization,
)
from mirrax._src.base.sparse import IndexedSlices
from mirrax._src.base.values import (
    Fn,
    Kwargs,
    PerReplica,
    PyTree,
    ReplicaValues,
    check_parts,
    is_number,
    only_part,
)
from mirrax._src.collectives.algorithms import NcclAllReduce
from mirrax._src.collectives.destinations import copy_to, destination_devices
from mirrax._src.collectives.ops import (
    CrossDeviceOps,
    check_destinations,
    check_pairs,
)
from mirrax._src.collectives.options import (
    CommunicationImplementation,
    CommunicationOptions,
)
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.feeding import numpy_dataset
from mirrax._src.state.distributed import ComponentVariable, DistributedVariable
from mirrax._src.state.mirrored import MirroredVariable
from mirrax._src.state.on_read import SyncOnReadVariable
from mirrax._src.state.variable import OrdinaryVariable, Variable, VariableSpec
from mirrax._src.strategies.reducing import is_reducible, reduce_over_workers
from mirrax._src.strategies.scope import check_cross_replica
from mirrax._src.strategies.updating import update_copies

# What `non_slot_devices` and `update_non_slot` pass on.
Devices = tuple[str, ...]


class StrategyExtended:
    """Methods of a strategy that libraries (optimizers, metrics) are built with."""

    __module__ = "mirrax.distribute"
    _worker_name = "/job:localhost/replica:0/task:0"

    def __init__(
        self,
        cross_device_ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        self._cross_device_ops = cross_device_ops or NcclAllReduce()
        self._options = options
        self._strategy: Any = None

    def attach(self, strategy: StrategyLike) -> None:
        """Tells whose extension this is."""
        self._strategy = strategy

    # What it is ----------------------------------------------------------------------

    @property
    def device_names(self) -> Devices:
        mesh = self._strategy.replica_mesh
        devices = mesh.local_devices if mesh else jax.local_devices()[:1]
        return tuple(device_name(device) for device in devices)

    @property
    def worker_devices(self) -> Devices:
        """The devices that run replicas on this worker, by their full names."""
        return tuple(f"{self._worker_name}/device:{n}" for n in self.device_names)

    @property
    def parameter_devices(self) -> Devices:
        """The devices that hold variables on this worker, by their full names."""
        return self.worker_devices

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """How this strategy reduces and copies."""
        return self._cross_device_ops

    @property
    def should_checkpoint(self) -> bool:
        """Whether this worker writes checkpoints."""
        return True

    @property
    def should_save_summary(self) -> bool:
        """Whether this worker writes summaries."""
        return True

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether every batch must have the same shape: it need not."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each worker builds a program of its own."""
        return False

    @property
    def experimental_should_init(self) -> bool:
        """Whether this worker initialises variables."""
        return True

    # Variables -----------------------------------------------------------------------

    def create_variable(self, spec: VariableSpec) -> Variable:
        """The variable that `mx.Variable(...)` gives in the current context."""
        here = context.current()
        is_alone = self._strategy.num_replicas_in_sync == 1
        if here.replica is None or here.frame is not None or is_alone:
            return self._create(spec)

        def merge(strategy: StrategyLike, specs: Any) -> Variable:
            parts = strategy.experimental_local_results(specs)
            return self._create(_same_spec(parts, strategy))

        return here.replica.merge("mx.Variable", merge, (spec,))

    def _create(self, spec: VariableSpec) -> Variable:
        colocate = context.current().colocate_with
        if colocate is not None and not isinstance(colocate, DistributedVariable):
            return OrdinaryVariable(spec)
        if spec.synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable(spec, self._strategy)
        return MirroredVariable(spec, self._strategy)

    def colocate_vars_with(
        self, colocate_with_variable: Variable
    ) -> contextlib.AbstractContextManager[Any]:
        """A scope in which new variables lie on the devices of `colocate_with_variable`."""
        if not isinstance(colocate_with_variable, Variable):
            raise ValueError(
                "`colocate_vars_with` takes a variable that was made in this strategy's "
                f"scope, got {colocate_with_variable!r}."
            )
        is_distributed = isinstance(colocate_with_variable, DistributedVariable)
        if is_distributed and not self.variable_created_in_scope(
            colocate_with_variable
        ):
            raise ValueError(
                f"Variable {colocate_with_variable.name!r} was made in the scope of another "
                "strategy; variables cannot be colocated with it here."
            )
        if context.current().strategy is not self._strategy:
            raise RuntimeError(
                "`colocate_vars_with` may only be used inside `strategy.scope()`."
            )
        return context.changed(colocate_with=colocate_with_variable)

    def experimental_make_numpy_dataset(
        self, numpy_input: PyTree, session: None = None
    ) -> Dataset:
        """The rows of arrays in memory as a dataset. There are no sessions: leave it out."""
        return numpy_dataset(numpy_input, session)

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether `v` was made in this strategy's scope."""
        return v.strategy is self._strategy

    def read_var(self, v: Variable) -> jax.Array:
        """The value of a variable, combined if it is synchronised when read."""
        if not isinstance(v, Variable):
            raise TypeError(f"`read_var` takes a variable, got {v!r}.")
        return v.read_value()

    # Reducing ------------------------------------------------------------------------

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """`value` of all replicas combined, with a copy on each device of `destinations`.

        Args:
            reduce_op: `ReduceOp.SUM`, `ReduceOp.MEAN` or their names.
            value: A per-replica value.
            destinations: A variable, a distributed value, a device or a list of devices.
            options: How the reduction travels.
        """
        return self.batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Several `reduce_to` in one, so that small values travel together."""
        self._check_cross_replica("batch_reduce_to")
        options = options or self._options
        self.check_options(options)
        op = ReduceOp(reduce_op)
        pairs = check_pairs(value_destination_pairs)
        flat = [jax.tree.flatten(value, is_leaf=is_reducible) for value, _ in pairs]
        each = [
            (leaf.copies() if isinstance(leaf, DistributedVariable) else leaf, d)
            for (leaves, _), (_, d) in zip(flat, pairs)
            for leaf in leaves
        ]
        it = iter(self._reduce_each(op, each, options))
        return [jax.tree.unflatten(tree, [next(it) for _ in ls]) for ls, tree in flat]

    def _reduce_each(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None,
    ) -> list[Any]:
        """Those that replicas have parts of together, the others one by one."""
        spread = [(self._at_home(v), d) for v, d in pairs if self._is_spread(v)]
        reduce = self._cross_device_ops.batch_reduce
        reduced = iter(reduce(op, spread, options) if spread else ())
        return [
            next(reduced) if self._is_spread(v) else self._reduce_alone(op, v, d)
            for v, d in pairs
        ]

    def _is_spread(self, value: Any) -> bool:
        if isinstance(value, IndexedSlices):
            return self._is_spread(value.values)
        return isinstance(value, PerReplica) and self._strategy.num_replicas_in_sync > 1

    def _at_home(self, value: Any) -> Any:
        """`value`, whose parts belong to this strategy's devices if nobody has said where."""
        if isinstance(value, IndexedSlices):
            slices = (self._at_home(value.values), self._at_home(value.indices))
            return IndexedSlices(*slices, value.dense_shape)
        mesh = self._strategy.replica_mesh
        if isinstance(value, PerReplica) and value.mesh is None:
            check_parts(value, len(mesh.local_ids))
            return PerReplica(value.values, value.shapes, mesh)
        return value

    def _reduce_alone(self, op: ReduceOp, value: Any, destinations: Any) -> Any:
        """A reduction of a value that is the same on all replicas."""
        count = self._strategy.num_replicas_in_sync
        if isinstance(value, IndexedSlices):
            return value
        if isinstance(value, ReplicaValues):
            if count == 1:
                value = only_part(value)
            elif op is ReduceOp.SUM:
                whole = value.array if value.array is not None else value.values[0]
                value = whole * count
        elif self._is_of_each_worker(value):
            value = reduce_over_workers(self._strategy.replica_mesh, op, value, (), "")
        elif op is ReduceOp.SUM and count > 1:
            if is_number(value) and value == 0:
                return value
            raise ValueError(
                f"{value!r} is not distributed, so whether a SUM should count it once or once "
                "per replica is ambiguous. Pass a per-replica value."
            )
        return copy_to(value, check_destinations(destinations))

    def _is_of_each_worker(self, value: Any) -> bool:
        """Whether a plain value is one of this worker, which counts once for it."""
        mesh = self._strategy.replica_mesh
        is_traced = isinstance(value, Tracer) or context.current().frame is not None
        return mesh is not None and mesh.spans_workers and not is_traced

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """`tensor` with a copy on each device of `destinations`."""
        self._check_cross_replica("broadcast_to")
        return self._cross_device_ops.broadcast(tensor, destinations)

    # Updating ------------------------------------------------------------------------

    def update(
        self,
        var: Variable,
        fn: Fn,
        args: Sequence[Any] = (),
        kwargs: Kwargs | None = None,
        group: bool = True,
    ) -> PyTree:
        """Calls `fn(copy, *args, **kwargs)` for each copy of `var`, on its device.

        Distributed arguments arrive as the part that belongs to the copy.

        Args:
            var: A variable.
            fn: The function; its first argument is one copy, a variable of its own.
            args: More arguments.
            kwargs: Keyword arguments.
            group: Whether the results come back as one value; else as one for each copy.
        """
        if not isinstance(var, Variable):
            raise TypeError(f"`update` takes a variable, got {type(var).__name__}.")
        call = (group, fn, args, kwargs)
        return update_copies(self._strategy, "update", var, None, *call)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Fn,
        args: Sequence[Any] = (),
        kwargs: Kwargs | None = None,
        group: bool = True,
    ) -> PyTree:
        """Calls `fn(*args, **kwargs)` on each device of `colocate_with`."""
        mesh = self._strategy.replica_mesh
        devices = destination_devices(check_destinations(colocate_with))
        if mesh is not None and set(devices) - set(mesh.local_devices):
            raise ValueError(
                "`colocate_with` must be what `non_slot_devices` returned: devices of this "
                "strategy."
            )
        call = (group, fn, args, kwargs)
        return update_copies(self._strategy, "update_non_slot", None, devices, *call)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Devices:
        """The devices for state that belongs to no single variable of `var_list`."""
        return self.worker_devices

    # Running and showing --------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Fn, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Calls `fn` once per replica; the older name of `strategy.run`."""
        self._check_cross_replica("call_for_each_replica")
        return self._strategy.run(fn, args, kwargs)

    def value_container(self, value: Any) -> Any:
        """The variable that a copy belongs to; any other value as it is."""
        return value.whole if isinstance(value, ComponentVariable) else value

    def check_options(self, options: CommunicationOptions | None) -> None:
        """Raises for a transport that the devices do not have; takes note of a time limit."""
        mesh = self._strategy.replica_mesh
        if options is None or mesh is None:
            return
        if mesh.spans_workers and options.timeout_seconds is not None:
            mesh.cluster.limit_waiting(options.timeout_seconds)
        if options.implementation is not CommunicationImplementation.NCCL:
            return
        others = [d for d in mesh.devices if device_kind(d) != "GPU"]
        if others:
            raise ValueError(
                f"`implementation=NCCL` needs GPUs, but a replica runs on "
                f"{device_name(others[0])}. Use AUTO or RING."
            )

    def _check_cross_replica(self, what: str) -> None:
        advice = (
            "Call it in cross-replica context: outside `run`, or in the function that you "
            "pass to `merge_call`."
        )
        check_cross_replica(self._strategy, what, advice)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(of {self._strategy!r})"


def _same_spec(specs: Sequence[VariableSpec], strategy: StrategyLike) -> VariableSpec:
    """The one spec that all replicas asked for; the first replica's initial value counts."""
    first = specs[0]
    for i, spec in enumerate(specs):
        for field in ("name", "dtype", "trainable", "synchronization", "aggregation"):
            mine, theirs = getattr(spec, field), getattr(first, field)
            if mine != theirs:
                raise ValueError(
                    f"Replicas make different variables at the same place: {field} is "
                    f"{theirs!r} in {strategy.describe_replica(0)} and {mine!r} in "
                    f"{strategy.describe_replica(i)}."
                )
    return first
