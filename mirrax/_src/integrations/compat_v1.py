"""`mx.compat.v1`: the strategies as TensorFlow 2.4 kept them for programs of TensorFlow 1.

Nearly all of it is the main strategies' own; what stands here are the other defaults, and
names that the main ones do not have: iterators with `initialize`, `experimental_run`, the
loop over steps.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from mirrax._src.base.errors import renamed
from mirrax._src.base.reduce_op import ReduceOp
from mirrax._src.base.values import PyTree
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.distributed import DistributedIterator
from mirrax._src.input.feeding import check_not_in_replica, distribute_from_function
from mirrax._src.input.options import InputContext, InputReplicationMode
from mirrax._src.integrations import experimental
from mirrax._src.integrations.loops import MultiStepContext, run_loop
from mirrax._src.state.variable import Variable
from mirrax._src.strategies import (
    extended,
    mirrored,
    multi_worker,
    one_device,
    strategy,
)

_Config = TypeVar("_Config")


class ConfigProto(types.SimpleNamespace):
    """Settings of a session, for programs that pass them along; mirrax reads none of them.

    >>> config = mx.compat.v1.ConfigProto(allow_soft_placement=True)
    >>> config.gpu_options.allow_growth = True
    """

    __module__ = "mirrax.compat.v1"

    def __init__(self, **settings: Any) -> None:
        defaults = {
            "isolate_session_state": False,
            "gpu_options": types.SimpleNamespace(),
        }
        super().__init__(**{**defaults, **settings})


class InputIterator(DistributedIterator):
    """The iterator of TensorFlow 1: `initialize`, then `get_next` until the data ends."""

    __module__ = "mirrax.compat.v1.distribute"

    def initialize(self) -> None:
        """Goes (back) to the start of the data."""
        self.restart()

    @property
    def initializer(self) -> None:
        """Goes (back) to the start of the data, for programs that ran it in a session."""
        self.restart()

    def get_next(self, name: str | None = None) -> Any:
        """The next element.

        Args:
            name: Named an operation of a graph; nothing is called so here.

        Raises:
            mx.errors.OutOfRangeError: Past the end of the data.
        """
        return super().get_next()


class StrategyExtended(extended.StrategyExtended):
    """`mx.distribute.StrategyExtended` with the loop of TensorFlow 1."""

    __module__ = "mirrax.compat.v1.distribute"

    @renamed("run_steps")
    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[..., Any],
        iterator: Iterator[Any],
        iterations: int = 1,
        initial_loop_values: dict[str, Any] | None = None,
    ) -> MultiStepContext:
        """Runs `fn(context, element)` on the next elements, as one compiled loop.

        `fn` is called in cross-replica context and names what the loop gives back by
        `context.set_last_step_output`. `strategy.run_steps` is the simpler form.

        Args:
            fn: The step.
            iterator: Gives the elements.
            iterations: How many steps.
            initial_loop_values: What the outputs are if `iterations` is 0.
        """
        values, kind = initial_loop_values, MultiStepContext
        return run_loop(self._strategy, fn, iterator, iterations, values, kind)


class Strategy(strategy.Strategy):
    """A strategy with the methods of TensorFlow 1."""

    __module__ = "mirrax.compat.v1.distribute"

    @property
    def extended(self) -> StrategyExtended:
        """`StrategyExtended` with additional methods."""
        made = self._extended
        assert isinstance(made, StrategyExtended)
        return made

    @renamed("run")
    def experimental_run(
        self, fn: Callable[..., PyTree], input_iterator: Any = None
    ) -> PyTree:
        """Runs `fn` on the next element of `input_iterator`.

        Write `strategy.run(fn, args=(next(iterator),))`.
        """
        args = () if input_iterator is None else (input_iterator.get_next(),)
        return self.run(fn, args)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        axis: int | Sequence[int] | None = None,
    ) -> PyTree:
        """`mx.distribute.Strategy.reduce`, with `axis=None` by default."""
        return super().reduce(reduce_op, value, axis)

    def experimental_make_numpy_dataset(
        self, numpy_input: PyTree, session: None = None
    ) -> Dataset:
        """The rows of arrays in memory as a dataset; the same as `from_tensor_slices`.

        Args:
            numpy_input: Arrays of the same length, in any structure; a list is stacked.
            session: There are no sessions; only None.
        """
        check_not_in_replica("experimental_make_numpy_dataset")
        return self.extended.experimental_make_numpy_dataset(numpy_input, session)

    @renamed("experimental_distribute_dataset")
    def make_dataset_iterator(self, dataset: Any) -> InputIterator:
        """An iterator over a dataset of global batches: `initialize`, `get_next`.

        Write `iter(strategy.experimental_distribute_dataset(dataset))`.
        """
        return InputIterator(self.experimental_distribute_dataset(dataset))

    @renamed("distribute_datasets_from_function")
    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """An iterator over the dataset that `input_fn` makes; full steps only.

        Write `iter(strategy.distribute_datasets_from_function(input_fn))`.
        """
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                "`make_input_fn_iterator` supports `InputReplicationMode.PER_WORKER` only, got "
                f"{replication_mode!r}."
            )
        check_not_in_replica("make_input_fn_iterator")

        def dataset_fn(context: InputContext) -> Any:
            made = input_fn(context)
            is_generator = callable(made) and not isinstance(made, Dataset)
            not_data = str | bytes | int | float | None
            if is_generator or isinstance(made, not_data):
                raise ValueError(f"`input_fn` must return a dataset, got {made!r}.")
            return made

        return InputIterator(
            distribute_from_function(
                dataset_fn,
                self.input_share,
                self.replica_mesh,
                options=None,
                drop_incomplete=True,
            )
        )

    @renamed("")
    def update_config_proto(self, config_proto: _Config) -> _Config:
        """A copy of the settings of a session, as this strategy needs them.

        >>> strategy = mx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> config = strategy.update_config_proto(mx.compat.v1.ConfigProto())
        >>> config.isolate_session_state
        True
        """
        config = copy.deepcopy(config_proto)
        self._set_up(config)
        return config

    @renamed("")
    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Sets what this strategy needs in `session_config`.

        Args:
            session_config: The settings of a session; changed in place.
            cluster_spec: Only None: one program does not drive several workers.
            task_type: Which worker of `cluster_spec` this is.
            task_id: Its number.
        """
        if (cluster_spec, task_type, task_id) != (None, None, None):
            raise ValueError(
                f"{type(self).__name__} takes no `cluster_spec`, `task_type` or `task_id`: "
                "in-graph multi-worker training, one program that drives all workers, is not "
                "supported. Start the program on each worker, with TF_CONFIG, and use "
                "MultiWorkerMirroredStrategy."
            )
        if session_config is not None:
            self._set_up(session_config)

    def _set_up(self, config: Any) -> None:
        """Changes a session's settings to those that the strategy needs."""

    @renamed("extended.colocate_vars_with")
    def colocate_vars_with(
        self, colocate_with_variable: Variable
    ) -> contextlib.AbstractContextManager[Any]:
        """The older place of `extended.colocate_vars_with`."""
        return self.extended.colocate_vars_with(colocate_with_variable)

    @renamed("experimental_local_results")
    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """The older name of `experimental_local_results`."""
        return self.experimental_local_results(value)

    @renamed("")
    def group(self, value: Any, name: str | None = None) -> Any:
        """The one value of this worker, or None if it has several: all have been started.

        Args:
            value: What `run` returned.
            name: Named an operation of a graph; nothing is called so here.
        """
        return grouped(self.experimental_local_results(value), name)


def isolate(config: Any) -> None:
    """Sets `config` so that variables of a session are its own."""
    if not hasattr(config, "isolate_session_state"):
        raise AttributeError(
            "A session's settings must have `isolate_session_state`, as "
            f"mx.compat.v1.ConfigProto has; got {config!r}."
        )
    config.isolate_session_state = True


def grouped(values: Sequence[Any], name: str | None) -> Any:
    """What grouping operations gives, when they run at once."""
    return values[0] if len(values) == 1 and name is None else None


class MirroredStrategy(Strategy, mirrored.MirroredStrategy):
    """`mx.distribute.MirroredStrategy` with the methods of TensorFlow 1.

    >>> strategy = mx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> iterator = strategy.make_dataset_iterator(mx.data.Dataset.range(8).batch(4))
    >>> iterator.initialize()
    >>> print(strategy.reduce("SUM", strategy.experimental_run(jnp.sum, iterator)))
    6

    Args:
        devices: Device strings (`"GPU:0"`) or `jax.Device`s; all accelerators by default,
            or all CPU devices where there are none.
        cross_device_ops: How values are reduced; `NcclAllReduce()` by default.
    """

    __module__ = "mirrax.compat.v1.distribute"
    extended_class = StrategyExtended

    def _set_up(self, config: Any) -> None:
        isolate(config)


class _OneDeviceExtended(StrategyExtended, one_device.OneDeviceExtended):
    __module__ = "mirrax.compat.v1.distribute"


class OneDeviceStrategy(Strategy, one_device.OneDeviceStrategy):
    """`mx.distribute.OneDeviceStrategy` with the methods of TensorFlow 1.

    Args:
        device: A device string (`"GPU:0"`) or a `jax.Device`.
    """

    __module__ = "mirrax.compat.v1.distribute"
    extended_class = _OneDeviceExtended


class _MultiWorkerExtended(StrategyExtended, multi_worker.MultiWorkerExtended):
    __module__ = "mirrax.compat.v1.distribute"


class MultiWorkerMirroredStrategy(
    Strategy, experimental.ExperimentalMultiWorkerMirroredStrategy
):
    """`mx.distribute.experimental.MultiWorkerMirroredStrategy` with those methods.

    Args:
        communication: A `CollectiveCommunication`.
        cluster_resolver: Says who the workers are; a `TFConfigClusterResolver` by default.
        **options: As those of `mx.distribute.MultiWorkerMirroredStrategy`.
    """

    __module__ = "mirrax.compat.v1.distribute.experimental"
    extended_class = _MultiWorkerExtended


def get_loss_reduction() -> ReduceOp:
    """How replicas' losses become one: by `SUM`, of losses that are scaled already.

    >>> mx.compat.v1.distribute.get_loss_reduction()
    <ReduceOp.SUM: 'SUM'>
    """
    return ReduceOp.SUM


get_loss_reduction.__module__ = "mirrax.compat.v1.distribute"
