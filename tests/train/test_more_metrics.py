"""Metrics give Keras' answers (`record_metrics.py`), however examples are spread."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import both_engines, compile_if, mirrored, per_replica

import mirrax as mx

from .metric_cases import CASES, batches
from .training import STRATEGIES

RECORDED = json.loads((Path(__file__).parent / "recorded" / "metrics.json").read_text())


def make(strategy, only_one_of_a_kind=False):
    """The metrics by the names of their cases."""
    cases = CASES
    if only_one_of_a_kind:
        cases = dict({case.kind: (k, case) for k, case in CASES.items()}.values())
    with strategy.scope():
        return {
            name: getattr(mx.metrics, case.kind)(**case.arguments, **case.ours)
            for name, case in cases.items()
        }


def steps_of(strategy):
    """What two replicas are given in each of two steps: unequal parts."""
    rows = {name: batches(name) for name in CASES}
    for step in (0, 2):
        yield {
            name: tuple(
                None if parts[0] is None else per_replica(strategy, *parts)
                for parts in zip(*found[step : step + 2])
            )
            for name, found in rows.items()
        }


def assert_as_keras(metrics, count):
    """All results are those that Keras has after so many batches."""
    for name, metric in metrics.items():
        np.testing.assert_allclose(
            metric.result(),
            RECORDED[name]["results"][count - 1],
            rtol=2e-6,
            atol=2e-7,
            err_msg=name,
        )


@pytest.mark.slow
@both_engines
def test_results_are_those_of_keras(engine, tmp_path):
    strategy = STRATEGIES[2]
    metrics = make(strategy, only_one_of_a_kind=engine == "eager")

    def update(args):
        for name, metric in metrics.items():
            metric.update_state(*args[name])

    step = compile_if(engine, update)
    first, second = steps_of(strategy)
    strategy.run(step, (first,))
    assert_as_keras(metrics, 2)
    saved = mx.train.Checkpoint(metrics=metrics).write(tmp_path / "metrics", wait=True)
    strategy.run(step, (second,))
    assert_as_keras(metrics, 4)
    for metric in metrics.values():
        metric.reset_state()
    assert not any(np.any(v.numpy()) for m in metrics.values() for v in m.variables)

    mx.train.Checkpoint(metrics=metrics).read(saved).assert_consumed()
    assert_as_keras(metrics, 2)
    strategy.run(step, (second,))
    assert_as_keras(metrics, 4)


@pytest.mark.slow
def test_outside_of_replicas():
    metrics = make(mirrored(3), only_one_of_a_kind=True)
    for name, metric in metrics.items():
        assert metric.name == re.sub(r"_\d+$", "", RECORDED[name]["name"])
        for batch in batches(name):
            metric.update_state(*batch)
    assert_as_keras(metrics, 4)


def test_numbers_count_as_examples():
    metric = mx.metrics.MeanSquaredError()
    metric.update_state([1.0, 2.0, 3.0], [1.0, 2.0, 6.0])
    metric.update_state([1.0], [2.0])
    assert float(metric.result()) == 10 / 4


def test_the_confusion_matrix_counts_pairs():
    rng = np.random.default_rng(0)
    rows, columns = rng.integers(0, 3, 40), rng.integers(0, 3, 40)
    weights = rng.integers(0, 5, 40).astype("f4") / 2
    strategy = mirrored(2)
    with strategy.scope():
        counts = mx.metrics.ConfusionMatrix(3)
        weighted = mx.metrics.ConfusionMatrix(3, dtype="float32")

    @mx.function
    def step(rows, columns, weights):
        counts.update_state(rows, columns)
        weighted.update_state(rows, columns, weights)

    cut = [25]
    args = [per_replica(strategy, *np.split(x, cut)) for x in (rows, columns, weights)]
    strategy.run(step, args)
    expected, heavy = np.zeros((3, 3), int), np.zeros((3, 3))
    np.add.at(expected, (rows, columns), 1)
    np.add.at(heavy, (rows, columns), weights)
    assert counts.result().tolist() == expected.tolist()
    np.testing.assert_allclose(weighted.result(), heavy)
    counts.update_state(
        [0, -1, 3, 1], [0, 0, 0, -2]
    )  # of which one is a pair of classes
    assert int(counts.result().sum()) == 41


@pytest.mark.parametrize("from_logits", [False, True])
def test_perplexity_counts_tokens(from_logits):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 4, 5)).astype("f4")
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    tokens = rng.integers(0, 5, (3, 4))
    metric = mx.metrics.Perplexity(from_logits=from_logits, mask_token_id=0)
    for rows in (slice(0, 1), slice(1, 3)):
        metric.update_state(tokens[rows], (logits if from_logits else chances)[rows])
    own = np.take_along_axis(chances, tokens[..., None], -1)[..., 0][tokens != 0]
    np.testing.assert_allclose(metric.result(), np.exp(-np.log(own).mean()), rtol=1e-5)
    metric.reset_state()
    assert float(metric.result()) == 0.0
    weights = rng.integers(1, 4, 3)
    metric.update_state(tokens, logits if from_logits else chances, weights)
    weights = np.broadcast_to(weights[:, None], (3, 4))[tokens != 0]
    mean = np.sum(-np.log(own) * weights) / weights.sum()
    np.testing.assert_allclose(metric.result(), np.exp(mean), rtol=1e-5)


def test_predictions_that_are_not_numbers_are_never_positive():
    metric = mx.metrics.Recall()
    metric.update_state([1, 1], [jnp.nan, 0.9])
    assert float(metric.result()) == 0.5


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda m: m.BinaryAccuracy(threshold=2.0), "between 0 and 1, got 2.0"),
        (lambda m: m.TopKCategoricalAccuracy(k=0), "`k` must be a positive.* got 0"),
        (lambda m: m.Precision([0.5, 1.5]), r"must be in \[0, 1\], got \[0.5, 1.5\]"),
        (lambda m: m.F1Score("mean", num_classes=2), "'weighted', got 'mean'"),
        (lambda m: m.AUC(num_thresholds=1), "at least 2, got 1"),
        (lambda m: m.AUC(thresholds=[2.0]), r"must be in \[0, 1\], got \[2.0\]"),
        (lambda m: m.AUC(curve="DET"), "`curve` must be one of .*, got 'DET'"),
        (lambda m: m.AUC(multi_label=True), "`multi_label=True` needs `num_labels`"),
        (lambda m: m.AUC(num_labels=2), "`num_labels=2` needs `multi_label=True`"),
    ],
)
def test_arguments_that_make_no_metric(make, message):
    with pytest.raises(ValueError, match=message):
        make(mx.metrics)


@pytest.mark.parametrize(
    "make, args, message",
    [
        (
            lambda m: m.CategoricalAccuracy(),
            (np.zeros(2), np.zeros((2, 3))),
            r"\(2,\) do not fit .*\(2, 3\).*Sparse",
        ),
        (
            lambda m: m.MeanSquaredError(),
            (np.zeros(2), np.zeros(3)),
            r"\(2,\) do not fit predictions of shape \(3,\)",
        ),
        (
            lambda m: m.AUC(multi_label=True, num_labels=2),
            (np.zeros((2, 3)), np.zeros((2, 3))),
            r"`num_labels=2` .*got \(2, 3\)",
        ),
        (
            lambda m: m.AUC(label_weights=[1.0, 2.0]),
            (np.zeros(2), np.zeros(2)),
            r"`label_weights` of shape \(2,\) do not fit predictions of shape \(2,\)",
        ),
        (
            lambda m: m.Precision(class_id=1),
            (np.zeros(2), np.zeros(2)),
            r"`class_id=1` needs a score for each class up to that one, got .*\(2,\)",
        ),
        (
            lambda m: m.Precision(class_id=3),
            (np.zeros((2, 3)), np.zeros((2, 3))),
            r"`class_id=3` needs .*\(2, 3\)",
        ),
        (
            lambda m: m.ConfusionMatrix(0),
            (),
            "`num_classes` must be a positive integer, got 0",
        ),
        (
            lambda m: m.Recall(top_k=4),
            (np.zeros((2, 3)), np.zeros((2, 3))),
            r"`top_k=4` must be .*\(2, 3\)",
        ),
        (
            lambda m: m.F1Score(num_classes=2),
            (np.zeros((2, 3)), np.zeros((2, 3))),
            r"`num_classes=2` .*got \(2, 3\)",
        ),
        (
            lambda m: m.ConfusionMatrix(2),
            (np.zeros(2), np.zeros((2, 3))),
            r"\(2,\) do not fit predictions of shape \(2, 3\)",
        ),
        (
            lambda m: m.ConfusionMatrix(2),
            (np.zeros(2), np.zeros(2), np.ones(2, "f4")),
            "counts in int32; for weights of dtype float32",
        ),
    ],
)
def test_batches_that_do_not_fit(make, args, message):
    with pytest.raises(ValueError, match=message):
        make(mx.metrics).update_state(*args)
