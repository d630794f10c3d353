"""Metrics over the examples of all workers, which have unequal parts."""

from __future__ import annotations

import numpy as np
from helpers.engines import compile_if, per_replica
from train.metric_cases import CASES, batches
from train.test_more_metrics import RECORDED

import mirrax as mx

from .comparing import Pool

NAMES = [
    next(name for name in CASES if name.startswith(kind))
    for kind in ("AUC", "F1Score", "TopK", "Recall")
]


def results(strategy, engine, found):
    """What metrics say after two steps, by every worker."""
    with strategy.scope():
        metrics = {
            name: getattr(mx.metrics, case.kind)(**case.arguments, **case.ours)
            for name, case in CASES.items()
            if name in found
        }

    def update(args):
        for name, metric in metrics.items():
            metric.update_state(*args[name])

    step = compile_if(engine, update)
    for k in (0, 2):
        args = {
            name: tuple(
                None if parts[0] is None else per_replica(strategy, *parts)
                for parts in zip(*rows[k : k + 2])
            )
            for name, rows in found.items()
        }
        strategy.run(step, (args,))
    return {name: np.asarray(metric.result()) for name, metric in metrics.items()}


def test_results_of_two_workers(two_by_one: Pool) -> None:
    found = {name: batches(name) for name in NAMES}
    for engine in ("eager", "compiled"):
        for name, value in two_by_one.run_alike(results, engine, found).items():
            expected = RECORDED[name]["results"][-1]
            np.testing.assert_allclose(value, expected, rtol=2e-6, err_msg=name)
