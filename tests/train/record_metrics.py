"""Asks Keras for the results of its metrics: run it with TensorFlow's Python.

python tests/train/record_metrics.py
"""

from __future__ import annotations

import json
from pathlib import Path

import keras  # pyright: ignore[reportMissingImports]
import numpy as np
from metric_cases import CASES, batches

answers = {"keras": keras.__version__}
for name, case in CASES.items():
    metric = getattr(keras.metrics, case.kind)(**case.arguments)
    results = []
    for y_true, y_pred, weights in batches(name):
        metric.update_state(y_true, y_pred, weights)
        results.append(np.asarray(metric.result()).tolist())
    answers[name] = {"name": metric.name, "results": results}
path = Path(__file__).parent / "recorded" / "metrics.json"
path.write_text(json.dumps(answers, indent=1) + "\n")
