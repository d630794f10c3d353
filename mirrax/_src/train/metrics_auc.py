"""`AUC`: the area under a curve of counts at many thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirrax._src.train.metrics import Metric, add
from mirrax._src.train.metrics_confusion import SMALL, Counts, checked, count, ratio


class AUC(Metric):
    """The area under the ROC curve, or under that of precision and recall.

    >>> metric = mx.metrics.AUC(num_thresholds=3)
    >>> metric.update_state([0, 0, 1, 1], [0.0, 0.5, 0.3, 0.9])
    >>> metric.result()
    Array(0.75, dtype=float32)

    The curve is a polygon with a point for each threshold, so that batches and replicas only
    have to add up counts; more thresholds come nearer to the exact area.

    Args:
        num_thresholds: How many, evenly spread over [0, 1].
        curve: "ROC" or "PR".
        summation_method: "interpolation" (for PR, as Davis and Goadrich do), "minoring" or
            "majoring": heights between two points.
        name: Shown in messages.
        dtype: The type of the sums.
        thresholds: These instead of evenly spread ones, in [0, 1]; one below 0 and one
            above 1 are added.
        multi_label: Whether each column has a curve of its own; the result is their mean.
        num_labels: With `multi_label`, the number of columns.
        label_weights: How much each column counts.
        from_logits: Whether predictions are logits rather than probabilities.
    """

    __module__ = "mirrax.metrics"

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str | None = None,
        dtype: Any = None,
        thresholds: Sequence[float] | None = None,
        multi_label: bool = False,
        num_labels: int | None = None,
        label_weights: Sequence[float] | None = None,
        from_logits: bool = False,
    ) -> None:
        super().__init__(name or "auc", dtype)
        self.curve = _one_of("curve", curve, ("ROC", "PR"))
        self.summation_method = _one_of(
            "summation_method",
            summation_method,
            ("interpolation", "minoring", "majoring"),
        )
        if multi_label and num_labels is None:
            raise ValueError(
                "`multi_label=True` needs `num_labels`, the number of columns, so that a "
                "checkpoint can be restored before the first batch."
            )
        if num_labels is not None and not multi_label:
            raise ValueError(f"`num_labels={num_labels}` needs `multi_label=True`.")
        self.multi_label, self.num_labels = multi_label, num_labels
        self.label_weights = (
            None if label_weights is None else np.asarray(label_weights, self.dtype)
        )
        self.from_logits = from_logits
        self.thresholds = _spread(num_thresholds, thresholds)
        columns = () if num_labels is None else (num_labels,)
        for each in Counts._fields:
            setattr(self, each, self.add_sum(each, (len(self.thresholds), *columns)))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of labels, 0 or 1, and of predictions in [0, 1]."""
        y_true, y_pred, weights = checked(y_true, y_pred, sample_weight, self.dtype)
        if self.from_logits:
            y_pred = jax.nn.sigmoid(y_pred)
        if self.multi_label and y_pred.shape[1:] != (self.num_labels,):
            raise ValueError(
                f"{self.name!r} has `num_labels={self.num_labels}` and needs arrays of shape "
                f"(examples, {self.num_labels}), got {y_pred.shape}."
            )
        if self.label_weights is not None:
            self._check_label_weights(y_pred.shape)
            weights = weights if self.multi_label else weights * self.label_weights
        if not self.multi_label:
            y_true, y_pred, weights = (
                x.reshape(-1, 1) for x in (y_true, y_pred, weights)
            )
        for each, found in (
            count(y_true, jnp.clip(y_pred, 0, 1), weights, self.thresholds)
            ._asdict()
            .items()
        ):
            add(self._sums[each], found if self.multi_label else found[:, 0])

    def _check_label_weights(self, shape: tuple[int, ...]) -> None:
        assert self.label_weights is not None
        if len(shape) < 2 or shape[-1:] != self.label_weights.shape:
            raise ValueError(
                f"`label_weights` of shape {self.label_weights.shape} do not fit "
                f"predictions of shape {shape}."
            )

    def result(self) -> jax.Array:
        """The area; with `multi_label` the mean of the columns' areas."""
        counts = Counts(*(variable.read_value() for variable in self._sums.values()))
        if self.curve == "PR" and self.summation_method == "interpolation":
            areas = _precision_recall_area(counts)
        else:
            areas = self._polygon(counts)
        if not self.multi_label:
            return areas
        if self.label_weights is None:
            return jnp.mean(areas)
        return ratio(jnp.sum(areas * self.label_weights), self.label_weights.sum())

    def _polygon(self, counts: Counts) -> jax.Array:
        found, wrong, missed, _ = counts
        recall = ratio(found, found + missed)
        if self.curve == "ROC":
            x, y = ratio(wrong, wrong + counts.true_negatives), recall
        else:
            x, y = recall, ratio(found, found + wrong)
        left, right = y[:-1], y[1:]
        height = {
            "interpolation": lambda: (left + right) / 2,
            "minoring": lambda: jnp.minimum(left, right),
            "majoring": lambda: jnp.maximum(left, right),
        }[self.summation_method]()
        return jnp.sum((x[:-1] - x[1:]) * height, axis=0)


def _spread(count: int, given: Sequence[float] | None) -> tuple[float, ...]:
    """Thresholds in order, the first below 0 and the last above 1."""
    if given is None:
        if not hasattr(count, "__index__") or count < 2:
            raise ValueError(f"`num_thresholds` must be at least 2, got {count!r}.")
        inner = [i / (count - 1) for i in range(1, count - 1)]
    else:
        inner = sorted(float(each) for each in given)
        if not all(0 <= each <= 1 for each in inner):
            raise ValueError(f"`thresholds` must be in [0, 1], got {given!r}.")
    return (-SMALL, *inner, 1 + SMALL)


def _precision_recall_area(counts: Counts) -> jax.Array:
    """The area where, between two thresholds, wrong ones grow linearly with found ones."""
    found, said = counts.true_positives, counts.true_positives + counts.false_positives
    more_found, more_said = found[:-1] - found[1:], said[:-1] - said[1:]
    slope = ratio(more_found, more_said)
    start = found[1:] - slope * said[1:]
    both = (said[:-1] > 0) & (said[1:] > 0)
    growth = jnp.where(both, said[:-1] / jnp.where(both, said[1:], 1), 1)
    true = found[1:] + counts.false_negatives[1:]
    parts = ratio(slope * (more_found + start * jnp.log(growth)), true)
    return jnp.sum(parts, axis=0)


def _one_of(what: str, given: str, names: tuple[str, ...]) -> str:
    if given not in names:
        raise ValueError(f"`{what}` must be one of {names}, got {given!r}.")
    return given
