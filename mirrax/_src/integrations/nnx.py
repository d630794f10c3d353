"""Flax NNX in a scope: see docs/nnx.md."""

from mirrax._src.integrations import nnx_training as nnx_training
from mirrax._src.integrations import nnx_variables as nnx_variables
