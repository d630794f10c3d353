"""Metrics that replicas add to: `mx.metrics`."""

from mirrax._src.train.metrics import Accuracy as Accuracy
from mirrax._src.train.metrics import Mean as Mean
from mirrax._src.train.metrics import Metric as Metric
from mirrax._src.train.metrics import (
    SparseCategoricalAccuracy as SparseCategoricalAccuracy,
)
from mirrax._src.train.metrics import Sum as Sum
from mirrax._src.train.metrics_auc import AUC as AUC
from mirrax._src.train.metrics_by_example import BinaryAccuracy as BinaryAccuracy
from mirrax._src.train.metrics_by_example import (
    CategoricalAccuracy as CategoricalAccuracy,
)
from mirrax._src.train.metrics_by_example import MeanAbsoluteError as MeanAbsoluteError
from mirrax._src.train.metrics_by_example import MeanMetricWrapper as MeanMetricWrapper
from mirrax._src.train.metrics_by_example import MeanSquaredError as MeanSquaredError
from mirrax._src.train.metrics_by_example import Perplexity as Perplexity
from mirrax._src.train.metrics_by_example import (
    RootMeanSquaredError as RootMeanSquaredError,
)
from mirrax._src.train.metrics_by_example import (
    SparseTopKCategoricalAccuracy as SparseTopKCategoricalAccuracy,
)
from mirrax._src.train.metrics_by_example import (
    TopKCategoricalAccuracy as TopKCategoricalAccuracy,
)
from mirrax._src.train.metrics_confusion import ConfusionMatrix as ConfusionMatrix
from mirrax._src.train.metrics_confusion import F1Score as F1Score
from mirrax._src.train.metrics_confusion import Precision as Precision
from mirrax._src.train.metrics_confusion import Recall as Recall
