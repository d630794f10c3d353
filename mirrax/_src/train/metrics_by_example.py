"""Metrics that are means of one number for each example: accuracies and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mirrax._src.train.losses import match_rank
from mirrax._src.train.metrics import (
    Mean,
    as_numbers,
    check_fit,
    checked_count,
    labels_and_scores,
    same_rank,
)


class MeanMetricWrapper(Mean):
    """The (weighted) mean of what a function returns for each example.

    >>> def hinge(y_true, y_pred):
    ...     return jnp.maximum(0.0, 1.0 - y_true * y_pred)
    >>> metric = mx.metrics.MeanMetricWrapper(hinge)
    >>> metric.update_state(jnp.array([1.0, -1.0]), jnp.array([0.5, 0.5]))
    >>> metric.name, metric.result()
    ('hinge', Array(1., dtype=float32))

    Args:
        fn: Called with `(y_true, y_pred, **kwargs)`; returns a number for each example.
        name: Shown in messages; the function's name by default.
        dtype: The type of the sums.
        **kwargs: Passed on to `fn`.
    """

    __module__ = "mirrax.metrics"

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str | None = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(name or getattr(fn, "__name__", None), dtype)
        self._fn, self._kwargs = fn, kwargs

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of labels and predictions."""
        y_true, y_pred = as_numbers(y_true), as_numbers(y_pred)
        super().update_state(self._fn(y_true, y_pred, **self._kwargs), sample_weight)


class BinaryAccuracy(Mean):
    """How often predictions are on their label's side of a threshold.

    >>> metric = mx.metrics.BinaryAccuracy()
    >>> metric.update_state([1, 1, 0, 0], [0.98, 1.0, 0.0, 0.6])
    >>> metric.result()
    Array(0.75, dtype=float32)

    Args:
        name: Shown in messages.
        dtype: The type of the sums.
        threshold: Predictions above it mean 1, the others 0.
    """

    __module__ = "mirrax.metrics"

    def __init__(
        self, name: str | None = None, dtype: Any = None, threshold: float = 0.5
    ) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"`threshold` must be between 0 and 1, got {threshold!r}.")
        super().__init__(name, dtype)
        self.threshold = threshold

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of labels, 0 or 1, and of predictions."""
        y_true, y_pred = _labels_and_predictions(y_true, y_pred)
        super().update_state(y_true == (y_pred > self.threshold), sample_weight)


class CategoricalAccuracy(Mean):
    """How often the largest of an example's scores is that of its one-hot label.

    >>> metric = mx.metrics.CategoricalAccuracy()
    >>> metric.update_state([[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0.0]])
    >>> metric.result()
    Array(0.5, dtype=float32)
    """

    __module__ = "mirrax.metrics"

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of one-hot labels and of the scores of all classes."""
        y_true, y_pred = _one_hot_and_scores(y_true, y_pred)
        right = jnp.argmax(y_true, axis=-1) == jnp.argmax(y_pred, axis=-1)
        super().update_state(right, sample_weight)


class TopKCategoricalAccuracy(Mean):
    """How often an example's one-hot label is among its `k` largest scores.

    >>> metric = mx.metrics.TopKCategoricalAccuracy(k=2)
    >>> metric.update_state([[0, 0, 1], [1, 0, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0.1]])
    >>> metric.result()
    Array(0.5, dtype=float32)

    Args:
        k: How many of the largest scores count.
        name: Shown in messages.
        dtype: The type of the sums.
    """

    __module__ = "mirrax.metrics"

    def __init__(self, k: int = 5, name: str | None = None, dtype: Any = None) -> None:
        super().__init__(name, dtype)
        self.k = checked_count("k", k)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of one-hot labels and of the scores of all classes."""
        y_true, y_pred = _one_hot_and_scores(y_true, y_pred)
        labels = jnp.argmax(y_true, axis=-1)
        super().update_state(_in_top_k(labels, y_pred, self.k), sample_weight)


class SparseTopKCategoricalAccuracy(Mean):
    """How often an example's label is among its `k` largest scores.

    >>> metric = mx.metrics.SparseTopKCategoricalAccuracy(k=2)
    >>> metric.update_state([2, 0], [[0.1, 0.9, 0.8], [0.05, 0.95, 0.1]])
    >>> metric.result()
    Array(0.5, dtype=float32)

    Args:
        k: How many of the largest scores count.
        name: Shown in messages.
        dtype: The type of the sums.
        from_sorted_ids: Whether predictions are class ids, best first, rather than
            the scores of all classes.
    """

    __module__ = "mirrax.metrics"

    def __init__(
        self,
        k: int = 5,
        name: str | None = None,
        dtype: Any = None,
        from_sorted_ids: bool = False,
    ) -> None:
        super().__init__(name, dtype)
        self.k, self.from_sorted_ids = checked_count("k", k), from_sorted_ids

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of labels and of the scores of all classes."""
        labels, y_pred = labels_and_scores(y_true, y_pred)
        if self.from_sorted_ids:
            found = jnp.any(labels[..., None] == y_pred[..., : self.k], axis=-1)
        else:
            found = _in_top_k(labels.astype(jnp.int32), y_pred, self.k)
        super().update_state(found, sample_weight)


class MeanSquaredError(Mean):
    """The mean of the squared differences between labels and predictions.

    >>> metric = mx.metrics.MeanSquaredError()
    >>> metric.update_state([[0.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]])
    >>> metric.result()
    Array(0.25, dtype=float32)

    Every example counts alike; in Keras a batch of numbers, without a second axis, counts as
    one example whatever its size.
    """

    __module__ = "mirrax.metrics"

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of labels and predictions."""
        squares = jnp.square(_difference(y_true, y_pred, self.dtype))
        super().update_state(_over_last_axis(squares), sample_weight)


class MeanAbsoluteError(Mean):
    """The mean of the absolute differences between labels and predictions.

    >>> metric = mx.metrics.MeanAbsoluteError()
    >>> metric.update_state([[0.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 0.0]])
    >>> metric.result()
    Array(0.5, dtype=float32)
    """

    __module__ = "mirrax.metrics"

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of labels and predictions."""
        errors = jnp.abs(_difference(y_true, y_pred, self.dtype))
        super().update_state(_over_last_axis(errors), sample_weight)


class RootMeanSquaredError(Mean):
    """The root of the mean squared error of all examples.

    >>> metric = mx.metrics.RootMeanSquaredError()
    >>> metric.update_state([0.0, 1.0], [2.0, 3.0])
    >>> metric.result()
    Array(2., dtype=float32)
    """

    __module__ = "mirrax.metrics"

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of labels and predictions."""
        squares = jnp.square(_difference(y_true, y_pred, self.dtype))
        super().update_state(squares, sample_weight)

    def result(self) -> jax.Array:
        """The root of the mean."""
        return jnp.sqrt(super().result())


class Perplexity(Mean):
    """The exponential of the mean cross-entropy of all tokens.

    >>> metric = mx.metrics.Perplexity()
    >>> metric.update_state([[0, 1]], [[[0.5, 0.5], [0.5, 0.5]]])
    >>> metric.result()
    Array(2., dtype=float32)

    Every token counts alike, whichever sequence, batch or replica it comes from.

    Args:
        from_logits: Whether predictions are logits rather than probabilities.
        mask_token_id: A token that does not count, such as padding.
        dtype: The type of the sums.
        name: Shown in messages.
    """

    __module__ = "mirrax.metrics"

    def __init__(
        self,
        from_logits: bool = False,
        mask_token_id: int | None = None,
        dtype: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name, dtype)
        self.from_logits, self.mask_token_id = from_logits, mask_token_id

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of tokens and of the scores of the whole vocabulary."""
        labels, scores = labels_and_scores(y_true, y_pred)
        scores, labels = scores.astype(self.dtype), labels.astype(jnp.int32)
        if self.from_logits:
            logarithms = jax.nn.log_softmax(scores)
        else:
            scores = scores / jnp.sum(scores, axis=-1, keepdims=True)
            logarithms = jnp.log(jnp.clip(scores, _SMALL, 1 - _SMALL))
        entropies = -jnp.take_along_axis(logarithms, labels[..., None], axis=-1)[..., 0]
        weights = jnp.ones_like(entropies)
        if sample_weight is not None:
            given = as_numbers(sample_weight).astype(self.dtype)
            weights = weights * match_rank(given, entropies)
        if self.mask_token_id is not None:
            weights = jnp.where(labels == self.mask_token_id, 0, weights)
        super().update_state(jnp.ravel(entropies), jnp.ravel(weights))

    def result(self) -> jax.Array:
        """The perplexity; 0 if there were no tokens."""
        return jnp.where(self.count.read_value() == 0, 0, jnp.exp(super().result()))


_SMALL = 1e-7  # as Keras clips probabilities


def _labels_and_predictions(y_true: Any, y_pred: Any) -> tuple[jax.Array, jax.Array]:
    y_true, y_pred = same_rank(as_numbers(y_true), as_numbers(y_pred))
    check_fit(y_true, y_pred)
    return y_true, y_pred


def _one_hot_and_scores(y_true: Any, y_pred: Any) -> tuple[jax.Array, jax.Array]:
    y_true, y_pred = as_numbers(y_true), as_numbers(y_pred)
    if y_true.shape != y_pred.shape or not y_true.ndim:
        raise ValueError(
            f"One-hot labels of shape {y_true.shape} do not fit scores of shape "
            f"{y_pred.shape}. For labels that are class ids use the metric whose name begins "
            "with Sparse."
        )
    return y_true, y_pred


def _in_top_k(labels: jax.Array, scores: jax.Array, k: int) -> jax.Array:
    """Whether fewer than `k` scores are larger than the label's: ties count as found."""
    own = jnp.take_along_axis(scores, labels[..., None], axis=-1)
    own = jnp.where(jnp.isnan(own), -jnp.inf, own)
    return jnp.sum(scores > own, axis=-1) < k


def _difference(y_true: Any, y_pred: Any, dtype: Any) -> jax.Array:
    y_true, y_pred = _labels_and_predictions(y_true, y_pred)
    return y_pred.astype(dtype) - y_true.astype(dtype)


def _over_last_axis(errors: jax.Array) -> jax.Array:
    return jnp.mean(errors, axis=-1) if errors.ndim > 1 else errors
