"""Training: `mx.train`."""

from mirrax._src.train.optimizer import Optimizer as Optimizer
