"""Metrics and the batches they are given; neither mirrax nor Keras is needed here."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np


class Case(NamedTuple):
    """A metric by its name in Keras and here, and what its batches look like."""

    kind: str
    arguments: dict[str, Any]
    batch: str
    weights: str | None = None
    ours: dict[str, Any] = {}  # what only mirrax needs


_LISTED: list[Any] = [
    ("BinaryAccuracy", {}, "binary"),
    ("BinaryAccuracy", {"threshold": 0.3}, "columns", "row"),
    ("CategoricalAccuracy", {}, "one_hot", "row"),
    ("SparseCategoricalAccuracy", {}, "sparse", "row"),
    ("SparseCategoricalAccuracy", {}, "sparse_column"),
    ("TopKCategoricalAccuracy", {"k": 2}, "one_hot", "row"),
    ("TopKCategoricalAccuracy", {}, "one_hot"),
    ("SparseTopKCategoricalAccuracy", {"k": 3}, "sparse"),
    ("SparseTopKCategoricalAccuracy", {"k": 2}, "sequence"),
    (
        "SparseTopKCategoricalAccuracy",
        {"k": 2, "from_sorted_ids": True},
        "sorted",
        "row",
    ),
    ("MeanSquaredError", {}, "regression", "row"),
    ("MeanSquaredError", {}, "column"),
    ("MeanAbsoluteError", {}, "regression", "row"),
    ("RootMeanSquaredError", {}, "regression", "row"),
    ("RootMeanSquaredError", {}, "numbers"),
    ("Precision", {}, "binary", "row"),
    ("Precision", {"thresholds": [0.8, 0.2]}, "columns", "row"),
    ("Precision", {"top_k": 2}, "one_hot"),
    ("Precision", {"class_id": 1, "top_k": 2}, "one_hot", "row"),
    ("Recall", {"thresholds": 0.4}, "column", "row"),
    ("Recall", {"class_id": 2}, "one_hot"),
    ("F1Score", {}, "one_hot", "row", {"num_classes": 4}),
    (
        "F1Score",
        {"average": "macro", "threshold": 0.4},
        *("columns", "row", {"num_classes": 3}),
    ),
    (
        "F1Score",
        {"average": "weighted"},
        *("one_hot", None, {"num_classes": 4}),
    ),
    (
        "F1Score",
        {"average": "micro", "threshold": 0.5},
        *("columns", None, {"num_classes": 3}),
    ),
    ("AUC", {}, "binary"),
    ("AUC", {"curve": "PR"}, "binary", "row"),
    ("AUC", {"num_thresholds": 7}, "columns", "row"),
    ("AUC", {"curve": "PR", "num_thresholds": 9}, "columns"),
    ("AUC", {"summation_method": "minoring", "num_thresholds": 5}, "binary"),
    (
        "AUC",
        {
            "summation_method": "majoring",
            "curve": "PR",
            "thresholds": [0.7, 0.3],
        },
        *("binary", "row"),
    ),
    ("AUC", {"multi_label": True, "num_labels": 3}, "columns", "row"),
    (
        "AUC",
        {
            "multi_label": True,
            "num_labels": 3,
            "label_weights": [1.0, 0.0, 2.5],
            "curve": "PR",
        },
        "columns",
    ),
    ("AUC", {"label_weights": [1.0, 0.0, 2.5]}, "columns", "row"),
    ("AUC", {"from_logits": True}, "logits"),
]
CASES = {f"{each[0]}-{i}": Case(*each) for i, each in enumerate(_LISTED)}
SIZES = [3, 2, 3, 2]  # examples: parts of two replicas, in two steps


def batches(name: str) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Labels, predictions and weights, which are the same in every process."""
    case, rng = CASES[name], np.random.default_rng(zlib.crc32(name.encode()))
    return [
        (
            *_BATCHES[case.batch](rng, size),
            rng.integers(0, 4, size).astype("f4") / 2 if case.weights else None,
        )
        for size in SIZES
    ]


def _scores(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 21, shape).astype("f4") / 20  # with ties, 0 and 1


def _one_hot(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.eye(4, dtype="f4")[rng.integers(0, 4, n)], _scores(rng, n, 4)


_BATCHES = {
    "binary": lambda rng, n: (rng.integers(0, 2, n), _scores(rng, n)),
    "column": lambda rng, n: (rng.integers(0, 2, (n, 1)), _scores(rng, n, 1)),
    "columns": lambda rng, n: (rng.integers(0, 2, (n, 3)), _scores(rng, n, 3)),
    "logits": lambda rng, n: (rng.integers(0, 2, n), 8 * _scores(rng, n) - 4),
    "one_hot": _one_hot,
    "sparse": lambda rng, n: (rng.integers(0, 4, n), _scores(rng, n, 4)),
    "sparse_column": lambda rng, n: (rng.integers(0, 4, (n, 1)), _scores(rng, n, 4)),
    "sequence": lambda rng, n: (rng.integers(0, 4, (n, 2)), _scores(rng, n, 2, 4)),
    "sorted": lambda rng, n: (
        rng.integers(0, 4, n),
        np.argsort(_scores(rng, n, 4), axis=-1)[:, ::-1].astype("i4"),
    ),
    "regression": lambda rng, n: (_scores(rng, n, 3), 4 * _scores(rng, n, 3)),
    "numbers": lambda rng, n: (_scores(rng, n), 4 * _scores(rng, n)),
}
