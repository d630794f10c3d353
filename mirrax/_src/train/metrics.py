"""`mx.metrics`: sums that every replica adds to on its own, combined when they are read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.base import context
from mirrax._src.base.hiding import all_brief, hides
from mirrax._src.base.jax_compat import Tracer
from mirrax._src.base.reduce_op import VariableAggregation, VariableSynchronization
from mirrax._src.state.variable import Variable
from mirrax._src.train.losses import match_rank
from mirrax._src.train.own_copies import OwnCopies


@hides("saved_parts")
class Metric:
    """What metrics share. Make them in the strategy's scope, update them in replicas.

    A subclass makes its sums with `add_sum` and defines `update_state` and `result`. Inside a
    replica `result` is the replica's own; outside it is that of all replicas.

    Args:
        name: Shown in messages.
        dtype: The type of the sums.
    """

    __module__ = "mirrax.metrics"

    def __init_subclass__(cls) -> None:
        all_brief(cls)

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        self.name = name or _snake_case(type(self).__name__)
        self.dtype = jnp.dtype(dtype or "float32")
        self._sums: dict[str, Variable] = {}

    def add_sum(self, name: str, shape: tuple[int, ...] = ()) -> Variable:
        """A new variable, 0 at the start: each replica adds to its own copy."""
        self._sums[name] = Variable(
            jnp.zeros(shape, self.dtype),
            name=f"{self.name}/{name}",
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        return self._sums[name]

    @property
    def variables(self) -> list[Variable]:
        """The sums."""
        return list(self._sums.values())

    def saved_parts(self) -> dict[str, Any]:
        """What a checkpoint saves, by name: what each replica has added."""
        return {name: OwnCopies(variable) for name, variable in self._sums.items()}

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Adds what one batch contributes."""
        raise NotImplementedError(
            f"{type(self).__name__} has to define `update_state`."
        )

    def result(self) -> jax.Array:
        """The value of all that has been added since the last reset."""
        raise NotImplementedError(f"{type(self).__name__} has to define `result`.")

    def reset_state(self) -> None:
        """Sets the sums back to 0, for the next epoch."""
        for variable in self._sums.values():
            variable.assign(jnp.zeros(variable.shape, self.dtype))

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """`update_state`, then `result`."""
        self.update_state(*args, **kwargs)
        return self.result()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} name={self.name}>"


class Sum(Metric):
    """The (weighted) sum of all values.

    >>> metric = mx.metrics.Sum()
    >>> metric.update_state([1.0, 2.0], sample_weight=[1.0, 3.0])
    >>> metric.result()
    Array(7., dtype=float32)
    """

    __module__ = "mirrax.metrics"

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        super().__init__(name, dtype)
        self.total = self.add_sum("total")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Adds `values`, times `sample_weight`."""
        values, _ = _per_example(values, sample_weight, self.dtype, jnp.sum)
        add(self.total, jnp.sum(values, dtype=self.dtype))

    def result(self) -> jax.Array:
        """The sum."""
        return self.total.read_value()


class Mean(Metric):
    """The (weighted) mean of all examples, 0 if there were none.

    >>> metric = mx.metrics.Mean()
    >>> metric.update_state([1.0, 3.0])
    >>> metric.update_state([8.0])
    >>> metric.result()
    Array(4., dtype=float32)

    Replicas and batches may have different numbers of examples: what counts is examples.
    """

    __module__ = "mirrax.metrics"

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        super().__init__(name, dtype)
        self.total = self.add_sum("total")
        self.count = self.add_sum("count")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Adds the examples along the first axis of `values`, times `sample_weight`.

        Further axes are averaged. A `sample_weight` that is one number makes the whole batch
        count as one example of that weight, as in Keras.
        """
        values, weights = _per_example(values, sample_weight, self.dtype, jnp.mean)
        add(self.total, jnp.sum(values, dtype=self.dtype))
        add(self.count, jnp.sum(weights, dtype=self.dtype))

    def result(self) -> jax.Array:
        """The mean."""
        total, count = self.total.read_value(), self.count.read_value()
        return jnp.where(count == 0, 0, total / jnp.where(count == 0, 1, count))


class Accuracy(Mean):
    """How often predictions equal labels.

    >>> metric = mx.metrics.Accuracy()
    >>> metric.update_state([1, 2, 3, 4], [0, 2, 3, 4])
    >>> metric.result()
    Array(0.75, dtype=float32)
    """

    __module__ = "mirrax.metrics"

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of labels and of what was predicted for them."""
        y_true, y_pred = as_numbers(y_true), as_numbers(y_pred)
        y_true, y_pred = same_rank(y_true.astype(y_pred.dtype), y_pred)
        check_fit(y_true, y_pred)
        super().update_state(y_true == y_pred, sample_weight)


class SparseCategoricalAccuracy(Mean):
    """How often the largest of an example's scores is that of its label.

    >>> metric = mx.metrics.SparseCategoricalAccuracy()
    >>> metric.update_state([2, 1], [[0.1, 0.6, 0.3], [0.05, 0.95, 0.0]])
    >>> metric.result()
    Array(0.5, dtype=float32)
    """

    __module__ = "mirrax.metrics"

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of labels and of the scores of all classes."""
        labels, scores = labels_and_scores(y_true, y_pred)
        super().update_state(labels == jnp.argmax(scores, axis=-1), sample_weight)


def _per_example(
    values: Any, weights: Any, dtype: Any, reduce: Any
) -> tuple[jax.Array, jax.Array]:
    """Values (weighted) and weights, one for each example; further axes are reduced."""
    values = as_numbers(values).astype(dtype)
    if weights is None:
        values = reduce(values, axis=tuple(range(1, values.ndim)))
        return values, jnp.ones_like(values)
    weights = as_numbers(weights).astype(dtype)
    if abs(weights.ndim - values.ndim) == 1:
        weights = match_rank(weights, values)
    values = reduce(values, axis=tuple(range(weights.ndim, values.ndim)))
    weights = jnp.broadcast_to(match_rank(weights, values), values.shape)
    both = (values * weights, weights)
    return tuple(reduce(x, axis=tuple(range(1, x.ndim))) for x in both)  # type: ignore[return-value]


def as_numbers(values: Any) -> jax.Array:
    """`values` as an array."""
    if values is None:
        raise ValueError("A metric needs values to add, got None.")
    try:
        return jnp.asarray(values)
    except TypeError:
        raise ValueError(
            f"A metric takes arrays of numbers, got {type(values).__name__}."
        ) from None


def checked_count(name: str, given: int) -> int:
    """A positive integer; raises for anything else."""
    if not hasattr(given, "__index__") or given < 1:
        raise ValueError(f"`{name}` must be a positive integer, got {given!r}.")
    return given


def same_rank(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Arrays of which one has a last axis of one too many, without it."""
    if a.ndim == b.ndim + 1 and a.shape[-1] == 1:
        return a[..., 0], b
    if b.ndim == a.ndim + 1 and b.shape[-1] == 1:
        return a, b[..., 0]
    return a, b


def labels_and_scores(y_true: Any, y_pred: Any) -> tuple[jax.Array, jax.Array]:
    """Numbers of classes, without a last axis of one, and the scores of all classes."""
    y_true, y_pred = as_numbers(y_true), as_numbers(y_pred)
    if y_true.ndim == y_pred.ndim and y_true.shape[-1:] == (1,):
        y_true = y_true[..., 0]
    if not y_pred.ndim or y_true.shape != y_pred.shape[:-1]:
        raise ValueError(
            f"Labels of shape {y_true.shape} do not fit scores of shape {y_pred.shape}."
        )
    return y_true, y_pred


def check_fit(a: jax.Array, b: jax.Array) -> None:
    """Raises if labels and predictions cannot be compared."""
    try:
        jnp.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        raise ValueError(
            f"Labels of shape {a.shape} do not fit predictions of shape {b.shape}."
        ) from None


def add(variable: Variable, amount: jax.Array) -> None:
    """Adds to a sum, in a replica or outside."""
    # Not `assign_add`, which is an error for sums outside of replicas.
    total = variable.read_value() + amount
    is_whole = jnp.issubdtype(variable.dtype, jnp.integer)
    if is_whole and not _in_own_replica(variable) and not isinstance(total, Tracer):
        OwnCopies(variable).put(np.asarray(total)[None])  # shares would be rounded
    else:
        variable.assign(total)


def _in_own_replica(variable: Variable) -> bool:
    here = context.current()
    return here.replica is not None and here.strategy is variable.strategy


def _snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
