"""`Strategy`: scope, run, reduce, gather."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base import context
from mirrax._src.base.errors import hide_own_frames, renamed
from mirrax._src.base.hiding import all_brief, hides
from mirrax._src.base.jax_compat import Device, Tracer
from mirrax._src.base.mesh import AXIS_NAME, Layout, ReplicaMesh
from mirrax._src.base.reduce_op import ReduceOp
from mirrax._src.base.structures import opened
from mirrax._src.base.values import (
    Fn,
    Kwargs,
    Mirrored,
    PerReplica,
    PyTree,
    ReplicaValues,
    first_copy,
    is_leaf,
    is_numeric,
    join,
    on_device,
    parts_of,
    regroup,
)
from mirrax._src.collectives.programs import first_of_all, run_on_parts
from mirrax._src.engines.dispatch import run_replicas
from mirrax._src.input.feeding import Feeding, check_not_in_replica
from mirrax._src.state import foreign
from mirrax._src.state.distributed import DistributedVariable
from mirrax._src.strategies import checking, reducing
from mirrax._src.strategies.arguments import RunOptions, ValueContext, checked_run
from mirrax._src.strategies.extended import StrategyExtended
from mirrax._src.strategies.memory import MemoryReport, report_memory
from mirrax._src.strategies.scope import Scope, check_cross_replica, enter_scope
from mirrax._src.strategies.stepping import Stepper, check_not_traced

_ALREADY = contextlib.nullcontext()


@all_brief
@hides(
    "describe_replica",
    "enter_scope",
    "entered",
    "extended_class",
    "first_part",
    "gather_everywhere",
    "has_plain_values",
    "initial_on_all_workers",
    "input_share",
    "place_of",
    "replica_mesh",
    "stepper",
)
class Strategy(Feeding):
    """How computation is spread over devices: one replica of a function on each.

    Use `MirroredStrategy`, or `OneDeviceStrategy`; outside any scope `get_strategy()`
    gives a default strategy that runs everything in place.
    """

    __module__ = "mirrax.distribute"

    # What `extended` is made of; an older generation has more methods there.
    extended_class: type[StrategyExtended] = StrategyExtended
    # Whether what it gives for its one replica is not wrapped, as in TensorFlow.
    has_plain_values = False

    def __init__(self, extended: StrategyExtended, mesh: ReplicaMesh | None) -> None:
        self._extended = extended
        # None for the default strategy only; typed as what the layers below meet.
        self.replica_mesh: ReplicaMesh = mesh  # pyright: ignore[reportAttributeAccessIssue]
        self._stop_reason: str | None = None
        self.stepper = Stepper(self)
        if mesh is not None:
            foreign.attach()

    # What it is ----------------------------------------------------------------------

    @property
    def extended(self) -> StrategyExtended:
        """`StrategyExtended` with additional methods."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are aggregated."""
        return self.replica_mesh.size if self.replica_mesh else 1

    @property
    def cluster_resolver(self) -> Any:
        """The cluster resolver of a strategy with several workers; None on one."""
        return None

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices as a JAX mesh with the one axis `axis_name`."""
        if self.replica_mesh is None:
            raise AttributeError(f"There is no mesh: this is {self!r}.")
        return self.replica_mesh.mesh

    @property
    def axis_name(self) -> str:
        """The name for `jax.lax.psum(x, strategy.axis_name)` in compiled replica functions."""
        return AXIS_NAME

    def __copy__(self) -> Strategy:
        raise RuntimeError(
            f"{self!r} cannot be copied by `copy.copy`: variables and values belong to this "
            "strategy. Use it itself, or make another one; `copy.deepcopy` of what holds it "
            "keeps it."
        )

    def __deepcopy__(self, memo: object) -> Strategy:
        return self  # so that copied variables still belong to it

    def __repr__(self) -> str:
        devices = ", ".join(repr(d) for d in self.extended.device_names)
        return f"{type(self).__name__}([{devices}])"

    # Scope ---------------------------------------------------------------------------

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Makes the strategy current, so that variables are made on all its devices.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     v = mx.Variable(1.0)
        >>> v
        MirroredVariable:{
          0: <mx.Variable 'Variable' shape=() dtype=float32, numpy=1.0>,
          1: <mx.Variable 'Variable/replica_1' shape=() dtype=float32, numpy=1.0>
        }
        """
        return Scope(self.enter_scope, self)

    def enter_scope(self) -> context.enter:
        """What `scope` does when it is entered."""
        return enter_scope(self)

    def entered(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """The scope for methods that need it; not in a replica, nor in another's scope."""
        check_cross_replica(self, what)
        is_current = context.current().strategy is self
        return _ALREADY if is_current else self.enter_scope()

    # Running -------------------------------------------------------------------------

    def run(
        self,
        fn: Fn,
        args: Sequence[Any] = (),
        kwargs: Kwargs | None = None,
        options: RunOptions | None = None,
    ) -> PyTree:
        """Calls `fn` once for each replica and merges what they return.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def replica_fn(x):
        ...     return x + mx.distribute.get_replica_context().replica_id_in_sync_group
        >>> strategy.run(replica_fn, args=(10,))
        PerReplica:{
          0: Array(10, dtype=int32),
          1: Array(11, dtype=int32)
        }

        Distributed values among the arguments arrive as this replica's part, everything
        else as it is. A plain `fn` runs as plain Python on every replica; an
        `mx.function`, or a `run` inside one, is one compiled program for all replicas.

        Args:
            fn: The function; it may use `mx.distribute.get_replica_context()`.
            args: Positional arguments.
            kwargs: Keyword arguments.
            options: A `RunOptions` or None.
        """
        try:
            if type(args) is not tuple or options is not None or not callable(fn):
                args = checked_run(fn, args, options)
            here = context.current()
            if here.strategy is not self or here.replica is not None:
                check_cross_replica(self, "run")
            return self._run(fn, args, kwargs or {}, here)
        except Exception as error:
            hide_own_frames(error)
            raise

    _run = run_replicas

    def run_steps(self, fn: Fn, iterator: Iterator[Any], steps: int) -> PyTree:
        """Runs `fn` on the next `steps` elements: many steps, one compiled program.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> dataset = mx.data.Dataset.range(12).batch(4)
        >>> batches = iter(strategy.experimental_distribute_dataset(dataset))
        >>> strategy.run_steps(jnp.sum, batches, steps=3)
        PerReplica:{
          0: Array([ 1,  9, 17], dtype=int32),
          1: Array([ 5, 13, 21], dtype=int32)
        }

        The values are those of `strategy.run(fn, args=(next(iterator),))` with a compiled
        `fn`, step by step; the time that Python needs for a step is gone. Results are
        stacked: each has a new first axis, the steps. At the end of the data there are
        fewer of them. These last steps, those of elements that differ in shape, and on
        CPUs steps with convolutions, which XLA makes slow in a loop, run one by one.

        Args:
            fn: The replica function, of one element.
            iterator: Gives the elements, `iter(distributed_dataset)` for example.
            steps: How many.

        Raises:
            mx.errors.OutOfRangeError: If the data has ended already.
        """
        if not callable(fn):
            raise TypeError(f"`run_steps` needs a function, got {fn!r}.")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"`steps` must be a positive integer, got {steps!r}.")
        check_not_traced("run_steps")
        with self.entered("run_steps"):
            return self.stepper.run_steps(fn, iterator, steps)

    @renamed("run")
    def experimental_run_v2(
        self, fn: Fn, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """The name of `run` in TensorFlow 2.0."""
        return self.run(fn, args, kwargs)

    def memory(self) -> MemoryReport:
        """What is alive on this worker's devices now: variables, slots, batches, the rest.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     v = mx.Variable(jnp.zeros((256, 256)), name="v")
        >>> strategy.memory().variables["v"]
        262144
        >>> strategy.memory().devices["CPU:1"]["variables"]
        262144
        """
        mesh = self.replica_mesh or ReplicaMesh((jax.local_devices()[0],))
        return report_memory(self, mesh)

    # Stopping ------------------------------------------------------------------------

    def request_stop(self, reason: str = "requested") -> None:
        """Asks for an orderly end: `should_stop` becomes true, on all workers at one step."""
        self._stop_reason = reason

    def should_stop(self) -> bool:
        """Whether to stop now. Call it once in every step, on every worker.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.should_stop()
        False
        >>> strategy.request_stop()
        >>> strategy.should_stop()
        True
        """
        return self._stop_reason is not None

    # Combining -----------------------------------------------------------------------

    def reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, axis: int | Sequence[int] | None
    ) -> PyTree:
        """Combines the replicas' values into one.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def replica_fn():
        ...     return mx.distribute.get_replica_context().replica_id_in_sync_group
        >>> print(strategy.reduce("SUM", strategy.run(replica_fn), axis=None))
        1

        With `axis=None` only replicas are combined, so their shapes must agree. With an
        axis, usually the batch, each replica is reduced along it first, and `MEAN` divides
        by the elements that really exist: a last batch of 4 + 2 examples is divided by 6.
        Inside a replica use `ReplicaContext.all_reduce`.

        Args:
            reduce_op: `ReduceOp.SUM`, `ReduceOp.MEAN` or their names, in any case.
            value: What `run` returned, or any pytree of per-replica values.
            axis: The axis or axes to reduce within each replica, or None.

        Raises:
            ValueError: If `axis` is None and the shapes differ, or a plain value, which no
                replica made, is summed.
        """
        op = ReduceOp(reduce_op)
        axis = reducing.checked_axis(axis)

        def reduce_one(path: Any, leaf: Any) -> Any:
            name = jax.tree_util.keystr(path)
            return reducing.LeafReduction(self, op, axis, name)(leaf)

        with self.entered("reduce"):
            return jax.tree.map_with_path(
                reduce_one, opened(value, "value"), is_leaf=reducing.is_reducible
            )

    def gather(self, value: PyTree, axis: int) -> PyTree:
        """The replicas' values joined along `axis`; their lengths there may differ.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.gather(mx.distribute.PerReplica([jnp.arange(3), jnp.arange(2)]), axis=0)
        Array([0, 1, 2, 0, 1], dtype=int32)
        """

        def gather_one(leaf: Any) -> Any:
            return reducing.gather_leaf(self, leaf, axis)

        with self.entered("gather"):
            whole = opened(value, "value")
            return jax.tree.map(gather_one, whole, is_leaf=reducing.is_reducible)

    gather_everywhere = reducing.gather_everywhere

    # Values --------------------------------------------------------------------------

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """This worker's parts of `value`, each an array on its own device.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.experimental_local_results(mx.distribute.PerReplica([1, 2]))
        (1, 2)

        A value that is not distributed comes back as `(value,)`. For a variable the parts
        are its copies; for a nested structure, structures of parts.
        """
        if isinstance(value, DistributedVariable):
            value = value.copies()
        if isinstance(value, ReplicaValues):
            return value.values
        whole = opened(value, "" if self.replica_mesh is None else "value")
        leaves = jax.tree.leaves(whole, is_leaf=is_leaf)
        is_plain = not leaves or leaves[0] is value
        if is_plain or self.replica_mesh is None:
            return (value,)
        count = len(self.replica_mesh.local_ids)
        return tuple(parts_of(value, None, i) for i in range(count))

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], PyTree]
    ) -> PyTree:
        """A distributed value of what `value_fn` returns for each replica.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.experimental_distribute_values_from_function(
        ...     lambda ctx: 10 * ctx.replica_id_in_sync_group)
        PerReplica:{
          0: 0,
          1: 10
        }
        """
        check_not_in_replica("experimental_distribute_values_from_function")
        if self.has_plain_values:
            return value_fn(ValueContext())
        count, ids = self.num_replicas_in_sync, self.replica_mesh.local_ids
        with self.enter_scope() if context.is_default() else _ALREADY:
            values = [value_fn(ValueContext(i, count)) for i in ids]
        return regroup(
            values, self.describe_replica, self._per_replica, lambda _: False
        )

    def _per_replica(self, parts: Sequence[Any]) -> PerReplica:
        mesh = self.replica_mesh
        if any(isinstance(part, Tracer) for part in parts):
            array, layout = join(PerReplica(parts), mesh)
            return PerReplica.of(array, mesh, layout)
        return PerReplica(map(on_device, parts, mesh.local_devices), mesh=mesh)

    def replicate(self, tree: PyTree) -> PyTree:
        """`tree` with a copy of every array and number on each replica's device.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.replicate({"w": jnp.ones(2)})["w"] * 3
        Array([3., 3.], dtype=float32)

        For functional code: pass the result to `run` and return the new state from there; `mx.function(step,
        donate_argnums=0)` reuses its memory. What is not an array stays as it is. Of a Flax NNX module
        made outside the scope it gives a copy that belongs to the strategy.
        """
        mesh = self.replica_mesh

        def mirror(x: Any) -> Any:
            module_kind = foreign.module_kind(x)
            if module_kind is not None:
                return module_kind.replicate(self, x)
            if not is_numeric(x):
                return x
            # A copy of its own, so that donating the state never takes the user's array. A
            # number gets the dtype for good: every step must see the type of the last one.
            array = jnp.array(x, dtype=jnp.asarray(x).dtype, copy=True)
            if mesh is None:
                return array
            whole = mesh.mirror(array)
            return Mirrored.of(whole, mesh) if mesh.size > 1 else first_copy(whole)

        return jax.tree.map(mirror, tree, is_leaf=foreign.is_module)

    # Watching over values --------------------------------------------------------------

    def assert_in_sync(self, tree: PyTree) -> None:
        """Raises an AssertionError if copies that should be equal are not, bit by bit.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     w, optimizer = mx.Variable(jnp.ones(3)), mx.train.Optimizer("sgd", learning_rate=0.1)
        >>> strategy.assert_in_sync([w, optimizer])

        The message names the variable, the replica and the worker. Every device reads its copies
        once and makes 4 bytes of each; the host compares them, workers exchange one number.
        Variables that are combined when they are read (ON_READ, as in metrics) may differ and
        are not looked at. Call it on all workers, outside `run`.

        Args:
            tree: Variables, modules, optimizers, values from `replicate` or `run`, in any
                structure. An object whose arrays are not known is a TypeError.
        """
        with self.entered("assert_in_sync"):
            checking.check_concrete("assert_in_sync")
            checking.check_in_sync(self.replica_mesh, tree)

    def check_numerics(self, tree: PyTree, step: Any = None) -> None:
        """Raises a FloatingPointError if there is a NaN or an infinite value in `tree`.

        >>> strategy = mx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> losses = strategy.run(lambda: jnp.array(0.5))
        >>> strategy.check_numerics({"loss": losses}, step=3)

        The message names the array, the replica, the worker and the step. Every device reads its
        parts once and counts; the host waits for 4 bytes of each array. Call it on all workers,
        outside `run`; to keep such gradients out of variables at the same time, wrap the
        transformation: `optax.apply_if_finite(optax.adam(1e-3), 5)`.

        Args:
            tree: As for `assert_in_sync`; arrays that are not floating-point are not looked at.
            step: The number or variable that the message names.
        """
        with self.entered("check_numerics"):
            checking.check_concrete("check_numerics")
            checking.check_finite(self.replica_mesh, tree, step)

    # For the layers below, which know a strategy only by these ------------------------

    def describe_replica(self, local_index: int) -> str:
        """A local replica for messages: `replica 1 (CPU:1)`."""
        if self.replica_mesh is None:
            return "replica 0"
        return self.replica_mesh.describe(self.replica_mesh.local_ids[local_index])

    def place_of(self, local_index: int) -> tuple[int, Device]:
        """The id and the device of a local replica."""
        if self.replica_mesh is None:
            return 0, jax.devices()[0]
        replica_id = self.replica_mesh.local_ids[local_index]
        return replica_id, self.replica_mesh.devices[replica_id]

    def first_part(self, value: Any) -> Any:
        """The first replica's part of a distributed value; a plain value as it is."""
        mesh = self.replica_mesh
        is_own = isinstance(value, PerReplica) and value.layout is Layout.OWN
        spans_workers = mesh is not None and mesh.spans_workers
        if is_own or (spans_workers and isinstance(value, PerReplica)):
            first = run_on_parts(first_of_all, mesh, [value])[0]
            return first if is_own else Mirrored.of(first, mesh)
        return value.values[0] if isinstance(value, ReplicaValues) else value

    def initial_on_all_workers(self, array: jax.Array) -> jax.Array:
        """The initial value of a variable: the same on all workers."""
        return array
