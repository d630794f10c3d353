"""`fit` and the like: Keras' own step as one program on all devices, split by the batch.

The program is that of one device. Its arguments are the variables, with a copy on each device,
and the whole batch, of which each device has some rows. Rows that do not divide are padded
outside the program and cut off inside it, where JAX takes uneven parts, so that nothing is
computed from the padding.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental.sparse import JAXSparse

from mirrax._src.base import context
from mirrax._src.base.launching import launching
from mirrax._src.base.logical import after_launch
from mirrax._src.base.mesh import ReplicaMesh
from mirrax._src.base.protocols import StrategyLike
from mirrax._src.base.values import one_copy
from mirrax._src.cluster import launches
from mirrax._src.integrations.keras.data import agree_on_randomness
from mirrax._src.integrations.keras.private import (
    JAXTrainer,
    Trainer,
    trainer_module,
    wrap,
)
from mirrax._src.integrations.keras.variables import adopt, doing, held_variable
from mirrax._src.strategies.scope import check_cross_replica

_METHODS = (
    *("fit", "evaluate", "predict"),
    *("train_on_batch", "test_on_batch", "predict_on_batch"),
)
_Original = Callable[..., Any]
# The strategy in whose scope a model was made or compiled.
_strategies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
# The model that an optimizer was compiled with.
trained_by: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def install() -> None:
    wrap(JAXTrainer, "__init__", _initialize)
    wrap(Trainer, "compile", _compile)
    wrap(JAXTrainer, "_get_jax_state", _get_state)
    wrap(JAXTrainer, "_make_function", _make_function)
    for name in _METHODS:
        wrap(JAXTrainer, name, _in_scope(name))
    wrap(trainer_module, "jit", _jit)
    wrap(trainer_module, "_distribute_data", _distribute_data)


# Which strategy ----------------------------------------------------------------------------


def _initialize(original: _Original, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if not context.is_default():
        _strategies[self] = context.current().strategy


def _compile(original: _Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not context.is_default():
        check_cross_replica(context.current().strategy, "compile")
        _take_over(self, "compile")
    strategy = strategy_of(self)
    with strategy.entered("compile") if strategy else contextlib.nullcontext():
        result = original(self, *args, **kwargs)
        if strategy is not None:
            _take_over(self, "compile")
    if self.optimizer is not None:
        trained_by[self.optimizer] = weakref.ref(self)
    return result


def strategy_of(model: Any) -> Any:
    """The strategy in whose scope a model was made, built or compiled; None if there is none."""
    known = _strategies.get(model)
    if known is not None:
        return known
    for variable in model.variables:
        held = held_variable(variable)
        if held is not None:
            return held.strategy
    return None


def _take_over(model: Any, name: str) -> None:
    """Makes a model's variables those of the current strategy."""
    strategy = context.current().strategy
    known = _strategies.get(model)
    if known is not None:
        _check_home(model, known, name)
    else:  # what Keras has compiled is for one device
        model.train_function = model.test_function = model.predict_function = None
    what = f"`{name}` of {model.name!r}"
    optimizer = getattr(model, "optimizer", None)
    for variable in [*model.variables, *(optimizer.variables if optimizer else ())]:
        adopt(variable, what)
    _strategies[model] = strategy


def _check_home(model: Any, strategy: StrategyLike, name: str) -> None:
    """Raises in the scope of another strategy than the model's."""
    here = context.current().strategy
    if not context.is_default() and here is not strategy:
        raise RuntimeError(
            f"`{name}` of {model.name!r}, which was made in the scope of {strategy!r}, is called "
            f"in the scope of {here!r}. Call it outside that scope, or make the model in it."
        )


def _in_scope(name: str) -> _Original:
    def call(original: _Original, self: Any, *args: Any, **kwargs: Any) -> Any:
        """As Keras does it, in the scope of the strategy to which the model belongs."""
        strategy = strategy_of(self)
        if strategy is None and not context.is_default():
            strategy = context.current().strategy
        if strategy is None:
            return original(self, *args, **kwargs)
        if keras.distribution.distribution() is not None:
            raise RuntimeError(
                f"`{name}` of {self.name!r}, which was made in the scope of {strategy!r}, is "
                "called while a distribution of Keras' own is set. One of them can divide the "
                "work: call `keras.distribution.set_distribution(None)`."
            )
        _check_home(self, strategy, name)
        with strategy.entered(name):
            _take_over(self, name)
            if name == "fit":
                agree_on_randomness(strategy)
            return original(self, *args, **kwargs)

    return call


# Steps -------------------------------------------------------------------------------------


def _get_state(original: _Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if context.is_default():
        return original(self, *args, **kwargs)
    _take_over(self, "fit")
    with doing(takes_whole=_is_compiled(self)):
        return original(self, *args, **kwargs)


def _is_compiled(model: Any) -> bool:
    return bool(model.jit_compile) and not model.run_eagerly


def _make_function(
    original: _Original, self: Any, step_function: Any, *args: Any, **kwargs: Any
) -> Any:
    if not context.is_default() and not isinstance(step_function, Step):
        step_function = _eager_step(step_function)
    return original(self, step_function, *args, **kwargs)


def _eager_step(fn: _Original) -> _Original:
    """A step that runs as plain Python, on a worker's first device.

    Over all devices every operation would be a program of its own, with an exchange where it
    sums over rows: several times as slow.
    """

    first = context.current().strategy.replica_mesh.local_devices[0]

    def step(state: Any, data: Any) -> Any:
        with doing(in_step=True):
            return fn(state, jax.device_put(data, first))

    return step


def _distribute_data(original: _Original, data: Any, layouts: Any = None) -> Any:
    """Puts a batch on all devices, where Keras does it for the next one while a step runs.

    One that does not divide, or is for several workers, waits on the host for its step.
    """
    if context.is_default():
        return original(data, layouts)
    mesh = context.current().strategy.replica_mesh
    if mesh.spans_workers:
        return data

    def place(leaf: Any) -> Any:
        is_numeric = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
        if not is_numeric or not leaf.ndim or not len(leaf) or len(leaf) % mesh.size:
            return leaf
        return jax.device_put(leaf, mesh.split)

    return jax.tree.map(place, data)


def _jit(original: _Original, fn: _Original, **options: Any) -> Any:
    """`jax.jit`, as Keras calls it for its steps."""
    if context.is_default():
        return original(fn, **options)
    if "donate_argnums" in options:
        return Step(fn, context.current().strategy)
    jitted = original(fn, **options)

    def call(*args: Any) -> Any:
        with launching():
            return jitted(*args)

    return call


class Step:
    """A step of Keras', compiled for all devices of a strategy."""

    def __init__(self, fn: _Original, strategy: StrategyLike) -> None:
        self._fn, self._strategy = fn, strategy
        self._mesh: ReplicaMesh = strategy.replica_mesh
        owner = getattr(fn, "__self__", None)
        self._label = f"Keras' {fn.__name__}"
        if owner is not None:
            self._label += f" of {type(owner).__name__}"
        self._labels: dict[Any, str] = {}
        self.program = jax.jit(
            self._pure,
            donate_argnums=0,
            static_argnums=2,
            out_shardings=(None, self._mesh.mirrored),
        )

    def __call__(self, state: Any, data: Any) -> Any:
        batch, rows = self.placed(data)
        if self._mesh.spans_workers:
            return self._launch_together(state, batch, rows, data)
        with launching(), doing(in_step=True):
            outputs, state = self.program(state, batch, rows)
            after_launch(state)
        return outputs, state

    def placed(self, data: Any) -> tuple[Any, tuple[int | None, ...]]:
        """The batch on the devices, and how many rows there are where some are padding."""
        leaves, tree = jax.tree.flatten(data, is_leaf=_is_sparse)
        mesh, placed, rows = self._mesh, [], []
        for leaf in leaves:
            if _is_sparse(leaf) or np.ndim(leaf) == 0:
                placed.append(jax.tree.map(mesh.mirror, leaf))
                rows.append(None)
                continue
            count = leaf.shape[0]
            padding = -count % mesh.size if count else mesh.size
            if padding:
                array = np.asarray(leaf)
                empty = np.zeros((padding, *array.shape[1:]), array.dtype)
                leaf = np.concatenate([array, empty])
            placed.append(_split(leaf, mesh))
            rows.append(count if padding else None)
        return tree.unflatten(placed), tuple(rows)

    def _pure(self, state: Any, batch: Any, rows: tuple[int | None, ...]) -> Any:
        constrain = jax.lax.with_sharding_constraint
        mesh = self._mesh
        leaves, tree = jax.tree.flatten(batch, is_leaf=_is_sparse)
        leaves = [
            leaf if count is None else constrain(leaf[:count], mesh.split)
            for leaf, count in zip(leaves, rows)
        ]
        outputs, state = self._fn(state, tree.unflatten(leaves))
        if mesh.spans_workers or any(count is not None for count in rows):
            outputs = jax.tree.map(
                lambda x: constrain(jnp.asarray(x), mesh.mirrored), outputs
            )
        return outputs, state

    def _launch_together(
        self, state: Any, batch: Any, rows: tuple[int | None, ...], data: Any
    ) -> Any:
        """A run that other workers take part in."""
        cluster: Any = self._mesh.cluster
        label = self._described(batch, rows, state, data)
        with launching(), doing(in_step=True):
            cluster.check()
            launches.last.begin(label)
            try:
                with cluster.explaining():
                    outputs, state = self.program(state, batch, rows)
            except BaseException:
                launches.last.undo()
                raise
            every = jax.tree.leaves((outputs, state))
            at = launches.smallest(every)
            launches.last.end(None if at is None else every[at])
            cluster.note_steps(1)
        after_launch(state)
        return jax.tree.map(one_copy, outputs), state

    def _described(
        self, batch: Any, rows: tuple[int | None, ...], state: Any, data: Any
    ) -> str:
        """What other workers are told; a new program is compared with theirs."""
        shapes = tuple(
            (x.shape if n is None else (n, *x.shape[1:]), x.dtype.name)
            for x, n in zip(jax.tree.leaves(batch), rows)
        )
        label = self._labels.get(shapes)
        if label is None:
            listed = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in shapes)
            label = f"{self._label} on {listed}"
            _compare(self._mesh.cluster, label, state, data)
            self._labels[shapes] = label
        return label


def _is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, JAXSparse)


def _split(leaf: Any, mesh: ReplicaMesh) -> jax.Array:
    """An array of which each device has some rows; every worker has all of it."""
    if not mesh.spans_workers:
        return jax.device_put(leaf, mesh.split)
    array = np.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.make_array_from_callback(
        array.shape, mesh.split, lambda index: array[index].astype(dtype, copy=False)
    )


def _compare(cluster: Any, label: str, state: Any, data: Any) -> None:
    """Raises unless all workers are about to train the same model on the same batch."""
    model = ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in jax.tree.leaves(state))
    checksum = 0
    for leaf in jax.tree.leaves(data):
        checksum = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), checksum)
    # Under the name under which variables are made: a worker that still makes one is noticed.
    found = cluster.agree("a new variable", [label, "", model, checksum])
    for k, theirs in enumerate(found):
        first, there = cluster.names[0], cluster.names[k]
        if theirs[0] != found[0][0]:
            raise ValueError(
                f"Workers do different things: {found[0][0]} on {first}, {theirs[0]} on "
                f"{there}. All workers have to build the same model and read the same batches."
            )
        if theirs[2] != found[0][2]:
            raise ValueError(
                f"Workers train different models. The variables of {first}: {found[0][2]}; of "
                f"{there}: {theirs[2]}."
            )
        if theirs[3] != found[0][3]:
            raise ValueError(
                f"Workers read different batches: the first one of {there} has the shapes of "
                f"that of {first}, but other values. Every worker reads the whole batch, of "
                "which it trains on its part: give the dataset's shuffle a seed, and all "
                "workers the same files."
            )
