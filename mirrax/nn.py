"""Losses and random numbers of replicas: `mx.nn`."""

from mirrax._src.train.losses import compute_average_loss as compute_average_loss
from mirrax._src.train.losses import (
    scale_regularization_loss as scale_regularization_loss,
)
from mirrax._src.train.randomness import example_keys as example_keys
