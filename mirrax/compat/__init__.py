"""Programs of older releases of TensorFlow: `mx.compat.v1`."""

from mirrax.compat import v1 as v1
