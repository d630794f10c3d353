"""The strategies of TensorFlow 1.11: other names for what the main strategies do.

A `DistributionStrategy` holds a main strategy, its `core`, and passes every call on to it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.base.errors import renamed
from mirrax._src.base.reduce_op import ReduceOp, VariableAggregation
from mirrax._src.base.values import (
    PerReplica,
    PyTree,
    ReplicaValues,
    is_leaf,
    parts_of,
)
from mirrax._src.collectives.ops import check_pairs
from mirrax._src.integrations.compat_v1 import grouped, isolate
from mirrax._src.integrations.contrib.cross_tower_ops import (
    reduce_op_of,
)
from mirrax._src.integrations.contrib.datasets import TowerDataset, distribute
from mirrax._src.integrations.contrib.multi_step import MultiStepContext
from mirrax._src.integrations.loops import run_loop
from mirrax._src.state.distributed import DistributedVariable
from mirrax._src.state.on_read import SyncOnReadVariable
from mirrax._src.state.variable import Variable
from mirrax._src.strategies.scope import Scope
from mirrax._src.strategies.strategy import Strategy

_ONLY_FIRST = VariableAggregation.ONLY_FIRST_TOWER


class MapOutput:
    """The results of `map` on one device."""

    __module__ = "mirrax.contrib.distribute"

    def __init__(self, results: Sequence[Any]) -> None:
        self._results = list(results)

    def get(self) -> list[Any]:
        """The results, in order."""
        return self._results

    def __repr__(self) -> str:
        return f"MapOutput({self._results!r})"


class DistributionStrategy:
    """How computation is spread over devices, by the names of TensorFlow 1.11.

    A tower is what is called a replica today.

    Args:
        core: The main strategy that does the work.
    """

    __module__ = "mirrax.contrib.distribute"

    def __init__(self, core: Strategy) -> None:
        self._prefetch_on_device: bool | None = None
        self._core: Strategy | None = None
        self._take(core)

    def _take(self, core: Strategy) -> None:
        self._core = core
        _faces[id(core)] = self

    @property
    def core(self) -> Strategy:
        """The main strategy that does the work."""
        assert self._core is not None
        return self._core

    def __repr__(self) -> str:
        return f"contrib.{type(self).__name__}({self.core!r})"

    # What it is ------------------------------------------------------------------------

    @property
    @renamed("num_replicas_in_sync")
    def num_towers(self) -> int:
        """The number of towers, of all workers."""
        return self.core.num_replicas_in_sync

    @property
    @renamed("num_replicas_in_sync == 1")
    def is_single_tower(self) -> bool:
        """Whether there is one tower only."""
        return self.core.num_replicas_in_sync == 1

    @property
    @renamed("extended.worker_devices")
    def worker_devices(self) -> list[str]:
        """The devices that run towers on this worker."""
        return list(self.core.extended.worker_devices)

    @property
    @renamed("extended.parameter_devices")
    def parameter_devices(self) -> list[str]:
        """The devices that hold variables on this worker."""
        return list(self.core.extended.parameter_devices)

    @property
    @renamed("experimental_distribute_values_from_function")
    def worker_device_index(self) -> Any:
        """For each tower its position in `worker_devices`; 0 if there is one tower only."""
        if self.core.num_replicas_in_sync == 1:
            return 0
        return PerReplica(range(len(self.core.extended.worker_devices)))

    @property
    @renamed("extended.experimental_between_graph")
    def between_graph(self) -> bool:
        """Whether each worker builds a program of its own."""
        return self.core.extended.experimental_between_graph

    @property
    @renamed("extended.experimental_should_init")
    def should_init(self) -> bool:
        """Whether this worker initialises variables."""
        return self.core.extended.experimental_should_init

    @property
    @renamed("extended.should_checkpoint")
    def should_checkpoint(self) -> bool:
        """Whether this worker writes checkpoints."""
        return self.core.extended.should_checkpoint

    @property
    @renamed("extended.should_save_summary")
    def should_save_summary(self) -> bool:
        """Whether this worker writes summaries."""
        return self.core.extended.should_save_summary

    # Scope and variables -----------------------------------------------------------------

    def scope(self) -> contextlib.AbstractContextManager[DistributionStrategy]:
        """Makes the strategy current, so that variables are made on all its devices."""
        return Scope(self.core.enter_scope, self)

    @renamed("extended.colocate_vars_with")
    def colocate_vars_with(
        self, colocate_with_variable: Variable
    ) -> contextlib.AbstractContextManager[Any]:
        """A scope in which new variables lie on the devices of `colocate_with_variable`."""
        return self.core.extended.colocate_vars_with(colocate_with_variable)

    @renamed("read_value")
    def read_var(self, tower_local_var: Variable) -> jax.Array:
        """The value of a variable; of a tower-local one, the towers' values combined."""
        return self.core.extended.read_var(tower_local_var)

    @renamed("extended.value_container")
    def value_container(self, val: Any) -> Any:
        """The variable that a copy belongs to; any other value as it is."""
        return self.core.extended.value_container(val)

    # Running -----------------------------------------------------------------------------

    @renamed("run")
    def call_for_each_tower(
        self, fn: Callable[..., PyTree], *args: Any, **kwargs: Any
    ) -> PyTree:
        """Calls `fn(*args, **kwargs)` once for each tower and merges what they return.

        Args:
            fn: The function; it may use `mx.contrib.get_tower_context()`.
            *args: Positional arguments; per-device values arrive as the tower's own.
            **kwargs: Keyword arguments. `run_concurrently` is not passed on: it allows
                towers to run at the same time, which those of plain Python never do here.
        """
        concurrently = kwargs.pop("run_concurrently", True)
        if not isinstance(concurrently, bool | None):
            raise TypeError(
                f"`run_concurrently` must be True or False, got {concurrently!r}."
            )
        return self.core.run(fn, args, kwargs)

    @renamed("run_steps")
    def run_steps_on_dataset(
        self,
        fn: Callable[..., Any],
        iterator: Any,
        iterations: int = 1,
        initial_loop_values: dict[str, Any] | None = None,
    ) -> MultiStepContext:
        """Runs `fn(context, *inputs)` on the next elements, as one compiled loop.

        The loop has run when this returns; `run_op()` of the result runs it again.

        Args:
            fn: The step, called in cross-tower context; it names what the loop gives back
                by `context.set_last_step_output`.
            iterator: Gives the elements; a tuple is passed as several arguments.
            iterations: How many steps.
            initial_loop_values: What the outputs are if `iterations` is 0.
        """
        return run_loop(
            self.core, fn, iterator, iterations, initial_loop_values, MultiStepContext
        )

    @renamed("distribute_datasets_from_function")
    def distribute_dataset(self, dataset_fn: Callable[[], Any]) -> TowerDataset:
        """The dataset that `dataset_fn()` makes; each tower takes one element in turn.

        Batch it by the size for one tower. What is left for fewer than all towers at the
        end is dropped.
        """
        return distribute(self.core, dataset_fn, self._prefetch_on_device)

    # Combining ---------------------------------------------------------------------------

    @renamed("extended.reduce_to")
    def reduce(
        self, aggregation: VariableAggregation, value: Any, destinations: Any
    ) -> Any:
        """`value` of all towers combined, with a copy on each device of `destinations`.

        Args:
            aggregation: `SUM`, `MEAN` or `ONLY_FIRST_TOWER` of `mx.VariableAggregation`.
            value: A per-device value.
            destinations: A variable, a per-device value, a device or a list of devices; to
                reduce onto all towers, `value` itself.
        """
        return self._reduce_all(aggregation, [(value, destinations)])[0]

    @renamed("extended.batch_reduce_to")
    def batch_reduce(
        self,
        aggregation: VariableAggregation,
        value_destination_pairs: Sequence[tuple[Any, Any]],
    ) -> list[Any]:
        """Several `reduce` in one, so that small values travel together."""
        return self._reduce_all(aggregation, check_pairs(value_destination_pairs))

    def _reduce_all(
        self, aggregation: VariableAggregation, pairs: list[tuple[Any, Any]]
    ) -> list[Any]:
        with self.core.entered("reduce"):
            return self._reduce_in_scope(aggregation, pairs)

    def _reduce_in_scope(
        self, aggregation: VariableAggregation, pairs: list[tuple[Any, Any]]
    ) -> list[Any]:
        extended = self.core.extended
        # A tower-local variable is one value for each tower.
        pairs = [
            (v.copies() if isinstance(v, SyncOnReadVariable) else v, d)
            for v, d in pairs
        ]
        if aggregation is _ONLY_FIRST:
            if any(_is_mapped(value) for value, _ in pairs):
                raise ValueError(
                    f"Results of `map` can be reduced by SUM or MEAN only, not by {aggregation}."
                )
            first = self.core.first_part
            return [extended.broadcast_to(first(v), d) for v, d in pairs]
        op = reduce_op_of(aggregation)
        others = [pair for pair in pairs if not _is_mapped(pair[0])]
        reduced = iter(extended.batch_reduce_to(op, others))
        return [
            self._reduce_mapped(op, v, d) if _is_mapped(v) else next(reduced)
            for v, d in pairs
        ]

    def _reduce_mapped(self, op: ReduceOp, value: PerReplica, destinations: Any) -> Any:
        """All results of a `map` combined, however many each device has."""
        outputs = [output.get() for output in value.values]
        if not any(outputs):
            raise ValueError(
                f"There is nothing to reduce by {op.name}: `map` had no elements."
            )
        zero = jnp.zeros_like(next(x for results in outputs for x in results))
        sums = [sum(results, start=zero) for results in outputs]
        counts = [jnp.asarray(len(results)) for results in outputs]
        total = self.core.reduce(ReduceOp.SUM, self._spread(sums), axis=None)
        if op is ReduceOp.MEAN:
            total = total / self.core.reduce(ReduceOp.SUM, self._spread(counts), None)
        return self.core.extended.broadcast_to(total, destinations)

    def _spread(self, parts: Sequence[jax.Array]) -> Any:
        """A per-device value of one part for each of this worker's towers."""
        it = iter(parts)
        return self.core.experimental_distribute_values_from_function(
            lambda _: next(it)
        )

    @renamed("extended.broadcast_to")
    def broadcast(self, tensor: Any, destinations: Any = None) -> Any:
        """`tensor` with a copy on each device of `destinations`; by default of all towers."""
        extended = self.core.extended
        if destinations is None or (
            isinstance(destinations, tuple | list) and not destinations
        ):
            destinations = extended.worker_devices
        return extended.broadcast_to(tensor, destinations)

    @renamed("[fn(x) for x in map_over]")
    def map(
        self, map_over: Sequence[Any], fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> PerReplica:
        """`fn(x, *args, **kwargs)` for each `x`, on the towers' devices in turn.

        `reduce` combines the results of all devices.
        """
        _check_mirrored("map", (args, kwargs))
        mesh = self.core.replica_mesh
        devices = mesh.local_devices if mesh is not None else jax.local_devices()[:1]
        results: list[list[Any]] = [[] for _ in devices]
        for k, x in enumerate(map_over):
            i = k % len(devices)
            own_args, own_kwargs = parts_of((args, kwargs), None, i)
            with jax.default_device(devices[i]):
                results[i].append(fn(x, *own_args, **own_kwargs))
        return PerReplica([MapOutput(each) for each in results])

    # Updating ----------------------------------------------------------------------------

    @renamed("extended.update")
    def update(
        self, var: Variable, fn: Callable[..., PyTree], *args: Any, **kwargs: Any
    ) -> PyTree:
        """Calls `fn(copy, *args, **kwargs)` for each copy of `var`, on its device.

        Args:
            var: A variable.
            fn: The function; its first argument is one copy, a variable of its own.
            *args: More arguments; mirrored ones arrive as the copy on the device.
            **kwargs: Keyword arguments.

        Raises:
            TypeError: For an argument that differs between towers: reduce it first.
        """
        _check_mirrored("update", (args, kwargs))
        return self.core.extended.update(var, fn, args, kwargs)

    @renamed("extended.update_non_slot")
    def update_non_slot(
        self, colocate_with: Any, fn: Callable[..., PyTree], *args: Any, **kwargs: Any
    ) -> PyTree:
        """Calls `fn(*args, **kwargs)` on each device of `colocate_with`."""
        _check_mirrored("update_non_slot", (args, kwargs))
        return self.core.extended.update_non_slot(colocate_with, fn, args, kwargs)

    @renamed("extended.non_slot_devices")
    def non_slot_devices(self, var_list: Sequence[Variable]) -> list[str]:
        """The devices for state that belongs to no single variable of `var_list`."""
        return list(self.core.extended.non_slot_devices(var_list))

    # Values ------------------------------------------------------------------------------

    @renamed("experimental_local_results")
    def unwrap(self, value: Any) -> list[Any]:
        """The values that `value` has for this worker's towers; `[value]` if it is one."""
        if isinstance(value, DistributedVariable | ReplicaValues):
            return list(value.values)
        return [value]

    @renamed("")
    def group(self, value: Any, name: str | None = None) -> Any:
        """The one value of this worker, or None if it has several: all have been started.

        Args:
            value: What `call_for_each_tower` returned.
            name: Named an operation of a graph; nothing is called so here.
        """
        is_spread = isinstance(value, DistributedVariable | ReplicaValues)
        return grouped(value.values if is_spread else [value], name)

    # The frame of a session ----------------------------------------------------------------

    @renamed("")
    def initialize(self) -> None:
        """What has to be done before computing: nothing."""

    @renamed("")
    def finalize(self) -> None:
        """What has to be done after computing: nothing."""

    @renamed("")
    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Sets `session_config` for this strategy; only `MirroredStrategy` takes a cluster."""
        if cluster_spec is not None:
            raise ValueError(
                f"{type(self).__name__} runs on this machine only, it takes no "
                "`cluster_spec`. Use MirroredStrategy."
            )
        if session_config is not None:
            isolate(session_config)


_faces: weakref.WeakValueDictionary[int, DistributionStrategy] = (
    weakref.WeakValueDictionary()
)


def face_of(core: Strategy) -> DistributionStrategy:
    """The strategy of this generation whose core is `core`."""
    return _faces.get(id(core)) or DistributionStrategy(core)


def _is_mapped(value: Any) -> bool:
    return (
        isinstance(value, PerReplica)
        and value.array is None
        and isinstance(value.values[0], MapOutput)
    )


def _check_mirrored(what: str, arguments: PyTree) -> None:
    leaves = jax.tree.leaves(arguments, is_leaf=is_leaf)
    if any(isinstance(leaf, PerReplica) for leaf in leaves):
        raise TypeError(
            f"`{what}` takes values that are the same on all towers, got one that differs. "
            "Reduce it first."
        )
