"""Metrics that count what was found and what was missed: precision, recall, F1."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.state.variable import Variable
from mirrax._src.train.losses import match_rank
from mirrax._src.train.metrics import (
    Metric,
    add,
    as_numbers,
    check_fit,
    checked_count,
    same_rank,
)

SMALL = 1e-7  # Keras' epsilon
_LOWEST = -1e10  # below all predictions that are among the top k


class Counts(NamedTuple):
    """Weights of what was predicted above each threshold, by what is true."""

    true_positives: Any
    false_positives: Any
    false_negatives: Any
    true_negatives: Any


class _AtThresholds(Metric):
    """Counts at one threshold or several, for labels that are 0 or 1."""

    _counted: tuple[str, ...]

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(name, dtype)
        default = 0.5 if top_k is None else _LOWEST
        given = np.atleast_1d(default if thresholds is None else thresholds)
        if thresholds is not None and not np.all((given >= 0) & (given <= 1)):
            raise ValueError(f"`thresholds` must be in [0, 1], got {thresholds!r}.")
        self.thresholds = tuple(given.tolist())
        self.top_k, self.class_id = top_k, class_id
        self._is_one = thresholds is None or np.ndim(thresholds) == 0
        for each in self._counted:
            setattr(self, each, self.add_sum(each, (len(given),)))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of labels, 0 or 1, and of predictions in [0, 1]."""
        y_true, y_pred, weights = checked(y_true, y_pred, sample_weight, self.dtype)
        if self.top_k is not None:
            y_pred = _only_top_k(y_pred, self.top_k)
        if self.class_id is not None:
            if y_pred.ndim < 2 or not 0 <= self.class_id < y_pred.shape[-1]:
                raise ValueError(
                    f"`class_id={self.class_id}` needs a score for each class up to that one, "
                    f"got predictions of shape {y_pred.shape}."
                )
            y_true, y_pred, weights = (
                x[..., self.class_id] for x in (y_true, y_pred, weights)
            )
        flat = (x.reshape(-1, 1) for x in (y_true, y_pred, weights))
        counts = count(*flat, self.thresholds)
        for each in self._counted:
            add(self._sums[each], getattr(counts, each)[:, 0])

    def result(self) -> jax.Array:
        """The value at the threshold, or those at all thresholds."""
        found, other = (variable.read_value() for variable in self._sums.values())
        shares = ratio(found, found + other)
        return shares[0] if self._is_one else shares


class Precision(_AtThresholds):
    """The part of what was predicted to be 1 that is.

    >>> metric = mx.metrics.Precision()
    >>> metric.update_state([0, 1, 1, 1], [1.0, 0.0, 1.0, 1.0])
    >>> metric.result()
    Array(0.6666667, dtype=float32)

    Args:
        thresholds: Predictions above it mean 1; of several, each has a result of its own. 0.5
            by default.
        top_k: Only the `k` largest scores of each example can mean 1.
        class_id: Only this class counts.
        name: Shown in messages.
        dtype: The type of the sums.
    """

    __module__ = "mirrax.metrics"
    _counted = ("true_positives", "false_positives")


class Recall(_AtThresholds):
    """The part of what is 1 that was predicted to be.

    >>> metric = mx.metrics.Recall()
    >>> metric.update_state([0, 1, 1, 1], [1.0, 0.0, 1.0, 1.0])
    >>> metric.result()
    Array(0.6666667, dtype=float32)

    Args:
        thresholds: Predictions above it mean 1; of several, each has a result of its own. 0.5
            by default.
        top_k: Only the `k` largest scores of each example can mean 1.
        class_id: Only this class counts.
        name: Shown in messages.
        dtype: The type of the sums.
    """

    __module__ = "mirrax.metrics"
    _counted = ("true_positives", "false_negatives")


class F1Score(Metric):
    """The harmonic mean of precision and recall, of each class or of all.

    >>> metric = mx.metrics.F1Score(threshold=0.5, num_classes=3)
    >>> metric.update_state([[1, 1, 1], [1, 0, 0], [1, 1, 0]],
    ...                     [[0.2, 0.6, 0.7], [0.2, 0.6, 0.6], [0.6, 0.8, 0.0]])
    >>> [round(float(score), 3) for score in metric.result()]
    [0.5, 0.8, 0.667]

    Args:
        average: None for a result of each class; "macro" for their mean, "weighted" for their
            mean weighted by how often each class is true, "micro" to count all classes as one.
        threshold: Scores above it mean 1. By default only the largest score of an example does.
        name: Shown in messages.
        dtype: The type of the sums.
        num_classes: The size of the last axis of labels and predictions; 1 if there is only
            one column. (Keras learns it from the first batch; here it is needed so that a
            checkpoint can be restored before that.)
    """

    __module__ = "mirrax.metrics"

    def __init__(
        self,
        average: str | None = None,
        threshold: float | None = None,
        name: str | None = None,
        dtype: Any = None,
        *,
        num_classes: int,
    ) -> None:
        if average not in (None, "micro", "macro", "weighted"):
            raise ValueError(
                "`average` must be None, 'micro', 'macro' or 'weighted', got "
                f"{average!r}."
            )
        super().__init__(name, dtype)
        self.average, self.threshold = average, threshold
        self.num_classes = checked_count("num_classes", num_classes)
        shape = () if average == "micro" else (num_classes,)
        for each in ("true_positives", "false_positives", "false_negatives"):
            setattr(self, each, self.add_sum(each, shape))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of labels, 0 or 1 for each class, and of scores."""
        y_true, y_pred, weights = checked(y_true, y_pred, sample_weight, self.dtype)
        if y_pred.ndim != 2 or y_pred.shape[1] != self.num_classes:
            raise ValueError(
                f"{self.name!r} has `num_classes={self.num_classes}` and needs arrays of "
                f"shape (examples, {self.num_classes}), got {y_pred.shape}."
            )
        if self.threshold is None:
            is_largest = y_pred >= jnp.max(y_pred, axis=-1, keepdims=True)
            said = is_largest & (
                jnp.abs(y_pred) > 1e-9
            )  # a row of zeros predicts nothing
        else:
            said = y_pred > self.threshold
        said, y_true = said.astype(self.dtype), y_true.astype(self.dtype)
        axis = None if self.average == "micro" else 0
        for each, part in (
            ("true_positives", said * y_true),
            ("false_positives", said * (1 - y_true)),
            ("false_negatives", (1 - said) * y_true),
        ):
            add(self._sums[each], jnp.sum(part * weights, axis=axis))

    def result(self) -> jax.Array:
        """The score of each class, or that of all."""
        found, wrong, missed = (v.read_value() for v in self._sums.values())
        precision = found / (found + wrong + SMALL)
        recall = found / (found + missed + SMALL)
        score = 2 * precision * recall / (precision + recall + SMALL)
        if self.average == "weighted":
            weights = found + missed
            return jnp.sum(score * weights / (jnp.sum(weights) + SMALL))
        return score if self.average is None else jnp.mean(score)


class ConfusionMatrix(Metric):
    """How often each class (row) was predicted to be each class (column).

    >>> metric = mx.metrics.ConfusionMatrix(num_classes=3)
    >>> metric.update_state([1, 2, 2], [2, 2, 2])
    >>> metric.result()
    Array([[0, 0, 0],
           [0, 0, 1],
           [0, 0, 2]], dtype=int32)

    As `tf.math.confusion_matrix`, of all batches.

    Args:
        num_classes: The number of classes.
        name: Shown in messages.
        dtype: The type of the counts, int32 by default; a float type for fractional weights.
    """

    __module__ = "mirrax.metrics"

    def __init__(
        self, num_classes: int, name: str | None = None, dtype: Any = None
    ) -> None:
        super().__init__(name, dtype or "int32")
        self.num_classes = checked_count("num_classes", num_classes)
        self.matrix: Variable = self.add_sum("matrix", (num_classes, num_classes))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of labels and predictions, both class ids.

        Where one of the two is not a class (negative, or at least `num_classes`), nothing
        is counted.
        """
        y_true, y_pred = same_rank(as_numbers(y_true), as_numbers(y_pred))
        if y_true.shape != y_pred.shape:
            raise ValueError(
                f"Labels of shape {y_true.shape} do not fit predictions of shape "
                f"{y_pred.shape}; both are class ids (`jnp.argmax(scores, -1)`)."
            )
        weights = jnp.ones(y_true.shape, self.dtype)
        if sample_weight is not None:
            given = as_numbers(sample_weight)
            is_fractional = jnp.issubdtype(given.dtype, jnp.inexact)
            if is_fractional and jnp.issubdtype(self.dtype, jnp.integer):
                raise ValueError(
                    f"{self.name!r} counts in {self.dtype}; for weights of dtype "
                    f"{given.dtype} make it with `dtype='float32'`."
                )
            weights = weights * match_rank(given.astype(self.dtype), weights)
        rows, columns = (x.ravel().astype(jnp.int32) for x in (y_true, y_pred))
        is_class = (rows >= 0) & (columns >= 0)
        rows = jnp.where(is_class, rows, self.num_classes)  # `drop` takes negative ones
        size = (self.num_classes, self.num_classes)
        found = jnp.zeros(size, self.dtype)
        add(self.matrix, found.at[rows, columns].add(weights.ravel(), mode="drop"))

    def result(self) -> jax.Array:
        """The matrix: labels are rows, predictions columns."""
        return self.matrix.read_value()


def checked(
    y_true: Any, y_pred: Any, sample_weight: Any, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Labels, predictions and weights of one shape."""
    y_true, y_pred = same_rank(as_numbers(y_true), as_numbers(y_pred).astype(dtype))
    check_fit(y_true, y_pred)
    shape = jnp.broadcast_shapes(y_true.shape, y_pred.shape)
    weights = jnp.ones((), dtype)
    if sample_weight is not None:
        weights = as_numbers(sample_weight).astype(dtype)
        weights = match_rank(weights, jnp.empty(shape, dtype))
    whole = (jnp.broadcast_to(x, shape) for x in (y_true, y_pred, weights))
    return tuple(whole)  # type: ignore[return-value]


@functools.partial(jax.jit, static_argnames="thresholds")
def count(
    y_true: jax.Array,
    y_pred: jax.Array,
    weights: jax.Array,
    thresholds: tuple[float, ...],
) -> Counts:
    """Counts for each threshold (rows) and column; `y_pred` has examples and columns.

    A prediction belongs to the bucket of the thresholds below it: examples x log(thresholds)
    steps, where comparing each with each takes examples x thresholds.
    """
    order = np.argsort(thresholds)
    levels = jnp.asarray(np.array(thresholds)[order], y_pred.dtype)
    y_pred = jnp.where(jnp.isnan(y_pred), -jnp.inf, y_pred)
    # The number of thresholds below a prediction.
    bucket = jnp.searchsorted(levels, y_pred, side="left")
    columns = jnp.broadcast_to(jnp.arange(y_pred.shape[1]), y_pred.shape)
    empty = jnp.zeros((len(levels) + 1, y_pred.shape[1]), y_pred.dtype)

    def above(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        inside = empty.at[bucket, columns].add(weight)
        total = jnp.cumsum(inside[::-1], axis=0)[::-1]
        in_order = total[1:][np.argsort(order)]
        return in_order, total[0] - in_order

    is_true = y_true != 0
    found, missed = above(jnp.where(is_true, weights, 0))
    wrong, right = above(jnp.where(is_true, 0, weights))
    return Counts(found, wrong, missed, right)


def _only_top_k(y_pred: jax.Array, k: int) -> jax.Array:
    if not hasattr(k, "__index__") or not 1 <= k <= y_pred.shape[-1]:
        raise ValueError(
            f"`top_k={k!r}` must be a positive integer up to the number of classes; the "
            f"predictions have shape {y_pred.shape}."
        )
    _, best = jax.lax.top_k(y_pred, k)
    is_best = jnp.any(jax.nn.one_hot(best, y_pred.shape[-1], dtype=bool), axis=-2)
    return jnp.where(is_best, y_pred, _LOWEST)


def ratio(a: Any, b: Any) -> jax.Array:
    """a / b, and 0 where b is not positive."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)
