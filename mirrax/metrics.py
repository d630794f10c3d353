"""Metrics that replicas add to: `mx.metrics`."""

from mirrax._src.train.metrics import Accuracy as Accuracy
from mirrax._src.train.metrics import Mean as Mean
from mirrax._src.train.metrics import Metric as Metric
from mirrax._src.train.metrics import (
    SparseCategoricalAccuracy as SparseCategoricalAccuracy,
)
from mirrax._src.train.metrics import Sum as Sum
