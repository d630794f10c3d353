"""`StrategyExtended`: the methods for library authors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.devices import device_kind, device_name
from mirrax._src.base.hiding import all_brief, hides
from mirrax._src.base.jax_compat import Device
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.reduce_op import (
    ReduceOp,
    VariableSynchronization,
)
from mirrax._src.base.structures import opened
from mirrax._src.base.values import (
    Fn,
    Kwargs,
    Mirrored,
    PerReplica,
    PyTree,
    is_leaf,
    is_numeric,
    regroup,
)
from mirrax._src.cluster.spec import TrainingCluster
from mirrax._src.collectives.algorithms import NcclAllReduce
from mirrax._src.collectives.destinations import destination_devices
from mirrax._src.collectives.ops import CrossDeviceOps, check_destinations, check_pairs
from mirrax._src.collectives.options import (
    CommunicationImplementation,
    CommunicationOptions,
)
from mirrax._src.engines.eager import update_eagerly
from mirrax._src.engines.trace import run_in_trace
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.feeding import numpy_dataset
from mirrax._src.state.distributed import ComponentVariable, DistributedVariable
from mirrax._src.state.mirrored import MirroredVariable
from mirrax._src.state.on_read import SyncOnReadVariable
from mirrax._src.state.spec import VariableSpec
from mirrax._src.state.variable import OrdinaryVariable, Variable
from mirrax._src.strategies.reducing import reduce_pairs
from mirrax._src.strategies.scope import check_cross_replica


@all_brief
@hides("check_options", "cross_device_ops", "device_names", "options")
class StrategyExtended:
    """Methods of a strategy that libraries (optimizers, metrics) are built with."""

    __module__ = "mirrax.distribute"

    def __init__(
        self,
        strategy: Any,
        cross_device_ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
        task: TrainingCluster | None = None,
    ) -> None:
        self._strategy, self._task = strategy, task
        self._cross_device_ops = cross_device_ops or NcclAllReduce()
        self._options = options

    # What it is ----------------------------------------------------------------------

    @property
    def device_names(self) -> tuple[str, ...]:
        mesh = self._strategy.replica_mesh
        devices = mesh.local_devices if mesh else jax.local_devices()[:1]
        return tuple(device_name(device) for device in devices)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that run replicas on this worker, by their full names."""
        job, index = "localhost", 0
        if self._task is not None and self._task.task_type is not None:
            job, index = self._task.task_type, self._task.task_id
        worker = f"/job:{job}/replica:0/task:{index}"
        return tuple(f"{worker}/device:{name}" for name in self.device_names)

    @property
    def worker_devices_by_replica(self) -> list[list[str]]:
        """The devices of each replica on this worker: one each."""
        return [[device] for device in self.worker_devices]

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables on this worker, by their full names."""
        return self.worker_devices

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """How this strategy reduces and copies."""
        return self._cross_device_ops

    @property
    def options(self) -> CommunicationOptions | None:
        """How values travel by default."""
        return self._options

    @property
    def should_checkpoint(self) -> bool:
        """Whether this worker writes checkpoints: the first one does."""
        return self._task is None or not self._task.index

    @property
    def should_save_summary(self) -> bool:
        """Whether this worker writes summaries: the first one does."""
        return self.should_checkpoint

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether every batch must have the same shape: it need not."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each worker builds a program of its own: one of a cluster does."""
        return self._task is not None

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
        if self._strategy.has_plain_values:
            variable = OrdinaryVariable(spec, self._strategy)
            with jax.ensure_compile_time_eval():  # also while a function is traced
                device = self._strategy.replica_mesh.devices[0]
                variable.stored = jax.device_put(variable.stored, device)
            return variable
        if spec.synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable(spec, self._strategy)
        return MirroredVariable(spec, self._strategy)

    def colocate_vars_with(
        self, colocate_with_variable: Variable
    ) -> contextlib.AbstractContextManager[Any]:
        """A scope in which new variables lie on the devices of `colocate_with_variable`.

        All variables of a strategy lie on the same devices, so only the argument is checked.
        """
        v = colocate_with_variable
        if not isinstance(v, Variable) or not self.variable_created_in_scope(v):
            raise ValueError(
                "`colocate_vars_with` takes a variable that was made in this strategy's "
                f"scope, got {v!r}."
            )
        if context.current().strategy is not self._strategy:
            raise RuntimeError(
                "`colocate_vars_with` may only be used inside `strategy.scope()` of "
                f"{self._strategy!r}."
            )
        return contextlib.nullcontext()

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
        check_cross_replica(self._strategy, "batch_reduce_to")
        options = options or self._options
        self.check_options(options)
        pairs = check_pairs(value_destination_pairs)
        op, ops = ReduceOp(reduce_op), self._cross_device_ops
        return reduce_pairs(self._strategy, ops, op, pairs, options)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """`tensor` with a copy on each device of `destinations`."""
        check_cross_replica(self._strategy, "broadcast_to")
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
        return self._update("update", var, None, group, fn, args, kwargs)

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
                "`colocate_with` must be what `non_slot_devices` returned: devices of "
                f"{self._strategy!r}, not {colocate_with!r}."
            )
        return self._update("update_non_slot", None, devices, group, fn, args, kwargs)

    def _update(
        self,
        what: str,
        variable: Variable | None,
        devices: tuple[Device, ...] | None,
        group: bool,
        fn: Fn,
        args: Sequence[Any],
        kwargs: Kwargs | None,
    ) -> PyTree:
        """`fn` for each copy of `variable`, or without one for each of `devices`."""
        here, strategy = context.current(), self._strategy
        mesh, args, kwargs = strategy.replica_mesh, tuple(args), dict(kwargs or {})
        if here.replica is not None and here.strategy is strategy and mesh is not None:

            def merge(_: StrategyLike, *args: Any, **kwargs: Any) -> PyTree:
                return self._update(what, variable, devices, group, fn, args, kwargs)

            return here.replica.merge(what, merge, args, kwargs)
        is_distributed = isinstance(variable, DistributedVariable)
        if variable is not None:
            self._check_owner(variable)
        if mesh is None or (variable is not None and not is_distributed):
            first = () if variable is None else (variable,)
            with context.changed(replica=None):
                result = fn(*first, *args, **kwargs)
            return result if group else (result,)
        if here.frame is not None and devices not in (None, mesh.local_devices):
            raise ValueError(
                f"`{what}` in a compiled function runs on all devices of the strategy; only in "
                "plain Python can it run on some."
            )

        def call(*args: Any, **kwargs: Any) -> PyTree:
            """`fn` on the copy of the replica that the traced code works for."""
            first = () if variable is None else (ComponentVariable(variable, 0),)
            return fn(*first, *args, **kwargs)

        with strategy.entered(what):
            if here.frame is not None:
                merged = run_in_trace(strategy, call, args, kwargs, is_update=True)
            else:
                copies = variable.values if is_distributed else None
                where = devices or mesh.local_devices
                results = update_eagerly(strategy, fn, args, kwargs, copies, where)
                describe = strategy.describe_replica
                merge_all = functools.partial(_merge, mesh=mesh)
                merged = regroup(results, describe, merge_all, what="result")
            if group:
                return merged
            local = strategy.experimental_local_results
            return jax.tree.map(
                local, opened(merged), is_leaf=lambda x: x is None or is_leaf(x)
            )

    def _check_owner(self, variable: Variable) -> None:
        is_distributed = isinstance(variable, DistributedVariable)
        is_own = is_distributed or self._strategy.num_replicas_in_sync == 1
        if not is_own or (is_distributed and variable.strategy is not self._strategy):
            raise ValueError(
                f"Variable {variable.name!r} was made outside the scope of {self._strategy!r}, so "
                "it has no copy on each of its devices. Make it inside `with strategy.scope():`."
            )

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """The devices for state that belongs to no single variable of `var_list`.

        The default strategy has none, and gives one of the variables.
        """
        return self.worker_devices

    # Running and showing --------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Fn, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Calls `fn` once per replica; the older name of `strategy.run`."""
        check_cross_replica(self._strategy, "call_for_each_replica")
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}(of {self._strategy!r})"


def _merge(parts: Sequence[Any], mesh: ReplicaMesh) -> Any:
    """The results of an update as one: the variable itself, if its copies were returned."""
    home = mesh if len(mesh.local_ids) == len(parts) else None
    if all(isinstance(part, ComponentVariable) for part in parts):
        if all(part.whole is parts[0].whole for part in parts):
            return parts[0].whole
    elif all(map(is_numeric, parts)):
        return Mirrored(map(jnp.asarray, parts), mesh=home)
    return PerReplica(parts, mesh=home)


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
