"""`StrategyExtended`: the methods for library authors, each a short call to the real thing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mirrax._src.base import context
from mirrax._src.base.context import Context
from mirrax._src.base.devices import device_name
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.reduce_op import (
    ReduceOp,
    VariableSynchronization,
    parse_reduce_op,
)
from mirrax._src.base.values import (
    InProgram,
    Mirrored,
    PerReplica,
    PyTree,
    ReplicaValues,
    is_array,
    is_leaf,
    is_number,
    regroup,
)
from mirrax._src.collectives.algorithms import NcclAllReduce
from mirrax._src.collectives.ops import CrossDeviceOps, copy_to, destination_devices
from mirrax._src.collectives.options import CommunicationOptions
from mirrax._src.collectives.sparse import IndexedSlices
from mirrax._src.engines.eager import update_eagerly
from mirrax._src.engines.spmd import in_program
from mirrax._src.engines.staging import call_in_trace
from mirrax._src.state.distributed import ComponentVariable, DistributedVariable
from mirrax._src.state.mirrored import MirroredVariable
from mirrax._src.state.on_read import SyncOnReadVariable
from mirrax._src.state.variable import OrdinaryVariable, Variable, VariableSpec

# What `non_slot_devices` and `update_non_slot` pass on.
Devices = tuple[str, ...]


class StrategyExtended:
    """Methods of a strategy that libraries (optimizers, metrics) are built with."""

    __module__ = "mirrax.distribute"

    def __init__(self, cross_device_ops: CrossDeviceOps | None = None) -> None:
        self._cross_device_ops = cross_device_ops or NcclAllReduce()
        self._strategy: Any = None

    def attach(self, strategy: Any) -> None:
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
        return tuple(
            f"/job:localhost/replica:0/task:0/device:{n}" for n in self.device_names
        )

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
        replica = here.replica
        if (
            replica is None
            or here.frame is not None
            or self._strategy.num_replicas_in_sync == 1
        ):
            return self._create(spec)

        def merge(strategy: Any, specs: Any) -> Variable:
            parts = strategy.experimental_local_results(specs)
            return self._create(_same_spec(parts, strategy))

        return replica.merge("mx.Variable", merge, (spec,))

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
        owner = colocate_with_variable.strategy
        if (
            isinstance(colocate_with_variable, DistributedVariable)
            and owner is not self._strategy
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

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether `v` was made in this strategy's scope."""
        return v.strategy is self._strategy

    def read_var(self, v: Variable) -> jax.Array:
        """The value of a variable, combined if it is synchronised when read."""
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
        op = parse_reduce_op(reduce_op)
        pairs = list(value_destination_pairs)
        results: list[Any] = [None] * len(pairs)
        many: list[int] = []
        for i, (value, destinations) in enumerate(pairs):
            if self._is_spread(value):
                many.append(i)
            else:
                results[i] = self._reduce_alone(op, value, destinations)
        if many:
            reduced = self._cross_device_ops.batch_reduce(
                op, [pairs[i] for i in many], options
            )
            for i, value in zip(many, reduced):
                results[i] = value
        return results

    def _is_spread(self, value: Any) -> bool:
        if isinstance(value, IndexedSlices):
            return self._is_spread(value.values)
        return isinstance(value, PerReplica) and self._strategy.num_replicas_in_sync > 1

    def _reduce_alone(self, op: ReduceOp, value: Any, destinations: Any) -> Any:
        """A reduction of a value that is the same on all replicas."""
        count = self._strategy.num_replicas_in_sync
        if isinstance(value, IndexedSlices):
            return value
        if isinstance(value, ReplicaValues):
            if count == 1:
                value = value.values[0]
            elif op is ReduceOp.SUM:
                whole = value.piece if value.piece is not None else value.values[0]
                value = whole * count
        elif op is ReduceOp.SUM and count > 1:
            if is_number(value) and value == 0:
                return value
            raise ValueError(
                f"{value!r} is not distributed, so whether a SUM should count it once or once "
                "per replica cannot be told. Pass a per-replica value."
            )
        return copy_to(value, destinations)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """`tensor` with a copy on each device of `destinations`."""
        self._check_cross_replica("broadcast_to")
        return self._cross_device_ops.broadcast(tensor, destinations)

    # Updating ------------------------------------------------------------------------

    def update(
        self,
        var: Variable,
        fn: Callable[..., PyTree],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
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
        return self._update(var, fn, tuple(args), dict(kwargs or {}), group, "update")

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., PyTree],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> PyTree:
        """Calls `fn(*args, **kwargs)` on each device of `colocate_with`."""
        devices = destination_devices(colocate_with, self._strategy.replica_mesh)
        mesh = self._strategy.replica_mesh
        if mesh is not None and set(devices) - set(mesh.local_devices):
            raise ValueError(
                "`colocate_with` must be what `non_slot_devices` returned: devices of this "
                "strategy."
            )
        return self._update(
            None, fn, tuple(args), dict(kwargs or {}), group, "update_non_slot"
        )

    def _update(
        self,
        var: Variable | None,
        fn: Callable[..., PyTree],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        group: bool,
        what: str,
    ) -> PyTree:
        here = context.current()
        is_ours = isinstance(var, DistributedVariable)
        if (
            here.replica is not None
            and here.strategy is self._strategy
            and here.strategy.replica_mesh
        ):

            def merge(strategy: Any, *args: Any, **kwargs: Any) -> PyTree:
                return self._update(var, fn, args, kwargs, group, what)

            return here.replica.merge(what, merge, args, kwargs)
        if var is not None and not is_ours and self._strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"Variable {var.name!r} was made outside the scope of {self._strategy!r}, so it "
                "has no copy on each device. Make it inside `with strategy.scope():`."
            )
        if not is_ours and (var is not None or self._strategy.replica_mesh is None):
            first = () if var is None else (var,)
            with context.changed(replica=None):
                result = fn(*first, *args, **kwargs)
            return result if group else (result,)
        if is_ours and var.strategy is not self._strategy:
            raise ValueError(
                f"Variable {var.name!r} belongs to another strategy and cannot be updated here."
            )
        with self._strategy.entered(what):
            if here.frame is not None and here.frame.is_spmd:
                merged = self._update_in_program(var, fn, args, kwargs)
                return merged if group else self._ungroup(merged)
            if here.frame is not None:
                merged = self._update_in_trace(var, fn, args, kwargs)
                return merged if group else self._ungroup(merged)
            copies = var.values if var is not None else None
            results = update_eagerly(self._strategy, fn, args, kwargs, copies)
        merged = regroup(results, self._strategy.describe_replica, _mirrored_or_parts)
        return merged if group else self._ungroup(merged)

    def _ungroup(self, merged: PyTree) -> PyTree:
        return jax.tree.map(
            self._strategy.experimental_local_results,
            merged,
            is_leaf=lambda x: x is None or is_leaf(x),
        )

    def _update_in_program(
        self,
        var: Any,
        fn: Callable[..., PyTree],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> PyTree:
        count = self._strategy.num_replicas_in_sync

        def own(leaf: Any) -> Any:
            if isinstance(leaf, ReplicaValues):
                if isinstance(leaf.piece, InProgram):
                    return leaf.piece.array
                return leaf.piece if leaf.piece is not None else leaf.values[0]
            return leaf

        args, kwargs = jax.tree.map(own, (args, kwargs), is_leaf=is_leaf)
        first = () if var is None else (ComponentVariable(var, 0),)
        with context.changed(updating=0, replica=None):
            result = fn(*first, *args, **kwargs)
        return jax.tree.map(
            lambda x: in_program(x, count) if isinstance(x, Tracer) else x, result
        )

    def _update_in_trace(
        self,
        var: Any,
        fn: Callable[..., PyTree],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> PyTree:
        def call(*args: Any, **kwargs: Any) -> PyTree:
            first = () if var is None else (ComponentVariable(var, 0),)
            return fn(*first, *args, **kwargs)

        return call_in_trace(
            self._strategy,
            call,
            args,
            kwargs,
            lambda frame: Context(self._strategy, updating=0, frame=frame),
        )

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Devices:
        """The devices for state that belongs to no single variable of `var_list`."""
        return self.worker_devices

    # Running and showing --------------------------------------------------------------

    def call_for_each_replica(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PyTree:
        """Calls `fn` once per replica; the older name of `strategy.run`."""
        self._check_cross_replica("call_for_each_replica")
        return self._strategy.run(fn, args, kwargs)

    def value_container(self, value: Any) -> Any:
        """The variable that a copy belongs to; any other value as it is."""
        return value.whole if isinstance(value, ComponentVariable) else value

    def _check_cross_replica(self, what: str) -> None:
        here = context.current()
        if here.replica is not None and not context.is_default():
            raise RuntimeError(
                f"`{what}` is called inside a replica function. Call it in cross-replica "
                "context: outside `run`, or in the function that you pass to `merge_call`."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(of {self._strategy!r})"


def _mirrored_or_parts(parts: Sequence[Any]) -> Any:
    return (
        Mirrored(parts) if all(is_array(part) for part in parts) else PerReplica(parts)
    )


def _same_spec(specs: Sequence[VariableSpec], strategy: Any) -> VariableSpec:
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
